// gather on the CPU: row copies with the next rows' lines already under way.
#include <algorithm>

#include "core/paged.h"
#include "core/parallel.h"
#include "core/simd.h"
#include "slicing/validate.h"

namespace sic::cpu::SIC_ISA {
namespace {

constexpr int kAhead = 16;  // rows

// Copies n listed rows; at(i) is the position of row i.
template <class At>
void copy_rows(const CacheRows& from, int64_t bytes, char* to, int64_t to_stride, int64_t n, At at) {
  for (int64_t i = 0; i < std::min<int64_t>(n, kAhead); ++i) prefetch_row(from[at(i)], bytes);
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) prefetch_row(from[at(i + kAhead)], bytes);
    std::memcpy(to + i * to_stride, from[at(i)], bytes);
  }
}

}  // namespace

void gather(const slicing::GatherArgs& a, const Exec&) {
  const slicing::Selected& s = a.selected;
  const int64_t T = s.indices.shape[1], Hkv = s.indices.shape[2], rows = s.indices.shape[0] * T * Hkv,
                page = a.kv.k_cache.shape[2];
  int64_t* indptr = a.indptr.as<int64_t>();
  indptr[0] = 0;
  for (int64_t r = 0; r < rows; ++r)
    indptr[r + 1] = indptr[r] + slicing::gathered_of_row(a, r / Hkv / T, r / Hkv % T, r % Hkv);
  parallel_for(rows, [&](int64_t r) {
    const int64_t h = r % Hkv, t = r / Hkv % T, b = r / Hkv / T, n = indptr[r + 1] - indptr[r];
    const int32_t* list =
        s.indices.as<const int32_t>() + b * s.indices.stride[0] + t * s.indices.stride[1] + h * s.indices.stride[2];
    const auto position = [&](int64_t i) -> uint32_t {
      return static_cast<uint32_t>(s.unit == slicing::Unit::token ? list[i] : list[i / page] * page + i % page);
    };
    const auto copy = [&](const TensorView& cache, const TensorView& out) {
      const int64_t bytes = cache.shape[3] * itemsize(cache.dtype);
      copy_rows(CacheRows(cache, a.kv.block_table, b, h), bytes, out.as<char>() + indptr[r] * out.stride_bytes(0),
                out.stride_bytes(0), n, position);
    };
    copy(a.kv.k_cache, a.k);
    copy(a.kv.v_cache, a.v);
  });
}

}  // namespace sic::cpu::SIC_ISA
