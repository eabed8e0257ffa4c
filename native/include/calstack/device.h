// The cpu device: loaded calbins, a bounded launch queue, and one dispatcher thread that is worker 0 of the pool.
// All methods but those of the dispatcher are called from one thread; they never wait for a launch unless they say so.
#pragma once
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "calstack/executor.h"

namespace calstack {

class ChipTeams;

struct DeviceOptions {
  int threads = 1, queue_depth = 4;
  bool strict = false, event = true;
  bool isolate = false;  // chips of a launch run one at a time, and none can read another's shard
};

struct QueueFullError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct BoundError : std::runtime_error {  // a launch or call that breaks a bound; nothing was queued
  using std::runtime_error::runtime_error;
};

enum class Outcome : int32_t { ok, cancelled, retryable, needs_reset, failed };
enum class SlotState : int32_t { free, filling, queued, running, done };

// Input storage and result of one launch, reused. Arrays are address space that fills on first use.
class Slot {
 public:
  Slot(const Calbin& calbin, int calbin_id);

  LaunchData data;
  int calbin_id;
  SlotState state = SlotState::free;
  int64_t ticket = -1;
  Outcome outcome = Outcome::ok;
  std::string error;
  Calbin* calbin = nullptr;  // while it runs
  bool tokens_known = false, ran = false;
  int64_t submitted_ns = 0, started_ns = 0, finished_ns = 0, h2d_ns = 0, infer_ns = 0, mask_wait_ns = 0;
  size_t h2d_bytes = 0;

  // Per-lane arrays with their capacities, filled by whoever prepares the launch.
  int32_t* table(int lane) const { return tables_ + static_cast<size_t>(lane) * static_cast<size_t>(table_room); }
  int32_t* history(int lane) const { return history_ + static_cast<size_t>(lane) * static_cast<size_t>(history_room); }
  uint32_t* mask(int lane) const { return mask_ + static_cast<size_t>(lane) * static_cast<size_t>(kMostEmit * mask_words); }
  int32_t* bias_ids(int lane) const { return bias_ids_ + static_cast<size_t>(lane) * static_cast<size_t>(bias_room); }
  float* bias(int lane) const { return bias_ + static_cast<size_t>(lane) * static_cast<size_t>(bias_room); }
  int table_room, history_room, mask_words, bias_room;

 private:
  Region memory_;
  int32_t *tables_, *history_, *bias_ids_;
  uint32_t* mask_;
  float* bias_;
};

enum class MoveKind : int32_t { copy, save, restore, clear };
struct Move {
  MoveKind kind;
  int src, dst;
  const uint8_t* in;  // restore
  uint8_t* out;       // save
};

void move_block(Calbin& calbin, const Move& m);

constexpr size_t kMostMoves = 1024;  // queued at once

struct MemoryUse {
  size_t parameters = 0, kv = 0, activations = 0, buffers = 0;
};

class CpuDevice {
 public:
  CpuDevice(const KernelTable& kernels, const DeviceOptions& options);
  ~CpuDevice();

  const DeviceOptions& options() const { return options_; }
  const KernelTable& kernels() const { return kernels_; }

  // Takes a calbin with its programs; waits until the queue is empty. Returns its id.
  int add_calbin(std::unique_ptr<Calbin> calbin);
  // Throws BoundError when the id is unknown or a launch of it is in flight.
  void remove_calbin(int id);
  const Calbin& calbin(int id) const;

  // A slot to fill for a launch; throws QueueFullError when the queue is at its depth.
  Slot& acquire(int calbin_id, int program);
  void release(Slot& slot);
  // Checks the filled slot and queues it. Throws BoundError (and releases the slot).
  int64_t submit(Slot& slot);
  // The finished slot of a ticket, or null after `timeout_ns`; BoundError when the ticket is unknown. `release` it after use.
  Slot* wait(int64_t ticket, int64_t timeout_ns);
  bool cancel(int64_t ticket);
  // The mask of a late lane (null: all allowed); ignored when the launch has ended or the lane waits for none.
  void give_mask(int64_t ticket, int lane, const uint32_t* words, int count);
  int event_fd() const { return event_fd_; }

