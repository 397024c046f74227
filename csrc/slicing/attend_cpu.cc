// attend on the CPU: scan, select, attend in one call.
//
// Per unit (sequence, KV head) the sketch is scanned once for both planes: a block of 16 tokens nearly always holds a
// candidate, so skipping the second plane would save nothing. Then each query token's scores are joined, the best are
// shortlisted by plane 0, ranked by both planes and selected. Attention over all selections follows.
#include <cmath>
#include <limits>

#include "core/parallel.h"
#include "slicing/scan_cpu.h"
#include "slicing/select_cpu.h"
#include "slicing/validate.h"

namespace sic::cpu::SIC_ISA {  // the ops that attend is made of
void sliced_attention(const slicing::AttentionArgs&, const Exec&);
void score_pages(const slicing::ScorePagesArgs&, const Exec&);
void select(const slicing::SelectArgs&, const Exec&);
}  // namespace sic::cpu::SIC_ISA

namespace sic::cpu::SIC_ISA {

namespace {

using slicing::AttendArgs;
using slicing::Pool;
using slicing::SelectArgs;

// Writes the scores whose bit is set in mask, in order; may overwrite up to 16 slots.
SIC_INLINE void compress_scores(const int16_t* from, unsigned mask, int16_t* to) {
#if defined(__AVX512BW__)
  if (mask != 1) {  // a full block of 16
    const __m512i x = _mm512_cvtepi16_epi32(load_as<__m256i>(from));
    store_as(to, _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), x)));
    return;
  }
#endif
  for (; mask; mask &= mask - 1) *to++ = from[__builtin_ctz(mask)];
}

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// exp(x - top), 1 where both are infinite.
template <class T>
T weight_below(T x, T top) {
  return x == top ? 1 : std::exp(x - top);
}

int64_t at(const TensorView& v, int64_t b, int64_t t, int64_t h) {
  return b * v.stride[0] + t * v.stride[1] + h * v.stride[2];
}

// ---- tokens, by the sketch ----

// The selection of one query token and KV head.
class TokenRow {
 public:
  TokenRow(const AttendArgs& a, const SelectArgs& s, const ScanUnit& u, int64_t t)
      : a_(a),
        s_(s),
        u_(u),
        t_(t),
        n_(u.visible(t)),
        G_(static_cast<int>(u.shape.G)),
        row_(t * u.shape.G * u.shape.positions) {}

  void run() {
    const int64_t K = a_.indices.shape[3], spans = slicing::span_room(s_);
    // A shortlist takes at most all positions; compact scores follow it.
    const int64_t room = n_ + 32;
    const int64_t bytes = 2 * spans * int64_t{sizeof(Span)} + room * 2 + room * 4 + G_ * room * 2 +
                          G_ * int64_t{2 * sizeof(HeadReference)} + 1024;
    Carver carve(thread_scratch(bytes));
    SelectRow row = slicing::select_row(s_, u_.b, u_.h, n_, carve.take<Span>(spans));
    joined_ = carve.take<int16_t>(room);
    list_ = carve.take<int32_t>(room);
    compact_ = carve.take<int16_t>(G_ * room);
    refs_ = carve.take<HeadReference>(G_);
    fine_refs_ = carve.take<HeadReference>(G_);
    spans_ = carve.take<Span>(spans);
    room_ = room;
    int32_t* out = a_.indices.as<int32_t>() + at(a_.indices, u_.b, t_, u_.h);
    int32_t* count = a_.counts.as<int32_t>() + at(a_.counts, u_.b, t_, u_.h);
    if (row.count() == row.visible && row.top_p == 1) {
      for (int32_t i = 0; i < row.visible; ++i) out[i] = i;
      *count = row.visible;
      std::fill(out + row.visible, out + K, -1);
    } else {
      for (int g = 0; g < G_; ++g) refs_[g].set(first(g), n_, one_plane_softmax());
      choose(row, out, K, count);
    }
    estimate_unread(row, out, *count);
  }

