// delta_decode and delta_attention from C++: rows packed here by the letter of the layout, their meaning worked out in
// double precision, every instruction set, inputs of exact size on the heap.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "core/isa.h"
#include "core/parallel.h"
#include "delta/delta.h"
#include "delta/levels.h"
#include "slicing/sketch.h"

namespace sic::delta {
namespace {

using Row = std::vector<double>;

const Exec kCpu;

class Delta : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (!is_supported(GetParam())) GTEST_SKIP() << name(GetParam()) << ": not on this processor";
    force_isa(name(GetParam()));
  }
  void TearDown() override {
    force_isa("auto");
    set_num_threads(0);
  }
};

double level_of(int bits, int code) { return bits == 8 ? code - 128.0 : levels_of(bits).level[code]; }

// ---- the layout ----

void set_bits(uint8_t* bytes, int64_t bit, int width, int value) {
  for (int i = 0; i < width; ++i)
    if (value >> i & 1) bytes[(bit + i) / 8] |= 1 << (bit + i) % 8;
}

std::vector<uint8_t> pack(const std::vector<int>& codes, int bits) {
  const int D = static_cast<int>(codes.size()), groups = (D + 15) / 16;
  const int low = bits == 3 ? 2 : bits == 5 ? 4 : bits;
  std::vector<uint8_t> row(code_bytes(D, bits), 0);
  int64_t at = 0;
  if (low == 8) {
    for (int d = 0; d < D; ++d) row[d] = static_cast<uint8_t>(codes[d]);
    at = D;
  }
  for (int first = 0, n; low < 8 && first < groups; first += n) {
    for (n = 1; 2 * n <= groups - first && 2 * n * low <= 32;) n *= 2;
    const int word = (n * low + 7) / 8;
    for (int i = 0; i < n; ++i)
      for (int lane = 0; lane < 16 && 16 * (first + i) + lane < D; ++lane)
        set_bits(&row[at + lane * word], i * low, low, codes[16 * (first + i) + lane] & ((1 << low) - 1));
    at += 16 * word;
  }
  for (int d = 0; low < bits && d < D; ++d) set_bits(&row[at], d, 1, codes[d] >> low);
  return row;
}

// ---- the meaning ----

double hadamard(int i, int j) { return __builtin_popcount(i & j) & 1 ? -1.0 : 1.0; }

Row unrotated_value(const Row& y) {
  const int D = static_cast<int>(y.size());
  Row x(D);
  for (int at = 0, n; at < D; at += n) {
    for (n = 1; 2 * n <= D - at;) n *= 2;
    for (int i = 0; i < n; ++i) {
      for (int j = 0; j < n; ++j) x[at + i] += hadamard(i, j) * y[at + j];
      x[at + i] *= (slicing::sketch_sign_is_negative(at + i) ? -1 : 1) / std::sqrt(double(n));
    }
  }
  return x;
}

Row unrotated_key(const Row& y, int R) {
  const int D = static_cast<int>(y.size()), stride = D / R;
  Row x(D);
  for (int d = 0; d < D; ++d)
    for (int j = 0; j < R; ++j) x[d] += hadamard(d / stride, j) * y[d % stride + j * stride] / std::sqrt(double(R));
  return x;
}

struct Shape {
  int64_t T = 1, group = 4, page = 16, Dk = 64, Dv = 64, length = 150;
  int k_bits = 4, v_bits = 4, rotation = 1, templates = 5, rotary = 0;
  bool interleaved = false, positions = false, tail = false;
  double raw = 0.05;  // share of the rows
};

// A random problem of two sequences.
struct Problem : Shape {
  int64_t B = 2, Hkv = 2, each, pages, S;
  std::mt19937 random;
  std::vector<uint8_t> k_codes, v_codes, tags;
  std::vector<float> raw_rows, lo, hi, tail_k, tail_v, q, out, lse, k_out, v_out;
  std::vector<f16_t> k_centres, v_centres;
  std::vector<int32_t> table, lengths, position, starts;
  std::vector<int32_t> indices, counts;
  std::vector<int64_t> owner;
  int32_t raw_state[2] = {0, 0};
  std::vector<Row> k_rows, v_rows;  // [B][S][Hkv], as attention sees them; those of the tail in place
  std::vector<Row> k_coded, v_coded;

