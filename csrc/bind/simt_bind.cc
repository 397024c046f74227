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
  d["synchronisations"] = c.synchronisations, d["live_graphs"] = c.live_graphs;
  return d;
}

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
