#include "delta/validate.h"

#include "delta/codes.h"

namespace sic::delta {
namespace {

void check_templates(const Check& check, const std::string& name, const Templates& t, int64_t Hkv, int64_t D,
                     bool encoding) {
  const auto of = [&](const char* part) { return name + "." + part; };
  check.tensor(of("centres").c_str(), t.centres, DType::f16, {Hkv, -1, D});
  check.contiguous(of("centres").c_str(), t.centres);
  const int64_t n = t.centres.shape[1];
  check.value(n >= 1 && n <= kMaxTemplates, of("centres").c_str(), double(n), "1 to 256 templates a head");
  if (!encoding) return;
  const int64_t groups = slicing::ceil_div(n, kLanes);
  check.tensor(of("search").c_str(), t.search, DType::i8, {Hkv, groups, slicing::ceil_div(D, 4), kLanes, 4});
  check.tensor(of("half_norm").c_str(), t.half_norm, DType::f32, {Hkv, groups * kLanes});
  check.tensor(of("mean").c_str(), t.mean, DType::f32, {Hkv, D});
  check.tensor(of("step").c_str(), t.step, DType::f32, {Hkv});
  check.tensor(of("bound").c_str(), t.bound, DType::f32, {Hkv});
  const TensorView* all[] = {&t.search, &t.half_norm, &t.mean, &t.step, &t.bound};
  const char* parts[] = {"search", "half_norm", "mean", "step", "bound"};
  for (int i = 0; i < 5; ++i) check.contiguous(of(parts[i]).c_str(), *all[i]);
}

void check_rope(const Check& check, const Rope& rope, int64_t Dk) {
  if (!rope.lo.given() && !rope.hi.given()) return;
  check.tensor("rope.lo", rope.lo, DType::f32, {kRopeBlock, 2, -1});
  const int64_t half = rope.lo.shape[2];
  check.value(half >= 1 && 2 * half <= Dk, "rope.lo", double(2 * half), "2 to Dk rotary channels");
  check.tensor("rope.hi", rope.hi, DType::f32, {-1, 2, half});
  check.tensor("rope.undo", rope.undo, DType::f32, {rope.hi.shape[0], 2, half});
  check.value(rope.hi.shape[0] >= 1, "rope.hi", double(rope.hi.shape[0]), "at least one block of positions");
  check.contiguous("rope.lo", rope.lo);
  check.contiguous("rope.hi", rope.hi);
  check.contiguous("rope.undo", rope.undo);
}

void check_codes(const Check& check, const char* arg, const TensorView& v, const CodedDims& d, int64_t bytes,
                 bool written) {
  if (written)
    check.output(arg, v, DType::u8, {d.P, d.Hkv, d.page, bytes});
  else
    check.tensor(arg, v, DType::u8, {d.P, d.Hkv, d.page, bytes});
}

// Positions below it have their place in the tables.
int64_t position_limit(const Codec& c) {
  return c.rope.hi.given() ? c.rope.hi.shape[0] * kRopeBlock : int64_t{1} << 31;
}

void check_bits(const Check& check, const char* arg, int bits) {
  check.value(bits_allowed(bits), arg, bits, "2, 3, 4, 5 or 8 bits");
}

}  // namespace

CodedDims check_coded(const Check& check, const Pages& p, const Codec& c, bool encoding) {
  check_bits(check, "codec.k_bits", c.k_bits);
  check_bits(check, "codec.v_bits", c.v_bits);
  check.tensor("pages.k_codes", p.k_codes, DType::u8, 4);
  check.tensor("codec.k_templates.centres", c.k.centres, DType::f16, 3);
  check.tensor("codec.v_templates.centres", c.v.centres, DType::f16, 3);
  CodedDims d;
  d.P = p.k_codes.shape[0], d.Hkv = p.k_codes.shape[1], d.page = p.k_codes.shape[2];
  d.Dk = c.k.centres.shape[2], d.Dv = c.v.centres.shape[2];
  check.value(d.page >= 1, "pages.k_codes", double(d.page), "pages of at least 1 token");
  for (const int64_t D : {d.Dk, d.Dv})
    check.value(D >= 1 && D <= kMaxDim, "codec.templates.centres", double(D), "a head size of 1 to 1024");
  check_templates(check, "codec.k_templates", c.k, d.Hkv, d.Dk, encoding);
  check_templates(check, "codec.v_templates", c.v, d.Hkv, d.Dv, encoding);
  const int64_t R = c.k_rotation;
  check.value(R >= 1 && R <= d.Dk && (R & (R - 1)) == 0 && d.Dk % R == 0, "codec.k_rotation", double(R),
              "a power of two that divides the head size");
  check_rope(check, c.rope, d.Dk);
  check_codes(check, "pages.k_codes", p.k_codes, d, code_bytes(d.Dk, c.k_bits), encoding);
  check_codes(check, "pages.v_codes", p.v_codes, d, code_bytes(d.Dv, c.v_bits), encoding);
  check_codes(check, "pages.tags", p.tags, d, kTagBytes, encoding);
  bool even = reinterpret_cast<uintptr_t>(p.tags.data) % 2 == 0;
  for (int axis = 0; axis < 3; ++axis) even = even && (p.tags.shape[axis] <= 1 || p.tags.stride[axis] % 2 == 0);
  check.require(even, "pages.tags", describe(p.tags) + " at odd addresses", "rows at even addresses");
  check.tensor("pages.raw", p.raw, kFloats, {-1, d.Dk + d.Dv});
  d.E = p.raw.shape[0];
  check.value(d.E < (int64_t{1} << 30), "pages.raw", double(d.E), "fewer than 2^30 entries");
  if (encoding) {
    check.output("pages.raw", p.raw, kFloats, {d.E, d.Dk + d.Dv});
    check.output("pages.raw_owner", p.raw_owner, DType::i64, {d.E});
    check.output("pages.raw_state", p.raw_state, DType::i32, {2});
  }
  return d;
}

slicing::CacheDims check_sequences(const Check& check, const Pages& p, const TensorView& block_table,
                                   const TensorView& seq_lens) {
  return slicing::check_cache(check, "pages.k_codes", p.k_codes, DType::u8, block_table, seq_lens, p.k_codes.shape[2]);
}

void check_row_positions(const Check& check, const TensorView& positions, const Codec& c, int64_t N) {
  check.tensor("positions", positions, kIndexInts, {N});
  const TensorView host = check.host(positions);
  const int64_t limit = position_limit(c);
  for (int64_t i = 0; host.given() && i < N; ++i) {
    const int64_t p = index_at(host, i * host.stride[0]);
    check.require(p >= 0 && p < limit, "positions", std::to_string(p) + " at [" + std::to_string(i) + "]",
                  "0 to " + std::to_string(limit - 1));
  }
}

void check_cache_positions(const Check& check, const TensorView& positions, const TensorView& seq_lens, const Codec& c,
                           int64_t S) {
  const int64_t limit = position_limit(c);
  if (!positions.given()) return check.value(S <= limit, "max_seq_len", double(S), "at most the positions of the rope");
  const int64_t B = seq_lens.shape[0];
  check.tensor("positions", positions, DType::i32, {B, -1});
  check.value(positions.shape[1] >= S, "positions", double(positions.shape[1]), "at least max_seq_len columns");
  const TensorView host = check.host(positions), lens = check.host(seq_lens);
  for (int64_t b = 0; host.given() && lens.given() && b < B; ++b)
    for (int64_t i = 0; i < index_at(lens, b * lens.stride[0]); ++i) {
      const int32_t p = host.as<const int32_t>()[b * host.stride[0] + i];
      check.require(p >= 0 && p < limit, "positions",
                    std::to_string(p) + " at [" + std::to_string(b) + "," + std::to_string(i) + "]",
                    "0 to " + std::to_string(limit - 1));
    }
}

}  // namespace sic::delta
