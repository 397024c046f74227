#include "slicing/validate.h"

#include "core/paged.h"
#include "slicing/sketch.h"

namespace sic::slicing {
namespace {

void check_lengths(const Check& check, const TensorView& seq_lens, int64_t S) {
  for (int64_t b = 0; b < seq_lens.shape[0]; ++b) {
    const int64_t n = index_at(seq_lens, b * seq_lens.stride[0]);
    check.require(n >= 0 && n <= S, "seq_lens", std::to_string(n) + " for sequence " + std::to_string(b),
                  "0 to " + std::to_string(S) + " positions");
  }
}

template <class Int>
void check_page_ids(const Check& check, const TensorView& table, const TensorView& seq_lens, const CacheDims& d) {
  for (int64_t b = 0; b < d.B; ++b) {
    const Int* row = table.as<const Int>() + b * table.stride[0];
    const int64_t live = ceil_div(index_at(seq_lens, b * seq_lens.stride[0]), d.page);
    bool ok = true;
    for (int64_t i = 0; i < live; ++i) ok &= row[i] >= 0 && row[i] < d.P;
    if (ok) continue;
    for (int64_t i = 0; i < live; ++i)
      check.require(row[i] >= 0 && row[i] < d.P, "block_table",
                    "page " + std::to_string(row[i]) + " at [" + std::to_string(b) + "," + std::to_string(i) + "]",
                    "0 to " + std::to_string(d.P - 1));
  }
}

}  // namespace

CacheDims check_cache(const Check& check, const char* arg, const TensorView& cache, DTypeSet types,
                      const TensorView& block_table, const TensorView& seq_lens, int64_t page) {
  check.tensor(arg, cache, types, cache.rank);
  check.tensor("seq_lens", seq_lens, kIndexInts, 1);
  CacheDims d;
  d.B = seq_lens.shape[0];
  d.P = cache.shape[0];
  d.Hkv = cache.shape[1];
  d.page = page;
  check.value(page >= 1 && page <= kMaxPage, "page_size", double(page), "1 to 2^31 - 1");
  if (block_table.given()) {
    check.tensor("block_table", block_table, kIndexInts, {d.B, -1});
    d.M = block_table.shape[1];
  } else if (d.P != d.B) {
    check.fail(arg, describe(cache),
               "one row for each of the " + std::to_string(d.B) + " sequences (no block_table is given)");
  }
  d.S = d.M * page;
  check.value(d.S < (int64_t{1} << 31), "block_table", double(d.S), "fewer than 2^31 positions a sequence");
  const TensorView lens = check.host(seq_lens), table = check.host(block_table);
  if (lens.given()) check_lengths(check, lens, d.S);
  if (table.given() && table.dtype == DType::i32) check_page_ids<int32_t>(check, table, lens, d);
  if (table.given() && table.dtype == DType::i64) check_page_ids<int64_t>(check, table, lens, d);
  return d;
}

void check_scale(const Check& check, const char* arg, const TensorView& scale, const TensorView& cache, int64_t Hkv) {
  if (!scale.given()) return;
  const bool number = scale.rank == 0 && scale.device == Device::cpu;  // passed by value to any device
  if (!number) check.tensor(arg, scale, DType::f32, scale.rank == 0 ? 0 : 1);
  check.require(scale.dtype == DType::f32, arg, describe(scale), name(DType::f32));
  if (scale.rank == 1) check.shape(arg, scale, {Hkv});
  check.require(cache.dtype == DType::f8e4m3, arg, describe(scale),
                "None, since the cache is " + std::string(name(cache.dtype)));
  if (number) check_finite(check, arg, *scale.as<const float>());
}

CacheDims check_kv(const Check& check, const PagedKv& kv) {
  check.tensor("k_cache", kv.k_cache, kCacheFloats, 4);
  const int64_t page = kv.k_cache.shape[2];
  const CacheDims d = check_cache(check, "k_cache", kv.k_cache, kCacheFloats, kv.block_table, kv.seq_lens, page);
  check.value(kv.k_cache.shape[3] >= 1, "k_cache", double(kv.k_cache.shape[3]), "a head size of at least 1");
  check.tensor("v_cache", kv.v_cache, kv.k_cache.dtype, {d.P, d.Hkv, page, -1});
  check.value(kv.v_cache.shape[3] >= 1, "v_cache", double(kv.v_cache.shape[3]), "a head size of at least 1");
  check_scale(check, "k_scale", kv.k_scale, kv.k_cache, d.Hkv);
  check_scale(check, "v_scale", kv.v_scale, kv.v_cache, d.Hkv);
  return d;
}

int64_t check_query(const Check& check, const TensorView& q, const CacheDims& d, int64_t D) {
  check.tensor("q", q, kFloats, {d.B, -1, -1, D});
  const int64_t Hq = q.shape[2];
  check.require(d.Hkv > 0 && Hq > 0 && Hq % d.Hkv == 0, "q", describe(q),
                "a multiple of " + std::to_string(d.Hkv) + " query heads");
  return Hq / d.Hkv;
}

void check_selection(const Check& check, const Selected& s, const CacheDims& d, int64_t T, const TensorView& seq_lens) {
  check.tensor("selection.indices", s.indices, DType::i32, {d.B, T, d.Hkv, -1});
  check.tensor("selection.counts", s.counts, DType::i32, {d.B, T, d.Hkv});
  const TensorView lens = check.host(seq_lens), indices = check.host(s.indices), counts = check.host(s.counts);
  if (!indices.given()) return;
  const int64_t K = s.indices.shape[3], unit = s.unit == Unit::token ? 1 : d.page;
  for (int64_t row = 0; row < d.B * T * d.Hkv; ++row) {
    const int64_t h = row % d.Hkv, t = row / d.Hkv % T, b = row / d.Hkv / T;
    const int64_t visible = visible_positions(index_at(lens, b * lens.stride[0]), T, t, d.S);
    const int32_t limit = static_cast<int32_t>(ceil_div(visible, unit));
    const auto at = [&](const TensorView& v) { return b * v.stride[0] + t * v.stride[1] + h * v.stride[2]; };
    const int32_t count = counts.as<const int32_t>()[at(counts)];
    const int32_t* index = indices.as<const int32_t>() + at(indices);
    bool ok = count >= 0 && count <= K;
    if (ok && count > 0) {  // ascending: the ends tell the rest
      ok = index[0] >= 0 && index[count - 1] < limit;
      for (int32_t i = 1; i < count; ++i) ok &= index[i] > index[i - 1];
    }
    if (ok) continue;
    const std::string where =
        " for sequence " + std::to_string(b) + ", token " + std::to_string(t) + ", head " + std::to_string(h);
    check.require(count >= 0 && count <= K, "selection.counts", std::to_string(count) + where,
                  "0 to " + std::to_string(K));
    for (int32_t i = 0; i < count; ++i) {
      check.require(index[i] >= 0 && index[i] < limit, "selection.indices", std::to_string(index[i]) + where,
                    "0 to " + std::to_string(limit - 1));
      check.require(i == 0 || index[i] > index[i - 1], "selection.indices",
                    std::to_string(index[i]) + " after " + std::to_string(index[i - 1]) + where, "ascending indices");
    }
  }
}

void check_sketch(const Check& check, const TensorView& bits, const TensorView& norm, int planes, const CacheDims& d,
                  int64_t D) {
  check.value(planes == 1 || planes == 2, "planes", planes, "1 or 2");
  check.value(D >= 1 && D <= kSketchMaxDim, "D", double(D), "1 to 1024 for a sketch");
  check.tensor("sketch.bits", bits, DType::u8, {d.P, d.Hkv, planes * sketch_plane_bytes(d.page, D)});
  check.tensor("sketch.norm", norm, DType::bf16, {d.P, d.Hkv, d.page});
}

void check_start(const Check& check, const TensorView& start, int64_t B) {
  if (!start.given()) return;
  check.tensor("start", start, kIndexInts, {B});
  const TensorView from = check.host(start);
  for (int64_t b = 0; from.given() && b < B; ++b)
    check.value(index_at(from, b * from.stride[0]) >= 0, "start", double(index_at(from, b * from.stride[0])),
                "0 or more");
}

void check_keep(const Check& check, const TensorView& keep, int64_t B) {
  if (!keep.given()) return;
  check.tensor("keep", keep, kIndexInts, {B, -1, 2});
  const TensorView spans = check.host(keep);
  for (int64_t i = 0; spans.given() && i < B * spans.shape[1]; ++i) {
    const int64_t b = i / spans.shape[1], n = i % spans.shape[1], at = b * spans.stride[0] + n * spans.stride[1];
    const int64_t begin = index_at(spans, at), end = index_at(spans, at + 1);
    if (begin >= 0 || begin >= end) continue;
    check.fail("keep",
               "tokens " + std::to_string(begin) + " to " + std::to_string(end) + " at [" + std::to_string(b) + "," +
                   std::to_string(n) + "]",
               "a span that begins at 0 or later, or an empty one");
  }
}

void check_max_seq_len(const Check& check, int64_t max_seq_len, const CacheDims& d, const TensorView& seq_lens) {
  check.value(max_seq_len >= 0 && max_seq_len <= d.S, "max_seq_len", double(max_seq_len),
              "0 to the positions of the block table");
  const TensorView lens = check.host(seq_lens);
  for (int64_t b = 0; lens.given() && b < d.B; ++b) {
    const int64_t n = index_at(lens, b * lens.stride[0]);
    check.require(n <= max_seq_len, "seq_lens", std::to_string(n) + " for sequence " + std::to_string(b),
                  "at most max_seq_len = " + std::to_string(max_seq_len));
  }
}

void check_finite(const Check& check, const char* arg, float x) {
  check.value(x >= -kLargest && x <= kLargest, arg, x, "a finite float32 number");
}

void check_count(const Check& check, const char* arg, int64_t n) {
  check.value(n >= 0 && n < (int64_t{1} << 31), arg, static_cast<double>(n), "0 to 2^31 - 1");
}

}  // namespace sic::slicing
