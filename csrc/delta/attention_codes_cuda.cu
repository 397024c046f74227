// Attention on coded rows, on tensor cores: which calls, which kernel.
#include "delta/attention_codes_cuda.cuh"

namespace sic::gpu {
namespace {

// Row offsets in units of 16 bytes must fit 32 bits.
bool offsets_fit(const TensorView& codes) {
  int64_t last = 0;
  for (int axis : {0, 2}) {
    if (codes.stride[axis] < 0) return false;
    last += std::max<int64_t>(0, codes.shape[axis] - 1) * codes.stride[axis];
  }
  return last / 16 < int64_t{1} << 32;
}

bool rows_fit(const TensorView& codes, const delta::Templates& t) {
  return t.centres.shape[2] == kCodedDim && row_access_bytes(codes) == 16 && offsets_fit(codes) &&
         row_access_bytes(t.centres) >= 8;
}

template <int kBits>
void launch_codes(const DeltaAttentionParams& p, const SplitPlan& plan, void* stream) {
  const bool rotated = p.cache.rotation.channels > 1;
  launch_tiles(rotated ? attention_codes<kBits, true> : attention_codes<kBits, false>, p, plan, 8,
               int64_t{sizeof(CodesShared)} + int64_t{4} * kAttentionWarps * 8 * p.cache.v.templates.n, stream);
}

}  // namespace

bool fits_codes_kernel(const delta::AttentionArgs& a) {
  const delta::Rope& rope = a.codec.rope;
  if (a.attention.q.dtype == DType::f32) return false;
  const int bits = a.codec.k_bits;
  if (bits != a.codec.v_bits || bits == 5) return false;
  if (!rows_fit(a.pages.k_codes, a.codec.k) || !rows_fit(a.pages.v_codes, a.codec.v)) return false;
  if (!rope.hi.given()) return true;
  return !rope.interleaved && 2 * rope.lo.shape[2] == kCodedDim && reinterpret_cast<uintptr_t>(rope.hi.data) % 16 == 0;
}

void attend_codes(const DeltaAttentionParams& p, const SplitPlan& plan, void* stream) {
  switch (p.cache.k.bits) {
    case 2:
      return launch_codes<2>(p, plan, stream);
    case 3:
      return launch_codes<3>(p, plan, stream);
    case 4:
      return launch_codes<4>(p, plan, stream);
    default:
      launch_codes<8>(p, plan, stream);
  }
}

}  // namespace sic::gpu
