#include "calstack/device.h"

#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "chip_teams.h"

namespace calstack {
namespace {

constexpr int kSpareSlots = 4;  // completions that may wait to be claimed beside a full queue

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

}  // namespace

// Saved blocks are the chips' parts one after the other.
void move_block(Calbin& calbin, const Move& m) {
  size_t at = 0;
  for (int chip = 0; chip < calbin.chips(); ++chip) {
    KVPool& kv = calbin.chip(chip).kv;
    if (m.kind == MoveKind::copy) kv.copy(m.src, m.dst);
    if (m.kind == MoveKind::save) kv.save(m.src, m.out + at);
    if (m.kind == MoveKind::restore) kv.restore(m.dst, m.in + at);
    if (m.kind == MoveKind::clear) kv.clear(m.dst);
    at += kv.block_bytes();
  }
}

CpuDevice::CpuDevice(const KernelTable& kernels, const DeviceOptions& options)
    : kernels_(kernels), options_(options), pool_(options.threads), executor_(kernels, pool_) {
  queue_.resize(static_cast<size_t>(options_.queue_depth));
  moves_.reserve(kMostMoves);
  batch_.reserve(kMostMoves);
  sampled_.resize(static_cast<size_t>(4 * options_.queue_depth + 8));
  if (options_.event) event_fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  dispatcher_ = std::thread([this] { dispatch(); });
}

CpuDevice::~CpuDevice() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    abort_.store(true);
  }
  queued_.notify_all();
  masked_.notify_all();
  dispatcher_.join();
  if (event_fd_ >= 0) close(event_fd_);
}

CpuDevice::Loaded* CpuDevice::find(int id) {
  for (auto& l : loaded_)
    if (l.id == id) return &l;
  throw BoundError("calbin " + std::to_string(id) + " is not loaded");
}

const CpuDevice::Loaded* CpuDevice::find(int id) const { return const_cast<CpuDevice*>(this)->find(id); }

const Calbin& CpuDevice::calbin(int id) const { return *find(id)->calbin; }

int CpuDevice::add_calbin(std::unique_ptr<Calbin> calbin) {
  std::unique_lock lock(mutex_);
  wait_idle(lock);
  for (const auto& p : calbin->programs)
    for (auto& s : sampled_) s.tokens.reserve(std::max(s.tokens.capacity(), static_cast<size_t>(p->lanes)));
  for (int chip = 0; chip < calbin->chips(); ++chip) {
    size_t arena = 0;
    for (const auto& p : calbin->chip(chip).programs) arena = std::max(arena, p->arena_bytes);
    calbin->chip(chip).arena = Region(arena);
  }
  prepare(*calbin);
  Loaded entry{next_calbin_++, std::move(calbin), {}};
  for (int i = 0; i < options_.queue_depth + kSpareSlots; ++i) entry.slots.push_back(std::make_unique<Slot>(*entry.calbin, entry.id));
  loaded_.push_back(std::move(entry));
  return loaded_.back().id;
}

// With no launch running.
void CpuDevice::prepare(const Calbin& calbin) {
  if (calbin.chips() == 1) return executor_.prepare(calbin);
  if (teams_ == nullptr || teams_->chips() < calbin.chips()) {
    teams_ = std::make_unique<ChipTeams>(kernels_, calbin.chips(), options_.threads);
    for (const auto& l : loaded_)
      if (l.calbin->chips() > 1) teams_->prepare(*l.calbin);
  }
  teams_->prepare(calbin);
}

void CpuDevice::remove_calbin(int id) {
  std::unique_lock lock(mutex_);
  Loaded* entry = find(id);
  for (const auto& slot : entry->slots)
    if (slot->state == SlotState::queued || slot->state == SlotState::running) throw BoundError("a launch of the calbin is in flight");
  moves_.erase(std::remove_if(moves_.begin(), moves_.end(), [id](const QueuedMove& m) { return m.calbin_id == id; }), moves_.end());
  done_.wait(lock, [this] { return !moving_; });
  for (const auto& slot : entry->slots) unclaimed_ -= slot->state == SlotState::done ? 1 : 0;
  loaded_.erase(loaded_.begin() + (entry - loaded_.data()));
  drain_event();
}

