// The slicing ops from C++: golden values worked by hand, every instruction set, inputs of exact size on the heap (so
// that AddressSanitizer sees one byte too many).
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "core/isa.h"
#include "core/parallel.h"
#include "slicing/slicing.h"

namespace sic::slicing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
const Exec kCpu;

class Slicing : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (!is_supported(GetParam())) GTEST_SKIP() << name(GetParam()) << ": not on this processor";
    force_isa(name(GetParam()));
  }
  void TearDown() override { force_isa("auto"); }
};

TEST_P(Slicing, MergeByHand) {
  // Softmax sums 2 and 8, outputs 0 and 1: merged 0.8, sum 10.
  float out_a[] = {0, 0}, out_b[] = {1, 1}, lse_a[] = {std::log(2.0f)}, lse_b[] = {std::log(8.0f)};
  float out[2], lse[1];
  MergeStatesArgs args;
  args.out_a = view_of(out_a, DType::f32, 1, 1, 2);
  args.out_b = view_of(out_b, DType::f32, 1, 1, 2);
  args.lse_a = view_of(lse_a, DType::f32, 1, 1);
  args.lse_b = view_of(lse_b, DType::f32, 1, 1);
  args.out = view_of(out, DType::f32, 1, 1, 2);
  args.lse = view_of(lse, DType::f32, 1, 1);
  merge_states(args, kCpu);
  EXPECT_NEAR(out[0], 0.8f, 1e-6f);
  EXPECT_NEAR(out[1], 0.8f, 1e-6f);
  EXPECT_NEAR(lse[0], std::log(10.0f), 1e-6f);

  lse_a[0] = lse_b[0] = -kInf;  // two empty states
  merge_states(args, kCpu);
  EXPECT_EQ(out[0], 0.0f);
  EXPECT_EQ(lse[0], -kInf);
}

TEST_P(Slicing, SelectTiesByHand) {
  std::vector<float> scores = {-0.0f, 0.0f, -1.0f, 0.0f, -0.0f};
  int32_t length = 5, indices[3], count;
  SelectArgs args;
  args.scores = view_of(scores.data(), DType::f32, 1, 1, 1, 5);
  args.seq_lens = view_of(&length, DType::i32, 1);
  args.budget = 3;
  args.sink = args.recent = 0;
  args.indices = view_of(indices, DType::i32, 1, 1, 1, 3);
  args.counts = view_of(&count, DType::i32, 1, 1, 1);
  select(args, kCpu);
  EXPECT_EQ(count, 3);
  EXPECT_EQ(indices[0], 0);
  EXPECT_EQ(indices[1], 1);
  EXPECT_EQ(indices[2], 3);
}

// A random paged problem whose buffers have exactly the size of their shapes.
struct Problem {
  int64_t B = 2, T = 2, Hkv = 2, group, page, dim, length, pages_each, pages;
  std::vector<float> q, k, v, out, lse;
  std::vector<int32_t> table, lengths;

  Problem(int64_t group, int64_t page, int64_t dim, int64_t length, unsigned seed)
      : group(group),
        page(page),
        dim(dim),
        length(length),
        pages_each((length + page - 1) / page),
        pages(B * pages_each) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    auto fill = [&](std::vector<float>& x, int64_t n) {
      x.resize(n);
      for (float& value : x) value = normal(random);
    };
    fill(q, B * T * Hkv * group * dim);
    fill(k, pages * Hkv * page * dim);
    fill(v, pages * Hkv * page * dim);
    out.assign(q.size(), NAN);
    lse.assign(B * T * Hkv * group, NAN);
    for (int64_t i = 0; i < pages; ++i) table.push_back(static_cast<int32_t>(pages - 1 - i));
    lengths = {static_cast<int32_t>(length), static_cast<int32_t>(std::max<int64_t>(1, length / 2))};
  }

  AttentionArgs args() {
    AttentionArgs a;
    a.q = view_of(q.data(), DType::f32, B, T, Hkv * group, dim);
    a.kv.k_cache = view_of(k.data(), DType::f32, pages, Hkv, page, dim);
    a.kv.v_cache = view_of(v.data(), DType::f32, pages, Hkv, page, dim);
    a.kv.block_table = view_of(table.data(), DType::i32, B, pages_each);
    a.kv.seq_lens = view_of(lengths.data(), DType::i32, B);
    a.scale = 1 / std::sqrt(static_cast<float>(dim));
    a.max_seq_len = pages_each * page;
    a.out = view_of(out.data(), DType::f32, B, T, Hkv * group, dim);
    a.lse = view_of(lse.data(), DType::f32, B, T, Hkv * group);
    return a;
  }

  const float* row(const std::vector<float>& cache, int64_t b, int64_t head, int64_t position) const {
    const int64_t slot = table[b * pages_each + position / page];
    return &cache[((slot * Hkv + head) * page + position % page) * dim];
  }

  // The definition in double precision.
  void expect(double tolerance) const {
    for (int64_t b = 0; b < B; ++b)
      for (int64_t t = 0; t < T; ++t)
        for (int64_t h = 0; h < Hkv * group; ++h) expect_row(b, t, h, tolerance);
  }
  void expect_row(int64_t b, int64_t t, int64_t h, double tolerance) const {
    const int64_t visible = lengths[b] - T + t + 1, r = (b * T + t) * Hkv * group + h;
    std::vector<double> sum(dim, 0.0);
    double total = 0;
    for (int64_t i = 0; i < visible; ++i) {
      double logit = 0;
      for (int64_t d = 0; d < dim; ++d) logit += double(q[r * dim + d]) * row(k, b, h / group, i)[d];
      const double weight = std::exp(logit / std::sqrt(double(dim)));
      total += weight;
      for (int64_t d = 0; d < dim; ++d) sum[d] += weight * row(v, b, h / group, i)[d];
    }
    if (visible <= 0) {
      EXPECT_EQ(lse[r], -kInf);
      EXPECT_EQ(out[r * dim], 0.0f);
      return;
    }
    ASSERT_NEAR(lse[r], std::log(total), tolerance);
    for (int64_t d = 0; d < dim; ++d) ASSERT_NEAR(out[r * dim + d], sum[d] / total, tolerance);
  }
};

