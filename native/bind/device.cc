// The cpu device as Python sees it. Only conversions; the device's rules are in src/device*.cc.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cmath>
#include <cstring>

#include "builder.h"
#include "read_python.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace calstack::bind {
namespace {

CpuDevice* open(int threads, const std::string& isa, int queue_depth, bool strict, bool event,
                bool isolate) {
  const KernelTable* table = kernels_by_name(isa.c_str());
  if (table == nullptr) throw nb::value_error(("instruction set " + isa + " is not usable here").c_str());
  if (threads < 1 || threads > 1024 || queue_depth < 1 || queue_depth > 64) throw nb::value_error("threads or queue_depth is out of range");
  return new CpuDevice(*table, {threads, queue_depth, strict, event, isolate});
}

// Gives a slot back unless it was queued.
struct Filling {
  CpuDevice& device;
  Slot* slot;
  ~Filling() {
    if (slot != nullptr) device.release(*slot);
  }
};

int64_t submit(CpuDevice& device, int calbin, int program, nb::handle lanes, bool profile) {
  Filling filling{device, &device.acquire(calbin, program)};
  Slot& slot = *filling.slot;
  const Py_ssize_t count = PyObject_Size(lanes.ptr());
  if (count < 0 || count > slot.data.program->lanes) throw BoundError("more lanes than the submodel has");
  slot.data.lanes = static_cast<int>(count);
  slot.data.profile = profile;
  int index = 0;
  for (nb::handle lane : lanes) slot.h2d_bytes += read_lane(lane, slot, index++);
  if (slot.data.rows == 0) throw BoundError("every lane is empty");
  const int64_t ticket = device.submit(slot);
  filling.slot = nullptr;
  return ticket;
}

nb::object logits_array(Lane& lane, int vocab) {
  if (!lane.logits) return nb::none();
  float* data = lane.logits.release();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  const size_t shape[] = {static_cast<size_t>(lane.logit_rows()), static_cast<size_t>(vocab)};
  return nb::cast(nb::ndarray<nb::numpy, float, nb::ndim<2>>(data, 2, shape, owner));
}

// What an encoder gives of a text: a copy, for the slot is used again.
nb::object vector_array(const float* values, int count) {
  if (count == 0) return nb::none();
  float* data = new float[static_cast<size_t>(count)];
  std::memcpy(data, values, static_cast<size_t>(count) * sizeof(float));
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  const size_t shape[] = {static_cast<size_t>(count)};
  return nb::cast(nb::ndarray<nb::numpy, float, nb::ndim<1>>(data, 1, shape, owner));
}

// What was sampled after one row: (token, log-probability, top ids, their log-probabilities).
nb::tuple row_result(const Lane& lane, int row) {
  nb::list ids, logprobs;
  for (int i = row * kMostTop; i < row * kMostTop + lane.n_top; ++i) {
    ids.append(lane.top_ids[i]);
    logprobs.append(static_cast<double>(lane.top_logprobs[i]));
  }
  const double logprob = lane.sampling.top_logprobs >= 0 ? static_cast<double>(lane.logprob[row]) : std::nan("");
  return nb::make_tuple(lane.token[row], logprob, nb::tuple(ids), nb::tuple(logprobs));
}

// The last row's answer, logits, and the answers of the rows before it.
nb::tuple lane_result(Lane& lane, const Calbin& calbin) {
  nb::list before;
  for (int row = 0; row < lane.emit - 1; ++row) before.append(row_result(lane, row));
  const nb::tuple last = lane.emit > 0 ? row_result(lane, lane.emit - 1) : nb::make_tuple(-1, std::nan(""), nb::tuple(), nb::tuple());
  return nb::make_tuple(last, logits_array(lane, calbin.vocab), nb::tuple(before), vector_array(lane.embedding, lane.cur > 0 ? calbin.embedding : 0),
                        vector_array(lane.scores, lane.cur > 0 ? calbin.labels : 0));
}

nb::list profile(const Slot& slot, const KVShape& kv) {
  nb::list out;
  const auto& calls = slot.data.program->calls;
  for (size_t i = 0; i < calls.size() && slot.data.profile; ++i) {
    const CallSpan& span = slot.data.spans[i];
    const CallWork work = call_work(calls[i], span, slot.data, kv);
    out.append(nb::make_tuple(op_name(calls[i].op), calls[i].layer, span.start_ns, span.ns, work.bytes, work.ops));
  }
  return out;
}

nb::object wait(CpuDevice& device, int64_t ticket, double timeout_s) {
  Slot* slot = nullptr;
  {
    nb::gil_scoped_release unlocked;
    slot = device.wait(ticket, static_cast<int64_t>(std::fmin(timeout_s, 1e9) * 1e9));
  }
  if (slot == nullptr) return nb::none();
  Filling given{device, slot};
  const Calbin& calbin = device.calbin(slot->calbin_id);
  nb::list lanes, calls;
  if (slot->outcome == Outcome::ok) {
    for (int i = 0; i < slot->data.lanes; ++i) lanes.append(lane_result(slot->data.lane[static_cast<size_t>(i)], calbin));
    calls = profile(*slot, calbin.kv.shape());
  }
  const bool ran = slot->outcome == Outcome::ok || slot->outcome == Outcome::failed;
  nb::tuple times = nb::make_tuple(slot->submitted_ns, slot->started_ns, slot->finished_ns, slot->h2d_ns, ran ? slot->infer_ns : 0,
                                   ran ? slot->data.d2h_ns : 0, slot->h2d_bytes, ran ? slot->data.d2h_bytes : 0);
  return nb::make_tuple(static_cast<int>(slot->outcome), slot->error, times, nb::tuple(lanes), nb::tuple(calls));
}

nb::list kv_move(CpuDevice& device, int calbin, nb::handle moves) {
  const KVPool& kv = device.calbin(calbin).kv;
  const size_t block_bytes = device.calbin(calbin).block_bytes();
  const auto known = [&](int block) {
    if (block < 0 || block >= kv.shape().blocks) throw BoundError("block " + std::to_string(block) + " does not exist");
  };
  std::vector<Move> list;
  nb::list saved;
  for (nb::handle h : moves) {
    nb::tuple t = nb::cast<nb::tuple>(h);
    const int kind = nb::cast<int>(t[0]), src = nb::cast<int>(t[1]), dst = nb::cast<int>(t[2]);
    nb::bytes data = nb::cast<nb::bytes>(t[3]);
    Move m{static_cast<MoveKind>(kind), src, dst, nullptr, nullptr};
    if (m.kind == MoveKind::copy || m.kind == MoveKind::save) known(src);
    if (m.kind != MoveKind::save) known(dst);
    if (m.kind == MoveKind::restore && data.size() != block_bytes)
      throw BoundError("a block has " + std::to_string(block_bytes) + " bytes, not " + std::to_string(data.size()));
    if (m.kind == MoveKind::restore) m.in = reinterpret_cast<const uint8_t*>(data.c_str());  // the caller's list keeps it alive
    if (m.kind == MoveKind::save) {
      nb::bytes out = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(block_bytes)));
      m.out = reinterpret_cast<uint8_t*>(const_cast<char*>(out.c_str()));
      saved.append(out);
    }
    list.push_back(m);
  }
  nb::gil_scoped_release unlocked;
  device.kv_move(calbin, list);
  return saved;
}

