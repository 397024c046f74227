// key_sketch on the GPU: every live key of the pages from `start` on.
//
// Floor: D * itemsize bytes read and planes * D / 8 + 2 written for each token and head, 290 B at D = 128 in bf16. The
// rotation and the three sums are some 25 operations an element, about as much time as the bytes take, so nothing is
// staged: a warp reads whole rows, 16 bytes a lane, one row ahead of the arithmetic.
#include <algorithm>

#include "slicing/sketch_cuda.cuh"
#include "slicing/validate.h"

namespace sic::gpu {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kTask = slicing::kTokenBlock;  // positions that a warp takes at once
constexpr int64_t kMaxParts = 64;            // blocks of a (sequence, head); each strides over the tasks

struct Params {
  Rows3 keys;
  PageMap pages;
  SeqLens seq_lens;
  IntVector start;
  const float* centre;
  int64_t centre_stride;
  HeadScale scale;
  DeviceSketch out;
  int64_t positions;  // S
  int D, lanes, planes, heads, parts;
  bool wide_keys, word_stores;
};

// Byte j of up to four consecutive tokens.
struct TokenBytes {
  uint32_t bytes = 0;

  __device__ __forceinline__ void put(int i, uint32_t byte) { bytes |= byte << 8 * i; }
  // The n gathered tokens; those of dead tokens are not written.
  __device__ __forceinline__ void store(uint8_t* to, int n, uint32_t live) {
    if (live == 0xf) {
      *reinterpret_cast<uint32_t*>(to) = bytes;
    } else if (live == 0x3 && n == 2) {
      *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(bytes);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (live >> i & 1) to[i] = static_cast<uint8_t>(bytes >> 8 * i);
    }
    bytes = 0;
  }
};

// Writes the entries of kTask consecutive positions of one sequence and head.
template <class T, int R, bool Uniform>
class TaskWriter {
 public:
  __device__ TaskWriter(const Params& p, int64_t b, int64_t h)
      : p_(p), row_(p.D, p.lanes), b_(b), h_(h), scale_(p.scale[h]) {
    if constexpr (R == 1) load_centre(0, centre_);
  }

  // Positions [first, first + kTask) that lie within [begin, end): at least one.
  __device__ __forceinline__ void run(int64_t first, int64_t begin, int64_t end) const {
    // The page of position i is on lane i.
    const int64_t pos = first + (lane_id() & (kTask - 1)), near = pos < begin ? begin : pos < end ? pos : end - 1;
    const int64_t page_id = p_.pages.place(b_, static_cast<uint32_t>(near)).page_id;
    const auto page_of = [&](int i) { return __shfl_sync(kFullWarp, page_id, i); };
    const auto live = [&](int i) { return first + i >= begin && first + i < end; };
    // Consecutive tokens go to one row of lanes, so that their bytes gather into words.
    const int each = p_.lanes / 2, mine = lane_id() / p_.lanes * each;
    Group<T> next[R];
    load(page_of(mine), first + mine, live(mine), next);
    TokenBytes bytes[2][R];
    uint32_t gathered = 0;  // bit i: token i of the word is live
    bf16_t norm{};
    for (int k = 0; k < each; ++k) {
      const int i = mine + k;
      float x[R][kGroup];
      centred(next, x);
      const int64_t id = page_of(i), id_after = page_of(k + 1 < each ? i + 1 : i);
      load(id_after, first + i + 1, k + 1 < each && live(i + 1), next);
      const SketchEntry<R> e = sketch_entry(row_, x, p_.planes);
      if (!p_.word_stores) {
        if (live(i))
          store_entry(row_, e, p_.planes, page_size(), offset(first + i), p_.out.page_bits(id, h_),
                      p_.out.page_norm(id, h_));
        continue;
      }
      if (row_.lane == k) norm = e.norm;
      gathered |= static_cast<uint32_t>(live(i)) << (k & 3);
#pragma unroll
      for (int r = 0; r < R; ++r) bytes[0][r].put(k & 3, e.sign[r]), bytes[1][r].put(k & 3, e.outer[r]);
      if ((k & 3) != 3 && k + 1 < each) continue;
      store_bytes(id, offset(first + mine + (k & ~3)), (k & 3) + 1, gathered, bytes);
      gathered = 0;
    }
    if (p_.word_stores && row_.lane < each && live(mine + row_.lane))
      p_.out.page_norm(page_id, h_)[offset(first + mine + row_.lane)] = norm;  // one page: page_id is the same on each
  }

 private:
  __device__ __forceinline__ uint32_t page_size() const { return p_.pages.split.page; }
  __device__ __forceinline__ uint32_t offset(int64_t pos) const {
    const uint32_t p = static_cast<uint32_t>(pos);
    return p - p_.pages.split.index(p) * page_size();
  }

