// key_sketch: checks, then the backend.
#include <algorithm>

#include "core/isa.h"
#include "slicing/sketch.h"
#include "slicing/validate.h"

SIC_CPU_OP(key_sketch, slicing::KeySketchArgs)

namespace sic::slicing {

void key_sketch(const KeySketchArgs& a, const Exec& exec) {
  const Check check("key_sketch", exec.device);
  check.tensor("k_cache", a.k_cache, kCacheFloats, 4);
  const CacheDims d =
      check_cache(check, "k_cache", a.k_cache, kCacheFloats, a.block_table, a.seq_lens, a.k_cache.shape[2]);
  const int64_t D = a.k_cache.shape[3];
  check.tensor("params.centre", a.centre, DType::f32, {d.Hkv, D});
  check_scale(check, "k_scale", a.k_scale, a.k_cache, d.Hkv);
  check_start(check, a.start, d.B);
  check.value(a.planes == 1 || a.planes == 2, "planes", a.planes, "1 or 2");
  check.value(D <= kSketchMaxDim, "D", double(D), "1 to 1024 for a sketch");
  if (exec.check_only && !a.bits.given()) return;
  check_sketch(check, a.bits, a.norm, a.planes, d, D);
  check.output("out.bits", a.bits, DType::u8, {d.P, d.Hkv, -1});
  check.output("out.norm", a.norm, DType::bf16, {d.P, d.Hkv, d.page});
  if (runs_on_cpu(check, exec)) cpu::key_sketch(a);
}

}  // namespace sic::slicing