nb::bytes read(CpuDevice& device, int64_t id, size_t offset, size_t bytes) {
  nb::bytes out = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(bytes)));
  if (!out.is_valid()) throw nb::python_error();
  nb::gil_scoped_release unlocked;
  device.read(id, offset, reinterpret_cast<uint8_t*>(const_cast<char*>(out.c_str())), bytes);
  return out;
}

void give_mask(CpuDevice& device, int64_t ticket, int lane, nb::handle mask) {
  if (mask.is_none()) return device.give_mask(ticket, lane, nullptr, 0);
  const auto words = nb::cast<nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>>(mask);
  device.give_mask(ticket, lane, words.data(), static_cast<int>(words.size()));
}

void add_queue(nb::class_<CpuDevice>& c) {
  c.def("submit", &submit, "calbin"_a, "program"_a, "lanes"_a, "profile"_a)
      .def("wait", &wait, "ticket"_a, "timeout_s"_a)
      .def("cancel", &CpuDevice::cancel, "ticket"_a)
      .def("give_mask", &give_mask, "ticket"_a, "lane"_a, "mask"_a.none())
      .def("event_fd", &CpuDevice::event_fd)
      .def("busy", &CpuDevice::busy)
      .def("reset", &CpuDevice::reset, nb::call_guard<nb::gil_scoped_release>());
}

void add_memory(nb::class_<CpuDevice>& c) {
  c.def("kv_move", &kv_move, "calbin"_a, "moves"_a)
      .def("alloc", &CpuDevice::alloc, "nbytes"_a)
      .def("free", &CpuDevice::free, "buffer"_a)
      .def("write", [](CpuDevice& d, int64_t id, size_t offset, nb::bytes data) {
        d.write(id, offset, reinterpret_cast<const uint8_t*>(data.c_str()), data.size());
      }, "buffer"_a, "offset"_a, "data"_a)
      .def("read", &read, "buffer"_a, "offset"_a, "nbytes"_a)
      .def("memory", [](const CpuDevice& d) {
        const MemoryUse use = d.memory();
        return nb::make_tuple(use.parameters, use.kv, use.activations, use.buffers);
      });
}

}  // namespace

void init_device(nb::module_& m) {
  nb::exception<QueueFullError>(m, "QueueFullError");
  nb::exception<BoundError>(m, "BoundError", PyExc_ValueError);
  nb::class_<CpuDevice> c(m, "CpuDevice", "Queue, threads and memory of the cpu device.");
  c.def(nb::new_(&open), "threads"_a, "isa"_a, "queue_depth"_a, "strict"_a, "event"_a, "isolate"_a)
      .def_prop_ro("isa", [](const CpuDevice& d) { return d.kernels().name; })
      .def("load", [](CpuDevice& d, CalbinBuilder& b) { return d.add_calbin(b.take()); }, "builder"_a)
      .def("unload", &CpuDevice::remove_calbin, "calbin"_a);
  add_queue(c);
  add_memory(c);
}

}  // namespace calstack::bind
