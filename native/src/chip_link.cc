#include "chip_link.h"

#include <time.h>

#include <chrono>

namespace calstack {
namespace {

constexpr int64_t kSpinNs = 50'000;
constexpr std::chrono::milliseconds kLook{2};  // how late a sleeping chip notices a reset

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

}  // namespace

ChipLink::ChipLink(std::vector<const Calbin*> chips, bool isolate)
    : chips_(std::move(chips)), logits_(chips_.size()), isolate_(isolate), gone_(chips_.size(), 0) {
  if (isolate_) take_turn(0);
}

ChipLink::~ChipLink() {
  for (const Calbin* c : chips_)
    if (isolate_) c->params.readable(true);
}

bool ChipLink::begin(int chip, const std::atomic<bool>& abort) {
  if (!isolate_) return true;
  std::unique_lock lock(mutex_);
  return await(lock, chip, 0, abort);
}

bool ChipLink::meet(int chip, const std::atomic<bool>& abort) {
  std::unique_lock lock(mutex_);
  const uint64_t next = phase_.load(std::memory_order_relaxed) + 1;
  if (++arrived_ == chips()) {
    arrived_ = 0;
    phase_.store(next, std::memory_order_release);
  }
  if (isolate_) pass_turn();
  moved_.notify_all();
  if (!isolate_) {
    lock.unlock();
    const int64_t until = now_ns() + kSpinNs;
    for (int i = 1; phase_.load(std::memory_order_acquire) < next && !broken_.load(std::memory_order_relaxed); ++i)
      if (i % 16 == 0 && now_ns() > until) break;
    if (phase_.load(std::memory_order_acquire) >= next) return !broken_.load() && !abort.load();
    lock.lock();
  }
  return await(lock, chip, next, abort);
}

bool ChipLink::await(std::unique_lock<std::mutex>& lock, int chip, uint64_t phase, const std::atomic<bool>& abort) {
  const auto go = [&] { return phase_.load(std::memory_order_acquire) >= phase && (!isolate_ || turn_ == chip); };
  while (!go() && !broken_.load() && !abort.load()) moved_.wait_for(lock, kLook);
  return go() && !broken_.load() && !abort.load();
}

void ChipLink::leave(int chip, bool finished) {
  std::lock_guard lock(mutex_);
  gone_[static_cast<size_t>(chip)] = 1;
  if (!finished) broken_.store(true);
  if (isolate_ && turn_ == chip) pass_turn();
  moved_.notify_all();
}

// To the next chip that is still there.
void ChipLink::pass_turn() {
  for (int i = 1; i <= chips(); ++i) {
    const int next = (turn_ + i) % chips();
    if (gone_[static_cast<size_t>(next)] == 0) return take_turn(next);
  }
}

void ChipLink::take_turn(int chip) {
  turn_ = chip;
  for (int i = 0; i < chips(); ++i) chips_[static_cast<size_t>(i)]->params.readable(i == chip);
}

}  // namespace calstack