  Problem(const Shape& shape, unsigned seed)
      : Shape(shape), each((length + page - 1) / page), pages(B * each), S(each * page), random(seed) {
    lengths = {static_cast<int32_t>(length), static_cast<int32_t>(std::max<int64_t>(1, length / 2))};
    for (int64_t i = 0; i < pages; ++i) table.push_back(static_cast<int32_t>(pages - 1 - i));
    for (int64_t i = 0; i < B * S; ++i)
      position.push_back(positions ? static_cast<int32_t>(random() % 640) : static_cast<int32_t>(i % S));
    centres(k_centres, Dk), centres(v_centres, Dv);
    angles(lo, 64, 1.0), angles(hi, 10, 64.0);
    k_codes.resize(pages * Hkv * page * code_bytes(Dk, k_bits));
    v_codes.resize(pages * Hkv * page * code_bytes(Dv, v_bits));
    tags.resize(pages * Hkv * page * kTagBytes);
    make_rows();
    make_tail();
    fill(q, B * T * Hkv * group * Dk);
    out.assign(B * T * Hkv * group * Dv, NAN);
    lse.assign(B * T * Hkv * group, NAN);
    k_out.assign(B * S * Hkv * Dk, NAN);
    v_out.assign(B * S * Hkv * Dv, NAN);
  }

  float uniform() { return static_cast<float>(random() % 65536) / 65536; }
  void fill(std::vector<float>& x, int64_t n) {
    std::normal_distribution<float> normal;
    x.resize(n);
    for (float& value : x) value = normal(random);
  }
  void centres(std::vector<f16_t>& to, int64_t D) {
    to.resize(Hkv * templates * D);
    for (f16_t& x : to) from_float(2 * uniform() - 1, x);
  }
  void angles(std::vector<float>& to, int rows, double step) {
    const int half = std::max(rotary, 2) / 2;
    for (int i = 0; i < rows; ++i)
      for (int part = 0; part < 2; ++part)
        for (int d = 0; d < half; ++d) {
          const double angle = i * step * std::pow(10000.0, -double(d) / half);
          to.push_back(static_cast<float>(part ? std::sin(angle) : std::cos(angle)));
        }
  }

  Row residual(int bits, int64_t D, float scale, std::vector<uint8_t>& codes, int64_t slot) {
    std::vector<int> code(D);
    Row y(D);
    for (int64_t d = 0; d < D; ++d) {
      code[d] = bits == 8 ? 1 + random() % 255 : random() % (1 << bits);
      y[d] = level_of(bits, code[d]) * scale;
    }
    const std::vector<uint8_t> row = pack(code, bits);
    std::copy(row.begin(), row.end(), codes.begin() + slot * static_cast<int64_t>(row.size()));
    return y;
  }
  Row with_centre(Row x, const std::vector<f16_t>& centres, int64_t h, int id) {
    const int64_t D = static_cast<int64_t>(x.size());
    for (int64_t d = 0; d < D; ++d) x[d] += to_float(centres[(h * templates + id) * D + d]);
    return x;
  }
  void turn(Row& x, int32_t at) const {
    const int half = rotary / 2;
    for (int d = 0; d < half; ++d) {
      double &a = x[interleaved ? 2 * d : d], &b = x[interleaved ? 2 * d + 1 : d + half];
      for (const float* row : {&lo[at % 64 * rotary], &hi[at / 64 * rotary]}) {
        const double c = row[d], s = row[half + d], re = a * c - b * s;
        b = a * s + b * c, a = re;
      }
    }
  }

