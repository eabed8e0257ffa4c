// Helpers of the bindings that call single kernels on numpy arrays, for tests: `_core.kernels`.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "calstack/kernels.h"

namespace calstack::bind {

namespace nb = nanobind;

template <class T, int dims> using Array = nb::ndarray<T, nb::ndim<dims>, nb::c_contig, nb::device::cpu>;
template <class T, int dims> using Result = nb::ndarray<nb::numpy, T, nb::ndim<dims>, nb::c_contig>;

inline void require(bool ok, const char* what) {
  if (!ok) throw nb::value_error(what);
}

inline const KernelTable& table_named(const std::string& isa) {
  const KernelTable* t = kernels_by_name(isa.c_str());
  require(t != nullptr, "[kernels] no such instruction set on this machine; see isas()");
  return *t;
}

// A new zeroed numpy array of `rows` x `columns`.
template <class T> Result<T, 2> zeros(size_t rows, size_t columns) {
  T* data = new T[rows * columns]();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return Result<T, 2>(data, {rows, columns}, owner);
}

template <class T> const T* data_or_null(const std::optional<Array<const T, 1>>& a) { return a ? a->data() : nullptr; }

}  // namespace calstack::bind
