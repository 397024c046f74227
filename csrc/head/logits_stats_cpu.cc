// logits_stats and logits_part on the CPU.
//
// Floor: the logits read once from memory. Two passes over a block in the first-level cache (its maximum, its moments)
// take about 10 vector operations a vector of the instruction set.
#include "core/parallel.h"
#include "head/finish_cpu.h"

namespace sic::cpu::SIC_ISA {
namespace {

constexpr int64_t kSegment = 16 * kBlock;  // columns of a task

template <class T>
void count_segment(const StatsArgs& a, int64_t b, int64_t index, const Segments& segments) {
  const int64_t first = index * kSegment, end = std::min(head::columns(a), first + kSegment);
  const T* row = a.in.x.as<const T>() + b * a.in.x.stride[0];
  const Shaping shaping(a.in, b);
  const double inverse = inverse_temperature(a.in.temperature, b);
  const bool in_place = std::is_same_v<T, float> && shaping.none();
  alignas(64) float buffer[kBlock];
  Moments moments;
  TopList list = segments.list(b, index);
  for (int64_t at = first; at < end; at += kBlock) {
    const int64_t n = std::min(kBlock, end - at);
    const float* z = buffer;
    if (in_place)
      z = reinterpret_cast<const float*>(row + at);
    else
      shape_block(row + at, shaping, at, n, buffer);
    count_block(z, n, at, inverse, row + at + n, moments, list);
  }
  segments.put(b, index, moments, list);
}

template <class T>
void run(const StatsArgs& a) {
  const int64_t B = head::rows(a), count = std::max<int64_t>(1, head::ceil_div(head::columns(a), kSegment));
  Carver measure(nullptr);
  Segments(measure, a, count);
  const CallScratch scratch({}, measure.used());
  Carver carve(scratch.data());
  const Segments segments(carve, a, count);
  for (int64_t b = 0; b < B; ++b) segments.floors[b].clear();
  const auto finish = [&](int64_t b) {
    const T* row = a.in.x.as<const T>() + b * a.in.x.stride[0];
    const Shaping shaping(a.in, b);
    finish_row(a, b, segments, [&](int64_t column) { return shaping(load_first(row + column, 1), column, 1)[0]; });
  };
  parallel_for(B * count, [&](int64_t task) {
    count_segment<T>(a, task / count, task % count, segments);
    if (count == 1) finish(task);
  });
  if (count > 1) parallel_for(B, finish);
}

}  // namespace

void logits_stats(const StatsArgs& a, const Exec&) {
  with_float_type(a.in.x.dtype, [&](auto type) {
    if constexpr (!std::is_same_v<decltype(type), f8_t>) run<decltype(type)>(a);
  });
}

}  // namespace sic::cpu::SIC_ISA
