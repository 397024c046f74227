// The Python module (_C, or _simt where the emulator runs the CUDA kernels): its parts, and facts about the build.
#include <pybind11/pybind11.h>

#include "bind/tensor_arg.h"
#include "core/device.h"
#include "core/isa.h"
#include "core/parallel.h"
#include "core/scratch.h"

namespace sic::bind {
void bind_slicing(py::module_&);
void bind_delta(py::module_&);
void bind_head(py::module_&);
void bind_termination(py::module_&);
void bind_ragged(py::module_&);
void bind_replay(py::module_&);
void bind_cursor_word(py::module_&);
void bind_graph(py::module_&);
#if defined(SIC_SIMT)
void bind_simt(py::module_&);
#else
void bind_block_index(py::module_&);
void bind_stop_matcher(py::module_&);
void bind_memory_pool(py::module_&);
void bind_references(py::module_&);
#endif
}  // namespace sic::bind

#if !defined(SIC_MODULE_NAME)
#define SIC_MODULE_NAME _C
#endif
#if defined(SIC_CUDA)
constexpr bool kHasCuda = true;
#else
constexpr bool kHasCuda = false;
#endif

PYBIND11_MODULE(SIC_MODULE_NAME, m) {
  namespace py = pybind11;
  sic::bind::register_errors();
  sic::bind::bind_slicing(m);
  sic::bind::bind_delta(m);
  sic::bind::bind_head(m);
  sic::bind::bind_termination(m);
  sic::bind::bind_ragged(m);
  sic::bind::bind_replay(m);
  sic::bind::bind_cursor_word(m);
  sic::bind::bind_graph(m);
#if defined(SIC_SIMT)
  sic::bind::bind_simt(m);
#else
  sic::bind::bind_block_index(m);
  sic::bind::bind_stop_matcher(m);
  sic::bind::bind_memory_pool(m);
  sic::bind::bind_references(m);
#endif
  m.def("set_num_threads", &sic::set_num_threads, "0: as many as the OpenMP runtime of the process uses");
  m.def("num_threads", &sic::num_threads);
  m.def("thread_pool", &sic::thread_pool_name);
  m.def("has_cuda", [] { return kHasCuda; });
  m.def("device_problem", &sic::device_problem);
  m.def("set_device_checks", &sic::bind::set_device_checks);
  m.def("advise_huge_pages", [](py::handle array) {
    const sic::TensorView v = sic::bind::Args("advise_huge_pages", py::none())("array", array);
    return v.given() && v.device == sic::Device::cpu &&
           sic::advise_huge_pages(v.data, v.size() * sic::itemsize(v.dtype));
  });
  m.def("force_isa", &sic::force_isa);
  m.def("isa", [] { return sic::name(sic::current_isa()); });
  m.def("supported_isas", [] {
    py::list names;
    for (auto isa : {sic::Isa::plain, sic::Isa::avx2, sic::Isa::avx512, sic::Isa::neon})
      if (sic::is_supported(isa)) names.append(sic::name(isa));
    return names;
  });
}
