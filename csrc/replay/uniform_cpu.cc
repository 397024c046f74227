// uniform on the CPU: tasks of as many blocks each.
#include <algorithm>

#include "core/parallel.h"
#include "replay/philox.h"
#include "replay/replay.h"

namespace sic::cpu::SIC_ISA {

constexpr int64_t kBlocksPerTask = 4096;

void uniform(const replay::UniformArgs& a, const Exec&) {
  const replay::Stream stream(a.key.as<const int64_t>());
  const int64_t blocks = (a.count + 3) / 4;
  parallel_for((blocks + kBlocksPerTask - 1) / kBlocksPerTask, [&](int64_t task) {
    const int64_t first = task * kBlocksPerTask, last = std::min(blocks, first + kBlocksPerTask);
    for (int64_t block = first; block < last; ++block) {
      const replay::Philox numbers = stream[static_cast<uint32_t>(block)];
      float* const out = a.out.as<float>() + 4 * block;
      const int64_t n = std::min<int64_t>(4, a.count - 4 * block);
      for (int64_t i = 0; i < n; ++i) out[i] = replay::unit_float(numbers.x[i]);
    }
  });
}

}  // namespace sic::cpu::SIC_ISA
