// The compiled module: only a list of what each binding file adds.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

NB_MODULE(_core, m) {
  m.doc() = "calstack's native core";
  m.def("version", [] { return 1; }, "Version of the native interface; the wrappers check it.");
}
