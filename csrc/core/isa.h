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

#if defined(__aarch64__)
#define SIC_FOR_EACH_ISA(X) X(plain) X(neon)
#else
#define SIC_FOR_EACH_ISA(X) X(plain) X(avx2) X(avx512)
#endif

// Declares sic::cpu::<isa>::op(const Args&, const Exec&) for every instruction set and defines sic::cpu::op, which
// picks one.
#define SIC_DECLARE_CPU_(isa, op, Args) \
  namespace isa {                       \
  void op(const Args&, const Exec&);    \
  }
#if defined(__aarch64__)
#define SIC_CPU_OP(op, Args)                                                                                        \
  namespace sic::cpu {                                                                                              \
  SIC_DECLARE_CPU_(plain, op, Args) SIC_DECLARE_CPU_(neon, op, Args) inline void op(const Args& a, const Exec& e) { \
    return current_isa() == Isa::neon ? neon::op(a, e) : plain::op(a, e);                                           \
  }                                                                                                                 \
  }
#else
#define SIC_CPU_OP(op, Args)                                                                                         \
  namespace sic::cpu {                                                                                               \
  SIC_DECLARE_CPU_(plain, op, Args)                                                                                  \
  SIC_DECLARE_CPU_(avx2, op, Args) SIC_DECLARE_CPU_(avx512, op, Args) inline void op(const Args& a, const Exec& e) { \
    const Isa isa = current_isa();                                                                                   \
    return isa == Isa::avx512 ? avx512::op(a, e) : isa == Isa::avx2 ? avx2::op(a, e) : plain::op(a, e);              \
  }                                                                                                                  \
  }
#endif
