// key_sketch: checks, then the backend.
#include <algorithm>

#include "slicing/sketch.h"
#include "slicing/validate.h"

SIC_OP_KERNELS(key_sketch, slicing::KeySketchArgs)

namespace sic::slicing {

namespace {

void check_inputs(const Check& check, const KeySketchArgs& a) {
  check.tensor("k_cache", a.k_cache, kCacheFloats, 4);
  const CacheDims d =
      check_cache(check, "k_cache", a.k_cache, kCacheFloats, a.block_table, a.seq_lens, a.k_cache.shape[2]);
  const int64_t D = a.k_cache.shape[3];
  check.tensor("params.centre", a.centre, DType::f32, {d.Hkv, D});
  check_scale(check, "k_scale", a.k_scale, a.k_cache, d.Hkv);
  check_start(check, a.start, d.B);
  check.value(a.planes == 1 || a.planes == 2, "planes", a.planes, "1 or 2");
  check.value(D >= 1 && D <= kSketchMaxDim, "D", double(D), "1 to 1024 for a sketch");
}

void check_outputs(const Check& check, const KeySketchArgs& a) {
  const TensorView& cache = a.k_cache;
  const int64_t P = cache.shape[0], Hkv = cache.shape[1], page = cache.shape[2];
  check.output("out.bits", a.bits, DType::u8, {P, Hkv, a.planes * sketch_plane_bytes(page, cache.shape[3])});
  check.output("out.norm", a.norm, DType::bf16, {P, Hkv, page});
  check.apart({{"out.bits", a.bits}, {"out.norm", a.norm}},
              {&cache, &a.block_table, &a.seq_lens, &a.centre, &a.k_scale, &a.start});
}

}  // namespace

const Op<KeySketchArgs> key_sketch{"key_sketch", check_inputs, check_outputs, SIC_KERNELS(key_sketch)};

}  // namespace sic::slicing
