// select: checks, then the backend.
#include "slicing/select.h"

#include <algorithm>
#include <vector>

#include "core/paged.h"

SIC_OP_KERNELS(select, slicing::SelectArgs)

namespace sic::slicing {

SelectRow select_row(const SelectArgs& a, int64_t b, int64_t h, int64_t tokens, Span* spans) {
  const int64_t unit = a.unit == Unit::token ? 1 : a.page;
  SelectRow row;
  row.visible = static_cast<int32_t>(ceil_div(tokens, unit));
  int64_t budget = a.budget >= 0 ? a.budget : static_cast<int64_t>(a.ratio * static_cast<double>(tokens));
  if (a.budgets.given())
    budget = std::max<int64_t>(0, index_at(a.budgets, b * a.budgets.stride[0] + h * a.budgets.stride[1]));
  budget = std::max(budget, a.least);
  row.top_p = tokens <= a.min_len ? 1.0 : a.top_p;
  if (tokens <= a.min_len || budget >= tokens)
    row.budget = row.visible;
  else
    row.budget = static_cast<int32_t>(a.unit == Unit::token ? budget : std::max<int64_t>(1, budget / unit));
  row.spans = spans;
  int32_t n = 0;
  const auto add = [&](int64_t from, int64_t to) {
    from = std::max<int64_t>(from, 0), to = std::min(to, tokens);
    if (from < to) spans[n++] = {static_cast<int32_t>(from / unit), static_cast<int32_t>(ceil_div(to, unit))};
  };
  add(0, a.sink);
  add(tokens - std::min(a.recent, tokens), tokens);
  for (int64_t i = 0; a.keep.given() && i < a.keep.shape[1]; ++i) {
    const int64_t at = b * a.keep.stride[0] + i * a.keep.stride[1];
    add(index_at(a.keep, at), index_at(a.keep, at + 1));
  }
  std::sort(spans, spans + n, [](Span x, Span y) { return x.begin < y.begin; });
  for (int32_t i = 0; i < n; ++i) {
    if (row.span_count > 0 && spans[i].begin <= spans[row.span_count - 1].end)
      spans[row.span_count - 1].end = std::max(spans[row.span_count - 1].end, spans[i].end);
    else
      spans[row.span_count++] = spans[i];
  }
  for (int32_t i = 0; i < row.span_count; ++i) row.forced += spans[i].end - spans[i].begin;
  return row;
}

int64_t selection_capacity(const SelectArgs& a) {
  const int64_t N = a.scores.shape[3];
  if (a.budgets.given() || a.keep.given()) return N;
  if (a.unit == Unit::token) {
    const int64_t budget = a.budget >= 0 ? a.budget : static_cast<int64_t>(a.ratio * static_cast<double>(N));
    return std::min(N, std::max({budget, a.sink + a.recent, a.min_len, a.least}));
  }
  const int64_t budget = a.budget >= 0 ? ceil_div(a.budget, a.page)
                                       : static_cast<int64_t>(a.ratio * static_cast<double>(N * a.page)) / a.page;
  const int64_t forced = ceil_div(a.sink, a.page) + (a.recent > 0 ? ceil_div(a.recent, a.page) + 1 : 0);
  return std::min(N, std::max({int64_t{1}, budget, forced, ceil_div(a.min_len, a.page)}));
}

void check_capacity(const Check& check, const SelectArgs& given) {
  if (given.indices.shape[3] >= given.scores.shape[3]) return;  // room for everything
  SelectArgs a = given;
  a.seq_lens = check.host(given.seq_lens), a.budgets = check.host(given.budgets), a.keep = check.host(given.keep);
  if (!a.seq_lens.given()) return;
  const int64_t T = a.scores.shape[1], Hkv = a.scores.shape[2], N = a.scores.shape[3], K = a.indices.shape[3];
  std::vector<Span> spans(span_room(a));
  for (int64_t b = 0; b < a.scores.shape[0]; ++b) {
    for (int64_t i = 0; i < T * Hkv; ++i) {
      const int64_t tokens = visible_positions(index_at(a.seq_lens, b * a.seq_lens.stride[0]), T, i / Hkv,
                                               N * (a.unit == Unit::token ? 1 : a.page));
      const int32_t count = select_row(a, b, i % Hkv, tokens, spans.data()).count();
      check.require(count <= K, "indices", std::to_string(K) + " slots a row", "at least " + std::to_string(count));
    }
  }
}

namespace {

void check_inputs(const Check& check, const SelectArgs& a) {
  check.tensor("scores", a.scores, kFloats | DType::i16, 4);
  const int64_t B = a.scores.shape[0], Hkv = a.scores.shape[2], N = a.scores.shape[3];
  check.tensor("seq_lens", a.seq_lens, kIndexInts, {B});
  check.value(a.unit == Unit::token || (a.page >= 1 && a.page <= kMaxPage), "page_size", double(a.page),
              "1 to 2^31 - 1");
  check.value(a.ratio >= 0 && a.ratio <= 1, "ratio", a.ratio, "0 to 1");
  check.value(a.top_p > 0 && a.top_p <= 1, "top_p", a.top_p, "above 0, at most 1");
  check_count(check, "sink", a.sink);
  check_count(check, "recent", a.recent);
  check.optional("budget", a.budgets, kIndexInts, 2);
  if (a.budgets.given()) check.shape("budget", a.budgets, {B, Hkv});
  check_keep(check, a.keep, B);
  const int64_t limit = N * (a.unit == Unit::token ? 1 : a.page);
  check.value(limit < (int64_t{1} << 31), "scores", double(limit), "fewer than 2^31 positions a row");
  const TensorView lens = check.host(a.seq_lens);
  for (int64_t b = 0; lens.given() && b < B; ++b) {
    const int64_t n = index_at(lens, b * lens.stride[0]);
    check.require(n >= 0 && n <= limit, "seq_lens", std::to_string(n) + " for sequence " + std::to_string(b),
                  "0 to " + std::to_string(limit) + " positions");
  }
}

void check_outputs(const Check& check, const SelectArgs& a) {
  const TensorView& s = a.scores;
  check.output("indices", a.indices, DType::i32, {s.shape[0], s.shape[1], s.shape[2], -1});
  check.output("counts", a.counts, DType::i32, {s.shape[0], s.shape[1], s.shape[2]});
  check.apart({{"indices", a.indices}, {"counts", a.counts}}, {&a.scores, &a.seq_lens, &a.budgets, &a.keep});
  check_capacity(check, a);
}

}  // namespace

const Op<SelectArgs> select{"select", check_inputs, check_outputs, SIC_KERNELS(select)};

}  // namespace sic::slicing