 private:
  // Positions before it are outside the sliding window: attention would not look at them.
  int64_t first_in_window() const {
    const int64_t window = a_.attention.window;
    return window > 0 && n_ > window ? n_ - window : 0;
  }
  bool one_plane_softmax() const { return a_.planes == 1 && a_.pool == Pool::softmax; }
  const int16_t* first(int g) const { return u_.first + row_ + g * u_.shape.positions; }
  const int16_t* second(int g) const { return u_.second + row_ + g * u_.shape.positions; }
  const float* bias() const {
    return a_.attention.key_bias.given()
               ? a_.attention.key_bias.as<const float>() + u_.b * a_.attention.key_bias.stride[0]
               : nullptr;
  }

  void add_bias(int16_t* scores, int64_t n, const int32_t* positions) const {
    const float* bias = this->bias();
    for (int64_t i = 0; bias && i < n; ++i) {
      const float steps = std::nearbyint(bias[positions ? positions[i] : i] * slicing::kScoreSteps);
      const float moved = scores[i] + (steps > -1048576.0f ? (steps < 1048576.0f ? steps : 1048576.0f) : -1048576.0f);
      scores[i] = static_cast<int16_t>(moved < slicing::kScoreMin    ? slicing::kScoreMin
                                       : moved > -slicing::kScoreMin ? -slicing::kScoreMin
                                                                     : moved);
    }
  }

  void choose(const SelectRow& row, int32_t* out, int64_t K, int32_t* count) {
    const bool two_stage = a_.planes == 2;
    join_scores(first(0), u_.shape.positions, refs_, G_, one_plane_softmax(), n_, joined_);
    add_bias(joined_, n_, nullptr);
    std::fill(joined_, joined_ + first_in_window(), INT16_MIN);
    if (!two_stage) return select_scores(joined_, row, out, K, count);
    // Shortlist: no forced tokens, the best by plane 0.
    SelectRow shortlist;
    shortlist.visible = row.visible;
    const double share = a_.candidates > a_.ratio ? a_.candidates : a_.ratio;
    const auto cut =
        cut_by_count(joined_, shortlist, std::max<int64_t>(1, static_cast<int64_t>(share * static_cast<double>(n_))));
    int64_t ties = cut.ties;
    const auto copy_scores = [&](int32_t i, unsigned mask, const int32_t* to) {
      for (int g = 0; g < G_; ++g) compress_scores(second(g) + i, mask, compact_ + g * room_ + (to - list_));
    };
    const int32_t* list_end = write_free(joined_, 0, row.visible, cut, ties, list_, list_ + room_, copy_scores);
    const auto listed = static_cast<int32_t>(list_end - list_);
    join_rows(compact_, room_, G_, listed, a_.pool == Pool::softmax, fine_refs_, compact_);
    add_bias(compact_, listed, list_);
    if (row.top_p < 1) {
      std::fill(joined_, joined_ + n_, INT16_MIN);
      for (int32_t i = 0; i < listed; ++i) joined_[list_[i]] = compact_[i];
      return select_scores(joined_, row, out, K, count);
    }
    select_listed(row, listed, out, K, count);
  }

  // Forced tokens and the best of the shortlist, ascending.
  void select_listed(const SelectRow& row, int32_t listed, int32_t* out, int64_t K, int32_t* count) {
    SelectRow inner;  // the same problem with list entries for units
    inner.visible = listed;
    inner.spans = spans_;
    const auto entry = [&](int32_t token) {
      return static_cast<int32_t>(std::lower_bound(list_, list_ + listed, token) - list_);
    };
    for (int32_t i = 0; i < row.span_count; ++i)
      inner.spans[inner.span_count++] = {entry(row.spans[i].begin), entry(row.spans[i].end)};
    const auto cut = cut_by_count(compact_, inner, row.count() - row.forced);
    int64_t ties = cut.ties;
    int32_t *p = out, from = 0;
    for (int32_t s = 0; s <= row.span_count; ++s) {
      const bool last = s == row.span_count;
      int32_t* chosen = write_free(compact_, from, last ? listed : inner.spans[s].begin, cut, ties, p, out + K);
      for (; p < chosen; ++p) *p = list_[*p];
      if (last) break;
      for (int32_t i = row.spans[s].begin; i < row.spans[s].end; ++i) *p++ = i;
      from = inner.spans[s].end;
    }
    *count = static_cast<int32_t>(p - out);
    std::fill(p, out + K, -1);
  }

