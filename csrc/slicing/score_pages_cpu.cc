// score_pages on the CPU: q.centre + beta * sum |q_i| radius_i for every page, joined over the group.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/paged.h"
#include "core/parallel.h"
#include "core/rows.h"
#include "core/scratch.h"
#include "slicing/validate.h"

namespace sic::cpu::SIC_ISA {
namespace {

using slicing::ScorePagesArgs;

template <class T>
float page_score(const T* centre, const T* radius, const float* q, int64_t D, float beta) {
  vf dot = {}, reach = {};
  int64_t d = 0;
  for (; d + W <= D; d += W) {
    const vf x = load(q + d);
    dot = fma(x, load(centre + d), dot);
    reach = fma(abs(x), load(radius + d), reach);
  }
  if (d < D) {
    const int left = static_cast<int>(D - d);
    const vf x = load_first(q + d, left);
    dot = fma(x, load_first(centre + d, left), dot);
    reach = fma(abs(x), load_first(radius + d, left), reach);
  }
  return reduce_add(dot) + beta * reduce_add(reach);
}

// Scores of one query token and KV head: scores[g][m], in nats.
template <class T>
void score_row(const ScorePagesArgs& a, int64_t b, int64_t t, int64_t h, int64_t G, int64_t pages, float* scores,
               float* q) {
  const PageTable table(a.block_table, b);
  const int64_t D = a.q.shape[3];
  for (int64_t g = 0; g < G; ++g) {
    load_row(a.q, b * a.q.stride[0] + t * a.q.stride[1] + (h * G + g) * a.q.stride[2], D, a.scale, q);
    for (int64_t m = 0; m < pages; ++m) {
      const T* centre =
          a.summary.as<const T>() + table[static_cast<uint32_t>(m)] * a.summary.stride[0] + h * a.summary.stride[1];
      scores[g * pages + m] = page_score(centre, centre + a.summary.stride[2], q, D, a.beta);
    }
  }
}

void join(float* scores, int64_t G, int64_t pages, slicing::Pool pool, float* out) {
  const bool softmax = pool == slicing::Pool::softmax;
  std::fill(out, out + pages, softmax ? 0.0f : -std::numeric_limits<float>::infinity());
  for (int64_t g = 0; g < G; ++g) {
    float* row = scores + g * pages;
    const float top = largest(row, pages);
    double total = 0;
    for (int64_t m = 0; m < pages; ++m) {
      row[m] -= top;
      if (softmax) row[m] = std::exp(row[m]), total += row[m];
    }
    for (int64_t m = 0; m < pages; ++m) {
      if (softmax)
        out[m] += row[m] / static_cast<float>(total);
      else
        out[m] = larger(out[m], row[m]);
    }
  }
  for (int64_t m = 0; softmax && m < pages; ++m) out[m] = std::log(out[m]);
}

}  // namespace

void score_pages(const ScorePagesArgs& a, const Exec&) {
  const int64_t T = a.q.shape[1], Hkv = a.summary.shape[1], G = a.q.shape[2] / Hkv, D = a.q.shape[3],
                M = a.out.shape[3];
  parallel_for(a.q.shape[0] * T * Hkv, [&](int64_t task) {
    const int64_t h = task % Hkv, t = task / Hkv % T, b = task / Hkv / T;
    const int64_t visible = visible_positions(index_at(a.seq_lens, b * a.seq_lens.stride[0]), T, t, a.max_seq_len);
    const int64_t pages = slicing::ceil_div(visible, a.page);
    float* out = a.out.as<float>() + b * a.out.stride[0] + t * a.out.stride[1] + h * a.out.stride[2];
    float* scores = reinterpret_cast<float*>(thread_scratch((G * pages + D) * static_cast<int64_t>(sizeof(float))));
    if (pages > 0) {
      with_float_type(a.summary.dtype,
                      [&](auto type) { score_row<decltype(type)>(a, b, t, h, G, pages, scores, scores + G * pages); });
      join(scores, G, pages, a.pool, out);
    }
    std::fill(out + pages, out + M, -std::numeric_limits<float>::infinity());
  });
}

}  // namespace sic::cpu::SIC_ISA
