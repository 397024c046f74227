// The rule of termination for Python.
#include <pybind11/stl.h>

#include <algorithm>
#include <vector>

#include "bind/call.h"
#include "head/termination.h"

namespace sic::bind {
namespace {

using namespace head;

TerminationRule rule_of(double threshold, double slope_per_1k, double max_threshold, double hysteresis,
                        int64_t patience, int64_t min_tokens, int64_t max_tokens, int64_t plateau_window,
                        double plateau_width, const std::vector<int64_t>& eos_ids) {
  TerminationRule r;
  r.threshold = threshold, r.slope_per_1k = slope_per_1k, r.max_threshold = max_threshold;
  r.hysteresis = hysteresis, r.patience = patience;
  r.min_tokens = min_tokens, r.max_tokens = max_tokens;
  r.plateau_window = plateau_window, r.plateau_width = plateau_width;
  r.eos_count = static_cast<int64_t>(eos_ids.size());
  std::copy_n(eos_ids.begin(), std::min<size_t>(eos_ids.size(), kMaxEosIds), r.eos_ids);
  return r;
}

py::tuple termination(py::handle tokens, py::handle score, py::handle entropy, py::handle status, py::handle matched,
                      py::handle input_lens, py::handle generated, py::handle streak, py::handle recent,
                      py::handle state_reason, double threshold, double slope_per_1k, double max_threshold,
                      double hysteresis, int64_t patience, int64_t min_tokens, int64_t max_tokens,
                      int64_t plateau_window, double plateau_width, const std::vector<int64_t>& eos_ids,
                      py::object done, py::object reason, py::handle workspace, int code) {
  Args in("termination_step", workspace);
  TerminationArgs a;
  a.tokens = in("tokens", tokens), a.score = in("score", score);
  a.entropy = in("stats.entropy", entropy), a.status = in("stats.status", status), a.matched = in("matched", matched);
  a.state = {in("state.input_lens", input_lens), in.out("state.generated", generated), in.out("state.streak", streak),
             in.out("state.recent", recent), in.out("state.reason", state_reason)};
  a.rule = rule_of(threshold, slope_per_1k, max_threshold, hysteresis, patience, min_tokens, max_tokens, plateau_window,
                   plateau_width, eos_ids);
  a.done = in.out("done", done), a.reason = in.out("reason", reason);
  Call call(in, tokens, a.tokens, workspace, code);
  call.run(head::termination_step, a, a.done.given() && a.reason.given(), [&] {
    const int64_t B = a.tokens.shape[0];
    done = output(done, tokens, {B}, DType::boolean), a.done = in.out("done", done);
    reason = output(reason, tokens, {B}, DType::u8), a.reason = in.out("reason", reason);
  });
  return py::make_tuple(done, reason);
}

}  // namespace

void bind_termination(py::module_& m) { define(m, "termination_step", &termination); }

}  // namespace sic::bind
