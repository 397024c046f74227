// What tests set and see of the emulator; in the module _simt only.
#if defined(SIC_SIMT)
#include <pybind11/pybind11.h>

#include <string>

#include "core/check.h"
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

}  // namespace

void bind_simt(pybind11::module_& m) {
  m.def("set_schedule", &set_schedule, pybind11::arg("schedule"), pybind11::arg("seed") = 1,
        "The order in which threads and blocks take turns: forward, reverse or random");
  m.def("set_multiprocessors", &simt::set_multiprocessors, "What launchers believe the device to have");
  m.def("counters", &counters, "Launches, threads, allocations, synchronisations, ... since the process started");
}

}  // namespace sic::bind
#endif
