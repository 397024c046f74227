// What tests set and see of the emulator; in the module _simt only.
#if defined(SIC_SIMT)
#include <pybind11/pybind11.h>

#include <string>

#include "bind/tensor_arg.h"
#include "core/gpu.cuh"
#include "simt/testing.h"

namespace sic::bind {
namespace {

void set_schedule(const std::string& name, uint32_t seed) {
  constexpr const char* kNames[] = {"forward", "reverse", "random"};
  for (int i = 0; i < 3; ++i)
    if (name == kNames[i]) return simt::set_schedule(static_cast<simt::Schedule>(i), seed);
  Check("set_schedule").fail("schedule", "'" + name + "'", "forward, reverse or random");
}

pybind11::dict counters() {
  const simt::Counters c = simt::counters();
  pybind11::dict d;
  d["launches"] = c.launches, d["threads"] = c.threads, d["switches"] = c.switches, d["accesses"] = c.accesses;
  d["graph_launches"] = c.graph_launches, d["copies"] = c.copies, d["fills"] = c.fills;
  d["allocations"] = c.allocations, d["frees"] = c.frees, d["live_bytes"] = c.live_bytes;
  d["synchronisations"] = c.synchronisations;
  return d;
}

// A graph of what `function` launches, replayed any number of times. The memory of its calls must stay alive.
class Graph {
 public:
  explicit Graph(const pybind11::function& function) {
    gpu::check_cuda(cudaStreamCreate(&stream_), "stream");
    capture_.stream = stream_;
    gpu::check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), "capture");
    simt_capture() = &capture_;
    try {
      function();
    } catch (...) {
      finish();
      throw;
    }
    finish();
  }
  ~Graph() {
    if (exec_) cudaGraphExecDestroy(exec_);
    cudaStreamDestroy(stream_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void replay() { gpu::check_cuda(cudaGraphLaunch(exec_, stream_), "graph"); }

 private:
  void finish() {
    simt_capture() = nullptr;
    cudaGraph_t graph = nullptr;
    gpu::check_cuda(cudaStreamEndCapture(stream_, &graph), "capture");
    gpu::check_cuda(cudaGraphInstantiate(&exec_, graph), "graph");
    cudaGraphDestroy(graph);
  }

  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
  SimtCapture capture_;
};

}  // namespace

SimtCapture*& simt_capture() {
  static SimtCapture* current = nullptr;
  return current;
}

void bind_simt(pybind11::module_& m) {
  pybind11::class_<Graph>(m, "Graph", "Graph(function): captures what a call of it launches; replay() runs that again")
      .def(pybind11::init<pybind11::function>())
      .def("replay", &Graph::replay);
  m.def("create_stream", [] {
    cudaStream_t stream = nullptr;
    gpu::check_cuda(cudaStreamCreate(&stream), "stream");
    return reinterpret_cast<uintptr_t>(stream);
  });
  m.def("set_schedule", &set_schedule, pybind11::arg("schedule"), pybind11::arg("seed") = 1,
        "The order in which threads and blocks take turns: forward, reverse or random");
  m.def("set_multiprocessors", &simt::set_multiprocessors, "What launchers believe the device to have");
  m.def("set_shared_memory", &simt::set_shared_memory, "Bytes of dynamic shared memory that a block may have");
  m.def("counters", &counters, "Launches, threads, allocations, synchronisations, ... since the process started");
}

}  // namespace sic::bind
#endif