  // Moves blocks in order, after the launches queued so far. Copies and clears are queued behind them; with a save or a restore,
  // or with more than kMostMoves waiting, it waits until the queue is empty.
  void kv_move(int calbin_id, const std::vector<Move>& moves);

  int64_t alloc(size_t bytes);
  void free(int64_t id);
  void write(int64_t id, size_t offset, const uint8_t* data, size_t bytes);
  void read(int64_t id, size_t offset, uint8_t* out, size_t bytes);

  MemoryUse memory() const;
  bool busy() const;
  void reset();

 private:
  struct Loaded {
    int id;
    std::unique_ptr<Calbin> calbin;
    std::vector<std::unique_ptr<Slot>> slots;
  };
  struct Buffer {
    int64_t id;
    Region region;
  };
  struct QueuedMove {
    int64_t after;  // ticket of the last launch before it
    int calbin_id;
    Move move;
  };
  // Token ids a launch sampled, kept for later launches that take theirs from it.
  struct Sampled {
    int64_t ticket = -1;
    int calbin_id = -1, lanes = 0;
    bool ready = false;
    std::vector<int32_t> tokens;  // -1 = the lane does not emit
  };

  Loaded* find(int id);
  const Loaded* find(int id) const;
  Slot* slot_of(int64_t ticket);
  Region& buffer(int64_t id, size_t offset, size_t bytes);
  void check_lane(const Slot& slot, const Calbin& calbin, const Lane& lane, int index) const;
  void check_source(const Slot& slot, const Lane& lane, int index) const;
  void place_rows(Slot& slot);
  void remember(const Slot& slot);
  void dispatch();
  void take_moves(int64_t before);
  void apply_moves();
  bool await_work(std::unique_lock<std::mutex>& lock);
  Slot* pick();
  void park();
  void run(Slot& slot);
  bool run(const Calbin& calbin, LaunchData& launch);
  void conclude(Slot& slot);
  void notify(std::unique_lock<std::mutex>& lock);
  void wake();
  void prepare(const Calbin& calbin);
  bool resolve_tokens(Slot& slot);
  void tell_later(LaunchData& launch);
  void expect_masks(Slot& slot);
  bool await_masks(Slot& slot);
  void finish(Slot& slot);
  void complete(Slot& slot, Outcome outcome, const char* error);
  void drop_queue(Outcome outcome, const char* error);
  bool idle() const { return waiting_ == 0 && running_ == nullptr && moves_.empty() && !moving_; }
  void wait_idle(std::unique_lock<std::mutex>& lock);
  void drain_event();

  const KernelTable& kernels_;
  DeviceOptions options_;
  ThreadPool pool_;
  Executor executor_;
  std::unique_ptr<ChipTeams> teams_;  // for calbins of several chips: there once one was loaded
  int event_fd_ = -1;

  mutable std::mutex mutex_;
  std::condition_variable queued_, done_, masked_;
  std::vector<Loaded> loaded_;
  std::vector<Slot*> queue_;  // ring of options_.queue_depth
  int head_ = 0, waiting_ = 0;
  Slot* running_ = nullptr;
  std::vector<QueuedMove> moves_, batch_;  // waiting; taken by the dispatcher
  bool moving_ = false;
  int unclaimed_ = 0;
  bool wake_ = false;  // launches have ended that nobody was told of
  std::vector<Sampled> sampled_;  // ring by ticket
  int64_t next_ticket_ = 1, next_buffer_ = 1;
  int next_calbin_ = 1;
  std::vector<Buffer> buffers_;
  std::atomic<bool> abort_{false};
  bool stop_ = false;
  std::thread dispatcher_;
};

}  // namespace calstack
