// delta_decode on the GPU: a row of lanes takes a token's key or value, reads its codes once and stores whole groups.
//
// Floor: codes and tags read once, rows written once: 134 + 512 B a token and head at D = 128, 4 bits, to half types.
// Four fifths of it are stores, 16 bytes a lane; a warp decodes two rows of 128 channels in about 400 instructions.
#include "delta/decode_rows_cuda.cuh"
#include "slicing/validate.h"

namespace sic::gpu {
namespace {

using delta::DecodeArgs;

constexpr int kWarps = 8, kThreads = 32 * kWarps;

struct DecodeParams {
  CodedCache cache;
  PageMap map;
  SeqLens lengths;
  Rows3 out;  // by (sequence, position, head)
  int64_t B = 0, S = 0;
  int32_t heads = 0;
  bool values = false, wide = false;  // values, not keys; whole groups of out
};

template <class T, int R, bool Uniform>
__device__ __forceinline__ void store_row(const SketchRow<R, Uniform>& row, char* to, bool wide,
                                          const float (&x)[R][kGroup]) {
#pragma unroll
  for (int r = 0; r < R; ++r) {
    Group<T> g = {};
#pragma unroll
    for (int c = 0; c < kGroup; ++c) {
      T y;
      from_float(x[r][c], y);
      g.put(c, y);
    }
    store_group(reinterpret_cast<T*>(to) + row.group(r) * kGroup, g, row.size(r), wide);
  }
}

template <class T, int R, bool Uniform>
__global__ void __launch_bounds__(kThreads, R == 4 ? 1 : 3) decode_rows(const __grid_constant__ DecodeParams p) {
  SIC_DYNAMIC_SHARED(float, shared);
  const CodeSide& side = p.values ? p.cache.v : p.cache.k;
  fill_levels(side, shared);
  __syncthreads();
  const RowDecoder<R, Uniform> decoder(side, shared);
  const auto& row = decoder.row;
  const int per_warp = 32 / side.lanes, own = warp_id() * per_warp + lane_id() / side.lanes;
  float* const room = shared + 32 + own * ((row.D + 7) / 8 * 8 + 4);
  const int64_t b = blockIdx.y + static_cast<int64_t>(blockIdx.z) * gridDim.y, h = blockIdx.x % p.heads;
  const int64_t s = static_cast<int64_t>(blockIdx.x / p.heads) * kWarps * per_warp + own;
  const bool inside = b < p.B && s < p.S, live = inside && s < p.lengths[b];
  RowSource source;
  int64_t position = 0;
  if (live) {
    const Place at = p.map.place(b, static_cast<uint32_t>(s));
    source = find_row(p.cache.pages, side, p.values, at.page_id, h, at.offset);
    position = p.cache.position(b, static_cast<int32_t>(s));
  } else {
    source.codes = side.codes.at(0, 0, 0);
  }
  float x[R][kGroup];
  const DType raw_type = p.cache.pages.raw_type;
  if (!__any_sync(kFullWarp, live)) {
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int c = 0; c < kGroup; ++c) x[r][c] = 0;
  } else if (!p.values) {
    decode_key(decoder, p.cache.rotation, p.cache.rope, source, raw_type, h, position, room, x);
  } else {
    decode_value(decoder, source, raw_type, h, x);
  }
  if (!inside) return;
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int c = 0; c < kGroup; ++c) x[r][c] = live ? x[r][c] : 0.0f;
  store_row<T>(row, p.out.at(b, s, h), p.wide, x);
}

template <class T>
void launch_decode(const DecodeParams& p, void* stream) {
  const CodeSide& side = p.values ? p.cache.v : p.cache.k;
  const int64_t rows = kWarps * (32 / side.lanes), room = rows * ((side.templates.D + 7) / 8 * 8 + 4);
  const unsigned y = static_cast<unsigned>(std::min<int64_t>(p.B, 65535)),
                 z = static_cast<unsigned>(slicing::ceil_div(p.B, 65535));
  const dim3 grid(grid_blocks(slicing::ceil_div(p.S, rows) * p.heads), y, z);
  with_sketch_row(side.templates.D, [&](auto sets, auto uniform) {
    launch(decode_rows<T, decltype(sets)::value, decltype(uniform)::value>, grid, kThreads,
           static_cast<size_t>(4 * (32 + room)), stream, p);
  });
}

}  // namespace

int64_t delta_decode_workspace(const DecodeArgs&) { return 0; }

void delta_decode(const DecodeArgs& a, const Exec& exec) {
  DecodeParams p;
  p.cache = CodedCache::of(a.pages, a.codec, a.positions);
  p.map = PageMap::of(a.block_table, a.pages.k_codes.shape[2]);
  p.lengths = SeqLens::of(a.seq_lens);
  p.B = a.k.shape[0], p.S = a.max_seq_len, p.heads = static_cast<int32_t>(a.k.shape[2]);
  for (const TensorView* out : {&a.k, &a.v}) {
    p.out = Rows3::of(*out), p.wide = groups_aligned(*out), p.values = out == &a.v;
    if (out->dtype == DType::f32) launch_decode<float>(p, exec.stream);
    if (out->dtype == DType::f16) launch_decode<f16_t>(p, exec.stream);
    if (out->dtype == DType::bf16) launch_decode<bf16_t>(p, exec.stream);
  }
}

}  // namespace sic::gpu
