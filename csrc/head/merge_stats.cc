// merge_stats: checks, then the backend.
#include <cmath>
#include <limits>

#include "head/validate.h"

SIC_OP_KERNELS(merge_stats, head::MergeArgs)

namespace sic::head {
namespace {

template <class T>
T at(const TensorView& v, int64_t i, int64_t b, int64_t j = 0) {
  return v.as<const T>()[i * v.stride[0] + b * v.stride[1] + j];
}

// One row of one part: numbers that statistics can have. What else there is would go unseen into a sum or a list.
void check_row(const Check& check, const Part& p, int64_t i, int64_t b) {
  const auto must = [&](bool ok, const char* arg, auto got, const char* expected) {
    if (!ok)
      check.fail(arg, std::to_string(got) + " of row " + std::to_string(b) + " in part " + std::to_string(i), expected);
  };
  const float m = at<float>(p.m, i, b);
  const double s = at<double>(p.s, i, b), t = at<double>(p.t, i, b), u = at<double>(p.u, i, b);
  const bool none = m == -std::numeric_limits<float>::infinity();
  must(none || std::isfinite(m), "parts.m", m, "a finite number, or -inf where no id takes part");
  must(none ? s == 0 : s > 0 && std::isfinite(s), "parts.s", s, "a finite number above 0, or 0 where no id takes part");
  must(std::isfinite(t), "parts.t", t, "a finite number");
  must(std::isfinite(u), "parts.u", u, "a finite number");
  for (int64_t j = 0; j < p.top_ids.shape[2]; ++j) {
    const int64_t id = at<int64_t>(p.top_ids, i, b, j), least = j == 0 && !none ? 0 : -1;
    must(id >= least && id < (int64_t{1} << 31) - 1, "parts.top_ids", id, "ids below 2^31 - 1, or -1 behind the last");
    const float z = at<float>(p.top, i, b, j);
    must(id < 0 || std::isfinite(z), "parts.top", z, "a finite number for each id");
  }
}

// What the host can read. Of a row with a status no number is used.
void check_numbers(const Check& check, const Part& p) {
  Part host;
  host.m = check.host(p.m), host.s = check.host(p.s), host.t = check.host(p.t), host.u = check.host(p.u);
  host.top_ids = check.host(p.top_ids), host.top = check.host(p.top), host.status = check.host(p.status);
  if (!host.m.given()) return;
  for (int64_t i = 0; i < p.m.shape[0]; ++i)
    for (int64_t b = 0; b < p.m.shape[1]; ++b)
      if (at<uint8_t>(host.status, i, b) == 0) check_row(check, host, i, b);
}

void check_inputs(const Check& check, const MergeArgs& a) {
  const Part& p = a.parts;
  check.tensor("parts.m", p.m, DType::f32, 2);
  const int64_t n = p.m.shape[0], B = p.m.shape[1];
  check.value(n >= 1, "parts", double(n), "1 or more");
  check.tensor("parts.s", p.s, DType::f64, {n, B});
  check.tensor("parts.t", p.t, DType::f64, {n, B});
  check.tensor("parts.u", p.u, DType::f64, {n, B});
  check.tensor("parts.top_ids", p.top_ids, DType::i64, {n, B, -1});
  const int64_t k = p.top_ids.shape[2];
  check.value(k >= 1 && k <= kMaxTop, "parts.top_ids", double(k), "1 to 64 ids");
  check.tensor("parts.top", p.top, DType::f32, {n, B, k});
  check.tensor("parts.watch", p.watch, DType::f32, {n, B, -1});
  check.tensor("parts.target", p.target, DType::f32, {n, -1});
  const int64_t targets = p.target.shape[1];
  check.require(targets == 0 || targets == B, "parts.target", describe(p.target), "one for each row, or none");
  check.tensor("parts.status", p.status, DType::u8, {n, B});
  check_temperature(check, a.temperature, B);
  check_numbers(check, p);
}

void check_outputs(const Check& check, const MergeArgs& a) {
  const Part& p = a.parts;
  check_stats(check, a.stats, stats_dims(p));
  check_apart(check, a.stats,
              {&p.m, &p.s, &p.t, &p.u, &p.top_ids, &p.top, &p.watch, &p.target, &p.status, &a.temperature});
}

}  // namespace

const Op<MergeArgs> merge_stats{"merge_stats", check_inputs, check_outputs, SIC_KERNELS(merge_stats)};

}  // namespace sic::head
