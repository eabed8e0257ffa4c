#include "read_python.h"

#include <algorithm>
#include <cstring>
#include <memory>

namespace nb = nanobind;

namespace calstack::bind {
namespace {

[[noreturn]] void refuse(const char* what, const std::string& why) { throw BoundError(std::string(what) + " " + why); }

// A contiguous buffer view, released with the object.
struct View {
  Py_buffer b{};
  bool held;
  explicit View(nb::handle h) : held(PyObject_CheckBuffer(h.ptr()) && PyObject_GetBuffer(h.ptr(), &b, PyBUF_FORMAT | PyBUF_ND) == 0) {
    if (!held) PyErr_Clear();
  }
  ~View() {
    if (held) PyBuffer_Release(&b);
  }
  View(const View&) = delete;
  View& operator=(const View&) = delete;
  char kind() const { return b.format == nullptr ? 'B' : b.format[std::strlen(b.format) - 1]; }
};

int32_t as_int(PyObject* item, const char* what) {
  const long long value = PyLong_AsLongLong(item);
  if (value == -1 && PyErr_Occurred()) {
    PyErr_Clear();
    refuse(what, "holds something that is not an integer");
  }
  if (value < INT32_MIN || value > INT32_MAX) refuse(what, "holds an integer beyond 32 bits");
  return static_cast<int32_t>(value);
}

void check_room(Py_ssize_t count, int room, const char* what) {
  if (count > room) refuse(what, "has " + std::to_string(count) + " entries, room is for " + std::to_string(room));
}

bool read_buffer(nb::handle values, int32_t* out, int room, const char* what, int& count) {
  const View v(values);
  if (!v.held || v.b.ndim != 1 || std::strchr("ilq", v.kind()) == nullptr) return false;
  check_room(v.b.shape[0], room, what);
  count = static_cast<int>(v.b.shape[0]);
  if (v.b.itemsize == 4) {
    if (count > 0) std::memcpy(out, v.b.buf, static_cast<size_t>(count) * 4);
    return true;
  }
  for (int i = 0; i < count; ++i) {
    const int64_t value = static_cast<const int64_t*>(v.b.buf)[i];
    if (value < INT32_MIN || value > INT32_MAX) refuse(what, "holds an integer beyond 32 bits");
    out[i] = static_cast<int32_t>(value);
  }
  return true;
}

template <class T>
T get(nb::handle object, const char* name) {
  return nb::cast<T>(object.attr(name));
}

// Behind the output ids come those that rows to be sampled later in the lane have in their history beside them.
size_t read_history(nb::handle input, Slot& slot, int index, const Lane& lane, SampleArgs& s) {
  const bool more = lane.from_ticket >= 0;
  int32_t* history = slot.history(index);
  const int room = slot.history_room - (more ? 1 : 0) - kMostEmit;
  s.n_prompt = read_ints(input.attr("prompt_history"), history, room, "prompt_history");
  s.prompt = history;
  s.output = history + s.n_prompt;
  s.n_output = read_ints(input.attr("output_history"), history + s.n_prompt, room - s.n_prompt, "output_history");
  if (lane.emit > 1) {
    const int32_t* drafted = slot.data.tokens + lane.first_row + lane.cur - lane.emit + 1;
    std::copy(drafted, drafted + lane.emit - 1, history + s.n_prompt + s.n_output);
  }
  return 4 * static_cast<size_t>(s.n_prompt + s.n_output);
}

size_t read_bias(nb::handle bias, Slot& slot, int index, SampleArgs& s) {
  nb::tuple entries = nb::cast<nb::tuple>(bias);
  check_room(static_cast<Py_ssize_t>(entries.size()), slot.bias_room, "logit_bias");
  s.n_bias = static_cast<int>(entries.size());
  s.bias_ids = slot.bias_ids(index);
  s.bias = slot.bias(index);
  for (int i = 0; i < s.n_bias; ++i) {
    slot.bias_ids(index)[i] = get<int32_t>(entries[static_cast<size_t>(i)], "token");
    slot.bias(index)[i] = static_cast<float>(get<double>(entries[static_cast<size_t>(i)], "bias"));
  }
  return 8 * static_cast<size_t>(s.n_bias);
}

size_t read_sampling(nb::handle input, Slot& slot, int index, Lane& lane) {
  nb::object p = input.attr("sampling");
  SampleArgs& s = lane.sampling;
  s.temperature = static_cast<float>(get<double>(p, "temperature"));
  s.top_p = static_cast<float>(get<double>(p, "top_p"));
  s.min_p = static_cast<float>(get<double>(p, "min_p"));
  s.top_k = get<int>(p, "top_k");
  s.repetition = static_cast<float>(get<double>(p, "repetition_penalty"));
  s.frequency = static_cast<float>(get<double>(p, "frequency_penalty"));
  s.presence = static_cast<float>(get<double>(p, "presence_penalty"));
  s.top_logprobs = get<int>(input, "top_logprobs");
  if (s.top_logprobs > kMostTop) refuse("top_logprobs", "is at most " + std::to_string(kMostTop));
  size_t bytes = read_bias(p.attr("logit_bias"), slot, index, s);
  if (s.repetition != 1.0f || s.frequency != 0.0f || s.presence != 0.0f) bytes += read_history(input, slot, index, lane, s);
  nb::object draw = input.attr("draw");
  if (!draw.is_none()) {
    s.seed = get<uint64_t>(draw, "seed");
    s.choice = get<uint64_t>(draw, "choice");
    s.index = get<uint64_t>(draw, "index");
  }
  lane.late = get<bool>(input, "late_mask");
  nb::object mask = input.attr("mask");
  if (mask.is_none()) return bytes + 64;
  const int words = lane.emit * slot.mask_words;
  read_words(mask, slot.mask(index), words, "mask");
  s.mask = slot.mask(index);
  return bytes + 64 + 4 * static_cast<size_t>(words);
}

size_t read_tokens(nb::handle input, Slot& slot, Lane& lane) {
  nb::object tokens = input.attr("tokens");
  LaunchData& d = slot.data;
  if (lane.cur > d.program->rows - d.rows) refuse("cur_len", "sums up to more than the submodel's rows");
  lane.first_row = d.rows;
  d.rows += lane.cur;
  if (nb::hasattr(tokens, "ticket")) {
    lane.from_ticket = get<int64_t>(tokens, "ticket");
    if (lane.from_ticket <= 0) refuse("tokens", "name no launch");
    lane.from_lane = get<int>(tokens, "lane");
    return 12;
  }
  const int count = read_ints(tokens, d.tokens + lane.first_row, lane.cur, "tokens");
  if (count != lane.cur) refuse("tokens", "has " + std::to_string(count) + " ids, cur_len is " + std::to_string(lane.cur));
  return 4 * static_cast<size_t>(count);
}

// Segments of the lane's rows; none given: all in the first.
size_t read_types(nb::handle types, Slot& slot, const Lane& lane) {
  int32_t* to = slot.data.types + lane.first_row;
  const int count = read_ints(types, to, lane.cur, "types");
  if (count != 0 && count != lane.cur) refuse("types", "has " + std::to_string(count) + " entries, cur_len is " + std::to_string(lane.cur));
  if (count == 0) std::memset(to, 0, static_cast<size_t>(lane.cur) * 4);
  return 4 * static_cast<size_t>(count);
}

void make_logits(Lane& lane, int vocab) {
  const size_t count = static_cast<size_t>(lane.logit_rows()) * static_cast<size_t>(vocab);
  lane.logits.reset(count == 0 ? nullptr : new float[count]);
}

}  // namespace

int read_ints(nb::handle values, int32_t* out, int room, const char* what) {
  int count = 0;
  if (read_buffer(values, out, room, what, count)) return count;
  PyObject* p = values.ptr();
  if (PyTuple_Check(p) || PyList_Check(p)) {
    const bool tuple = PyTuple_Check(p);
    const Py_ssize_t size = tuple ? PyTuple_Size(p) : PyList_Size(p);
    check_room(size, room, what);
    for (Py_ssize_t i = 0; i < size; ++i) out[i] = as_int(tuple ? PyTuple_GetItem(p, i) : PyList_GetItem(p, i), what);
    return static_cast<int>(size);
  }
  for (nb::handle item : values) {
    if (count == room) refuse(what, "has more entries than the " + std::to_string(room) + " there is room for");
    out[count++] = as_int(item.ptr(), what);
  }
  return count;
}

void read_words(nb::handle values, uint32_t* out, int count, const char* what) {
  const View v(values);
  if (!v.held || v.b.itemsize != 4 || v.b.len != static_cast<Py_ssize_t>(count) * 4)
    refuse(what, "must be contiguous: " + std::to_string(count) + " 32-bit words");
  std::memcpy(out, v.b.buf, static_cast<size_t>(count) * 4);
}

size_t read_lane(nb::handle input, Slot& slot, int index) {
  Lane& lane = slot.data.lane[static_cast<size_t>(index)];
  lane.past = get<int>(input, "past_len");
  lane.cur = get<int>(input, "cur_len");
  lane.emit = get<bool>(input, "emit") && lane.cur > 0 ? get<int>(input, "emit_rows") : 0;
  if (lane.emit < 0 || lane.emit > std::min(std::max(lane.cur, 0), kMostEmit)) refuse("emit_rows", "lies beyond the lane's rows or the bound");
  const int logits = nb::cast<int>(nb::int_(input.attr("logits")));
  lane.last_logits = logits == 1 && lane.cur > 0;
  lane.all_logits = logits == 2 && lane.cur > 0;
  lane.from_ticket = -1;
  lane.n_top = 0;
  lane.late = false;
  lane.sampling = SampleArgs{};
  lane.sampling.top_logprobs = -1;
  if (lane.cur < 0) refuse("cur_len", "is negative");
  if (lane.cur == 0) return 8;
  size_t bytes = 8 + read_tokens(input, slot, lane);
  bytes += read_types(input.attr("types"), slot, lane);
  bytes += 4 * static_cast<size_t>(read_ints(input.attr("blocks"), slot.table(index), slot.table_room, "blocks"));
  if (lane.emit > 0) bytes += read_sampling(input, slot, index, lane);
  make_logits(lane, slot.bias_room);
  return bytes;
}

}  // namespace calstack::bind