  void make_rows() {
    for (int64_t b = 0; b < B; ++b)
      for (int64_t i = 0; i < S; ++i)
        for (int64_t h = 0; h < Hkv; ++h) make_row(b, i, h);
    if (raw_rows.empty()) raw_rows.assign(Dk + Dv, 0.0f);
    owner.assign(raw_rows.size() / (Dk + Dv), -1);
    k_coded = k_rows, v_coded = v_rows;
  }
  void make_row(int64_t b, int64_t i, int64_t h) {
    const int64_t slot = (table[b * each + i / page] * Hkv + h) * page + i % page;
    f16_t k_scale, v_scale;
    from_float(0.004f + 0.01f * uniform(), k_scale), from_float(0.004f + 0.01f * uniform(), v_scale);
    Tag tag{k_scale.bits, v_scale.bits, static_cast<uint8_t>(random() % templates),
            static_cast<uint8_t>(random() % templates)};
    Row k = unrotated_key(residual(k_bits, Dk, to_float(k_scale), k_codes, slot), rotation);
    k = with_centre(k, k_centres, h, tag.k_id);
    Row v = unrotated_value(residual(v_bits, Dv, to_float(v_scale), v_codes, slot));
    v = with_centre(v, v_centres, h, tag.v_id);
    if (uniform() < raw) {
      const auto entry = static_cast<uint32_t>(raw_rows.size() / (Dk + Dv));
      for (Row* row : {&k, &v})
        for (double& x : *row) raw_rows.push_back(4 * uniform() - 2), x = raw_rows.back();
      tag = Tag{kRawScale, 0, 0, 0};
      std::memcpy(&k_codes[slot * code_bytes(Dk, k_bits)], &entry, sizeof entry);
    }
    if (rotary) turn(k, position[b * S + i]);
    std::memcpy(&tags[slot * kTagBytes], &tag, sizeof tag);
    k_rows.push_back(k), v_rows.push_back(v);
  }

  static constexpr int64_t kTailRoom = 9;
  void make_tail() {
    if (!tail) return;
    fill(tail_k, B * Hkv * kTailRoom * Dk), fill(tail_v, B * Hkv * kTailRoom * Dv);
    for (int64_t b = 0; b < B; ++b) {
      starts.push_back(std::max(0, lengths[b] - 7));
      for (int64_t i = starts[b]; i < lengths[b]; ++i)
        for (int64_t h = 0; h < Hkv; ++h) {
          const int64_t from = (b * Hkv + h) * kTailRoom + i - starts[b], to = (b * S + i) * Hkv + h;
          k_rows[to].assign(&tail_k[from * Dk], &tail_k[from * Dk] + Dk);
          v_rows[to].assign(&tail_v[from * Dv], &tail_v[from * Dv] + Dv);
        }
    }
  }

  // Some of each row's visible tokens or pages; the same tokens for every query token.
  void select(slicing::Unit unit, double share) {
    const int64_t K = unit == slicing::Unit::page ? each : S;
    indices.assign(B * T * Hkv * K, -1), counts.assign(B * T * Hkv, 0);
    for (int64_t row = 0; row < B * T * Hkv; ++row) {
      const int64_t b = row / (T * Hkv), visible = std::max<int64_t>(0, lengths[b] - T + row / Hkv % T + 1);
      const int64_t n = unit == slicing::Unit::page ? (visible + page - 1) / page : visible;
      for (int64_t i = 0; i < n; ++i)
        if (i == 0 || uniform() < share) indices[row * K + counts[row]++] = static_cast<int32_t>(i);
    }
  }

