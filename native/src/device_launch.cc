// A launch on its way: its slot, the checks before it is queued, and the dispatcher that runs it.
#include <sys/eventfd.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "calstack/device.h"
#include "chip_teams.h"

namespace calstack {
namespace {

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

[[noreturn]] void refuse(int lane, const std::string& what) { throw BoundError("lane " + std::to_string(lane) + ": " + what); }

constexpr std::chrono::seconds kMostMaskWait{5};

size_t align64(size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

Slot::Slot(const Calbin& calbin, int id) : calbin_id(id) {
  int lanes = 0, rows = 0, context = 0;
  size_t calls = 0;
  for (const auto& p : calbin.programs) {
    lanes = std::max(lanes, p->lanes);
    rows = std::max(rows, p->rows);
    context = std::max(context, p->context);
    calls = std::max(calls, p->calls.size());
  }
  table_room = (context + kBlockPositions - 1) / kBlockPositions;
  history_room = context + 1 + kMostEmit;
  mask_words = (calbin.vocab + 31) / 32;
  bias_room = calbin.vocab;
  const size_t n = static_cast<size_t>(lanes), row_bytes = align64(static_cast<size_t>(rows) * 4);
  const auto per_lane = [n](int count) { return align64(n * static_cast<size_t>(count) * 4); };
  const size_t parts[] = {row_bytes, row_bytes, row_bytes, row_bytes, per_lane(calbin.embedding), per_lane(calbin.labels), per_lane(table_room),
                          per_lane(history_room), per_lane(kMostEmit * mask_words), per_lane(bias_room), per_lane(bias_room),
                          per_lane(kMostEmit * kMostTop), per_lane(kMostEmit * kMostTop)};
  size_t total = 0;
  for (const size_t part : parts) total += part;
  memory_ = Region(total);
  size_t offset = 0, index = 0;
  const auto next = [&] {
    uint8_t* p = memory_.data() + offset;
    offset += parts[index++];
    return p;
  };
  data.tokens = reinterpret_cast<int32_t*>(next());
  data.row_lane = reinterpret_cast<int32_t*>(next());
  data.positions = reinterpret_cast<int32_t*>(next());
  data.types = reinterpret_cast<int32_t*>(next());
  float* embeddings = reinterpret_cast<float*>(next());
  float* scores = reinterpret_cast<float*>(next());
  tables_ = reinterpret_cast<int32_t*>(next());
  history_ = reinterpret_cast<int32_t*>(next());
  mask_ = reinterpret_cast<uint32_t*>(next());
  bias_ids_ = reinterpret_cast<int32_t*>(next());
  bias_ = reinterpret_cast<float*>(next());
  int32_t* top_ids = reinterpret_cast<int32_t*>(next());
  float* top_logprobs = reinterpret_cast<float*>(next());
  data.lane.resize(n);
  data.tables.resize(n);
  data.spans.resize(calls);
  for (size_t i = 0; i < n; ++i) {
    data.lane[i].top_ids = top_ids + i * kMostEmit * kMostTop;
    data.lane[i].top_logprobs = top_logprobs + i * kMostEmit * kMostTop;
    data.lane[i].embedding = embeddings + i * static_cast<size_t>(calbin.embedding);
    data.lane[i].scores = scores + i * static_cast<size_t>(calbin.labels);
    data.tables[i] = table(static_cast<int>(i));
  }
}

// Memory safety only; what a launch may ask for is checked where its values still have names.
void CpuDevice::check_lane(const Slot& slot, const Calbin& calbin, const Lane& lane, int index) const {
  const Program& p = *slot.data.program;
  if (lane.past < 0 || lane.cur < 0 || lane.past > p.context - lane.cur) refuse(index, "positions lie outside the context");
  const auto known = [&](int32_t t) { return t >= 0 && t < std::max(calbin.types, 1); };
  const int32_t* types = slot.data.types + lane.first_row;
  if (!std::all_of(types, types + lane.cur, known)) refuse(index, "a segment does not exist");
  const int blocks = calbin.kv.shape().layers == 0 ? 0 : (lane.past + lane.cur + kBlockPositions - 1) / kBlockPositions;
  for (int i = 0; i < blocks; ++i) {
    const int block = slot.table(index)[i];
    if (block < 0 || block >= calbin.kv.shape().blocks) refuse(index, "block " + std::to_string(block) + " does not exist");
  }
  const auto in_vocab = [&](const int32_t* ids, int n) { return std::all_of(ids, ids + n, [&](int32_t t) { return t >= 0 && t < calbin.vocab; }); };
  if (lane.from_ticket < 0 && !in_vocab(slot.data.tokens + lane.first_row, lane.cur)) refuse(index, "a token id lies outside the vocabulary");
  const SampleArgs& s = lane.sampling;
  if (lane.emit < 0 || lane.emit > std::min(lane.cur, kMostEmit)) refuse(index, "more rows are sampled than it has or may have");
  if (!in_vocab(s.prompt, s.n_prompt) || !in_vocab(s.output, s.n_output)) refuse(index, "a history id lies outside the vocabulary");
  if (!in_vocab(s.bias_ids, s.n_bias)) refuse(index, "a bias id lies outside the vocabulary");
}

void CpuDevice::check_source(const Slot& slot, const Lane& lane, int index) const {
  if (lane.from_ticket < 0 || lane.cur == 0) return;
  const Sampled& s = sampled_[static_cast<size_t>(lane.from_ticket) % sampled_.size()];
  const int64_t oldest = next_ticket_ + options_.queue_depth + 1 - static_cast<int64_t>(sampled_.size());
  if (s.ticket != lane.from_ticket || s.calbin_id != slot.calbin_id || s.ticket < oldest) refuse(index, "its token's launch is not known");
  if (lane.from_lane < 0 || lane.from_lane >= s.lanes || s.tokens[static_cast<size_t>(lane.from_lane)] == -1)
    refuse(index, "its token's lane does not emit");
  if (lane.cur != 1) refuse(index, "a token of an earlier launch is one row");
}

void CpuDevice::place_rows(Slot& slot) {
  LaunchData& d = slot.data;
  for (int i = 0; i < d.lanes; ++i) {
    const Lane& lane = d.lane[static_cast<size_t>(i)];
    for (int r = 0; r < lane.cur; ++r) {
      d.row_lane[lane.first_row + r] = i;
      d.positions[lane.first_row + r] = lane.past + r;
    }
  }
}

void CpuDevice::remember(const Slot& slot) {
  Sampled& s = sampled_[static_cast<size_t>(slot.ticket) % sampled_.size()];
  s.ticket = slot.ticket;
  s.calbin_id = slot.calbin_id;
  s.lanes = slot.data.lanes;
  s.ready = false;
  s.tokens.clear();
  for (int i = 0; i < s.lanes; ++i) s.tokens.push_back(slot.data.lane[static_cast<size_t>(i)].emit > 0 ? 0 : -1);
}

// Between two launches the mutex is taken once: whoever waits for the first is woken when the second has been picked, for a thread
// that sleeps on a mutex here costs both of them tens of microseconds.
void CpuDevice::dispatch() {
  std::unique_lock lock(mutex_);
  while (await_work(lock)) {
    Slot* slot = pick();
    take_moves(slot != nullptr ? slot->ticket : next_ticket_);
    if (slot != nullptr && !moving_ && slot->calbin->chips() == 1) tell_later(slot->data);
    notify(lock);
    if (moving_) apply_moves();
    if (slot != nullptr) run(*slot);
    lock.lock();
    if (slot != nullptr) conclude(*slot);
  }
  drop_queue(Outcome::cancelled, "the device was closed");
  notify(lock);
}

// False when the device closes.
bool CpuDevice::await_work(std::unique_lock<std::mutex>& lock) {
  const auto some = [this] { return stop_ || waiting_ > 0 || !moves_.empty(); };
  if (waiting_ == 0) park();
  if (!some() && wake_) {
    notify(lock);
    lock.lock();
  }
  queued_.wait(lock, some);
  return !stop_;
}

void CpuDevice::park() {
  pool_.park();
  if (teams_ != nullptr) teams_->park();
}

// The next launch of the queue, ready to run; null when there is none.
Slot* CpuDevice::pick() {
  if (waiting_ == 0) return nullptr;
  Slot* slot = running_ = queue_[static_cast<size_t>(head_)];
  head_ = (head_ + 1) % options_.queue_depth;
  --waiting_;
  slot->state = SlotState::running;
  slot->calbin = find(slot->calbin_id)->calbin.get();
  slot->tokens_known = resolve_tokens(*slot);
  slot->data.d2h_ns = 0;
  slot->data.d2h_bytes = 0;
  slot->data.nan_lane = -1;
  expect_masks(*slot);
  return slot;
}

// Wakes those who wait, with the mutex released: they would only fall asleep on it again.
void CpuDevice::notify(std::unique_lock<std::mutex>& lock) {
  const bool some = std::exchange(wake_, false);
  lock.unlock();
  if (some) wake();
}

// Whoever is woken takes a core from the thread that wakes it. Once the launch has begun that is one of its threads, and the others do
// its part meanwhile; before, the whole launch would wait.
void CpuDevice::tell_later(LaunchData& launch) {
  if (std::exchange(wake_, false)) launch.begun = [this] { wake(); };
}

void CpuDevice::wake() {
  if (event_fd_ >= 0) eventfd_write(event_fd_, 1);  // fails only when the counter is full, and then it is readable
  done_.notify_all();
}

// Moves queued before launch `before` go to the batch.
void CpuDevice::take_moves(int64_t before) {
  const auto later = std::find_if(moves_.begin(), moves_.end(), [before](const QueuedMove& m) { return m.after >= before; });
  batch_.assign(moves_.begin(), later);
  moves_.erase(moves_.begin(), later);
  moving_ = !batch_.empty();
}

// Outside the lock, so that giving pages back delays no submit; a calbin is not unloaded meanwhile.
void CpuDevice::apply_moves() {
  for (const QueuedMove& m : batch_) {
    Calbin* calbin = nullptr;
    {
      std::lock_guard lock(mutex_);
      calbin = find(m.calbin_id)->calbin.get();
    }
    move_block(*calbin, m.move);
  }
  std::lock_guard lock(mutex_);
  moving_ = false;
  done_.notify_all();
}

// A picked launch, without the mutex.
void CpuDevice::run(Slot& slot) {
  LaunchData& d = slot.data;
  Calbin& calbin = *slot.calbin;
  for (int i = 0; i < d.lanes && calbin.kv.shape().layers > 0; ++i) {
    const Lane& lane = d.lane[static_cast<size_t>(i)];
    for (int b = lane.past / kBlockPositions; lane.cur > 0 && b <= (lane.past + lane.cur - 1) / kBlockPositions; ++b)
      for (int chip = 0; chip < calbin.chips(); ++chip) calbin.chip(chip).kv.touch(slot.table(i)[b]);
  }
  slot.started_ns = now_ns();
  slot.ran = slot.tokens_known && run(calbin, d);
  slot.infer_ns = now_ns() - slot.started_ns - d.d2h_ns - slot.mask_wait_ns;
  if (const auto begun = std::exchange(d.begun, nullptr)) begun();  // it did not begin
}

void CpuDevice::conclude(Slot& slot) {
  const LaunchData& d = slot.data;
  running_ = nullptr;
  if (!slot.tokens_known) return complete(slot, Outcome::retryable, "the launch that its token comes from did not finish");
  if (d.dropped && !abort_.load()) return complete(slot, Outcome::retryable, "a mask did not come in time");
  if (!slot.ran) return complete(slot, Outcome::needs_reset, "the device was reset");
  if (d.nan_lane >= 0) return complete(slot, Outcome::failed, ("logits of lane " + std::to_string(d.nan_lane) + " hold NaN").c_str());
  finish(slot);
}

bool CpuDevice::run(const Calbin& calbin, LaunchData& launch) {
  return calbin.chips() == 1 ? executor_.run(calbin, launch, abort_) : teams_->run(calbin, launch, abort_, options_.isolate);
}

void CpuDevice::expect_masks(Slot& slot) {
  LaunchData& d = slot.data;
  d.dropped = false;
  d.masks = nullptr;
  slot.mask_wait_ns = 0;
  for (int i = 0; i < d.lanes; ++i)
    if (d.lane[static_cast<size_t>(i)].late) d.masks = [this, &slot] { return await_masks(slot); };
}

// On the dispatcher, in the middle of a launch. Time spent here is the host's, not the device's.
bool CpuDevice::await_masks(Slot& slot) {
  LaunchData& d = slot.data;
  const int64_t begin = now_ns();
  std::unique_lock lock(mutex_);
  const auto late = [&d] { return std::any_of(d.lane.begin(), d.lane.begin() + d.lanes, [](const Lane& l) { return l.late; }); };
  masked_.wait_for(lock, kMostMaskWait, [&] { return stop_ || abort_.load() || !late(); });
  slot.mask_wait_ns += now_ns() - begin;
  return !stop_ && !abort_.load() && !late();
}

void CpuDevice::give_mask(int64_t ticket, int lane, const uint32_t* words, int count) {
  std::lock_guard lock(mutex_);
  for (auto& l : loaded_) {
    for (auto& slot : l.slots) {
      const bool open = slot->state == SlotState::queued || slot->state == SlotState::running;
      if (!open || slot->ticket != ticket || lane < 0 || lane >= slot->data.lanes) continue;
      Lane& to = slot->data.lane[static_cast<size_t>(lane)];
      if (!to.late) return;
      if (words != nullptr && count != slot->mask_words) refuse(lane, "its mask has the wrong size");
      if (words != nullptr) std::memcpy(slot->mask(lane), words, static_cast<size_t>(count) * sizeof(uint32_t));
      to.sampling.mask = words != nullptr ? slot->mask(lane) : nullptr;
      to.late = false;
      slot->h2d_bytes += static_cast<size_t>(count) * sizeof(uint32_t);
      masked_.notify_all();
      return;
    }
  }
}

// Puts ids of earlier launches into their rows and histories; false when one of those launches did not finish.
bool CpuDevice::resolve_tokens(Slot& slot) {
  for (int i = 0; i < slot.data.lanes; ++i) {
    Lane& lane = slot.data.lane[static_cast<size_t>(i)];
    lane.failed = false;
    if (lane.from_ticket < 0 || lane.cur == 0) continue;
    const Sampled& s = sampled_[static_cast<size_t>(lane.from_ticket) % sampled_.size()];
    if (s.ticket != lane.from_ticket || !s.ready) return false;
    const int32_t token = s.tokens[static_cast<size_t>(lane.from_lane)];
    lane.failed = token < 0;
    slot.data.tokens[lane.first_row] = std::max(token, 0);
    if (lane.sampling.output != nullptr && token >= 0) slot.history(i)[lane.sampling.n_prompt + lane.sampling.n_output++] = token;
  }
  return true;
}

void CpuDevice::finish(Slot& slot) {
  const int64_t before = now_ns();
  Sampled& s = sampled_[static_cast<size_t>(slot.ticket) % sampled_.size()];
  for (int i = 0; i < slot.data.lanes; ++i) {
    const Lane& lane = slot.data.lane[static_cast<size_t>(i)];
    if (lane.emit == 0 || lane.cur == 0) continue;
    s.tokens[static_cast<size_t>(i)] = lane.last_token();
    const size_t scores = lane.sampling.top_logprobs >= 0 ? sizeof(float) + static_cast<size_t>(lane.n_top) * 8 : 0;
    slot.data.d2h_bytes += static_cast<size_t>(lane.emit) * (sizeof(int32_t) + scores);
  }
  s.ready = true;
  slot.data.d2h_ns += now_ns() - before;
  complete(slot, Outcome::ok, "");
}

}  // namespace calstack