TEST_P(Slicing, DenseAttentionIsTheDefinition) {
  unsigned seed = 0;
  for (int64_t group : {1, 3, 4})
    for (int64_t page : {1, 7, 16})
      for (int64_t dim : {1, 46, 64})
        for (int64_t length : {1, 16, 130}) {
          Problem p(group, page, dim, length, ++seed);
          sliced_attention(p.args(), kCpu);
          p.expect(2e-5);
        }
}

TEST_P(Slicing, FullSelectionEqualsDenseBitForBit) {
  Problem p(4, 16, 64, 700, 1);
  sliced_attention(p.args(), kCpu);
  const std::vector<float> dense = p.out;
  std::vector<int32_t> indices(p.B * p.T * p.Hkv * 700), counts(p.B * p.T * p.Hkv);
  for (int64_t row = 0; row < p.B * p.T * p.Hkv; ++row) {
    const int64_t b = row / (p.T * p.Hkv), t = row / p.Hkv % p.T;
    counts[row] = static_cast<int32_t>(p.lengths[b] - p.T + t + 1);
    for (int32_t i = 0; i < 700; ++i) indices[row * 700 + i] = i < counts[row] ? i : -1;
  }
  AttentionArgs args = p.args();
  args.selected.indices = view_of(indices.data(), DType::i32, p.B, p.T, p.Hkv, 700);
  args.selected.counts = view_of(counts.data(), DType::i32, p.B, p.T, p.Hkv);
  std::fill(p.out.begin(), p.out.end(), NAN);
  sliced_attention(args, kCpu);
  EXPECT_EQ(p.out, dense);
}

TEST_P(Slicing, ThreadCountDoesNotChangeABit) {
  Problem p(4, 16, 64, 3000, 2);
  set_num_threads(1);
  sliced_attention(p.args(), kCpu);
  const std::vector<float> one = p.out;
  for (int threads : {2, 3, 8}) {
    set_num_threads(threads);
    std::fill(p.out.begin(), p.out.end(), NAN);
    sliced_attention(p.args(), kCpu);
    EXPECT_EQ(p.out, one) << threads << " threads";
  }
  set_num_threads(0);
}

TEST_P(Slicing, BadArgumentsTouchNothing) {
  Problem p(2, 16, 64, 100, 3);
  auto refused = [&](AttentionArgs args, const char* expected) {
    try {
      sliced_attention(args, kCpu);
      ADD_FAILURE() << "accepted: " << expected;
    } catch (const ArgumentError& e) {
      EXPECT_EQ(std::string(e.what()).find("sliced_attention: "), 0u) << e.what();
      EXPECT_NE(std::string(e.what()).find(expected), std::string::npos) << e.what();
    }
    for (float x : p.out) ASSERT_TRUE(std::isnan(x));
  };
  AttentionArgs args = p.args();
  args.kv.k_cache.dtype = DType::i16;
  refused(args, "k_cache");
  args = p.args();
  args.q.shape[2] = 3;  // 3 query heads over 2 KV heads
  refused(args, "q");
  args = p.args();
  args.out.shape[3] = 32;
  refused(args, "out");
  for (int32_t page : {static_cast<int32_t>(p.pages), -2, std::numeric_limits<int32_t>::max()}) {
    const int32_t saved = p.table[0];
    p.table[0] = page;
    refused(p.args(), "block_table");
    p.table[0] = saved;
  }
}

INSTANTIATE_TEST_SUITE_P(EveryIsa, Slicing, testing::ValuesIn({SIC_FOR_EACH_ISA(SIC_ISA_VALUE)}),
                         [](const auto& info) { return name(info.param); });

}  // namespace
}  // namespace sic::slicing
