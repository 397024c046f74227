// lm_head_stats and lm_head_part on the CPU: logits of some hundred columns at a time, counted before they leave the
// cache.
//
// Floor: the weights read once from memory (a row of logits needs D products each: above some rows arithmetic decides).
// A product of a row of hidden states and a row of weights is summed in an order of D alone, so no result depends on
// the batch.
#include "core/parallel.h"
#include "head/dots_cpu.h"
#include "head/finish_cpu.h"
#include "head/probe_cpu.h"

namespace sic::cpu::SIC_ISA {
namespace {

constexpr int64_t kColumns = 512;     // of a task; a multiple of 32
constexpr int64_t kRowsAtATime = 64;  // of hidden states, which share the weights that a task has in its cache

// What the tasks of a call share.
template <class H, class T>
struct Call {
  const StatsArgs& a;
  const H* hidden;  // [B, Dp]
  int64_t Dp, B, V;
  Segments segments;

  void columns_of(int64_t task) const {
    const int64_t b0 = task / segments.count * kRowsAtATime, rows = std::min(kRowsAtATime, B - b0);
    const int64_t index = task % segments.count, first = index * kColumns, n = std::min(kColumns, V - first);
    float* z = reinterpret_cast<float*>(thread_scratch(kRowsAtATime * kColumns * static_cast<int64_t>(sizeof(float))));
    const TensorView& w = a.in.weight;
    dots(hidden + b0 * Dp, Dp, rows, w.as<const T>() + first * w.stride[0], w.stride[0], n, w.shape[1], z, kColumns);
    for (int64_t r = 0; r < rows; ++r)
      if (count_row(b0 + r, index, first, n, z + r * kColumns)) finish(b0 + r);
  }

  // Whether the row is complete with it.
  bool count_row(int64_t b, int64_t index, int64_t first, int64_t n, float* z) const {
    const Shaping shaping(a.in, b);
    if (!shaping.none()) shape_block(z, shaping, first, n, z);
    Moments moments;
    TopList list = segments.list(b, index);
    BlockTop top;
    top.of(z, n);
    count_block(z, n, first, top, inverse_temperature(a.in.temperature, b), {nullptr, z}, moments, list);
    return segments.put(b, index, moments, list);
  }

  void finish(int64_t b) const {
    const Shaping shaping(a.in, b);
    finish_row(a, b, segments, [&](int64_t column) {
      float x[1];
      const TensorView& w = a.in.weight;
      dots(hidden + b * Dp, Dp, 1, w.as<const T>() + column * w.stride[0], w.stride[0], 1, w.shape[1], x, 1);
      return shaping(load_first(x, 1), column, 1)[0];
    });
    if (!a.probe.projection.given()) return;
    const int64_t D = a.in.hidden.shape[1];
    float* row = reinterpret_cast<float*>(thread_scratch(D * static_cast<int64_t>(sizeof(float)), ScratchSlot::unit));
    load_row(a.in.hidden, b * a.in.hidden.stride[0], D, 1.0f, row);
    probe_row(a.probe, row, b);
  }
};

// The hidden states as the products take them: contiguous, in the weights' bf16 where instructions multiply it.
template <class H>
void take_hidden(const TensorView& v, int64_t Dp, H* out) {
  const int64_t D = v.shape[1];
  for (int64_t b = 0; b < v.shape[0]; ++b) {
    H* row = out + b * Dp;
    if constexpr (std::is_same_v<H, float>)
      load_row(v, b * v.stride[0], D, 1.0f, row);
    else
      std::copy_n(v.as<const H>() + b * v.stride[0], D, row);
    std::fill(row + D, row + Dp, H{});
  }
}

template <class H, class T>
void run(const StatsArgs& a) {
  const int64_t B = head::rows(a), V = head::columns(a), D = a.in.hidden.shape[1], Dp = (D + 63) / 64 * 64;
  const int64_t count = std::max<int64_t>(1, head::ceil_div(V, kColumns));
  Carver measure(nullptr);
  measure.take<H>(B * Dp), Segments(measure, a, count);
  const CallScratch scratch({}, measure.used());
  Carver carve(scratch.data());
  H* hidden = carve.take<H>(B * Dp);
  take_hidden(a.in.hidden, Dp, hidden);
  const Call<H, T> call{a, hidden, Dp, B, V, Segments(carve, a, count)};
  for (int64_t b = 0; b < B; ++b) call.segments.rows[b].begin(count);
  parallel_for(count * head::ceil_div(B, kRowsAtATime), [&](int64_t task) { call.columns_of(task); });
}

}  // namespace

void lm_head_stats(const StatsArgs& a, const Exec&) {
  if (a.in.weight.dtype == DType::bf16 && a.in.hidden.dtype == DType::bf16 && multiplies_bf16())
    return run<bf16_t, bf16_t>(a);
  with_float_type(a.in.weight.dtype, [&](auto type) {
    if constexpr (!std::is_same_v<decltype(type), f8_t>) run<float, decltype(type)>(a);
  });
}

}  // namespace sic::cpu::SIC_ISA