  Codec codec() {
    Codec c;
    c.k_bits = k_bits, c.v_bits = v_bits, c.k_rotation = rotation;
    c.k.centres = view_of(k_centres.data(), DType::f16, Hkv, templates, Dk);
    c.v.centres = view_of(v_centres.data(), DType::f16, Hkv, templates, Dv);
    if (rotary) {
      c.rope.lo = view_of(lo.data(), DType::f32, 64, 2, rotary / 2);
      c.rope.hi = c.rope.undo = view_of(hi.data(), DType::f32, 10, 2, rotary / 2);
      c.rope.interleaved = interleaved;
    }
    return c;
  }
  Pages coded() {
    Pages p;
    p.k_codes = view_of(k_codes.data(), DType::u8, pages, Hkv, page, code_bytes(Dk, k_bits));
    p.v_codes = view_of(v_codes.data(), DType::u8, pages, Hkv, page, code_bytes(Dv, v_bits));
    p.tags = view_of(tags.data(), DType::u8, pages, Hkv, page, kTagBytes);
    p.raw = view_of(raw_rows.data(), DType::f32, owner.size(), Dk + Dv);
    p.raw_owner = view_of(owner.data(), DType::i64, owner.size());
    p.raw_state = view_of(raw_state, DType::i32, 2);
    return p;
  }
  DecodeArgs decode_args() {
    DecodeArgs a;
    a.pages = coded(), a.codec = codec();
    a.block_table = view_of(table.data(), DType::i32, B, each);
    a.seq_lens = view_of(lengths.data(), DType::i32, B);
    if (positions) a.positions = view_of(position.data(), DType::i32, B, S);
    a.max_seq_len = S;
    a.k = view_of(k_out.data(), DType::f32, B, S, Hkv, Dk);
    a.v = view_of(v_out.data(), DType::f32, B, S, Hkv, Dv);
    return a;
  }
  AttentionArgs args() {
    AttentionArgs a;
    slicing::AttentionArgs& c = a.attention;
    c.q = view_of(q.data(), DType::f32, B, T, Hkv * group, Dk);
    c.kv.k_cache = view_of(nullptr, DType::f32, pages, Hkv, page, Dk);
    c.kv.v_cache = view_of(nullptr, DType::f32, pages, Hkv, page, Dv);
    c.kv.block_table = view_of(table.data(), DType::i32, B, each);
    c.kv.seq_lens = view_of(lengths.data(), DType::i32, B);
    c.scale = 1 / std::sqrt(static_cast<float>(Dk));
    c.max_seq_len = S;
    c.out = view_of(out.data(), DType::f32, B, T, Hkv * group, Dv);
    c.lse = view_of(lse.data(), DType::f32, B, T, Hkv * group);
    a.pages = coded(), a.codec = codec();
    if (positions) a.positions = view_of(position.data(), DType::i32, B, S);
    if (tail) {
      a.tail.k = view_of(tail_k.data(), DType::f32, B, Hkv, kTailRoom, Dk);
      a.tail.v = view_of(tail_v.data(), DType::f32, B, Hkv, kTailRoom, Dv);
      a.tail.start = view_of(starts.data(), DType::i32, B);
    }
    return a;
  }
  AttentionArgs selected_args(slicing::Unit unit) {
    AttentionArgs a = args();
    a.attention.selected.indices = view_of(indices.data(), DType::i32, B, T, Hkv, indices.size() / (B * T * Hkv));
    a.attention.selected.counts = view_of(counts.data(), DType::i32, B, T, Hkv);
    a.attention.selected.unit = unit;
    return a;
  }

  // The decoded rows against what was packed; zeros behind a sequence.
  void expect_decoded() const {
    for (int64_t row = 0; row < B * S * Hkv; ++row) {
      const bool live = row / Hkv % S < lengths[row / Hkv / S];
      for (int64_t d = 0; d < Dk; ++d)
        ASSERT_NEAR(k_out[row * Dk + d], live ? k_coded[row][d] : 0.0, live ? 3e-6 : 0) << row << " " << d;
      for (int64_t d = 0; d < Dv; ++d)
        ASSERT_NEAR(v_out[row * Dv + d], live ? v_coded[row][d] : 0.0, live ? 3e-6 : 0) << row << " " << d;
    }
  }
  // Attention by its definition.
  void expect(double tolerance, const AttentionArgs& a) const {
    for (int64_t b = 0; b < B; ++b)
      for (int64_t t = 0; t < T; ++t)
        for (int64_t h = 0; h < Hkv * group; ++h) expect_row(b, t, h, tolerance, a);
  }
  std::vector<int64_t> tokens(int64_t b, int64_t t, int64_t h, const AttentionArgs& a) const {
    const int64_t visible = std::max<int64_t>(0, lengths[b] - T + t + 1);
    const bool by_page = a.attention.selected.unit == slicing::Unit::page;
    std::vector<int64_t> all;
    if (!a.attention.selected.indices.given()) {
      for (int64_t i = 0; i < visible; ++i) all.push_back(i);
      return all;
    }
    const int64_t row = (b * T + t) * Hkv + h, K = a.attention.selected.indices.shape[3];
    for (int64_t i = 0; i < counts[row]; ++i)
      for (int64_t j = 0; j < (by_page ? page : 1); ++j) {
        const int64_t position = indices[row * K + i] * (by_page ? page : 1) + j;
        if (position < visible) all.push_back(position);
      }
    return all;
  }
  void expect_row(int64_t b, int64_t t, int64_t h, double tolerance, const AttentionArgs& a) const {
    const int64_t r = (b * T + t) * Hkv * group + h;
    Row sum(Dv);
    double total = 0;
    for (const int64_t i : tokens(b, t, h / group, a)) {
      const int64_t row = (b * S + i) * Hkv + h / group;
      double logit = 0;
      for (int64_t d = 0; d < Dk; ++d) logit += double(q[r * Dk + d]) * k_rows[row][d];
      const double weight = std::exp(logit / std::sqrt(double(Dk)));
      total += weight;
      for (int64_t d = 0; d < Dv; ++d) sum[d] += weight * v_rows[row][d];
    }
    if (total == 0) {
      EXPECT_EQ(lse[r], -std::numeric_limits<float>::infinity());
      EXPECT_EQ(out[r * Dv], 0.0f);
      return;
    }
    ASSERT_NEAR(lse[r], std::log(total), tolerance);
    for (int64_t d = 0; d < Dv; ++d) ASSERT_NEAR(out[r * Dv + d], sum[d] / total, tolerance);
  }
  void forget() {
    std::fill(out.begin(), out.end(), NAN);
    std::fill(lse.begin(), lse.end(), NAN);
  }
};

