// Instruction sets of the CPU backend: every `*_cpu.cc` is compiled once for each, in a namespace of its own, and the
// entry picks one at run time.
#pragma once

namespace sic {

enum class Isa { plain, avx2, avx512, neon };

const char* name(Isa isa);
bool is_supported(Isa isa);  // built in, and this processor has it
Isa current_isa();           // the best supported one unless forced
// "auto" or a name; throws ArgumentError for an unknown or unsupported one. Not while ops run.
void force_isa(const char* name);

}  // namespace sic

// X(isa, ...) for every instruction set of this build, best first. CMake's SIC_ISAS may leave out all but plain.
#if defined(__aarch64__) || defined(SIC_WITHOUT_avx512)
#define SIC_IF_AVX512_(...)
#else
#define SIC_IF_AVX512_(...) __VA_ARGS__
#endif
#if defined(__aarch64__) || defined(SIC_WITHOUT_avx2)
#define SIC_IF_AVX2_(...)
#else
#define SIC_IF_AVX2_(...) __VA_ARGS__
#endif
#if !defined(__aarch64__) || defined(SIC_WITHOUT_neon)
#define SIC_IF_NEON_(...)
#else
#define SIC_IF_NEON_(...) __VA_ARGS__
#endif
#define SIC_FOR_EACH_ISA(X, ...)         \
  SIC_IF_AVX512_(X(avx512, __VA_ARGS__)) \
  SIC_IF_AVX2_(X(avx2, __VA_ARGS__))     \
  SIC_IF_NEON_(X(neon, __VA_ARGS__))     \
  X(plain, __VA_ARGS__)
#define SIC_ISA_VALUE(isa, ...) ::sic::Isa::isa,

// Declares sic::cpu::<isa>::op(const Args&, const Exec&) for every instruction set and defines sic::cpu::op, which
// picks one.
#define SIC_DECLARE_CPU_(isa, op, Args) \
  namespace isa {                       \
  void op(const Args&, const Exec&);    \
  }
#define SIC_CALL_CPU_(isa, op, Args) \
  if (current == Isa::isa) return isa::op(a, e);
#define SIC_CPU_OP(op, Args)                     \
  namespace sic::cpu {                           \
  SIC_FOR_EACH_ISA(SIC_DECLARE_CPU_, op, Args)   \
  inline void op(const Args& a, const Exec& e) { \
    const Isa current = current_isa();           \
    SIC_FOR_EACH_ISA(SIC_CALL_CPU_, op, Args)    \
  }                                              \
  }
