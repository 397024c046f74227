// What the operations of a warp compute, once all lanes have arrived.
#include <cstring>

#include "core/dtype.h"
#include "simt/warp.h"

namespace sic::simt {
namespace {

template <class Body>
void for_lanes(unsigned mask, Body body) {
  for (; mask; mask &= mask - 1) body(__builtin_ctz(mask));
}

// ---- shuffles ----

// A lane outside of the mask has no value: CUDA leaves it undefined, here it is a pattern that tests notice.
constexpr unsigned char kUndefined = 0xcb;

template <class Source>
void shuffle_lanes(void* const* records, unsigned mask, Source source) {
  for_lanes(mask, [&](int lane) {
    auto& to = *static_cast<ShuffleRecord*>(records[lane]);
    const int first = lane & ~(to.width - 1);
    const int from = source(lane, to.argument, first, to.width);
    if (mask >> from & 1)
      std::memcpy(to.result, static_cast<ShuffleRecord*>(records[from])->value, 16);
    else
      std::memset(to.result, kUndefined, 16);
  });
}
void combine_index(void* const* records, unsigned mask) {
  shuffle_lanes(records, mask, [](int, int a, int first, int width) { return first + (a & (width - 1)); });
}
void combine_up(void* const* records, unsigned mask) {
  shuffle_lanes(records, mask, [](int lane, int a, int first, int) { return lane - a < first ? lane : lane - a; });
}
void combine_down(void* const* records, unsigned mask) {
  shuffle_lanes(records, mask,
                [](int lane, int a, int first, int width) { return lane + a >= first + width ? lane : lane + a; });
}
void combine_xor(void* const* records, unsigned mask) {
  shuffle_lanes(records, mask, [](int lane, int a, int first, int width) {
    const int from = lane ^ (a & 31);
    return from >= first + width ? lane : from;
  });
}

// ---- votes, reductions, matches ----

uint64_t value_of(void* const* records, int lane) { return static_cast<IntegerRecord*>(records[lane])->value; }
void give_all(void* const* records, unsigned mask, uint64_t result) {
  for_lanes(mask, [&](int lane) { static_cast<IntegerRecord*>(records[lane])->result = result; });
}
template <class T, class Op>
void reduce_lanes(void* const* records, unsigned mask, Op op) {
  T total = static_cast<T>(value_of(records, __builtin_ctz(mask)));
  for_lanes(mask & (mask - 1), [&](int lane) { total = op(total, static_cast<T>(value_of(records, lane))); });
  give_all(records, mask, static_cast<uint64_t>(total));
}

void combine_ballot(void* const* records, unsigned mask) {
  unsigned votes = 0;
  for_lanes(mask, [&](int lane) { votes |= static_cast<unsigned>(value_of(records, lane)) << lane; });
  give_all(records, mask, votes);
}
void combine_or(void* const* records, unsigned mask) {
  reduce_lanes<uint32_t>(records, mask, [](uint32_t a, uint32_t b) { return a | b; });
}
void combine_and(void* const* records, unsigned mask) {
  reduce_lanes<uint32_t>(records, mask, [](uint32_t a, uint32_t b) { return a & b; });
}
void combine_exclusive_or(void* const* records, unsigned mask) {
  reduce_lanes<uint32_t>(records, mask, [](uint32_t a, uint32_t b) { return a ^ b; });
}
void combine_add(void* const* records, unsigned mask) {
  reduce_lanes<uint32_t>(records, mask, [](uint32_t a, uint32_t b) { return a + b; });
}
template <class T>
void combine_min(void* const* records, unsigned mask) {
  reduce_lanes<T>(records, mask, [](T a, T b) { return a < b ? a : b; });
}
template <class T>
void combine_max(void* const* records, unsigned mask) {
  reduce_lanes<T>(records, mask, [](T a, T b) { return a > b ? a : b; });
}
void combine_match_any(void* const* records, unsigned mask) {
  for_lanes(mask, [&](int lane) {
    unsigned equal = 0;
    for_lanes(mask, [&](int other) {
      if (value_of(records, other) == value_of(records, lane)) equal |= 1u << other;
    });
    static_cast<IntegerRecord*>(records[lane])->result = equal;
  });
}

// ---- matrix fragments ----
//
// d (16 x 8) += a (16 x K) b (K x 8). With g = lane / 4 and c = lane % 4, register r of a lane holds
//   a: row g + 8 (r & 1), the n elements from column n (c + 4 (r >> 1))     n = 4 bytes / element size, K = 8 n
//   b: column g,          the n elements from row    n (c + 4 r)
//   d: row g + 8 (r >> 1), column 2 c + (r & 1)

double element(const uint32_t* registers, int r, int i, f16_t) {
  return to_float(f16_t{static_cast<uint16_t>(registers[r] >> 16 * i)});
}
double element(const uint32_t* registers, int r, int i, bf16_t) {
  return to_float(bf16_t{static_cast<uint16_t>(registers[r] >> 16 * i)});
}
int element(const uint32_t* registers, int r, int i, int8_t) { return static_cast<int8_t>(registers[r] >> 8 * i); }

// Products are exact and so is their sum, up to a double's precision; one rounding follows. Tensor cores round more
// often, in an order of their own: compare with a tolerance.
template <class T, class Sum, class Total>
void multiply_fragments(void* const* records) {
  constexpr int n = 4 / sizeof(T), K = 8 * n;
  Sum a[16][K], b[K][8], d[16][8] = {};
  for (int lane = 0; lane < 32; ++lane) {
    const auto& m = *static_cast<const MatrixRecord*>(records[lane]);
    const int g = lane / 4, c = lane % 4;
    for (int r = 0; r < 4; ++r)
      for (int i = 0; i < n; ++i) a[g + 8 * (r & 1)][n * (c + 4 * (r >> 1)) + i] = element(m.a, r, i, T{});
    for (int r = 0; r < 2; ++r)
      for (int i = 0; i < n; ++i) b[n * (c + 4 * r) + i][g] = element(m.b, r, i, T{});
  }
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < K; ++k)
      for (int column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
  for (int lane = 0; lane < 32; ++lane) {
    auto& m = *static_cast<MatrixRecord*>(records[lane]);
    for (int r = 0; r < 4; ++r) {
      Total total;
      std::memcpy(&total, &m.d[r], 4);
      total = static_cast<Total>(d[lane / 4 + 8 * (r >> 1)][2 * (lane % 4) + (r & 1)] + total);
      std::memcpy(&m.d[r], &total, 4);
    }
  }
}
void combine_mma_f16(void* const* records, unsigned) { multiply_fragments<f16_t, double, float>(records); }
void combine_mma_bf16(void* const* records, unsigned) { multiply_fragments<bf16_t, double, float>(records); }
void combine_mma_s8(void* const* records, unsigned) { multiply_fragments<int8_t, int64_t, int32_t>(records); }

// Element (row, column) of an 8 x 8 matrix lies in half column & 1 of lane 4 row + column / 2.
uint16_t half_of(uint32_t word, int i) { return static_cast<uint16_t>(word >> 16 * i); }

void combine_transpose(void* const* records, unsigned) {
  for (int lane = 0; lane < 32; ++lane) {
    uint32_t word = 0;
    for (int i = 0; i < 2; ++i) {
      const int row = 2 * (lane % 4) + i, column = lane / 4;
      const auto& source = *static_cast<const TransposeRecord*>(records[4 * row + column / 2]);
      word |= static_cast<uint32_t>(half_of(source.row[0], column & 1)) << 16 * i;
    }
    static_cast<TransposeRecord*>(records[lane])->result[0] = word;
  }
}
// Lane 8 m + i has brought row i of matrix m.
template <bool kTransposed>
void combine_load_matrix(void* const* records, unsigned) {
  for (int lane = 0; lane < 32; ++lane)
    for (int m = 0; m < 4; ++m) {
      uint32_t word = 0;
      for (int i = 0; i < 2; ++i) {
        const int row = kTransposed ? 2 * (lane % 4) + i : lane / 4;
        const int column = kTransposed ? lane / 4 : 2 * (lane % 4) + i;
        const auto& source = *static_cast<const TransposeRecord*>(records[8 * m + row]);
        word |= static_cast<uint32_t>(half_of(source.row[column / 2], column & 1)) << 16 * i;
      }
      static_cast<TransposeRecord*>(records[lane])->result[m] = word;
    }
}

}  // namespace

const WarpOperation shuffle_index{"__shfl_sync", combine_index};
const WarpOperation shuffle_up{"__shfl_up_sync", combine_up};
const WarpOperation shuffle_down{"__shfl_down_sync", combine_down};
const WarpOperation shuffle_xor{"__shfl_xor_sync", combine_xor};
const WarpOperation ballot{"__ballot_sync", combine_ballot};
const WarpOperation vote_any{"__any_sync", combine_or};
const WarpOperation vote_all{"__all_sync", combine_and};
const WarpOperation match_any{"__match_any_sync", combine_match_any};
const WarpOperation reduce_add{"__reduce_add_sync", combine_add};
const WarpOperation reduce_min_signed{"__reduce_min_sync", combine_min<int32_t>};
const WarpOperation reduce_max_signed{"__reduce_max_sync", combine_max<int32_t>};
const WarpOperation reduce_min_unsigned{"__reduce_min_sync", combine_min<uint32_t>};
const WarpOperation reduce_max_unsigned{"__reduce_max_sync", combine_max<uint32_t>};
const WarpOperation reduce_and{"__reduce_and_sync", combine_and};
const WarpOperation reduce_or{"__reduce_or_sync", combine_or};
const WarpOperation reduce_xor{"__reduce_xor_sync", combine_exclusive_or};
const WarpOperation mma_f16{"mma.m16n8k16.f16", combine_mma_f16};
const WarpOperation mma_bf16{"mma.m16n8k16.bf16", combine_mma_bf16};
const WarpOperation mma_s8{"mma.m16n8k32.s8", combine_mma_s8};
const WarpOperation transpose_matrix{"movmatrix", combine_transpose};
const WarpOperation load_matrix{"ldmatrix", combine_load_matrix<false>};
const WarpOperation load_matrix_transposed{"ldmatrix.trans", combine_load_matrix<true>};

void copy_registers(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }

}  // namespace sic::simt
