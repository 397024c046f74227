// termination_step on the CPU: a few dozen instructions a row.
#include "core/parallel.h"
#include "head/termination_row.h"

namespace sic::cpu::SIC_ISA {
namespace {

constexpr int64_t kRowsPerTask = 1024;

}  // namespace

void termination_step(const head::TerminationArgs& a, const Exec&) {
  const head::TerminationRows rows = head::rows_of(a);
  const int64_t B = a.tokens.shape[0];
  parallel_for((B + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task) {
    const int64_t end = (task + 1) * kRowsPerTask;
    for (int64_t b = task * kRowsPerTask; b < (end < B ? end : B); ++b) head::termination_row(a.rule, rows, b);
  });
}

}  // namespace sic::cpu::SIC_ISA
