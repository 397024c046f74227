// gather on the GPU: the listed rows of K and V, packed, and where each list begins.
//
// Floor: every listed row read once and written once, 2 * (Dk + Dv) * itemsize bytes: 1 KB for each token and head at
// D = 128 in bf16. Launches: totals of blocks of lists (where there are several), their prefix sum, the copy. The copy
// looks up the places of 64 rows at once; then each thread keeps four 16-byte loads in flight.
#include <algorithm>

#include "core/words.cuh"
#include "slicing/device_views.cuh"
#include "slicing/validate.h"

namespace sic::gpu {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kListsPerThread = 4, kListsPerBlock = kThreads * kListsPerThread;
constexpr int kRowsPerStep = 64;
constexpr int64_t kMaxParts = 64;  // blocks of a list in the copy; each strides over the steps

// The selection of every (sequence, query token, KV head) is a list.
struct Lists {
  DeviceSelection selected;
  SeqLens seq_lens;
  int64_t count, T, heads, capacity, page;  // capacity: K
  bool of_pages;

  struct Index {
    int64_t b, t, h;
  };
  __device__ __forceinline__ Index index(int64_t list) const {
    return {list / heads / T, list / heads % T, list % heads};
  }
  // Rows of a list. Only the last page listed can be one that is seen in part.
  __device__ __forceinline__ int64_t rows(int64_t list) const {
    const Index i = index(list);
    const int64_t given = selected.count(i.b, i.t, i.h), n = given < 0 ? 0 : given < capacity ? given : capacity;
    if (!of_pages || n == 0) return n;
    const int64_t last = selected.row(i.b, i.t, i.h)[n - 1];
    const int64_t left = seq_lens.visible(i.b, T, i.t, INT32_MAX) - last * page;
    return (n - 1) * page + (left < 0 ? 0 : left < page ? left : page);
  }
};

// ---- where each list begins ----

__device__ __forceinline__ int64_t first_list() {
  return (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kListsPerThread;
}

__global__ void __launch_bounds__(kThreads) list_totals_kernel(const __grid_constant__ Lists lists, int64_t* totals) {
  __shared__ int64_t shared[kWarps];
  int64_t sum = 0;
  for (int64_t l = first_list(); l < first_list() + kListsPerThread && l < lists.count; ++l) sum += lists.rows(l);
  sum = block_reduce_add(sum, shared);
  if (threadIdx.x == 0) totals[blockIdx.x] = sum;
}

// Sum over the threads before this one.
__device__ __forceinline__ int64_t sum_before(int64_t v, int64_t* shared) {
  int64_t sum = v;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int64_t other = __shfl_up_sync(kFullWarp, sum, d);
    if (lane_id() >= d) sum += other;
  }
  if (lane_id() == 31) shared[warp_id()] = sum;
  __syncthreads();
  for (int w = 0; w < warp_id(); ++w) sum += shared[w];
  return sum - v;
}

__global__ void __launch_bounds__(kThreads)
    list_starts_kernel(const __grid_constant__ Lists lists, const int64_t* totals, int64_t* indptr) {
  __shared__ int64_t shared[2][kWarps];
  int64_t earlier = 0;
  for (unsigned i = threadIdx.x; i < blockIdx.x; i += kThreads) earlier += totals[i];
  earlier = block_reduce_add(earlier, shared[0]);
  int64_t rows[kListsPerThread], sum = 0;
#pragma unroll
  for (int i = 0; i < kListsPerThread; ++i) {
    rows[i] = first_list() + i < lists.count ? lists.rows(first_list() + i) : 0;
    sum += rows[i];
  }
  int64_t at = earlier + sum_before(sum, shared[1]);
#pragma unroll
  for (int i = 0; i < kListsPerThread; ++i) {
    at += rows[i];
    if (first_list() + i < lists.count) indptr[first_list() + i + 1] = at;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) indptr[0] = 0;
}

// ---- the copy ----

struct CopyParams {
  Lists lists;
  PageMap pages;
  const int64_t* indptr;
  int64_t out_rows;
  int parts;
  Rows3 from[2];  // K and V
  char* to[2];
  int64_t to_stride[2];
  PageSplit words[2];  // of a row
};

// n rows whose places are known, to `to` on.
template <class Word>
__device__ __forceinline__ void copy_rows(const Rows3& from, int64_t h, const Place* places, int n, PageSplit words,
                                          char* to, int64_t to_stride) {
  constexpr int kInFlight = 4;
  const uint32_t total = static_cast<uint32_t>(n) * words.page;
  for (uint32_t first = threadIdx.x; first < total; first += kInFlight * kThreads) {
    Word w[kInFlight];
    char* target[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const uint32_t i = first + u * kThreads;
      target[u] = nullptr;
      if (i >= total) continue;
      const uint32_t row = words.index(i);
      const int64_t at = static_cast<int64_t>(i - row * words.page) * static_cast<int64_t>(sizeof(Word));
      target[u] = to + row * to_stride + at;
      w[u] = load_word<Word>(from.at(places[row].page_id, h, places[row].offset) + at);
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u)
      if (target[u]) store_word(target[u], w[u]);
  }
}

template <class Word>
__global__ void __launch_bounds__(kThreads) gather_rows_kernel(const __grid_constant__ CopyParams p) {
  __shared__ Place places[kRowsPerStep];
  const int64_t list = blockIdx.x / p.parts, part = blockIdx.x % p.parts;
  const int64_t start = p.indptr[list], rows = p.indptr[list + 1] - start;
  const int64_t n = start + rows <= p.out_rows ? rows : p.out_rows - start;
  const Lists::Index at = p.lists.index(list);
  const int32_t* listed = p.lists.selected.row(at.b, at.t, at.h);
  for (int64_t first = part * kRowsPerStep; first < n; first += static_cast<int64_t>(p.parts) * kRowsPerStep) {
    const int here = static_cast<int>(n - first < kRowsPerStep ? n - first : kRowsPerStep);
    __syncthreads();  // the places of the step before are still read
    if (static_cast<int>(threadIdx.x) < here) {
      uint32_t pos = static_cast<uint32_t>(first) + threadIdx.x;
      if (p.lists.of_pages) {
        const uint32_t i = p.pages.split.index(pos), page = p.pages.split.page;
        pos = static_cast<uint32_t>(listed[i]) * page + (pos - i * page);
      } else {
        pos = static_cast<uint32_t>(listed[pos]);
      }
      places[threadIdx.x] = p.pages.place(at.b, pos);
    }
    __syncthreads();
#pragma unroll
    for (int kv = 0; kv < 2; ++kv)
      copy_rows<Word>(p.from[kv], at.h, places, here, p.words[kv], p.to[kv] + (start + first) * p.to_stride[kv],
                      p.to_stride[kv]);
  }
}

// ---- host side ----

int64_t list_blocks(const slicing::GatherArgs& a) {
  const TensorView& s = a.selected.indices;
  return std::max<int64_t>(1, slicing::ceil_div(s.shape[0] * s.shape[1] * s.shape[2], kListsPerBlock));
}

Lists make_lists(const slicing::GatherArgs& a) {
  const TensorView& s = a.selected.indices;
  Lists l;
  l.selected = DeviceSelection::of(s, a.selected.counts);
  l.seq_lens = SeqLens::of(a.kv.seq_lens);
  l.count = s.shape[0] * s.shape[1] * s.shape[2];
  l.T = s.shape[1], l.heads = s.shape[2], l.capacity = s.shape[3], l.page = a.kv.k_cache.shape[2];
  l.of_pages = a.selected.unit == slicing::Unit::page;
  return l;
}

template <class Word>
void launch_copy(const slicing::GatherArgs& a, const Lists& lists, void* stream) {
  CopyParams p;
  p.lists = lists;
  p.pages = PageMap::of(a.kv.block_table, lists.page);
  p.indptr = a.indptr.as<int64_t>();
  p.out_rows = std::min(a.k.shape[0], a.v.shape[0]);
  const int64_t longest = lists.capacity * (lists.of_pages ? lists.page : 1);
  p.parts = static_cast<int>(std::clamp<int64_t>(slicing::ceil_div(longest, kRowsPerStep), 1, kMaxParts));
  const TensorView *from[2] = {&a.kv.k_cache, &a.kv.v_cache}, *to[2] = {&a.k, &a.v};
  for (int kv = 0; kv < 2; ++kv) {
    p.from[kv] = Rows3::of(*from[kv]);
    p.to[kv] = to[kv]->as<char>(), p.to_stride[kv] = to[kv]->stride_bytes(0);
    const int64_t bytes = from[kv]->shape[3] * itemsize(from[kv]->dtype);
    p.words[kv] = PageSplit::of(bytes / static_cast<int64_t>(sizeof(Word)));
  }
  launch(gather_rows_kernel<Word>, dim3(grid_blocks(lists.count * p.parts)), dim3(kThreads), 0, stream, p);
}

}  // namespace

int64_t gather_workspace(const slicing::GatherArgs& a) {
  const int64_t blocks = list_blocks(a);
  return blocks > 1 ? blocks * static_cast<int64_t>(sizeof(int64_t)) : 0;
}

void gather(const slicing::GatherArgs& a, const Exec& exec) {
  const Lists lists = make_lists(a);
  const dim3 blocks(static_cast<unsigned>(list_blocks(a)));
  int64_t* totals = exec.workspace.as<int64_t>();
  if (blocks.x > 1) launch(list_totals_kernel, blocks, dim3(kThreads), 0, exec.stream, lists, totals);
  launch(list_starts_kernel, blocks, dim3(kThreads), 0, exec.stream, lists, totals, a.indptr.as<int64_t>());
  const int access = std::min(
      {row_access_bytes(a.kv.k_cache), row_access_bytes(a.kv.v_cache), row_access_bytes(a.k), row_access_bytes(a.v)});
  with_word(access, [&](auto word) { launch_copy<decltype(word)>(a, lists, exec.stream); });
}

}  // namespace sic::gpu