  // log of sum exp(estimated logit) over the positions not selected, left in omitted_mass for finish().
  void estimate_unread(const SelectRow& row, const int32_t* chosen, int32_t count) {
    const slicing::AttentionArgs& c = a_.attention;
    const bool plain = c.window == 0 && c.softcap == 0 && !c.key_bias.given();
    for (int g = 0; g < G_; ++g) {
      float& unread = a_.omitted_mass.as<float>()[at(a_.omitted_mass, u_.b, t_, u_.h * G_ + g)];
      unread = count >= row.visible ? kNothing : plain ? unread_sum(g, chosen, count) : unread_loop(g, chosen, count);
    }
  }

  float unread_sum(int g, const int32_t* chosen, int32_t count) {
    for (int32_t i = 0; i < count; ++i) compact_[i] = first(g)[chosen[i]];
    const auto weight = [](vi d) { return rough_exp_weight(d, slicing::kUnreadShrink * kLog2OfStep); };
    const int32_t top = refs_[g].top;
    const uint64_t left = weight_sum(first(g), n_, top, weight) - weight_sum(compact_, count, top, weight);
    if (left == 0) return kNothing;
    const float largest = slicing::kUnreadShrink * static_cast<float>(top) / slicing::kScoreSteps;
    return std::log(static_cast<float>(left)) - 24 * 0.6931471805599453f + largest + centre_logit(u_.h * G_ + g);
  }

  // The same where a logit is more than its score: softcap, bias, window.
  float unread_loop(int g, const int32_t* chosen, int32_t count) const {
    const float centre = centre_logit(u_.h * G_ + g), cap = a_.attention.softcap;
    const float* bias = this->bias();
    double top = kNothing, sum = 0;
    const int32_t* end = chosen + count;
    for (int64_t i = 0; i < n_; ++i) {
      while (chosen < end && *chosen < i) ++chosen;
      if ((chosen < end && *chosen == i) || i < first_in_window()) continue;
      float logit = slicing::kUnreadShrink * first(g)[i] / slicing::kScoreSteps + centre;
      if (cap > 0) logit = cap * std::tanh(logit / cap);
      if (bias) logit += bias[i];
      if (logit == kNothing) continue;
      const double bigger = larger(logit, static_cast<float>(top));
      sum = sum * weight_below(top, bigger) + weight_below<double>(logit, bigger);
      top = bigger;
    }
    return sum == 0 ? kNothing : static_cast<float>(top + std::log(sum));
  }

  // What the scores leave out: the centre's share of every logit.
  float centre_logit(int64_t head) const {
    const TensorView& q = a_.attention.q;
    float x[slicing::kSketchMaxDim], dot = 0;
    load_row(q, at(q, u_.b, t_, head), u_.shape.D, 1.0f, x);
    const float* centre = a_.centre.as<const float>() + u_.h * a_.centre.stride[0];
    for (int64_t d = 0; d < u_.shape.D; ++d) dot += x[d] * centre[d];
    return dot * a_.attention.scale;
  }

  const AttendArgs& a_;
  const SelectArgs& s_;
  const ScanUnit& u_;
  int64_t t_, n_;
  int G_;
  int64_t row_, room_ = 0;
  int16_t *joined_ = nullptr, *compact_ = nullptr;
  int32_t* list_ = nullptr;
  HeadReference *refs_ = nullptr, *fine_refs_ = nullptr;
  Span* spans_ = nullptr;
};

void select_tokens(const AttendArgs& a, const SelectArgs& s) {
  const slicing::AttentionArgs& c = a.attention;
  const ScanShape shape(c.q, c.kv.k_cache.shape[1], c.max_seq_len);
  const auto scan = [&](const ScanUnit& u, int64_t chunk) {
    u.scan(a.bits, a.norm, c.kv.block_table, a.planes, chunk, a.planes == 2);
  };
  for_each_unit(shape, c.q, c.kv.seq_lens, c.scale, 2, scan,
                [&](const ScanUnit& u, int64_t t) { TokenRow(a, s, u, t).run(); });
}

// ---- pages, by their summaries ----

