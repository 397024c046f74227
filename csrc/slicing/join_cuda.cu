// Joining heads on the device. A thread takes 8 consecutive positions of one row and goes through its heads.
//
// Floor: 2 G bytes a position read (twice for softmax) and 2 written, mostly in L2 behind the scan; an exponential is
// some 20 operations.
#include "slicing/join_cuda.cuh"
#include "slicing/validate.h"

namespace sic::gpu {
namespace {

constexpr int kThreads = 256;

// A block's row, and the first position of each thread.
struct JoinPlace {
  JoinRow row;
  int64_t first;

  __device__ JoinPlace(const JoinTask& a, int64_t chunks)
      : row(a, blockIdx.x / chunks), first((blockIdx.x % chunks * kThreads + threadIdx.x) * kJoinEach) {}
};

__global__ void __launch_bounds__(kThreads) join_tops(JoinTask a, int64_t chunks) {
  const JoinPlace at(a, chunks);
  const uint32_t present = at.row.present(a, at.first);
  for (int g = 0; g < a.G; ++g) {
    int32_t s[kJoinEach], top = INT32_MIN;
    load_scores(a, at.row, g, at.first, s);
#pragma unroll
    for (int i = 0; i < kJoinEach; ++i) top = present >> i & 1 && s[i] > top ? s[i] : top;
    top = warp_reduce_max(top);
    if (lane_id() == 0 && top > INT32_MIN) atomicMax(a.top + at.row.row * a.G + g, top);
  }
}

__global__ void __launch_bounds__(kThreads) join_weights(JoinTask a, int64_t chunks) {
  const JoinPlace at(a, chunks);
  const uint32_t present = at.row.present(a, at.first);
  if (!__any_sync(kFullWarp, present != 0)) return;
  for (int g = 0; g < a.G; ++g) {
    int32_t s[kJoinEach];
    load_scores(a, at.row, g, at.first, s);
    const uint32_t sum = sum_weights(s, present, a.top[at.row.row * a.G + g]);
    // Halves, so that the warp's sums fit 32 bits.
    const unsigned long long low = warp_reduce_add(sum & 0xffff), high = warp_reduce_add(sum >> 16);
    if (lane_id() == 0) atomicAdd(a.weight + at.row.row * a.G + g, low + (high << 16));
  }
}

template <bool kSoftmax, bool kWide>
__global__ void __launch_bounds__(kThreads) join_write(JoinTask a, int64_t chunks) {
  const JoinPlace at(a, chunks);
  const int64_t first = at.first;
  if (first >= a.width) return;
  const auto reference = [&](int g) {
    const int64_t head = at.row.row * a.G + g;
    return HeadReference{a.top[head], kSoftmax ? inverse_weight(a.weight[head]) : 0.0f};
  };
  int32_t joined[kJoinEach];
  join_eight<kSoftmax>(a, at.row, first, reference, joined);
  int16_t* out = a.out + at.row.b * a.out_stride[0] + at.row.t * a.out_stride[1] + at.row.h * a.out_stride[2] + first;
  if (kWide && first + kJoinEach <= a.width) {
    store16(out, pack_scores(joined));
  } else {
#pragma unroll
    for (int i = 0; i < kJoinEach; ++i)
      if (first + i < a.width) out[i] = static_cast<int16_t>(joined[i]);
  }
}

int64_t chunks_of(const JoinTask& a) { return slicing::ceil_div(a.width, kThreads * kJoinEach); }

template <class Kernel>
void launch_rows(Kernel kernel, const JoinTask& a, void* stream) {
  const int64_t chunks = chunks_of(a);
  launch(kernel, dim3(grid_blocks(a.rows() * chunks)), dim3(kThreads), 0, stream, a, chunks);
}

bool wide_out(const JoinTask& a) {
  const int64_t size[3] = {a.B, a.T, a.Hkv};
  uint64_t any = reinterpret_cast<uintptr_t>(a.out);
  for (int i = 0; i < 3; ++i)
    if (size[i] > 1) any |= static_cast<uint64_t>(a.out_stride[i]) * sizeof(int16_t);
  return any % 16 == 0;
}

}  // namespace

void launch_join(const JoinTask& a, void* stream) {
  const bool wide = wide_out(a);
  if (a.pool == slicing::Pool::softmax) {
    launch_rows(join_weights, a, stream);
    return launch_rows(wide ? join_write<true, true> : join_write<true, false>, a, stream);
  }
  launch_rows(wide ? join_write<false, true> : join_write<false, false>, a, stream);
}

void launch_join_tops(const JoinTask& a, void* stream) { launch_rows(join_tops, a, stream); }

}  // namespace sic::gpu