Slot& CpuDevice::acquire(int calbin_id, int program) {
  std::lock_guard lock(mutex_);
  Loaded* entry = find(calbin_id);
  const auto& programs = entry->calbin->programs;
  if (program < 0 || static_cast<size_t>(program) >= programs.size()) throw BoundError("no such submodel");
  const int in_flight = waiting_ + (running_ != nullptr ? 1 : 0);
  if (in_flight >= options_.queue_depth) throw QueueFullError("the launch queue holds " + std::to_string(in_flight));
  for (auto& slot : entry->slots) {
    if (slot->state != SlotState::free) continue;
    slot->state = SlotState::filling;
    slot->data.program = programs[static_cast<size_t>(program)].get();
    slot->data.lanes = slot->data.rows = 0;
    slot->h2d_bytes = 0;
    slot->h2d_ns = now_ns();  // until submit: its start
    return *slot;
  }
  throw QueueFullError("completions wait to be claimed");
}

void CpuDevice::release(Slot& slot) {
  std::lock_guard lock(mutex_);
  for (Lane& lane : slot.data.lane) lane.logits.reset();
  slot.state = SlotState::free;
}

int64_t CpuDevice::submit(Slot& slot) {
  std::unique_lock lock(mutex_);
  try {
    const Calbin& c = *find(slot.calbin_id)->calbin;
    for (int i = 0; i < slot.data.lanes; ++i) {
      check_lane(slot, c, slot.data.lane[static_cast<size_t>(i)], i);
      check_source(slot, slot.data.lane[static_cast<size_t>(i)], i);
    }
  } catch (...) {
    slot.state = SlotState::free;
    throw;
  }
  place_rows(slot);
  slot.ticket = next_ticket_++;
  slot.data.strict = options_.strict;
  remember(slot);
  slot.state = SlotState::queued;
  slot.submitted_ns = now_ns();
  slot.h2d_ns = slot.submitted_ns - slot.h2d_ns;
  queue_[static_cast<size_t>((head_ + waiting_) % options_.queue_depth)] = &slot;
  ++waiting_;
  lock.unlock();
  queued_.notify_one();
  return slot.ticket;
}

Slot* CpuDevice::slot_of(int64_t ticket) {
  for (auto& l : loaded_)
    for (auto& slot : l.slots)
      if (slot->ticket == ticket && slot->state != SlotState::free && slot->state != SlotState::filling) return slot.get();
  throw BoundError("ticket " + std::to_string(ticket) + " is not known or was claimed before");
}

Slot* CpuDevice::wait(int64_t ticket, int64_t timeout_ns) {
  std::unique_lock lock(mutex_);
  Slot* slot = slot_of(ticket);
  const auto ready = [slot] { return slot->state == SlotState::done; };
  if (!ready() && timeout_ns <= 0) return nullptr;
  if (!done_.wait_for(lock, std::chrono::nanoseconds(std::min<int64_t>(timeout_ns, int64_t{1} << 60)), ready)) return nullptr;
  slot->state = SlotState::filling;  // the caller's until it is released
  --unclaimed_;
  drain_event();
  return slot;
}

bool CpuDevice::cancel(int64_t ticket) {
  std::lock_guard lock(mutex_);
  Slot* slot = slot_of(ticket);
  if (slot->state != SlotState::queued) return false;
  int kept = 0;
  for (int i = 0; i < waiting_; ++i) {
    Slot* s = queue_[static_cast<size_t>((head_ + i) % options_.queue_depth)];
    if (s != slot) queue_[static_cast<size_t>((head_ + kept++) % options_.queue_depth)] = s;
  }
  waiting_ = kept;
  complete(*slot, Outcome::cancelled, "the launch was cancelled");
  wake();
  return true;
}

// The event descriptor stays readable as long as a completion can be claimed.
void CpuDevice::drain_event() {
  eventfd_t count;
  if (unclaimed_ == 0 && event_fd_ >= 0) eventfd_read(event_fd_, &count);
}