int largest_rotation(int64_t D) { return static_cast<int>(D & -D); }

// A shape for case number i: what is not given varies with it.
Shape shape_of(int bits, int64_t D, int64_t page, int i) {
  constexpr int kOther[] = {4, 2, 8, 3, 5};
  Shape s;
  s.k_bits = bits, s.v_bits = i % 3 ? bits : kOther[i % 5];
  s.Dk = D, s.Dv = i % 4 == 3 ? 48 : D, s.page = page;
  s.group = i % 5 == 0 ? 1 : i % 5 == 1 ? 2 : i % 5 == 2 ? 3 : i % 5 == 3 ? 4 : 6;
  s.rotation = i % 3 == 0 ? largest_rotation(D) : i % 3 == 1 ? 1 : std::min(largest_rotation(D), 8);
  while (D % s.rotation) s.rotation /= 2;
  while (s.rotation & (s.rotation - 1)) s.rotation &= s.rotation - 1;
  s.rotary = static_cast<int>(i % 4 == 0 ? D / 2 * 2 : i % 4 == 1 ? D / 4 * 2 : i % 4 == 2 ? D / 2 * 2 : 0);
  s.interleaved = i % 5 == 2;
  s.positions = i % 7 >= 4, s.tail = i % 3 == 1;
  s.templates = i % 6 == 5 ? 1 : 5;
  s.length = page == 1 ? 37 : 90;
  return s;
}

TEST_P(Delta, DecodeIsTheDefinition) {
  int i = 0;
  for (int bits : {2, 3, 4, 5, 8})
    for (int64_t D : {32, 64, 80, 96, 128, 256, 100, 33, 31, 1})
      for (int64_t page : {1, 3, 16}) {
        ++i;
        Problem p(shape_of(bits, D, page, i), i);
        delta_decode(p.decode_args(), kCpu);
        SCOPED_TRACE(testing::Message() << bits << " bits, D " << D << ", page " << page << ", case " << i);
        p.expect_decoded();
        if (HasFatalFailure()) return;
      }
}

TEST_P(Delta, AttentionIsTheDefinition) {
  int i = 1000;
  for (int bits : {2, 3, 4, 5, 8})
    for (int64_t D : {32, 64, 80, 96, 128, 256, 100, 33, 31, 1}) {
      Shape shape = shape_of(bits, D, i % 2 ? 16 : 3, i);
      ++i;
      shape.T = i % 3 ? 1 : 3;
      Problem p(shape, i);
      SCOPED_TRACE(testing::Message() << bits << " bits, D " << D << ", case " << i);
      delta_attention(p.args(), kCpu);
      p.expect(3e-5, p.args());
      for (auto unit : {slicing::Unit::token, slicing::Unit::page}) {
        p.select(unit, 0.3);
        p.forget();
        delta_attention(p.selected_args(unit), kCpu);
        p.expect(3e-5, p.selected_args(unit));
      }
      if (HasFatalFailure()) return;
    }
}

