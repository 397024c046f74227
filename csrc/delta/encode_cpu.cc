// delta_encode on the CPU: rows are coded in parallel, then entries of the side table are handed out in order.
#include "core/parallel.h"
#include "core/scratch.h"
#include "delta/encode.h"
#include "delta/quantise_cpu.h"

namespace sic::cpu::SIC_ISA {
namespace {

using delta::EncodeArgs;
using delta::Tag;

constexpr int64_t kRowsPerTask = 128;
constexpr int64_t kAhead = 8;  // rows between the one that is coded and the one that is fetched

char* row_of(const TensorView& pages, int64_t h, int64_t slot) {
  const int64_t page = pages.shape[2];
  return pages.as<char>() + slot / page * pages.stride[0] + h * pages.stride[1] + slot % page * pages.stride[2];
}

// A row and zeros behind it.
void load_input(const TensorView& rows, int64_t i, int64_t h, float* x) {
  const int64_t D = rows.shape[2];
  load_row(rows, i * rows.stride[0] + h * rows.stride[1], D, 1.0f, x);
  for (int64_t d = D; d < D + delta::kLanes; ++d) x[d] = 0;
}
Tag* tag_of(const EncodeArgs& a, int64_t h, int64_t slot) {
  return reinterpret_cast<Tag*>(row_of(a.pages.tags, h, slot));
}
void load_key(const EncodeArgs& a, int64_t i, int64_t h, float* x) {
  load_input(a.k, i, h, x);
  if (a.codec.rope.hi.given()) undo_rope(x, {a.codec.rope, index_at(a.positions, i * a.positions.stride[0])});
}

void write_sketch(const EncodeArgs& a, int64_t i, int64_t h, int64_t slot, RowRoom& room) {
  const int64_t page = a.norm.shape[2], D = a.k.shape[2], id = slot / page;
  const int planes = static_cast<int>(a.bits.shape[2] / slicing::sketch_plane_bytes(page, D));
  const float* centre = a.centre.as<const float>() + h * a.centre.stride[0];
  load_input(a.k, i, h, room.x);
  for (int64_t d = 0; d < D; ++d) room.x[d] -= centre[d];
  SketchWriter(page, static_cast<int>(D), planes)
      .write(room.x, room.temp, a.bits.as<uint8_t>() + id * a.bits.stride[0] + h * a.bits.stride[1],
             a.norm.as<bf16_t>() + id * a.norm.stride[0] + h * a.norm.stride[1], slot % page);
}

// Rows [begin, end) of one head. Keys, then values: their templates do not fit the nearest cache together.
class HeadEncoder {
 public:
  HeadEncoder(const EncodeArgs& a, const int64_t* slots, int64_t h)
      : a_(a), slots_(slots), h_(h), k_(a.codec.k, h), v_(a.codec.v, h) {}

  // fates: of this head, Hkv apart.
  void run(int64_t begin, int64_t end, int32_t* fates) {
    const int64_t Hkv = a_.k.shape[1];
    for (int64_t i = begin; i < end; ++i) fates[i * Hkv] = delta::kNoFate;
    for (int64_t i = begin; i < std::min(end, begin + kAhead); ++i) fetch(a_.k, a_.pages.k_codes, i);
    for (int64_t i = begin; i < std::min(end, begin + kAhead); ++i) fetch(a_.v, a_.pages.v_codes, i);
    in_batches(begin, end, [&](const int64_t* rows, int n) { encode_keys(rows, n, end, fates); });
    in_batches(begin, end, [&](const int64_t* rows, int n) { encode_values(rows, n, end, fates); });
  }

 private:
  // body(rows, how many) for all rows that have a slot, a few at a time.
  template <class Body>
  void in_batches(int64_t begin, int64_t end, Body body) const {
    int64_t rows[kRowsAtOnce];
    int n = 0;
    for (int64_t i = begin; i < end; ++i) {
      if (slots_[i] >= 0) rows[n++] = i;
      if (n == kRowsAtOnce || (n > 0 && i + 1 == end)) body(rows, n), n = 0;
    }
  }

  // What row i reads and writes: the rows of a head lie too far apart for the hardware to foresee.
  SIC_MEMBER_INLINE void fetch(const TensorView& rows, const TensorView& codes, int64_t i) const {
    const int64_t bytes = itemsize(rows.dtype);
    prefetch_row(rows.as<const char>() + (i * rows.stride[0] + h_ * rows.stride[1]) * bytes, rows.shape[2] * bytes);
    if (slots_[i] < 0) return;
    prefetch_row(row_of(codes, h_, slots_[i]), codes.shape[3]);
    prefetch(tag_of(a_, h_, slots_[i]));
  }

  void encode_keys(const int64_t* rows, int n, int64_t end, int32_t* fates) {
    uint8_t* codes[kRowsAtOnce];
    int32_t entry[kRowsAtOnce];
    for (int r = 0; r < n; ++r) {
      fetch(a_.k, a_.pages.k_codes, std::min(rows[r] + kAhead, end - 1));
      codes[r] = reinterpret_cast<uint8_t*>(row_of(a_.pages.k_codes, h_, slots_[rows[r]]));
      entry[r] = delta::entry_of(tag_of(a_, h_, slots_[rows[r]])->k_scale, codes[r], a_.pages.raw.shape[0]);
      load_key(a_, rows[r], h_, rooms_.row[r].x);
    }
    RowCode coded[kRowsAtOnce];
    code_rows(k_, a_.codec.k_bits, a_.codec.k_rotation, n, rooms_, codes, coded);
    for (int r = 0; r < n; ++r) {
      const int64_t i = rows[r], slot = slots_[i];
      Tag* const tag = tag_of(a_, h_, slot);
      tag->k_scale = coded[r].scale, tag->k_id = coded[r].id;
      if (a_.bits.given()) write_sketch(a_, i, h_, slot, rooms_.row[r]);
      const bool sink = index_at(a_.positions, i * a_.positions.stride[0]) < a_.sinks;
      fates[i * a_.k.shape[1]] = delta::fate(entry[r], sink || !coded[r].fits);
    }
  }

