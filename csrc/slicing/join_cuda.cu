// Joining heads on the device. A thread takes 8 consecutive positions of one row and goes through its heads.
//
// Floor: 2 G bytes a position read (twice for softmax) and 2 written, mostly in L2 behind the scan; an exponential is
// some 20 operations.
#include "slicing/join_cuda.cuh"
#include "slicing/validate.h"

namespace sic::gpu {
namespace {

constexpr int kThreads = 256, kEach = 8;

struct JoinRow {
  int32_t b, t, h;
  int64_t row, first, length;  // the thread's first position; how many the row has

  __device__ JoinRow(const JoinTask& a, int64_t chunks) {
    row = blockIdx.x / chunks, first = (blockIdx.x % chunks * kThreads + threadIdx.x) * kEach;
    b = static_cast<int32_t>(row / a.Hkv / a.T), t = static_cast<int32_t>(row / a.Hkv % a.T);
    h = static_cast<int32_t>(row % a.Hkv);
    length = a.list.counts ? a.list.count(b, t, h) : a.seq_lens.visible(b, a.T, t, a.width);
  }

  // Bit i: position first + i takes part.
  __device__ __forceinline__ uint32_t present(const JoinTask& a) const {
    const int64_t left = length - first;
    uint32_t bits = left >= kEach ? 0xff : left > 0 ? (1u << left) - 1 : 0;
    if (a.marks) {
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (bits >> i & 1 && !a.marks[row * a.width + first + i]) bits &= ~(1u << i);
    }
    return bits;
  }
};

// 8 scores of head row `head`; only those in range are read.
__device__ __forceinline__ void load_scores(const JoinTask& a, int64_t head, const JoinRow& r, int32_t (&s)[kEach]) {
  const int16_t* from = a.scores + head * a.stride + r.first;
  if (r.first + kEach <= r.length) {
    const uint4 v = load_cached16(from);
    const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < kEach; ++i) s[i] = static_cast<int16_t>(word[i / 2] >> 16 * (i & 1));
  } else {
#pragma unroll
    for (int i = 0; i < kEach; ++i) s[i] = r.first + i < r.length ? from[i] : 0;
  }
}

__global__ void __launch_bounds__(kThreads) join_tops(JoinTask a, int64_t chunks) {
  const JoinRow r(a, chunks);
  const uint32_t present = r.present(a);
  for (int g = 0; g < a.G; ++g) {
    int32_t s[kEach], top = INT32_MIN;
    load_scores(a, r.row * a.G + g, r, s);
#pragma unroll
    for (int i = 0; i < kEach; ++i) top = present >> i & 1 && s[i] > top ? s[i] : top;
    top = warp_reduce_max(top);
    if (lane_id() == 0 && top > INT32_MIN) atomicMax(a.top + r.row * a.G + g, top);
  }
}

__global__ void __launch_bounds__(kThreads) join_weights(JoinTask a, int64_t chunks) {
  const JoinRow r(a, chunks);
  const uint32_t present = r.present(a);
  if (!__any_sync(kFullWarp, present != 0)) return;
  for (int g = 0; g < a.G; ++g) {
    int32_t s[kEach];
    load_scores(a, r.row * a.G + g, r, s);
    const int32_t top = a.top[r.row * a.G + g];
    uint32_t sum = 0;  // of 8 weights of at most 2^24
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (present >> i & 1) sum += static_cast<uint32_t>(exp_weight(s[i] - top));
    // Halves, so that the warp's sums fit 32 bits.
    const unsigned long long low = warp_reduce_add(sum & 0xffff), high = warp_reduce_add(sum >> 16);
    if (lane_id() == 0) atomicAdd(a.weight + r.row * a.G + g, low + (high << 16));
  }
}

// The joined score with the position's bias, as attend ranks it.
__device__ __forceinline__ int32_t biased(int32_t score, float bias) {
  const float limit = 1048576.0f, x = mul_rn(bias, slicing::kScoreSteps);
  const float steps = x > -limit ? x < limit ? exact_float(round_to_int(x)) : limit : -limit;
  const float moved = add_rn(static_cast<float>(score), steps);
  const float low = static_cast<float>(slicing::kScoreMin);
  return static_cast<int32_t>(moved < low ? low : moved > -low ? -low : moved);
}

template <bool kSoftmax, bool kWide>
__global__ void __launch_bounds__(kThreads) join_write(JoinTask a, int64_t chunks) {
  const JoinRow r(a, chunks);
  if (r.first >= a.width) return;
  const uint32_t present = r.present(a);
  float p[kEach] = {};
  int32_t joined[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) joined[i] = slicing::kScoreMin;
  if (present) {
    for (int g = 0; g < a.G; ++g) {
      int32_t s[kEach];
      load_scores(a, r.row * a.G + g, r, s);
      const int32_t top = a.top[r.row * a.G + g];
      if constexpr (kSoftmax) {
        const float inverse = div_rn(1.0f, static_cast<float>(a.weight[r.row * a.G + g]));
#pragma unroll
        for (int i = 0; i < kEach; ++i)
          p[i] = add_rn(p[i], mul_rn(static_cast<float>(exp_weight(s[i] - top)), inverse));
      } else {
#pragma unroll
        for (int i = 0; i < kEach; ++i) joined[i] = s[i] - top > joined[i] ? s[i] - top : joined[i];
      }
    }
  }
  const int64_t window_begin = a.window > 0 && r.length > a.window ? r.length - a.window : 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int64_t pos = r.first + i;
    if constexpr (kSoftmax) joined[i] = log_steps(p[i]);
    if (a.bias && present >> i & 1) joined[i] = biased(joined[i], a.bias[r.b * a.bias_stride + pos]);
    if (!(present >> i & 1) || pos < window_begin) joined[i] = kInvisible;
  }
  int16_t* out = a.out + r.b * a.out_stride[0] + r.t * a.out_stride[1] + r.h * a.out_stride[2] + r.first;
  if (kWide && r.first + kEach <= a.width) {
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      word[i] = byte_perm(static_cast<uint32_t>(joined[2 * i]), static_cast<uint32_t>(joined[2 * i + 1]), 0x5410);
    store16(out, make_uint4(word[0], word[1], word[2], word[3]));
  } else {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (r.first + i < a.width) out[i] = static_cast<int16_t>(joined[i]);
  }
}

int64_t chunks_of(const JoinTask& a) { return slicing::ceil_div(a.width, kThreads * kEach); }

template <class Kernel>
void launch_rows(Kernel kernel, const JoinTask& a, void* stream) {
  const int64_t chunks = chunks_of(a);
  launch(kernel, dim3(static_cast<unsigned>(a.rows() * chunks)), dim3(kThreads), 0, stream, a, chunks);
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