  __device__ __forceinline__ void load_centre(int r, float (&centre)[kGroup]) const {
    const float* from = p_.centre + h_ * p_.centre_stride + row_.group(r) * kGroup;
#pragma unroll
    for (int c = 0; c < kGroup; ++c) centre[c] = c < row_.size(r) ? from[c] : 0.0f;
  }

  __device__ __forceinline__ void load(int64_t page_id, int64_t pos, bool live, Group<T> (&keys)[R]) const {
    const T* from = p_.keys.as<const T>(page_id, h_, offset(pos));
#pragma unroll
    for (int r = 0; r < R; ++r)
      keys[r] = load_group(from + row_.group(r) * kGroup, live ? row_.size(r) : 0, p_.wide_keys);
  }

  __device__ __forceinline__ void centred(const Group<T> (&keys)[R], float (&x)[R][kGroup]) const {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      float centre[kGroup];
      if constexpr (R > 1) load_centre(r, centre);
#pragma unroll
      for (int c = 0; c < kGroup; ++c)
        x[r][c] = sub_rn(mul_rn(to_float(keys[r].element(c)), scale_), R > 1 ? centre[c] : centre_[c]);
    }
  }

  // n tokens from `token` of the page on.
  __device__ __forceinline__ void store_bytes(int64_t page_id, uint32_t token, int n, uint32_t live,
                                              TokenBytes (&bytes)[2][R]) const {
    const int row_bytes = (p_.D + 7) / 8;
    const SketchBytes at(page_size(), token, row_bytes);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int j = row_.group(r);
      if (j < row_bytes) {
        uint8_t* to = p_.out.page_bits(page_id, h_) + at.first + static_cast<int64_t>(j) * at.stride;
        bytes[0][r].store(to, n, live);
        if (p_.planes == 2) bytes[1][r].store(to + static_cast<int64_t>(page_size()) * row_bytes, n, live);
      }
      bytes[0][r].bytes = bytes[1][r].bytes = 0;
    }
  }

  const Params& p_;
  SketchRow<R, Uniform> row_;
  int64_t b_, h_;
  float scale_;
  float centre_[kGroup];
};

template <class T, int R, bool Uniform>
__global__ void __launch_bounds__(kThreads, Uniform  ? 3
                                            : R == 1 ? 2
                                                     : 1) key_sketch_kernel(const __grid_constant__ Params p) {
  const int64_t row = blockIdx.x / p.parts, part = blockIdx.x % p.parts, b = row / p.heads, h = row % p.heads;
  const int64_t len = p.seq_lens[b], start = p.start.data ? p.start[b] : 0, page = p.pages.split.page;
  const int64_t end = len < p.positions ? len : p.positions;
  if (start >= p.positions) return;
  const int64_t begin = start > 0 ? p.pages.split.index(static_cast<uint32_t>(start)) * page : 0;
  const TaskWriter<T, R, Uniform> writer(p, b, h);
  const int64_t stride = static_cast<int64_t>(p.parts) * kWarps * kTask;
  for (int64_t first = begin / kTask * kTask + (part * kWarps + warp_id()) * kTask; first < end; first += stride)
    writer.run(first, begin, end);
}

}  // namespace

int64_t key_sketch_workspace(const slicing::KeySketchArgs&) { return 0; }

void key_sketch(const slicing::KeySketchArgs& a, const Exec& exec) {
  const int64_t page = a.k_cache.shape[2], D = a.k_cache.shape[3], Hkv = a.k_cache.shape[1], B = a.seq_lens.shape[0];
  Params p;
  p.keys = Rows3::of(a.k_cache);
  p.pages = PageMap::of(a.block_table, page);
  p.seq_lens = SeqLens::of(a.seq_lens);
  p.start = IntVector::of(a.start);
  p.centre = a.centre.as<const float>(), p.centre_stride = a.centre.stride[0];
  p.scale = HeadScale::of(a.k_scale);
  p.out = DeviceSketch::of(a.bits, a.norm);
  p.positions = a.block_table.given() ? a.block_table.shape[1] * page : page;
  p.D = static_cast<int>(D), p.lanes = lanes_per_row(D), p.planes = a.planes, p.heads = static_cast<int>(Hkv);
  p.parts = static_cast<int>(std::clamp<int64_t>(slicing::ceil_div(p.positions, kTask * kWarps), 1, kMaxParts));
  p.wide_keys = groups_aligned(a.k_cache);
  p.word_stores = page % kTask == 0 && row_access_bytes(a.bits) >= 4;
  with_float_type(a.k_cache.dtype, [&](auto type) {
    with_sketch_row(D, [&](auto sets, auto uniform) {
      launch(key_sketch_kernel<decltype(type), decltype(sets)::value, decltype(uniform)::value>,
             dim3(grid_blocks(B * Hkv * p.parts)), dim3(kThreads), 0, exec.stream, p);
    });
  });
}

}  // namespace sic::gpu
