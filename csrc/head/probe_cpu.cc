// probe on the CPU.
#include "head/probe_cpu.h"

#include "core/parallel.h"
#include "core/scratch.h"

namespace sic::cpu::SIC_ISA {

void probe(const head::ProbeArgs& a, const Exec&) {
  const int64_t D = a.hidden.shape[1];
  parallel_for(a.hidden.shape[0], [&](int64_t b) {
    float* hidden = reinterpret_cast<float*>(thread_scratch(D * static_cast<int64_t>(sizeof(float))));
    load_row(a.hidden, b * a.hidden.stride[0], D, 1.0f, hidden);
    probe_row(a.probe, hidden, b);
  });
}

}  // namespace sic::cpu::SIC_ISA
