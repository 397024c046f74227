// What delta_encode's backends share: which rows stay, and what becomes of a row's entry in the side table.
#pragma once
#include <cstring>

#include "delta/codes.h"
#include "delta/delta.h"

namespace sic::delta {

// The entry, of `entries`, that a stored row has by its tag and the beginning of its key code; -1: none.
inline int32_t entry_of(uint16_t k_scale, const uint8_t* k_code, int64_t entries) {
  int32_t entry = -1;
  if (k_scale == kRawScale) std::memcpy(&entry, k_code, sizeof entry);
  return static_cast<uint32_t>(entry) < entries ? entry : -1;
}

// A row's old entry (or none), and whether it is to be raw now. Most rows have nothing of either.
constexpr int32_t kNoFate = 0;
constexpr SIC_HD int32_t fate(int32_t entry, bool raw) { return (entry + 1) * 2 + (raw ? 1 : 0); }
constexpr SIC_HD int32_t fate_entry(int32_t fate) { return fate / 2 - 1; }
constexpr SIC_HD bool fate_is_raw(int32_t fate) { return fate & 1; }

// Of rows for one slot the last one stays: -1 for the others. room: of as many rows.
struct SlotRow {
  int64_t slot, row;
};
void last_slots(const TensorView& slots, int64_t* out, SlotRow* room);

int64_t encode_workspace(const EncodeArgs& a);  // of the CPU kernels

}  // namespace sic::delta
