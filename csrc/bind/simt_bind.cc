// What tests set and see of the emulator; in the module _simt only.
#if defined(SIC_SIMT)
#include <pybind11/pybind11.h>

#include <string>

#include "bind/tensor_arg.h"
#include "core/gpu.cuh"
#include "simt/testing.h"

namespace sic::bind {
namespace {

void set_schedule(const std::string& name, int64_t seed) {
  constexpr const char* kNames[] = {"forward", "reverse", "random"};
  const Check check("set_schedule");
  check.value(seed >= 0 && seed < int64_t{1} << 32, "seed", static_cast<double>(seed), "0 to 2^32 - 1");
  for (int i = 0; i < 3; ++i)
    if (name == kNames[i]) return simt::set_schedule(static_cast<simt::Schedule>(i), static_cast<uint32_t>(seed));
  check.fail("schedule", "'" + name + "'", "forward, reverse or random");
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

struct Stream {
  Stream() { gpu::check_cuda(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), "stream"); }
  ~Stream() { cudaStreamDestroy(handle); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t handle = nullptr;
};

// A graph of what `function` launches on this thread, replayed any number of times. As torch's graphs do, it keeps the
// memory that its calls used.
class Graph {
 public:
  explicit Graph(const pybind11::function& function) {
    if (simt_capture()) Check("Graph").fail("function", "a call while a graph is captured", "one capture at a time");
    capture_.stream = stream_.handle;
    gpu::check_cuda(cudaStreamBeginCapture(stream_.handle, cudaStreamCaptureModeGlobal), "capture");
    simt_capture() = &capture_;
    cudaGraph_t graph = nullptr;
    try {
      function();
    } catch (...) {  // what went wrong is worth more than that the capture is void
      simt_capture() = nullptr;
      cudaStreamEndCapture(stream_.handle, &graph);
      cudaGraphDestroy(graph);
      cudaGetLastError();
      throw;
    }
    simt_capture() = nullptr;
    gpu::check_cuda(cudaStreamEndCapture(stream_.handle, &graph), "capture");
    gpu::check_cuda(cudaGraphInstantiate(&exec_, graph), "graph");
    cudaGraphDestroy(graph);
  }
  ~Graph() { cudaGraphExecDestroy(exec_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void replay() { gpu::check_cuda(cudaGraphLaunch(exec_, stream_.handle), "graph"); }

 private:
  SimtCapture capture_;
  Stream stream_;
  cudaGraphExec_t exec_ = nullptr;
};

int positive(const char* op, int64_t n) {
  Check(op).value(n >= 1 && n < int64_t{1} << 31, "number", static_cast<double>(n), "1 to 2^31 - 1");
  return static_cast<int>(n);
}

}  // namespace

SimtCapture*& simt_capture() {
  static thread_local SimtCapture* current = nullptr;
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
  m.def(
      "set_multiprocessors", [](int64_t n) { simt::set_multiprocessors(positive("set_multiprocessors", n)); },
      "What launchers believe the device to have");
  m.def(
      "set_shared_memory", [](int64_t n) { simt::set_shared_memory(positive("set_shared_memory", n)); },
      "Bytes of dynamic shared memory that a block may have");
  m.def("set_clusters", &simt::set_clusters, "Whether the device launches clusters of blocks");
  m.def("counters", &counters, "Launches, threads, allocations, synchronisations, ... since the process started");
}

}  // namespace sic::bind
#endif
