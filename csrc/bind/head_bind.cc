// The head ops for Python.
#include "bind/call.h"
#include "bind/defaults.h"
#include "head/validate.h"

namespace sic::bind {
namespace {

using head::MergeArgs;
using head::Part;
using head::Probe;
using head::ProbeArgs;
using head::Stats;
using head::StatsArgs;
using head::StatsDims;

using Objects = py::tuple;  // outputs as they came, and then as they were made

constexpr int64_t kAllIds = (int64_t{1} << 31) - 1;

// The nine outputs in the order of their struct.
Stats stats(Args& in, const Objects& o) {
  return {in.out("lse", o[0]),
          in.out("entropy", o[1]),
          in.out("varentropy", o[2]),
          in.out("argmax", o[3]),
          in.out("topk_ids", o[4]),
          in.out("topk_logprobs", o[5]),
          in.out("watch_logprobs", o[6]),
          in.out("target_logprob", o[7]),
          in.out("status", o[8])};
}
Part part(Args& in, const Objects& o) {
  return {in.out("m", o[0]),     in.out("s", o[1]),       in.out("t", o[2]),
          in.out("u", o[3]),     in.out("top_ids", o[4]), in.out("top", o[5]),
          in.out("watch", o[6]), in.out("target", o[7]),  in.out("status", o[8])};
}

bool all_given(const Objects& o) {
  for (const py::handle x : o)
    if (x.is_none()) return false;
  return true;
}

Objects made(const Objects& given, py::handle like, const StatsDims& d, bool parts) {
  const DType sums = parts ? DType::f64 : DType::f32, fourth = parts ? DType::f64 : DType::i64;
  return py::make_tuple(output(given[0], like, {d.B}, DType::f32), output(given[1], like, {d.B}, sums),
                        output(given[2], like, {d.B}, sums), output(given[3], like, {d.B}, fourth),
                        output(given[4], like, {d.B, d.k}, DType::i64), output(given[5], like, {d.B, d.k}, DType::f32),
                        output(given[6], like, {d.B, d.W}, DType::f32), output(given[7], like, {d.targets}, DType::f32),
                        output(given[8], like, {d.B}, DType::u8));
}

void read_common(Args& in, StatsArgs& a, py::handle temperature, py::handle bias, Number softcap, Count valid_vocab,
                 py::handle mask_bits, int64_t k, py::handle watch_ids, py::handle target_ids, int64_t vocab_start) {
  a.in.temperature = in.scale("temperature", temperature), a.in.bias = in("bias", bias);
  a.in.softcap = softcap_of(softcap), a.in.valid_vocab = valid_vocab.value_or(kAllIds);
  a.in.mask_bits = in("mask_bits", mask_bits), a.in.vocab_start = vocab_start;
  a.wanted = {k, in("watch_ids", watch_ids), in("target_ids", target_ids)};
}

// Outputs that were not given are made between the checks of inputs and of outputs.
template <class Allocate>
Objects run(Args& in, const Op<StatsArgs>& op, StatsArgs& a, py::handle first, const TensorView& view, bool parts,
            Objects outs, bool more_given, Allocate more, py::handle workspace, int code) {
  const auto take = [&] {
    if (parts)
      a.part = part(in, outs);
    else
      a.stats = stats(in, outs);
  };
  const bool given = all_given(outs) && more_given;
  if (given) take();
  Call call(in, first, view, workspace, code);
  call.run(op, a, given, [&] {
    outs = made(outs, first, head::stats_dims(view.shape[0], a.wanted), parts);
    take();
    more();
  });
  return outs;
}

template <bool kPart>
Objects on_logits(py::handle logits, py::handle temperature, py::handle bias, Number softcap, Count valid_vocab,
                  py::handle mask_bits, int64_t k, py::handle watch_ids, py::handle target_ids, int64_t vocab_start,
                  py::handle o0, py::handle o1, py::handle o2, py::handle o3, py::handle o4, py::handle o5,
                  py::handle o6, py::handle o7, py::handle o8, py::handle workspace, int code) {
  const Op<StatsArgs>& op = kPart ? head::logits_part : head::logits_stats;
  Args in(op.name, workspace);
  StatsArgs a;
  a.in.x = in("logits", logits);
  read_common(in, a, temperature, bias, softcap, valid_vocab, mask_bits, k, watch_ids, target_ids, vocab_start);
  return run(
      in, op, a, logits, a.in.x, kPart, py::make_tuple(o0, o1, o2, o3, o4, o5, o6, o7, o8), true, [] {}, workspace,
      code);
}

Objects lm_head_part(py::handle hidden, py::handle weight, py::handle temperature, py::handle bias, Number softcap,
                     Count valid_vocab, py::handle mask_bits, int64_t k, py::handle watch_ids, py::handle target_ids,
                     int64_t vocab_start, py::handle o0, py::handle o1, py::handle o2, py::handle o3, py::handle o4,
                     py::handle o5, py::handle o6, py::handle o7, py::handle o8, py::handle workspace, int code) {
  Args in(head::lm_head_part.name, workspace);
  StatsArgs a;
  a.in.hidden = in("hidden", hidden), a.in.weight = in("weight", weight);
  read_common(in, a, temperature, bias, softcap, valid_vocab, mask_bits, k, watch_ids, target_ids, vocab_start);
  return run(
      in, head::lm_head_part, a, hidden, a.in.hidden, true, py::make_tuple(o0, o1, o2, o3, o4, o5, o6, o7, o8), true,
      [] {}, workspace, code);
}

// (projection, vector, bias, activation, link), or all of it None
Probe read_probe(Args& in, const py::tuple& t) {
  Probe p;
  p.projection = in("projection", t[0]), p.vector = in("vector", t[1]), p.bias = in("bias", t[2]);
  p.activation = static_cast<head::Activation>(t[3].cast<int>()), p.link = static_cast<head::Link>(t[4].cast<int>());
  return p;
}

Objects lm_head_stats(py::handle hidden, py::handle weight, py::handle temperature, py::handle bias, Number softcap,
                      Count valid_vocab, py::handle mask_bits, int64_t k, py::handle watch_ids, py::handle target_ids,
                      int64_t vocab_start, py::tuple of_probe, py::handle o0, py::handle o1, py::handle o2,
                      py::handle o3, py::handle o4, py::handle o5, py::handle o6, py::handle o7, py::handle o8,
                      py::object score, py::handle workspace, int code) {
  Args in(head::lm_head_stats.name, workspace);
  StatsArgs a;
  a.in.hidden = in("hidden", hidden), a.in.weight = in("weight", weight);
  read_common(in, a, temperature, bias, softcap, valid_vocab, mask_bits, k, watch_ids, target_ids, vocab_start);
  a.probe = read_probe(in, of_probe), a.probe.score = in.out("score", score);
  const Objects outs = run(
      in, head::lm_head_stats, a, hidden, a.in.hidden, false, py::make_tuple(o0, o1, o2, o3, o4, o5, o6, o7, o8),
      a.probe.score.given(),
      [&] {
        const int64_t n = a.probe.projection.given() ? a.probe.vector.shape[0] : 0;
        a.probe.score = in.out("score", score = output(score, hidden, {a.in.hidden.shape[0], n}, DType::f32));
      },
      workspace, code);
  return outs + py::make_tuple(score);
}

Objects merge_stats(py::handle m, py::handle s, py::handle t, py::handle u, py::handle top_ids, py::handle top,
                    py::handle watch, py::handle target, py::handle status, py::handle temperature, py::handle o0,
                    py::handle o1, py::handle o2, py::handle o3, py::handle o4, py::handle o5, py::handle o6,
                    py::handle o7, py::handle o8, py::handle workspace, int code) {
  Args in("merge_stats", workspace);
  MergeArgs a;
  a.parts = {in("parts.m", m),
             in("parts.s", s),
             in("parts.t", t),
             in("parts.u", u),
             in("parts.top_ids", top_ids),
             in("parts.top", top),
             in("parts.watch", watch),
             in("parts.target", target),
             in("parts.status", status)};
  a.temperature = in.scale("temperature", temperature);
  Objects outs = py::make_tuple(o0, o1, o2, o3, o4, o5, o6, o7, o8);
  const bool given = all_given(outs);
  if (given) a.stats = stats(in, outs);
  Call call(in, m, a.parts.m, workspace, code);
  call.run(head::merge_stats, a, given, [&] {
    outs = made(outs, m, head::stats_dims(a.parts), false);
    a.stats = stats(in, outs);
  });
  return outs;
}

py::object probe(py::handle hidden, py::handle projection, py::handle vector, py::handle bias, int activation, int link,
                 py::object score, py::handle workspace, int code) {
  Args in("probe", workspace);
  ProbeArgs a;
  a.hidden = in("hidden", hidden);
  a.probe = read_probe(in, py::make_tuple(projection, vector, bias, activation, link));
  a.probe.score = in.out("score", score);
  Call call(in, hidden, a.hidden, workspace, code);
  call.run(head::probe, a, a.probe.score.given(), [&] {
    a.probe.score =
        in.out("score", score = output(score, hidden, {a.hidden.shape[0], a.probe.vector.shape[0]}, DType::f32));
  });
  return score;
}

}  // namespace

void bind_head(py::module_& m) {
  define(m, "logits_stats", &on_logits<false>);
  define(m, "logits_part", &on_logits<true>);
  define(m, "lm_head_stats", &lm_head_stats);
  define(m, "lm_head_part", &lm_head_part);
  define(m, "merge_stats", &merge_stats);
  define(m, "probe", &probe);
}

}  // namespace sic::bind
