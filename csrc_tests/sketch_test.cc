// The key sketch: a value worked by hand, and the same bits and integers on every instruction set.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "core/isa.h"
#include "slicing/slicing.h"

namespace sic::slicing {
namespace {

const Exec kCpu;
constexpr Isa kAll[] = {Isa::plain, Isa::avx2, Isa::avx512, Isa::neon};

// The sign of channel d: the lowest bit of the splitmix64 finaliser.
float sign_of(uint64_t d) {
  uint64_t z = (d + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  z ^= z >> 31;
  return z & 1 ? -1.0f : 1.0f;
}

TEST(Sketch, OneChannelByHand) {
  // k = 2, centre = 0.5: |y| = 1.5, A = 1.5, threshold 1.875, so an inner level; norm = 2.25 / 1.5.
  float key = 2, centre = 0.5f;
  int32_t table = 0, length = 1;
  uint8_t bits[2] = {0xaa, 0xaa};
  bf16_t norm{};
  KeySketchArgs args;
  args.k_cache = view_of(&key, DType::f32, 1, 1, 1, 1);
  args.block_table = view_of(&table, DType::i32, 1, 1);
  args.seq_lens = view_of(&length, DType::i32, 1);
  args.centre = view_of(&centre, DType::f32, 1, 1);
  args.bits = view_of(bits, DType::u8, 1, 1, 2);
  args.norm = view_of(&norm, DType::bf16, 1, 1, 1);
  for (Isa isa : kAll) {
    if (!is_supported(isa)) continue;
    force_isa(name(isa));
    key_sketch(args, kCpu);
    const bool positive = sign_of(0) > 0;
    EXPECT_EQ(bits[0], positive ? 1 : 0);
    EXPECT_EQ(bits[1], positive ? 0 : 1);  // plane 1 says "sign equals outer"
    EXPECT_EQ(to_float(norm), 1.5f);
  }
  force_isa("auto");
}

// The chain of one step on buffers of exact size: sketch, scores, selection, refined scores.
struct Chain {
  std::vector<uint8_t> bits;
  std::vector<uint16_t> norm;
  std::vector<int16_t> scores, refined;
  std::vector<int32_t> indices, counts;

  bool operator==(const Chain& o) const {
    return bits == o.bits && norm == o.norm && scores == o.scores && refined == o.refined && indices == o.indices &&
           counts == o.counts;
  }
};

struct Shape {
  int64_t page, dim, length, group;
  Pool pool;
};

Chain run(const Shape& s) {
  constexpr int64_t B = 2, T = 1, Hkv = 2;
  const int64_t M = (s.length + s.page - 1) / s.page, P = B * M, S = M * s.page, Hq = Hkv * s.group;
  const int64_t bytes = 2 * s.page * ((s.dim + 7) / 8);
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::vector<float> q(B * T * Hq * s.dim), centre(Hkv * s.dim);
  std::vector<bf16_t> k(P * Hkv * s.page * s.dim);
  for (float& x : q) x = normal(random);
  for (float& x : centre) x = 0.1f * normal(random);
  for (bf16_t& x : k) from_float(normal(random), x);
  std::vector<int32_t> table(P), lengths = {static_cast<int32_t>(s.length), static_cast<int32_t>((s.length + 1) / 2)};
  for (int64_t i = 0; i < P; ++i) table[i] = static_cast<int32_t>(P - 1 - i);

  Chain c;
  c.bits.resize(P * Hkv * bytes);
  c.norm.resize(P * Hkv * s.page);
  KeySketchArgs sketch;
  sketch.k_cache = view_of(k.data(), DType::bf16, P, Hkv, s.page, s.dim);
  sketch.block_table = view_of(table.data(), DType::i32, B, M);
  sketch.seq_lens = view_of(lengths.data(), DType::i32, B);
  sketch.centre = view_of(centre.data(), DType::f32, Hkv, s.dim);
  sketch.bits = view_of(c.bits.data(), DType::u8, P, Hkv, bytes);
  sketch.norm = view_of(c.norm.data(), DType::bf16, P, Hkv, s.page);
  key_sketch(sketch, kCpu);

  c.scores.resize(B * T * Hkv * S);
  SketchScoreArgs score;
  score.q = view_of(q.data(), DType::f32, B, T, Hq, s.dim);
  score.bits = sketch.bits;
  score.norm = sketch.norm;
  score.block_table = sketch.block_table;
  score.seq_lens = sketch.seq_lens;
  score.page = s.page;
  score.pool = s.pool;
  score.scale = 1 / std::sqrt(static_cast<float>(s.dim));
  score.max_seq_len = S;
  score.out = view_of(c.scores.data(), DType::i16, B, T, Hkv, S);
  score_tokens(score, kCpu);

  SelectArgs select;
  select.scores = score.out;
  select.seq_lens = sketch.seq_lens;
  select.ratio = 0.25;
  select.sink = 2;
  select.recent = 3;
  const int64_t K = selection_capacity(select);
  c.indices.resize(B * T * Hkv * K);
  c.counts.resize(B * T * Hkv);
  select.indices = view_of(c.indices.data(), DType::i32, B, T, Hkv, K);
  select.counts = view_of(c.counts.data(), DType::i32, B, T, Hkv);
  sic::slicing::select(select, kCpu);

  c.refined.resize(B * T * Hkv * K);
  score.cand_indices = select.indices;
  score.cand_counts = select.counts;
  score.out = view_of(c.refined.data(), DType::i16, B, T, Hkv, K);
  refine_tokens(score, kCpu);
  return c;
}

TEST(Sketch, EveryInstructionSetGivesTheSameBits) {
  for (const Shape& s :
       {Shape{16, 64, 500, 4, Pool::max}, Shape{16, 128, 333, 3, Pool::softmax}, Shape{7, 46, 100, 1, Pool::max},
        Shape{1, 3, 40, 2, Pool::softmax}, Shape{64, 80, 65, 8, Pool::max}}) {
    force_isa("plain");
    const Chain plain = run(s);
    int spread = 0;
    for (int16_t x : plain.scores) spread += x != plain.scores[0];
    EXPECT_GT(spread, 10);
    for (Isa isa : kAll) {
      if (!is_supported(isa)) continue;
      force_isa(name(isa));
      EXPECT_TRUE(run(s) == plain) << name(isa) << " page " << s.page << " dim " << s.dim;
    }
  }
  force_isa("auto");
}

}  // namespace
}  // namespace sic::slicing
