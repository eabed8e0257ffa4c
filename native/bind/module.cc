// The compiled module: only a list of what each binding file adds.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace calstack::bind {
void init_kernels(nb::module_& core);
void init_kernels_attention(nb::module_& core);
void init_pool(nb::module_& core);
void init_program(nb::module_& core);
void init_device(nb::module_& core);
}

NB_MODULE(_core, m) {
  m.doc() = "calstack's native core";
  m.def("version", [] { return 1; }, "Version of the native interface; the wrappers check it.");
  calstack::bind::init_kernels(m);
  calstack::bind::init_kernels_attention(m);
  calstack::bind::init_pool(m);
  calstack::bind::init_program(m);
  calstack::bind::init_device(m);
}