void select_pages(const AttendArgs& a, SelectArgs s) {
  const slicing::AttentionArgs& c = a.attention;
  const int64_t B = c.q.shape[0], T = c.q.shape[1], Hkv = c.kv.k_cache.shape[1], M = s.scores.shape[3];
  const CallScratch memory({}, B * T * Hkv * M * int64_t{4});
  s.scores = view_of(memory.data(), DType::f32, B, T, Hkv, M);
  score_pages(
      {c.q, a.summary, c.kv.block_table, c.kv.seq_lens, s.page, a.beta, a.pool, c.scale, c.max_seq_len, s.scores}, {});
  parallel_for(B * T * Hkv, [&](int64_t row) {
    const int64_t t = row / Hkv % T, b = row / Hkv / T;
    const int64_t visible =
        visible_positions(index_at(c.kv.seq_lens, b * c.kv.seq_lens.stride[0]), T, t, c.max_seq_len);
    const float* bias = c.key_bias.given() ? c.key_bias.as<const float>() + b * c.key_bias.stride[0] : nullptr;
    float* scores = s.scores.as<float>() + row * M;
    for (int64_t m = 0; m * s.page < visible; ++m) {
      const int64_t end = std::min((m + 1) * s.page, visible);
      if (c.window > 0 && end <= visible - c.window) scores[m] = kNothing;
      if (bias) scores[m] += largest(bias + m * s.page, end - m * s.page);
    }
  });
  select(s, {});
}

// The estimate for pages: every position of an unread page is taken to have the page's centre for its key.
void estimate_unread_pages(const AttendArgs& a, const SelectArgs& s, int64_t row) {
  const slicing::AttentionArgs& c = a.attention;
  const int64_t T = c.q.shape[1], Hq = c.q.shape[2], G = Hq / c.kv.k_cache.shape[1], D = c.q.shape[3];
  const int64_t head = row % Hq, t = row / Hq % T, b = row / Hq / T, h = head / G;
  const int64_t visible = visible_positions(index_at(c.kv.seq_lens, b * c.kv.seq_lens.stride[0]), T, t, c.max_seq_len);
  const int32_t* chosen = a.indices.as<const int32_t>() + at(a.indices, b, t, h);
  const int32_t* chosen_end = chosen + a.counts.as<const int32_t>()[at(a.counts, b, t, h)];
  const PageTable table(c.kv.block_table, b);
  const int64_t pages = slicing::ceil_div(visible, s.page);
  Carver carve(thread_scratch((D + pages) * static_cast<int64_t>(sizeof(float)) + 256));
  float *q = carve.take<float>(D), *logits = carve.take<float>(pages), top = kNothing;
  const float* bias = c.key_bias.given() ? c.key_bias.as<const float>() + b * c.key_bias.stride[0] : nullptr;
  load_row(c.q, at(c.q, b, t, head), D, c.scale, q);
  with_float_type(a.summary.dtype, [&](auto type) {
    const auto* centres = a.summary.as<const decltype(type)>() + h * a.summary.stride[1];
    for (int64_t m = 0; m < pages; ++m) {
      const bool read = chosen < chosen_end && *chosen == m;
      chosen += read;
      const int64_t end = std::min((m + 1) * s.page, visible);
      const bool outside = c.window > 0 && end <= visible - c.window;
      logits[m] = kNothing;
      if (read || outside) continue;
      logits[m] = dot_row(q, centres + table[static_cast<uint32_t>(m)] * a.summary.stride[0], D);
      if (c.softcap > 0) logits[m] = c.softcap * std::tanh(logits[m] / c.softcap);
      if (bias) logits[m] += largest(bias + m * s.page, end - m * s.page);
      top = larger(top, logits[m]);
    }
  });
  float sum = 0;
  for (int64_t m = 0; top != kNothing && m < pages; ++m)
    sum += static_cast<float>(std::min(s.page, visible - m * s.page)) * weight_below(logits[m], top);
  a.omitted_mass.as<float>()[at(a.omitted_mass, b, t, head)] = sum == 0 ? kNothing : top + std::log(sum);
}

// ---- the result ----

