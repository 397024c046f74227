// The scan of one (sequence, KV head) of a sketch: its scratch, its integer queries and its per-head scores.
#pragma once
#include <algorithm>

#include "core/parallel.h"
#include "core/scratch.h"
#include "slicing/sketch_cpu.h"
#include "slicing/sketch_join_cpu.h"
#include "slicing/slicing.h"

namespace sic::cpu::SIC_ISA {

constexpr int64_t kChunkTokens = 2048;            // tokens of one scan task
constexpr int64_t kWaveBytes = int64_t{8} << 20;  // per-head scores alive at a time

// Bits of a sketch as cache rows: the page stride and the table are what a scan needs.
inline CacheRows sketch_rows(const TensorView& bits, const TensorView& norm, const TensorView& block_table, int64_t b,
                             int64_t h) {
  TensorView v = norm;  // [P,Hkv,page]: supplies the page size
  v.stride[2] = 1;
  CacheRows rows(v, block_table, b, 0);
  rows.base = bits.as<const char>() + h * bits.stride_bytes(1);
  rows.page_stride = bits.stride_bytes(0);
  return rows;
}

struct ScanShape {
  int64_t T, G, Hkv, D, positions, chunks;

  ScanShape(const TensorView& q, int64_t Hkv_, int64_t positions_)
      : T(q.shape[1]),
        G(q.shape[2] / Hkv_),
        Hkv(Hkv_),
        D(q.shape[3]),
        // The last block is written whole. The rest keeps rows of a power of two, written side by side, apart in the
        // sets of the first-level cache.
        positions((positions_ + 2 * slicing::kTokenBlock - 1) / slicing::kTokenBlock * slicing::kTokenBlock + 160),
        chunks(std::max<int64_t>(1, (positions + kChunkTokens - 1) / kChunkTokens)) {}

  int64_t table_bytes() const { return (QueryTables::bytes(G, D) + 63) / 64 * 64; }
  // stages: 1 = plane 0 only, 2 = plane 0 and both planes.
  int64_t unit_bytes(int stages) const { return T * table_bytes() + stages * T * G * positions * int64_t{2} + 64; }
  int64_t wave(int64_t units, int stages) const {
    return std::clamp<int64_t>(kWaveBytes / unit_bytes(stages), 1, std::max<int64_t>(units, 1));
  }
};

// Scores of the rows of one query token, joined over the group. ref: where to leave the heads' references, or null.
inline void join_rows(const int16_t* rows, int64_t stride, int heads, int64_t n, bool softmax, HeadReference* ref,
                      int16_t* out) {
  if (n == 0) return;
  if (!ref) ref = reinterpret_cast<HeadReference*>(thread_scratch(heads * static_cast<int64_t>(sizeof(HeadReference))));
  for (int h = 0; h < heads; ++h) ref[h].set(rows + h * stride, n, softmax);
  join_scores(rows, stride, ref, heads, softmax, n, out);
}

struct ScanUnit {
  const ScanShape& shape;
  int64_t b, h, seq_len;
  char* memory;
  int16_t *first, *second;  // [T][G][positions]: scores from plane 0, and from both

  ScanUnit(const ScanShape& s, const TensorView& seq_lens, char* memory_, int64_t unit, int stages)
      : shape(s),
        b(unit / s.Hkv),
        h(unit % s.Hkv),
        seq_len(index_at(seq_lens, b * seq_lens.stride[0])),
        memory(memory_) {
    first = reinterpret_cast<int16_t*>(memory + s.T * s.table_bytes());
    second = stages == 2 ? first + s.T * s.G * s.positions : nullptr;
  }

  int64_t visible(int64_t t) const { return visible_positions(seq_len, shape.T, t, INT32_MAX); }
  QueryTables tables(int64_t t) const {
    return QueryTables(memory + t * shape.table_bytes(), static_cast<int>(shape.G), static_cast<int>(shape.D));
  }

  void set_queries(const TensorView& q, float scale) const {
    float x[slicing::kSketchMaxDim];
    for (int64_t t = 0; t < shape.T; ++t) {
      QueryTables out = tables(t);
      for (int64_t g = 0; g < shape.G; ++g) {
        load_row(q, b * q.stride[0] + t * q.stride[1] + (h * shape.G + g) * q.stride[2], shape.D, 1.0f, x);
        out.set(static_cast<int>(g), x, static_cast<int>(shape.D), scale);
      }
    }
  }

  void scan(const TensorView& bits, const TensorView& norm, const TensorView& block_table, int planes, int64_t chunk,
            bool both) const {
    const CacheRows rows = sketch_rows(bits, norm, block_table, b, h);
    const int64_t page = norm.shape[2];
    for (int64_t t = 0; t < shape.T; ++t) {
      const int64_t end = std::min(visible(t), chunk_edge(chunk + 1, page));
      const QueryTables q = tables(t);
      const int64_t row = t * shape.G * shape.positions;
      SketchScan(q, page, static_cast<int>(shape.D), planes)
          .range(rows, norm, h, chunk_edge(chunk, page), end, 0, first + row, both ? second + row : nullptr,
                 shape.positions);
    }
  }

  void join(const int16_t* rows, int64_t t, int64_t n, bool softmax, HeadReference* ref, int16_t* out) const {
    join_rows(rows + t * shape.G * shape.positions, shape.positions, static_cast<int>(shape.G), n, softmax, ref, out);
  }

 private:
  // Chunks begin at token blocks, which begin anew in every page.
  static int64_t chunk_edge(int64_t chunk, int64_t page) {
    const int64_t pos = chunk * kChunkTokens, token = pos % page;
    return pos - token % slicing::kTokenBlock;
  }
};

// Scans every unit of a call, then calls finish(unit, t) for each of its query tokens. scan(unit, chunk) scans one
// chunk.
//
// With several units a thread, each thread takes whole units and reuses one block of scores, which stays in its cache.
// With few, the chunks of a unit are spread over the threads; such units go in waves, to bound the scratch.
template <class Scan, class Finish>
void for_each_unit(const ScanShape& shape, const TensorView& q, const TensorView& seq_lens, float scale, int stages,
                   Scan scan, Finish finish) {
  const int64_t units = q.shape[0] * shape.Hkv, bytes = shape.unit_bytes(stages);
  if (units >= 2 * num_threads() && bytes <= kWaveBytes) {
    parallel_for(units, [&](int64_t i) {
      const ScanUnit u(shape, seq_lens, thread_scratch(bytes, ScratchSlot::unit), i, stages);
      u.set_queries(q, scale);
      for (int64_t c = 0; c < shape.chunks; ++c) scan(u, c);
      for (int64_t t = 0; t < shape.T; ++t) finish(u, t);
    });
    return;
  }
  const int64_t wave = shape.wave(units, stages);
  const CallScratch scratch({}, wave * bytes);
  for (int64_t first = 0; first < units; first += wave) {
    const int64_t count = std::min(wave, units - first);
    const auto unit = [&](int64_t i) {
      return ScanUnit(shape, seq_lens, scratch.data() + i * bytes, first + i, stages);
    };
    parallel_for(count, [&](int64_t i) { unit(i).set_queries(q, scale); });
    parallel_for(count * shape.chunks, [&](int64_t i) { scan(unit(i / shape.chunks), i % shape.chunks); });
    parallel_for(count * shape.T, [&](int64_t i) { finish(unit(i / shape.T), i % shape.T); });
  }
}

}  // namespace sic::cpu::SIC_ISA
