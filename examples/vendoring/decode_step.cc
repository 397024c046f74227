// One decode step on a paged KV cache, from C++: build the key sketch, score, select 12 %, attend; then compare with
// dense attention. Exits with 1 if the sliced answer is far off, so that CI can run it.
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "slicing/slicing.h"

namespace {

using sic::DType;
using sic::TensorView;
using sic::view_of;

constexpr int64_t kTokens = 4096, kPage = 16, kPages = kTokens / kPage, kHeads = 2, kGroup = 4, kDim = 64;
constexpr int64_t kQueryHeads = kHeads * kGroup, kPlanes = 2, kSketchBytes = kPlanes * kPage * (kDim / 8);

// Queries that attend to few of the keys, and alike within a group of heads, as the heads of a model do.
void fill(std::vector<float>& q, std::vector<float>& k, std::vector<float>& v) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (float& x : k) x = normal(random);
  for (float& x : v) x = normal(random);
  for (int64_t head = 0; head < kHeads; ++head)
    for (int64_t d = 0; d < kDim; ++d) {
      const float shared = 4 * normal(random);
      for (int64_t g = 0; g < kGroup; ++g) q[(head * kGroup + g) * kDim + d] = shared + normal(random);
    }
}

double relative_error(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    size += b[i] * b[i];
  }
  return std::sqrt(difference / size);
}

}  // namespace

int main() {
  std::vector<float> q(kQueryHeads * kDim), k(kPages * kHeads * kPage * kDim), v(k.size());
  fill(q, k, v);

  // The library borrows memory: a TensorView is a pointer, a type, a shape and strides.
  std::vector<int32_t> block_table(kPages), seq_lens = {static_cast<int32_t>(kTokens)};
  for (int64_t i = 0; i < kPages; ++i) block_table[i] = static_cast<int32_t>(kPages - 1 - i);
  const TensorView table = view_of(block_table.data(), DType::i32, 1, kPages);
  const TensorView lengths = view_of(seq_lens.data(), DType::i32, 1);
  const TensorView query = view_of(q.data(), DType::f32, 1, 1, kQueryHeads, kDim);
  const TensorView keys = view_of(k.data(), DType::f32, kPages, kHeads, kPage, kDim);
  const TensorView values = view_of(v.data(), DType::f32, kPages, kHeads, kPage, kDim);
  const float scale = 1 / std::sqrt(static_cast<float>(kDim));
  const sic::slicing::Exec cpu;

  // Once for each token, when it is written: the sketch of its key.
  std::vector<float> centre(kHeads * kDim, 0.0f);
  std::vector<uint8_t> bits(kPages * kHeads * kSketchBytes);
  std::vector<uint16_t> norm(kPages * kHeads * kPage);
  sic::slicing::KeySketchArgs sketch;
  sketch.k_cache = keys;
  sketch.block_table = table;
  sketch.seq_lens = lengths;
  sketch.centre = view_of(centre.data(), DType::f32, kHeads, kDim);
  sketch.planes = kPlanes;
  sketch.bits = view_of(bits.data(), DType::u8, kPages, kHeads, kSketchBytes);
  sketch.norm = view_of(norm.data(), DType::bf16, kPages, kHeads, kPage);
  sic::slicing::key_sketch(sketch, cpu);

  // Once for each step: score all tokens from the sketch, ...
  std::vector<int16_t> scores(kHeads * kTokens);
  sic::slicing::SketchScoreArgs score;
  score.q = query;
  score.bits = sketch.bits;
  score.norm = sketch.norm;
  score.block_table = table;
  score.seq_lens = lengths;
  score.page = kPage;
  score.planes = kPlanes;
  score.scale = scale;
  score.max_seq_len = kTokens;
  score.out = view_of(scores.data(), DType::i16, 1, 1, kHeads, kTokens);
  sic::slicing::score_tokens(score, cpu);

  // ... keep the best 12 %, ...
  sic::slicing::SelectArgs select;
  select.scores = score.out;
  select.seq_lens = lengths;
  select.ratio = 0.12;
  const int64_t capacity = selection_capacity(select);
  std::vector<int32_t> indices(kHeads * capacity), counts(kHeads);
  select.indices = view_of(indices.data(), DType::i32, 1, 1, kHeads, capacity);
  select.counts = view_of(counts.data(), DType::i32, 1, 1, kHeads);
  sic::slicing::select(select, cpu);

  // ... and attend to them.
  std::vector<float> out(kQueryHeads * kDim), dense(out.size()), lse(kQueryHeads);
  sic::slicing::AttentionArgs attention;
  attention.q = query;
  attention.kv.k_cache = keys;
  attention.kv.v_cache = values;
  attention.kv.block_table = table;
  attention.kv.seq_lens = lengths;
  attention.scale = scale;
  attention.max_seq_len = kTokens;
  attention.lse = view_of(lse.data(), DType::f32, 1, 1, kQueryHeads);
  attention.out = view_of(dense.data(), DType::f32, 1, 1, kQueryHeads, kDim);
  sic::slicing::sliced_attention(attention, cpu);

  attention.selected.indices = select.indices;
  attention.selected.counts = select.counts;
  attention.out = view_of(out.data(), DType::f32, 1, 1, kQueryHeads, kDim);
  sic::slicing::sliced_attention(attention, cpu);

  const double error = relative_error(out, dense);
  std::printf("%lld tokens, %d read for each head: relative error of the output %.3f\n",
              static_cast<long long>(kTokens), counts[0], error);

  // A wrong argument throws before anything is touched.
  attention.kv.k_cache.dtype = DType::i16;
  try {
    sic::slicing::sliced_attention(attention, cpu);
    std::puts("a wrong dtype was accepted");
    return 1;
  } catch (const sic::ArgumentError& e) {
    std::printf("refused as it should be: %s\n", e.what());
  }
  return counts[0] == static_cast<int32_t>(0.12 * kTokens) && error < 0.3 ? 0 : 1;
}