// Kernels of their own for common shapes, with long lists.
TEST_P(Delta, AttentionIsDecodeThenAttention) {
  for (int bits : {2, 3, 4, 5, 8})
    for (int64_t D : {64, 96, 128, 256}) {
      Shape shape;
      shape.Dk = shape.Dv = D, shape.k_bits = shape.v_bits = bits, shape.length = 590,
      shape.rotary = static_cast<int>(D);
      shape.rotation = bits == 8 ? largest_rotation(D) : 8, shape.raw = 0.01, shape.T = D == 64 ? 2 : 1;
      Problem p(shape, bits + static_cast<unsigned>(D));
      delta_decode(p.decode_args(), kCpu);
      slicing::AttentionArgs a = p.args().attention;
      for (TensorView* rows : {&a.kv.k_cache, &a.kv.v_cache}) {
        *rows = view_of(rows == &a.kv.k_cache ? p.k_out.data() : p.v_out.data(), DType::f32, p.B, p.Hkv, p.S, D);
        rows->stride[1] = D, rows->stride[2] = p.Hkv * D;
      }
      a.kv.block_table = TensorView();
      slicing::sliced_attention(a, kCpu);
      const std::vector<float> expected = p.out, expected_lse = p.lse;
      p.forget();
      delta_attention(p.args(), kCpu);
      for (size_t i = 0; i < expected.size(); ++i) ASSERT_NEAR(p.out[i], expected[i], 1e-5) << bits << " bits, D " << D;
      for (size_t i = 0; i < expected_lse.size(); ++i) ASSERT_NEAR(p.lse[i], expected_lse[i], 1e-5);
    }
}

Shape long_shape(int64_t T, int64_t group) {
  Shape s;
  s.T = T, s.group = group, s.Dk = s.Dv = 128, s.rotation = 8, s.rotary = 128, s.length = 600, s.tail = true,
  s.raw = 0.02;
  return s;
}

TEST_P(Delta, FullSelectionEqualsDenseBitForBit) {
  for (int64_t T : {1, 3})
    for (int64_t group : {1, 4, 7}) {
      Problem p(long_shape(T, group), 5);
      delta_attention(p.args(), kCpu);
      const std::vector<float> dense = p.out;
      for (auto unit : {slicing::Unit::token, slicing::Unit::page}) {
        p.select(unit, 1.1);
        p.forget();
        delta_attention(p.selected_args(unit), kCpu);
        EXPECT_EQ(p.out, dense) << T << " " << group;
      }
    }
}

TEST_P(Delta, BatchAndThreadsDoNotChangeABit) {
  Shape shape = long_shape(2, 4);
  shape.length = 2300;
  shape.positions = false, shape.rotary = 0;  // the tables of the tests end at 640
  Problem p(shape, 6);
  set_num_threads(1);
  delta_attention(p.args(), kCpu);
  delta_decode(p.decode_args(), kCpu);
  const std::vector<float> one = p.out, k = p.k_out;
  for (int threads : {2, 3, 8}) {
    set_num_threads(threads);
    p.forget();
    std::fill(p.k_out.begin(), p.k_out.end(), NAN);
    delta_attention(p.args(), kCpu);
    delta_decode(p.decode_args(), kCpu);
    EXPECT_EQ(p.out, one) << threads << " threads";
    EXPECT_EQ(p.k_out, k) << threads << " threads";
  }
  // The second sequence alone.
  AttentionArgs a = p.args();
  const auto second = [](TensorView& v) { v.data = static_cast<char*>(v.data) + v.stride_bytes(0), v.shape[0] = 1; };
  p.forget();
  for (TensorView* v : {&a.attention.q, &a.attention.kv.block_table, &a.attention.kv.seq_lens, &a.attention.out,
                        &a.attention.lse, &a.tail.k, &a.tail.v, &a.tail.start})
    second(*v);
  delta_attention(a, kCpu);
  const auto half = static_cast<int64_t>(one.size() / 2);
  EXPECT_EQ(std::vector<float>(p.out.begin() + half, p.out.end()), std::vector<float>(one.begin() + half, one.end()));
}

// Tags and entries that no encoder writes are read within bounds.
TEST_P(Delta, DamagedTagsStayInBounds) {
  Shape shape;
  shape.raw = 0.5;
  Problem p(shape, 7);
  for (uint8_t& x : p.tags)
    if (p.uniform() < 0.2) x = static_cast<uint8_t>(p.random());
  for (uint8_t& x : p.k_codes)
    if (p.uniform() < 0.2) x = static_cast<uint8_t>(p.random());
  delta_attention(p.args(), kCpu);
  delta_decode(p.decode_args(), kCpu);
}

INSTANTIATE_TEST_SUITE_P(EveryIsa, Delta, testing::ValuesIn({SIC_FOR_EACH_ISA(SIC_ISA_VALUE)}),
                         [](const auto& info) { return name(info.param); });

}  // namespace
}  // namespace sic::delta