// Whoever calls it wakes those who wait.
void CpuDevice::complete(Slot& slot, Outcome outcome, const char* error) {
  slot.outcome = outcome;
  slot.error = error;
  slot.finished_ns = now_ns();
  if (slot.state == SlotState::queued) slot.started_ns = slot.finished_ns;
  slot.state = SlotState::done;
  ++unclaimed_;
  wake_ = true;
}

void CpuDevice::drop_queue(Outcome outcome, const char* error) {
  for (int i = 0; i < waiting_; ++i) complete(*queue_[static_cast<size_t>((head_ + i) % options_.queue_depth)], outcome, error);
  waiting_ = 0;
}

void CpuDevice::wait_idle(std::unique_lock<std::mutex>& lock) {
  done_.wait(lock, [this] { return idle(); });
}

void CpuDevice::kv_move(int calbin_id, const std::vector<Move>& moves) {
  std::unique_lock lock(mutex_);
  Calbin& calbin = *find(calbin_id)->calbin;
  const bool host = std::any_of(moves.begin(), moves.end(), [](const Move& m) { return m.in != nullptr || m.out != nullptr; });
  if (idle() || host || moves_.size() + moves.size() > kMostMoves) {
    wait_idle(lock);
    for (const Move& m : moves) move_block(calbin, m);
    return;
  }
  for (const Move& m : moves) moves_.push_back({next_ticket_ - 1, calbin_id, m});
  lock.unlock();
  queued_.notify_one();
}

int64_t CpuDevice::alloc(size_t bytes) {
  std::lock_guard lock(mutex_);
  buffers_.push_back({next_buffer_, Region(bytes)});
  return next_buffer_++;
}

Region& CpuDevice::buffer(int64_t id, size_t offset, size_t bytes) {
  for (auto& b : buffers_) {
    if (b.id != id) continue;
    if (offset > b.region.size() || bytes > b.region.size() - offset) throw BoundError("range lies outside buffer " + std::to_string(id));
    return b.region;
  }
  throw BoundError("buffer " + std::to_string(id) + " does not exist");
}

void CpuDevice::free(int64_t id) {
  std::lock_guard lock(mutex_);
  buffer(id, 0, 0);
  buffers_.erase(std::find_if(buffers_.begin(), buffers_.end(), [id](const Buffer& b) { return b.id == id; }));
}

void CpuDevice::write(int64_t id, size_t offset, const uint8_t* data, size_t bytes) {
  std::unique_lock lock(mutex_);
  Region& b = buffer(id, offset, bytes);
  if (bytes != 0) std::memcpy(b.data() + offset, data, bytes);
}

void CpuDevice::read(int64_t id, size_t offset, uint8_t* out, size_t bytes) {
  std::unique_lock lock(mutex_);
  Region& b = buffer(id, offset, bytes);
  wait_idle(lock);
  if (bytes != 0) std::memcpy(out, b.data() + offset, bytes);
}

MemoryUse CpuDevice::memory() const {
  std::lock_guard lock(mutex_);
  MemoryUse use;
  for (const auto& l : loaded_) {
    for (int chip = 0; chip < l.calbin->chips(); ++chip) {
      const Calbin& part = l.calbin->chip(chip);
      use.parameters += part.params.size();
      use.kv += part.kv.committed_bytes();
      use.activations += part.arena.size();
    }
  }
  if (!loaded_.empty()) use.activations += executor_.scratch_bytes() + (teams_ != nullptr ? teams_->scratch_bytes() : 0);
  for (const auto& b : buffers_) use.buffers += b.region.size();
  return use;
}

bool CpuDevice::busy() const {
  std::lock_guard lock(mutex_);
  return !idle();
}

void CpuDevice::reset() {
  std::unique_lock lock(mutex_);
  abort_.store(true);
  masked_.notify_all();
  drop_queue(Outcome::needs_reset, "the device was reset");
  wake();
  moves_.clear();
  done_.wait(lock, [this] { return running_ == nullptr && !moving_; });
  abort_.store(false);
  for (auto& l : loaded_)
    for (int chip = 0; chip < l.calbin->chips(); ++chip) l.calbin->chip(chip).kv.clear_all();
  for (auto& s : sampled_) s.ticket = -1;
}

}  // namespace calstack