// Query head `head` of one query token, computed dense.
void attend_dense_head(const AttendArgs& a, int64_t b, int64_t t, int64_t head) {
  slicing::AttentionArgs one = a.attention;
  const int64_t h = head / (one.q.shape[2] / one.kv.k_cache.shape[1]);
  const auto narrow = [](TensorView& v, int axis, int64_t i) {
    if (!v.given()) return;
    v.data = v.as<char>() + i * v.stride_bytes(axis);
    v.shape[axis] = 1;
  };
  int64_t length =
      visible_positions(index_at(one.kv.seq_lens, b * one.kv.seq_lens.stride[0]), one.q.shape[1], t, one.max_seq_len);
  for (TensorView* v : {&one.q, &one.out}) narrow(*v, 0, b), narrow(*v, 1, t), narrow(*v, 2, head);
  narrow(one.lse, 0, b), narrow(one.lse, 1, t), narrow(one.lse, 2, head);
  for (TensorView* v : {&one.kv.k_cache, &one.kv.v_cache}) {
    if (!one.kv.block_table.given()) narrow(*v, 0, b);
    narrow(*v, 1, h);
  }
  narrow(one.kv.block_table, 0, b), narrow(one.key_bias, 0, b), narrow(one.sinks, 0, head);
  for (TensorView* v : {&one.kv.k_scale, &one.kv.v_scale})
    if (v->rank == 1) narrow(*v, 0, h);
  one.kv.seq_lens = view_of(&length, DType::i64, 1);
  one.selected = {};
  sliced_attention(one, {});
}

// log of the unread weight becomes the share of the whole; heads above the limit are recomputed.
void finish(const AttendArgs& a) {
  const slicing::AttentionArgs& c = a.attention;
  const int64_t T = c.q.shape[1], Hq = c.q.shape[2], G = Hq / c.kv.k_cache.shape[1];
  for (int64_t row = 0; row < c.q.shape[0] * T * Hq; ++row) {
    const int64_t head = row % Hq, t = row / Hq % T, b = row / Hq / T;
    float& omitted = a.omitted_mass.as<float>()[at(a.omitted_mass, b, t, head)];
    uint8_t& status = a.status.as<uint8_t>()[at(a.status, b, t, head)];
    const float lse = c.lse.as<const float>()[at(c.lse, b, t, head)];
    const int32_t count = a.counts.as<const int32_t>()[at(a.counts, b, t, head / G)];
    const int64_t unit = a.summary.given() ? c.kv.k_cache.shape[2] : 1;
    const int64_t visible =
        visible_positions(index_at(c.kv.seq_lens, b * c.kv.seq_lens.stride[0]), T, t, c.max_seq_len);
    status = count == slicing::ceil_div(visible, unit) ? slicing::kDenseShort : slicing::kSliced;
    omitted = omitted == kNothing ? 0.0f : 1.0f / (1.0f + std::exp(lse - omitted));
    if (a.max_omitted_mass <= 1 && !(omitted <= a.max_omitted_mass)) {  // NaN too
      attend_dense_head(a, b, t, head);
      status = slicing::kFallbackMass;
      omitted = 0;
    }
  }
}

void attend_dense(const AttendArgs& a, const Exec& exec) {
  sliced_attention(a.attention, exec);
  const slicing::AttentionArgs& c = a.attention;
  const int64_t T = c.q.shape[1], Hq = c.q.shape[2], Hkv = c.kv.k_cache.shape[1];
  for (int64_t row = 0; row < c.q.shape[0] * T * Hq; ++row) {
    const int64_t head = row % Hq, t = row / Hq % T, b = row / Hq / T;
    a.omitted_mass.as<float>()[at(a.omitted_mass, b, t, head)] = 0;
    a.status.as<uint8_t>()[at(a.status, b, t, head)] = a.dense_layer ? slicing::kDenseLayer : slicing::kDensePrefill;
    if (head >= Hkv) continue;
    a.counts.as<int32_t>()[at(a.counts, b, t, head)] = 0;
    int32_t* indices = a.indices.as<int32_t>() + at(a.indices, b, t, head);
    std::fill(indices, indices + a.indices.shape[3], -1);
  }
}

}  // namespace

void select_slice(const AttendArgs& a, const Exec&) {
  const SelectArgs s = slicing::attend_selection(a);
  if (!a.summary.given()) return select_tokens(a, s);
  select_pages(a, s);
  parallel_for(a.attention.q.shape[0] * a.attention.q.shape[1] * a.attention.q.shape[2],
               [&](int64_t row) { estimate_unread_pages(a, s, row); });
}

void attend(const AttendArgs& a, const Exec& exec) {
  if (slicing::attend_is_dense(a)) return attend_dense(a, exec);
  select_slice(a, exec);
  sliced_attention(slicing::attend_attention(a), exec);
  finish(a);
}

}  // namespace sic::cpu::SIC_ISA
