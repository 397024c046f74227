// delta_decode: checks, then the backend.
#include "delta/validate.h"

SIC_OP_KERNELS(delta_decode, delta::DecodeArgs)

namespace sic::delta {
namespace {

void check_inputs(const Check& check, const DecodeArgs& a) {
  check_coded(check, a.pages, a.codec, false);
  const slicing::CacheDims d = check_sequences(check, a.pages, a.block_table, a.seq_lens);
  slicing::check_max_seq_len(check, a.max_seq_len, d, a.seq_lens);
  check_cache_positions(check, a.positions, a.seq_lens, a.codec, a.max_seq_len);
}

void check_outputs(const Check& check, const DecodeArgs& a) {
  const int64_t B = a.seq_lens.shape[0], Hkv = a.pages.k_codes.shape[1];
  check.output("k", a.k, kFloats, {B, a.max_seq_len, Hkv, a.codec.k.centres.shape[2]});
  check.output("v", a.v, a.k.dtype, {B, a.max_seq_len, Hkv, a.codec.v.centres.shape[2]});
  check.apart({{"k", a.k}, {"v", a.v}}, {&a.pages.k_codes, &a.pages.v_codes, &a.pages.tags, &a.pages.raw,
                                         &a.block_table, &a.seq_lens, &a.positions});
}

}  // namespace

const Op<DecodeArgs> delta_decode{"delta_decode", check_inputs, check_outputs, SIC_KERNELS(delta_decode),
                                  [](const DecodeArgs& a) { return a.k.size() == 0 && a.v.size() == 0; }};

}  // namespace sic::delta
