// delta_attention on the CPU.
//
// Keys are decoded a few at a time into rows of floats. Values are not: their levels are added up in the rotated space,
// each weight times its row's scale, and the weights by template; after a split the sums are rotated back and the
// templates added. Rows that are not coded, those of the side table and of the tail, have sums of their own.
#include "slicing/attention_cpu.h"
#include "delta/encode.h"
#include "delta/rows_cpu.h"

namespace sic::cpu::SIC_ISA {
namespace {

// Bit i: lane i is all ones.
SIC_INLINE uint32_t lane_bits(vi mask) {
#if defined(__AVX512BW__)
  return _mm512_movepi32_mask(__m512i(mask));
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(bit_cast<__m256>(mask)));
#else
  uint32_t bits = 0;
  for (int i = 0; i < W; ++i) bits |= static_cast<uint32_t>(mask[i] & 1) << i;
  return bits;
#endif
}

class CodedSource {
 public:
  using Args = delta::AttentionArgs;

  // Behind the keys follow the first values, behind the values the next tile's first keys.
  struct Tile : Positions {
    static constexpr int kSlots = kTile + CodeRows::kAhead;
    const uint8_t* k[kSlots];
    const uint8_t* v[kSlots];
    const uint8_t* tag[kTile];

    void link(const Tile& next) {
      for (int i = 0; i < CodeRows::kAhead; ++i) {
        k[n + i] = v[i < n ? i : n - 1];
        v[n + i] = next.n == 0 ? v[n - 1] : next.k[i < next.n ? i : next.n - 1];
      }
    }
  };

  static int64_t bytes(const Args& a, int64_t rows) { return Buffers(a, rows, Carver(nullptr)).used; }
  CodedSource(const Args& a, int64_t b, int64_t h, int64_t rows, Carver& carve);

  void begin();
  void place(Tile&) const;
  SIC_MEMBER_INLINE void fetch_first(const Tile& tile, const Rows&) const {
    for (int j = 0; j < tile.n; ++j) prefetch(tile.tag[j]);
    for (int j = 0; j < CodeRows::kAhead && j < tile.n; ++j) prefetch_row(tile.k[j], k_bytes_);
  }
  void start(Tile&, const Tile& next);
  void logits(const Tile&, Rows&, int row, int count, int to);
  void values(const Tile&, Rows&, int row, int count, int from, int to);
  void finish(Rows&) const;

 private:
  static constexpr int kKeys = 16, kValues = 32;  // decoded at a time: they stay in the first-level cache
  static constexpr uint32_t kNoBlock = ~0u;

  struct Buffers {
    float *keys, *values;      // decoded rows
    float *plain, *mass;       // per query row: sums of what is not coded, weights by template [kTile]
    float *k_scale, *v_scale;  // of a tile's tokens
    float* turned;             // [rows][Dk] queries turned back by a block of positions
    float *one, *row;          // [rows] of 1; a row that is not coded
    int32_t *k_id, *v_id, *position;
    uint8_t* no_codes;
    const char **key_rows, **value_rows, **centres;
    int64_t used;

    Buffers(const Args& a, int64_t rows, Carver carve);
  };

  bool in_tail(int32_t pos) const { return pos >= tail_start_; }
  // Tokens of the tile that are not coded, 64 a word.
  bool any_special(int block) const { return special_[block / 64] >> (block % 64) & ((1 << kKeys) - 1); }
  template <class Body>
  void each_special(int from, int to, Body body) const {
    for (int w = from / 64; w * 64 < to; ++w)
      for (uint64_t bits = special_[w]; bits; bits &= bits - 1) {
        const int j = w * 64 + __builtin_ctzll(bits);
        if (j >= from && j < to) body(j);
      }
  }
  void fetch_centres(int from, int to) const;
  const float* turned_queries(const Rows&, int from, int n);
  void load_special(const Tile&, int j, bool value, float* out) const;
  void add_mass(Rows&, int row, int count, int from, int to);
  void add_special_values(const Tile&, Rows&, int row, int count, int from, int to);

