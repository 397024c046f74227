// logits_stats and logits_part on the CPU.
//
// Floor: the logits read once from memory. Two passes over a block in the first-level cache (its maximum, its moments)
// take about 10 vector operations a vector of the instruction set.
#include "core/parallel.h"
#include "head/finish_cpu.h"

namespace sic::cpu::SIC_ISA {
namespace {

constexpr int64_t kSegment = 8 * kBlock;  // columns of a task

template <class T>
void count_segment(const StatsArgs& a, int64_t b, int64_t first, int64_t end, const Segments& segments, int64_t index) {
  const T* row = a.in.x.as<const T>() + b * a.in.x.stride[0];
  const Shaping shaping(a.in, b);
  const double inverse = inverse_temperature(a.in.temperature, b);
  const bool in_place = std::is_same_v<T, float> && shaping.none();
  alignas(64) float buffer[kBlock];
  Moments moments;
  TopList list = segments.list(index);
  for (int64_t at = first; at < end; at += kBlock) {
    const int64_t n = std::min(kBlock, end - at);
    const float* z = buffer;
    if (in_place)
      z = reinterpret_cast<const float*>(row + at);
    else
      shape_block(row + at, shaping, at, n, buffer);
    count_block(z, n, at, inverse, moments, list);
  }
  segments.put(index, moments, list);
}

template <class T>
void run(const StatsArgs& a) {
  const int64_t B = head::rows(a), columns = head::columns(a);
  const int64_t count = std::max<int64_t>(1, head::ceil_div(columns, kSegment));
  const int64_t room = head::is_part(a) ? a.part.top_ids.shape[1] : std::max<int64_t>(1, a.wanted.k);
  const CallScratch scratch({}, B * count * Segments::bytes_of(room));
  const Segments segments{scratch.data(), room};
  const auto finish = [&](int64_t b) {
    const T* row = a.in.x.as<const T>() + b * a.in.x.stride[0];
    const Shaping shaping(a.in, b);
    finish_row(a, b, segments, b * count, count,
               [&](int64_t column) { return shaping(load_first(row + column, 1), column, 1)[0]; });
  };
  parallel_for(B * count, [&](int64_t task) {
    const int64_t b = task / count, first = task % count * kSegment;
    count_segment<T>(a, b, first, std::min(columns, first + kSegment), segments, task);
    if (count == 1) finish(b);
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
