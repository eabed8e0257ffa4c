#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <new>
#include <stdexcept>
#include <utility>

#include "calstack/executor.h"

namespace calstack {

Region::Region(size_t bytes, Pages pages) : size_(bytes) {
  if (bytes == 0) return;
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  if (pages == Pages::huge) madvise(p, bytes, MADV_HUGEPAGE);  // only a hint
  data_ = static_cast<uint8_t*>(p);
}

Region::~Region() {
  if (data_ != nullptr) munmap(data_, size_);
}

Region::Region(Region&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Region& Region::operator=(Region&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

void Region::discard(size_t offset, size_t bytes) {
  if (bytes != 0) madvise(data_ + offset, bytes, MADV_DONTNEED);
}

namespace {

constexpr size_t kHugePage = 2 << 20;

bool fits_in_memory(size_t bytes) {
  return bytes >= kHugePage && bytes / static_cast<size_t>(sysconf(_SC_PAGESIZE)) < static_cast<size_t>(sysconf(_SC_AVPHYS_PAGES)) / 2;
}

// MAP_FAILED when the file is shorter than it was, or memory is.
void* copied(int fd, size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return p;
  size_t done = 0;
  bool whole = madvise(p, bytes, MADV_HUGEPAGE) == 0;
  while (whole && done < bytes) {
    const ssize_t n = pread(fd, static_cast<uint8_t*>(p) + done, bytes - done, static_cast<off_t>(done));
    whole = n > 0;
    done += whole ? static_cast<size_t>(n) : 0;
  }
  if (whole && mprotect(p, bytes, PROT_READ) == 0) return p;
  munmap(p, bytes);
  return MAP_FAILED;
}

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) throw std::runtime_error(path + " cannot be opened");
  struct stat info{};
  void* p = MAP_FAILED;
  if (fstat(fd, &info) == 0 && info.st_size > 0) {
    size_ = static_cast<size_t>(info.st_size);
    if (fits_in_memory(size_)) p = copied(fd, size_);
    if (p == MAP_FAILED) p = mmap(nullptr, size_, PROT_READ, MAP_SHARED | MAP_POPULATE, fd, 0);
  }
  close(fd);
  if (p == MAP_FAILED) throw std::runtime_error(path + " cannot be mapped");
  data_ = static_cast<const uint8_t*>(p);
}

void MappedFile::readable(bool yes) const { mprotect(const_cast<uint8_t*>(data_), size_, yes ? PROT_READ : PROT_NONE); }

MappedFile::~MappedFile() { munmap(const_cast<uint8_t*>(data_), size_); }

}  // namespace calstack