  const Args& a_;
  const int64_t b_, h_, rows_;
  const KeyHead k_;
  const CodedHead v_;
  const KeyDecoder decode_keys_;
  const LevelDecoder decode_levels_;
  const KeyDots dot_keys_, dot_turned_;
  const LevelSums add_levels_;
  const CacheRows k_codes_, v_codes_, tags_;
  const int64_t k_bytes_, v_bytes_;
  const int32_t tail_start_;
  Buffers buffers_;
  const Tile* next_ = nullptr;
  const int32_t* position_ = nullptr;  // of RoPE, by place in the tile
  uint64_t special_[kTile / 64];
  bool plain_used_ = false;
  uint32_t turned_block_ = kNoBlock;
};

CodedSource::Buffers::Buffers(const Args& a, int64_t rows, Carver carve) {
  const int64_t Dk = CodedHead::stride(a.attention.q.shape[3]), Dv = CodedHead::stride(a.codec.v.centres.shape[2]);
  keys = carve.take<float>(kKeys * Dk), values = carve.take<float>(kValues * Dv);
  plain = carve.take<float>(rows * Dv), mass = carve.take<float>(rows * kTile);
  k_scale = carve.take<float>(kTile), v_scale = carve.take<float>(kTile);
  turned = carve.take<float>(rows * padded(a.attention.q.shape[3]));
  one = carve.take<float>(rows), row = carve.take<float>(std::max(Dk, Dv));
  k_id = carve.take<int32_t>(kTile), v_id = carve.take<int32_t>(kTile);
  const int64_t code_bytes = std::max(a.pages.k_codes.shape[3], a.pages.v_codes.shape[3]);
  no_codes = carve.take<uint8_t>(std::max<int64_t>(code_bytes, delta::kTagBytes));
  position = carve.take<int32_t>(kTile);
  key_rows = carve.take<const char*>(kKeys), value_rows = carve.take<const char*>(kValues);
  centres = carve.take<const char*>(delta::kMaxTemplates);
  used = carve.used();
}

int32_t tail_start(const delta::Tail& tail, int64_t b) {
  if (!tail.k.given()) return std::numeric_limits<int32_t>::max();
  const int64_t start = index_at(tail.start, b * tail.start.stride[0]);
  return static_cast<int32_t>(std::min<int64_t>(start, std::numeric_limits<int32_t>::max()));
}

CodedSource::CodedSource(const Args& a, int64_t b, int64_t h, int64_t rows, Carver& carve)
    : a_(a),
      b_(b),
      h_(h),
      rows_(rows),
      k_(a.codec, h),
      v_(a.codec.v, a.codec.v_bits, h),
      decode_keys_(key_decoder(k_)),
      decode_levels_(level_decoder(v_)),
      dot_keys_(key_dots<Turn::whole>(k_, rows)),
      dot_turned_(key_dots<Turn::in_block>(k_, rows)),
      add_levels_(level_sums(v_, rows)),
      k_codes_(a.pages.k_codes, a.attention.kv.block_table, b, h),
      v_codes_(a.pages.v_codes, a.attention.kv.block_table, b, h),
      tags_(a.pages.tags, a.attention.kv.block_table, b, h),
      k_bytes_(a.pages.k_codes.shape[3]),
      v_bytes_(a.pages.v_codes.shape[3]),
      tail_start_(tail_start(a.tail, b)),
      buffers_(a, rows, carve) {
  carve.take<char>(bytes(a, rows));
  const Buffers& f = buffers_;
  std::memset(f.no_codes, 0, std::max({k_bytes_, v_bytes_, int64_t{delta::kTagBytes}}));
  std::memset(f.keys, 0, kKeys * CodedHead::stride(k_.D) * sizeof(float));
  std::fill(f.one, f.one + rows, 1.0f);
  for (int i = 0; i < kKeys; ++i) f.key_rows[i] = reinterpret_cast<char*>(f.keys + i * CodedHead::stride(k_.D));
  for (int i = 0; i < kValues; ++i) f.value_rows[i] = reinterpret_cast<char*>(f.values + i * CodedHead::stride(v_.D));
  for (int i = 0; i < v_.templates; ++i) f.centres[i] = reinterpret_cast<const char*>(v_.centres + i * v_.D);
}

void CodedSource::begin() {
  std::memset(buffers_.mass, 0, rows_ * kTile * sizeof(float));
  std::memset(buffers_.plain, 0, rows_ * CodedHead::stride(v_.D) * sizeof(float));
  plain_used_ = false;
}

void CodedSource::place(Tile& tile) const {
  const CacheRows k = k_codes_, v = v_codes_, tags = tags_;
  for (int j = 0; j < tile.n; ++j) {
    const auto pos = static_cast<uint32_t>(tile.pos[j]);
    if (in_tail(tile.pos[j])) {
      tile.k[j] = tile.v[j] = tile.tag[j] = buffers_.no_codes;
      continue;
    }
    const RowPlace row = k.place(pos);
    tile.k[j] = reinterpret_cast<const uint8_t*>(k.at(row));
    tile.v[j] = reinterpret_cast<const uint8_t*>(v.at(row));
    tile.tag[j] = reinterpret_cast<const uint8_t*>(tags.at(row));
  }
}

// Tags apart, in arrays.
void CodedSource::start(Tile& tile, const Tile& next) {
  tile.link(next);
  next_ = &next;
  const Buffers& f = buffers_;
  alignas(64) uint32_t scales[kTile];
  alignas(64) uint16_t ids[kTile];
  for (int j = 0; j < tile.n; ++j) {
    std::memcpy(&scales[j], tile.tag[j], sizeof *scales);
    std::memcpy(&ids[j], tile.tag[j] + sizeof *scales, sizeof *ids);
  }
  const auto end = static_cast<int>(padded(tile.n));
  for (int j = tile.n; j < end; ++j) scales[j] = ids[j] = 0, tile.pos[j] = 0;
  std::memset(special_, 0, sizeof special_);
  for (int j = 0; j < end; j += W) {
    const vu both = load_as<vu>(scales + j), id = widen(ids + j);
    const vi special = ((both & 0xffff) == delta::kRawScale) | (load_as<vi>(tile.pos + j) >= tail_start_);
    f16_t halves[2][W];
    store_as(halves[0], low_halves(both)), store_as(halves[1], low_halves(both >> 16));
    store(f.k_scale + j, bit_cast<vf>(bit_cast<vi>(load(halves[0])) & ~special));
    store(f.v_scale + j, bit_cast<vf>(bit_cast<vi>(load(halves[1])) & ~special));
    const vu k_id = id & 0xff, v_id = id >> 8;
    store_as(f.k_id + j, k_id & (k_id < static_cast<uint32_t>(k_.templates)));
    store_as(f.v_id + j, v_id & (v_id < static_cast<uint32_t>(v_.templates)));
    special_[j / 64] |= uint64_t{lane_bits(special)} << (j % 64);
  }
  position_ = tile.pos;
  if (!a_.positions.given()) return;
  const int32_t* given = a_.positions.as<const int32_t>() + b_ * a_.positions.stride[0];
  for (int j = 0; j < end; ++j) f.position[j] = in_tail(tile.pos[j]) ? 0 : given[tile.pos[j]];
  position_ = f.position;
}

// The key or value of a token that is not coded, as it takes part; template 0 where its entry is none.
void CodedSource::load_special(const Tile& tile, int j, bool value, float* out) const {
  const int D = value ? v_.D : k_.D;
  if (in_tail(tile.pos[j])) {
    const TensorView& tail = value ? a_.tail.v : a_.tail.k;
    const int64_t row = tile.pos[j] - tail_start_;
    return load_row(tail, b_ * tail.stride[0] + h_ * tail.stride[1] + row * tail.stride[2], D, 1, out);
  }
  const TensorView& raw = a_.pages.raw;
  const int32_t entry = delta::entry_of(delta::kRawScale, tile.k[j], raw.shape[0]);
  if (entry < 0)
    for (int d = 0; d < D; ++d) out[d] = to_float((value ? v_.centres : k_.centres)[d]);
  else
    load_row(raw, entry * raw.stride[0] + (value ? k_.D : 0), D, 1, out);
  if (!value && k_.rope) apply_rope(out, *k_.rope, position_[j]);
}

// What keys [from, to) of a tile are differences from.
SIC_MEMBER_INLINE void CodedSource::fetch_centres(int from, int to) const {
  for (int j = from; j < to; ++j)
    prefetch_row(k_.centres + int64_t{buffers_.k_id[j]} * k_.D, k_.D * int64_t{sizeof(f16_t)});
}

// The queries turned back by the block of positions of keys [from, from + n), so that the keys need not be turned by
// it; null if they are of several blocks or some are turned already. It goes by the keys alone, whoever asks.
const float* CodedSource::turned_queries(const Rows& rows, int from, int n) {
  if (!k_.rope || a_.positions.given() || any_special(from)) return nullptr;
  const uint32_t block = static_cast<uint32_t>(position_[from]) / delta::kRopeBlock;
  vi others = {};
  for (int j = 0; j < n; j += W)
    others |= vi(load_as<vu>(position_ + from + j) / delta::kRopeBlock != block) & (lane_numbers() < n - j);
  if (any(others)) return nullptr;
  float* const turned = buffers_.turned;
  if (block == turned_block_) return turned;
  turned_block_ = block;
  std::memcpy(turned, rows.q, rows_ * rows.Dkp * sizeof(float));
  for (int r = 0; r < rows.count; ++r) turn_back(turned + r * rows.Dkp, *k_.rope, position_[from]);
  return turned;
}

void CodedSource::logits(const Tile& tile, Rows& rows, int row, int count, int to) {
  const Buffers& f = buffers_;
  // A dense call soon has all of them in the caches.
  const bool sparse = row == 0 && a_.attention.selected.indices.given();
  if (sparse) fetch_centres(0, std::min(kKeys, to));
  for (int j = 0; j < to; j += kKeys) {
    const int n = std::min(kKeys, to - j);
    if (row == 0)
      for (int i = j; i < j + kKeys && i < next_->n; ++i) prefetch(next_->tag[i]);
    if (sparse) fetch_centres(j + n, std::min(j + n + kKeys, to));
    KeyRows keys;
    keys.codes = tile.k + j, keys.bytes = k_bytes_, keys.n = n, keys.fetch = row == 0;
    keys.scale = f.k_scale + j, keys.id = f.k_id + j, keys.position = position_ + j;
    const float* const turned = turned_queries(rows, j, n);
    const float* const q = turned ? turned : rows.q;
    keys.in_block = turned != nullptr;
    if (dot_keys_ && count == rows.count && !any_special(j)) {
      (turned ? dot_turned_ : dot_keys_)(k_, keys, q, rows.Dkp, rows.logits + j, kTile);
      continue;
    }
    decode_keys_(k_, keys, f.keys);
    each_special(j, j + n, [&](int i) { load_special(tile, i, false, f.keys + (i - j) * CodedHead::stride(k_.D)); });
    in_row_groups(count, [&](auto R, int r) {
      tile_logits<float, R()>(q + (row + r) * rows.Dkp, rows.Dkp, f.key_rows, n, rows.Dk,
                              rows.logits + (row + r) * kTile + j);
    });
  }
}

// Their weights become 0: what follows is about coded rows.
void CodedSource::add_special_values(const Tile& tile, Rows& rows, int row, int count, int from, int to) {
  const Buffers& f = buffers_;
  const int64_t stride = CodedHead::stride(v_.D);
  for (int r = row; plain_used_ && r < row + count; ++r)
    for (int64_t d = 0; d < v_.D; ++d) f.plain[r * stride + d] *= rows.decay[r];
  each_special(from, to, [&](int j) {
    plain_used_ = true;
    load_special(tile, j, true, f.row);
    for (int r = row; r < row + count; ++r) {
      float* weight = rows.logits + r * kTile + j;
      float* sum = f.plain + r * stride;
      for (int64_t d = 0; d < stride; d += W) store(sum + d, fma(splat(*weight), load(f.row + d), load(sum + d)));
      *weight = 0;
    }
  });
}

// The rows' weights by the tokens' templates.
void CodedSource::add_mass(Rows& rows, int row, int count, int from, int to) {
  const Buffers& f = buffers_;
  for (int r = row; r < row + count; ++r)
    if (rows.decay[r] != 1)
      for (int i = 0; i < v_.templates; i += W)
        store(f.mass + r * kTile + i, load(f.mass + r * kTile + i) * splat(rows.decay[r]));
  in_row_groups(count, [&](auto R, int r) {
    float* mass = f.mass + (row + r) * kTile;
    const float* weights = rows.logits + (row + r) * kTile;
    for (int j = from; j < to; ++j) {
      float* own = mass + f.v_id[j];
      for (int i = 0; i < R(); ++i) own[i * kTile] += weights[i * kTile + j];
    }
  });
}

void CodedSource::values(const Tile& tile, Rows& rows, int row, int count, int from, int to) {
  const Buffers& f = buffers_;
  add_special_values(tile, rows, row, count, from, to);
  add_mass(rows, row, count, from, to);
  for (int r = row; r < row + count; ++r) {
    float* weight = rows.logits + r * kTile;
    for (int j = from / W * W; j < to; j += W) store(weight + j, load(weight + j) * load(f.v_scale + j));
  }
  CodeRows codes;
  codes.bytes = v_bytes_, codes.fetch = row == 0;
  if (add_levels_ && count == rows.count) {
    codes.codes = tile.v + from, codes.n = to - from;
    return add_levels_(v_, codes, rows.logits + from, kTile, rows.decay, rows.acc, rows.Dvp);
  }
  for (int j = from; j < to; j += kValues) {
    codes.codes = tile.v + j, codes.n = std::min(kValues, to - j);
    decode_levels_(v_, codes, f.values);
    in_row_groups(count, [&](auto R, int r) {
      tile_values<float, R()>(rows.logits + (row + r) * kTile + j, (j == from ? rows.decay : f.one) + row + r,
                              f.value_rows, 0, codes.n, rows.Dv, rows.acc + (row + r) * rows.Dvp, rows.Dvp);
    });
  }
}

void CodedSource::finish(Rows& rows) const {
  const Buffers& f = buffers_;
  for (int r = 0; r < rows.count; ++r) {
    float* acc = rows.acc + r * rows.Dvp;
    unrotate(acc, v_.D);
    for (int d = 0; plain_used_ && d < v_.D; ++d) acc[d] += f.plain[r * CodedHead::stride(v_.D) + d];
  }
  in_row_groups(rows.count, [&](auto R, int r) {
    tile_values<f16_t, R()>(f.mass + r * kTile, f.one, f.centres, 0, v_.templates, rows.Dv, rows.acc + r * rows.Dvp,
                            rows.Dvp);
  });
}

}  // namespace

void delta_attention(const delta::AttentionArgs& a, const Exec& exec) {
  run_attention<CodedSource>(a, a.attention, exec);
}

}  // namespace sic::cpu::SIC_ISA
