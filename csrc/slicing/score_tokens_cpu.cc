// score_tokens and refine_tokens on the CPU: a byte-shuffle scan of the sketch ("fast scan"), then the heads are
// joined.
//
#include "slicing/scan_cpu.h"

#include "core/parallel.h"
#include "core/scratch.h"
#include "slicing/sketch_join_cpu.h"
#include "slicing/validate.h"

namespace sic::cpu::SIC_ISA {

using slicing::Pool;
using slicing::SketchScoreArgs;

void score_tokens(const SketchScoreArgs& a, const Exec&) {
  const ScanShape shape(a.q, a.norm.shape[1], a.max_seq_len);
  const auto scan = [&](const ScanUnit& u, int64_t chunk) {
    u.scan(a.bits, a.norm, a.block_table, a.planes, chunk, false);
  };
  const auto join = [&](const ScanUnit& u, int64_t t) {
    const int64_t n = u.visible(t);
    int16_t* out = a.out.as<int16_t>() + u.b * a.out.stride[0] + t * a.out.stride[1] + u.h * a.out.stride[2];
    u.join(u.first, t, n, a.pool == Pool::softmax, nullptr, out);
    std::fill(out + n, out + a.max_seq_len, INT16_MIN);
  };
  for_each_unit(shape, a.q, a.seq_lens, a.scale, 1, scan, join);
}

namespace {

// Two-plane scores of ascending candidates of one query token: each token block that holds one is scanned once.
void refine_row(const SketchScoreArgs& a, const ScanUnit& u, int64_t t, const int32_t* list, int64_t count,
                int16_t* scores, int64_t stride) {
  const QueryTables tables = u.tables(t);
  const SketchScan scan(tables, a.page, static_cast<int>(a.q.shape[3]), 2);
  const CacheRows bits = sketch_rows(a.bits, a.norm, a.block_table, u.b, u.h);
  int16_t* block = reinterpret_cast<int16_t*>(thread_scratch(u.shape.G * slicing::kTokenBlock * int64_t{2}));
  int64_t start = -1;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t page = bits.split.index(static_cast<uint32_t>(list[i])), token = list[i] - page * a.page;
    const int64_t here = list[i] - token % slicing::kTokenBlock;
    if (here != start)
      scan.range(bits, a.norm, u.h, here, here + 1, here, nullptr, block, slicing::kTokenBlock), start = here;
    for (int g = 0; g < u.shape.G; ++g) scores[g * stride + i] = block[g * slicing::kTokenBlock + (list[i] - start)];
  }
}

}  // namespace

void refine_tokens(const SketchScoreArgs& a, const Exec&) {
  const ScanShape s(a.q, a.norm.shape[1], 0);
  const int64_t units = a.q.shape[0] * s.Hkv, K = a.cand_indices.shape[3];
  const int64_t row_bytes = s.G * K * int64_t{2};
  const CallScratch scratch({}, units * s.unit_bytes(1) + units * s.T * row_bytes);
  const auto unit = [&](int64_t i) { return ScanUnit(s, a.seq_lens, scratch.data() + i * s.unit_bytes(1), i, 1); };
  parallel_for(units, [&](int64_t i) { unit(i).set_queries(a.q, a.scale); });
  parallel_for(units * s.T, [&](int64_t i) {
    const ScanUnit u = unit(i / s.T);
    const int64_t t = i % s.T;
    const auto at = [&](const TensorView& v) { return u.b * v.stride[0] + t * v.stride[1] + u.h * v.stride[2]; };
    const int64_t n = a.cand_counts.as<const int32_t>()[at(a.cand_counts)];
    auto* scores = reinterpret_cast<int16_t*>(scratch.data() + units * s.unit_bytes(1) + i * row_bytes);
    refine_row(a, u, t, a.cand_indices.as<const int32_t>() + at(a.cand_indices), n, scores, K);
    int16_t* out = a.out.as<int16_t>() + at(a.out);
    join_rows(scores, K, static_cast<int>(s.G), n, a.pool == Pool::softmax, nullptr, out);
    std::fill(out + n, out + K, INT16_MIN);
  });
}

}  // namespace sic::cpu::SIC_ISA
