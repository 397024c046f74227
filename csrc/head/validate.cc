#include "head/validate.h"

#include <cmath>

namespace sic::head {

void check_temperature(const Check& check, const TensorView& temperature, int64_t B) {
  if (!temperature.given()) return;
  const bool number = temperature.rank == 0 && temperature.device == Device::cpu;  // passed by value to any device
  if (!number) check.tensor("temperature", temperature, DType::f32, temperature.rank == 0 ? 0 : 1);
  check.require(temperature.dtype == DType::f32, "temperature", describe(temperature), name(DType::f32));
  if (temperature.rank == 1) check.shape("temperature", temperature, {B});
  const TensorView host = check.host(temperature);
  for (int64_t b = 0; host.given() && b < host.size(); ++b) {
    const float t = host.as<const float>()[host.rank == 1 ? b * host.stride[0] : 0];
    check.value(std::isfinite(t) && t >= 0, "temperature", t, "0 or more, finite");
  }
}

void check_logits(const Check& check, const Logits& in, int64_t B, int64_t V) {
  check.value(in.vocab_start >= 0 && V < (int64_t{1} << 31) && in.vocab_start < (int64_t{1} << 31) - V, "vocab_start",
              double(in.vocab_start), "0 or more, and ids below 2^31");
  check_temperature(check, in.temperature, B);
  check.optional("bias", in.bias, DType::f32, 1);
  if (in.bias.given()) check.shape("bias", in.bias, {V});
  check.value(std::isfinite(in.softcap) && in.softcap >= 0, "softcap", in.softcap, "above 0, finite");
  check.value(in.valid_vocab >= 0, "valid_vocab", double(in.valid_vocab), "0 or more ids");
  if (in.mask_bits.given()) check.tensor("mask_bits", in.mask_bits, DType::i32, {B, ceil_div(V, 32)});
}

namespace {

// Every id that the host can read is in [least, end).
void check_ids(const Check& check, const char* arg, const TensorView& ids, int64_t least, int64_t end) {
  const TensorView host = check.host(ids);
  if (!host.given()) return;
  const int64_t rows = host.rank == 2 ? host.shape[0] : 1, n = host.shape[host.rank - 1];
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < n; ++i) {
      const int64_t id = index_at(host, (host.rank == 2 ? r * host.stride[0] : 0) + i * host.stride[host.rank - 1]);
      check.require(id >= least && id < end, arg, "id " + std::to_string(id),
                    std::to_string(least) + " to " + std::to_string(end - 1));
    }
  }
}

}  // namespace

void check_wanted(const Check& check, const Wanted& w, const Logits& in, int64_t B, int64_t V, bool whole) {
  check.value(w.k >= (whole ? 0 : 1) && w.k <= kMaxTop, "k", double(w.k), whole ? "0 to 64" : "1 to 64");
  const int64_t end = whole ? in.vocab_start + V : int64_t{1} << 31;
  if (w.watch_ids.given()) {
    const int rank = w.watch_ids.rank == 2 ? 2 : 1;
    check.tensor("watch_ids", w.watch_ids, kIndexInts, rank);
    if (rank == 2) check.shape("watch_ids", w.watch_ids, {B, -1});
    check.value(w.watch_ids.shape[rank - 1] <= kMaxWatched, "watch_ids", double(w.watch_ids.shape[rank - 1]),
                "at most 64 ids");
    check_ids(check, "watch_ids", w.watch_ids, 0, end);
  }
  if (w.target_ids.given()) {
    check.tensor("target_ids", w.target_ids, kIndexInts, {B});
    check_ids(check, "target_ids", w.target_ids, -1, end);
  }
}

void check_probe(const Check& check, const Probe& p, int64_t D) {
  check.tensor("projection", p.projection, kFloats, {-1, D});
  const int64_t R = p.projection.shape[0];
  check.value(R >= 1 && R <= kMaxRank, "projection", double(R), "1 to 64 rows");
  check.tensor("vector", p.vector, DType::f32, {-1, R});
  check.value(p.vector.shape[0] <= kMaxOutputs, "vector", double(p.vector.shape[0]), "at most 16 rows");
  check.tensor("bias", p.bias, DType::f32, {p.vector.shape[0]});
}

StatsDims stats_dims(int64_t B, const Wanted& w) {
  return {B, w.k, w.watch_ids.given() ? w.watch_ids.shape[w.watch_ids.rank - 1] : 0, w.target_ids.given() ? B : 0};
}

StatsDims stats_dims(const Part& parts) {
  return {parts.m.shape[1], parts.top_ids.shape[2], parts.watch.shape[2], parts.target.shape[1]};
}

void check_stats(const Check& check, const Stats& s, const StatsDims& d) {
  check.output("lse", s.lse, DType::f32, {d.B});
  check.output("entropy", s.entropy, DType::f32, {d.B});
  check.output("varentropy", s.varentropy, DType::f32, {d.B});
  check.output("argmax", s.argmax, DType::i64, {d.B});
  check.output("topk_ids", s.topk_ids, DType::i64, {d.B, d.k});
  check.output("topk_logprobs", s.topk_logprobs, DType::f32, {d.B, d.k});
  check.output("watch_logprobs", s.watch_logprobs, DType::f32, {d.B, d.W});
  check.output("target_logprob", s.target_logprob, DType::f32, {d.targets});
  check.output("status", s.status, DType::u8, {d.B});
}

void check_part(const Check& check, const Part& p, const StatsDims& d) {
  check.output("m", p.m, DType::f32, {d.B});
  check.output("s", p.s, DType::f64, {d.B});
  check.output("t", p.t, DType::f64, {d.B});
  check.output("u", p.u, DType::f64, {d.B});
  check.output("top_ids", p.top_ids, DType::i64, {d.B, d.k});
  check.output("top", p.top, DType::f32, {d.B, d.k});
  check.output("watch", p.watch, DType::f32, {d.B, d.W});
  check.output("target", p.target, DType::f32, {d.targets});
  check.output("status", p.status, DType::u8, {d.B});
}

void check_apart(const Check& check, const Stats& s, std::initializer_list<const TensorView*> inputs) {
  check.apart({{"lse", s.lse},
               {"entropy", s.entropy},
               {"varentropy", s.varentropy},
               {"argmax", s.argmax},
               {"topk_ids", s.topk_ids},
               {"topk_logprobs", s.topk_logprobs},
               {"watch_logprobs", s.watch_logprobs},
               {"target_logprob", s.target_logprob},
               {"status", s.status}},
              inputs);
}

void check_apart(const Check& check, const Part& p, std::initializer_list<const TensorView*> inputs) {
  check.apart({{"m", p.m},
               {"s", p.s},
               {"t", p.t},
               {"u", p.u},
               {"top_ids", p.top_ids},
               {"top", p.top},
               {"watch", p.watch},
               {"target", p.target},
               {"status", p.status}},
              inputs);
}

}  // namespace sic::head
