#include "core/isa.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>

#include "core/check.h"

namespace sic {
namespace {

constexpr Isa kBestFirst[] = {SIC_FOR_EACH_ISA(SIC_ISA_VALUE)};  // of this build

bool processor_has(Isa isa) {
#if defined(__aarch64__)
  return isa == Isa::plain || isa == Isa::neon;
#else
  switch (isa) {
    case Isa::plain:
      return true;
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    case Isa::avx512:
      return processor_has(Isa::avx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    default:
      return false;
  }
#endif
}

Isa best() {
  for (Isa isa : kBestFirst)
    if (is_supported(isa)) return isa;
  return Isa::plain;
}

std::atomic<Isa>& chosen() {
  static std::atomic<Isa> isa{best()};
  return isa;
}

}  // namespace

const char* name(Isa isa) {
  constexpr const char* kNames[] = {"plain", "avx2", "avx512", "neon"};
  return kNames[static_cast<int>(isa)];
}

bool is_supported(Isa isa) {
  const bool built = std::find(std::begin(kBestFirst), std::end(kBestFirst), isa) != std::end(kBestFirst);
  return built && processor_has(isa);
}

Isa current_isa() { return chosen().load(std::memory_order_relaxed); }

void force_isa(const char* wanted) {
  if (!std::strcmp(wanted, "auto")) {
    chosen() = best();
    return;
  }
  std::string supported = "auto";
  for (Isa isa : kBestFirst) {
    if (!is_supported(isa)) continue;
    if (!std::strcmp(wanted, name(isa))) {
      chosen() = isa;
      return;
    }
    supported += std::string("|") + name(isa);
  }
  Check("force_isa").fail("isa", wanted, supported);
}

}  // namespace sic
