// Addresses inside a paged KV cache.
#pragma once
#include <cstdint>

#include "core/tensor_view.h"

namespace sic {

// Division of a position by the page size, without the division.
struct PageSplit {
  uint32_t page = 1;
  uint64_t magic = 0;

  SIC_FLAT explicit PageSplit(int64_t page_size)
      : page(static_cast<uint32_t>(page_size)), magic(page > 1 ? ~uint64_t{0} / page + 1 : 0) {}
  // Exact for every 32-bit position.
  SIC_FLAT uint32_t index(uint32_t pos) const {
    return page > 1 ? static_cast<uint32_t>(static_cast<unsigned __int128>(magic) * pos >> 64) : pos;
  }
};

// One sequence's map from page number to page id. Without a table, page 0 is the sequence itself.
struct PageTable {
  const void* row = nullptr;
  bool wide = false;
  int64_t self = 0;

  SIC_FLAT PageTable(const TensorView& block_table, int64_t b) : self(b) {
    if (!block_table.given()) return;
    wide = block_table.dtype == DType::i64;
    row = static_cast<const char*>(block_table.data) + b * block_table.stride_bytes(0);
  }
  SIC_FLAT int64_t operator[](uint32_t page) const {
    if (!row) return self;
    return wide ? static_cast<const int64_t*>(row)[page] : static_cast<const int32_t*>(row)[page];
  }
};

struct RowPlace {
  int64_t page_id, offset;
};

// Rows of one (sequence, head) of a cache [P, Hkv, page, D].
struct CacheRows {
  const char* base;
  int64_t page_stride, row_stride;  // bytes
  PageTable table;
  PageSplit split;

  SIC_FLAT CacheRows(const TensorView& cache, const TensorView& block_table, int64_t b, int64_t h)
      : base(static_cast<const char*>(cache.data) + h * cache.stride_bytes(1)),
        page_stride(cache.stride_bytes(0)),
        row_stride(cache.stride_bytes(2)),
        table(block_table, b),
        split(cache.shape[2] > 0 ? cache.shape[2] : 1) {}
  SIC_FLAT RowPlace place(uint32_t pos) const {
    const uint32_t page = split.index(pos);
    return {table[page], static_cast<int64_t>(pos - page * split.page)};
  }
  SIC_FLAT const char* at(RowPlace p) const { return base + p.page_id * page_stride + p.offset * row_stride; }
  SIC_FLAT const char* operator[](uint32_t pos) const { return at(place(pos)); }
};

// seq_lens[b], and how many positions query token t of T sees.
SIC_FLAT inline int64_t visible_positions(int64_t seq_len, int64_t T, int64_t t, int64_t limit) {
  const int64_t n = seq_len - T + t + 1;
  return n < 0 ? 0 : n < limit ? n : limit;
}

}  // namespace sic