  void encode_values(const int64_t* rows, int n, int64_t end, int32_t* fates) {
    uint8_t* codes[kRowsAtOnce];
    for (int r = 0; r < n; ++r) {
      fetch(a_.v, a_.pages.v_codes, std::min(rows[r] + kAhead, end - 1));
      codes[r] = reinterpret_cast<uint8_t*>(row_of(a_.pages.v_codes, h_, slots_[rows[r]]));
      load_input(a_.v, rows[r], h_, rooms_.row[r].x);
    }
    RowCode coded[kRowsAtOnce];
    code_rows(v_, a_.codec.v_bits, 0, n, rooms_, codes, coded);
    for (int r = 0; r < n; ++r) {
      Tag* const tag = tag_of(a_, h_, slots_[rows[r]]);
      tag->v_scale = coded[r].scale, tag->v_id = coded[r].id;
      if (!coded[r].fits) fates[rows[r] * a_.k.shape[1]] |= delta::fate(-1, true);
    }
  }

  const EncodeArgs& a_;
  const int64_t* const slots_;
  const int64_t h_;
  const HeadTemplates k_, v_;
  RowRooms rooms_;
};

// Hands out entries in the order of rows and heads: the lowest that is free.
class SideTable {
 public:
  explicit SideTable(const EncodeArgs& a)
      : a_(a), owner_(a.pages.raw_owner), state_(a.pages.raw_state), entries_(a.pages.raw.shape[0]) {}

  void settle(int32_t fate, int64_t i, int64_t h, int64_t slot, RowRoom& room) {
    const int64_t mine = slot * a_.k.shape[1] + h;
    int32_t entry = delta::fate_entry(fate);
    if (entry >= 0 && owner(entry) != mine) entry = -1;  // a copied page
    if (!delta::fate_is_raw(fate)) {
      if (entry >= 0) owner(entry) = -1, --state(0), first_free_ = std::min<int64_t>(first_free_, entry);
      return;
    }
    if (entry < 0) entry = take(mine);
    if (entry < 0) {
      ++state(1);
      return;
    }
    write(entry, i, h, slot, room);
  }

 private:
  int64_t& owner(int64_t entry) { return owner_.as<int64_t>()[entry * owner_.stride[0]]; }
  int32_t& state(int64_t i) { return state_.as<int32_t>()[i * state_.stride[0]]; }

  int32_t take(int64_t mine) {
    while (first_free_ < entries_ && owner(first_free_) >= 0) ++first_free_;
    if (first_free_ == entries_) return -1;
    owner(first_free_) = mine, ++state(0);
    return static_cast<int32_t>(first_free_++);
  }

  void write(int32_t entry, int64_t i, int64_t h, int64_t slot, RowRoom& room) {
    const TensorView& raw = a_.pages.raw;
    const int64_t Dk = a_.k.shape[2], Dv = a_.v.shape[2];
    load_key(a_, i, h, room.x);
    store_row(raw, entry * raw.stride[0], Dk, room.x, 1.0f);
    load_input(a_.v, i, h, room.x);
    store_row(raw, entry * raw.stride[0] + Dk, Dv, room.x, 1.0f);
    *tag_of(a_, h, slot) = {delta::kRawScale, 0, 0, 0};
    char* const codes = row_of(a_.pages.k_codes, h, slot);
    std::memset(codes, 0, a_.pages.k_codes.shape[3]);
    std::memcpy(codes, &entry, sizeof entry);
    std::memset(row_of(a_.pages.v_codes, h, slot), 0, a_.pages.v_codes.shape[3]);
  }

  const EncodeArgs& a_;
  const TensorView &owner_, &state_;
  const int64_t entries_;
  int64_t first_free_ = 0;
};

}  // namespace

void delta_encode(const EncodeArgs& a, const Exec& exec) {
  const int64_t N = a.k.shape[0], Hkv = a.k.shape[1], chunks = (N + kRowsPerTask - 1) / kRowsPerTask;
  const CallScratch scratch(exec.workspace, delta::encode_workspace(a));
  Carver parts(scratch.data());
  auto* const slots = parts.take<int64_t>(N);
  auto* const sorted = parts.take<delta::SlotRow>(N);
  auto* const fates = parts.take<int32_t>(N * Hkv);
  delta::last_slots(a.slots, slots, sorted);
  parallel_for(Hkv * chunks, [&](int64_t task) {
    const int64_t h = task % Hkv, begin = task / Hkv * kRowsPerTask;
    HeadEncoder(a, slots, h).run(begin, std::min(N, begin + kRowsPerTask), fates + h);
  });
  SideTable table(a);
  RowRoom room;
  for (int64_t i = 0; i < N * Hkv; ++i)
    if (fates[i] != delta::kNoFate) table.settle(fates[i], i / Hkv, i % Hkv, slots[i / Hkv], room);
}

}  // namespace sic::cpu::SIC_ISA
