// sliced_attention on the CPU: rows of a cache as they are.
#include "slicing/attention_cpu.h"

namespace sic::cpu::SIC_ISA {
namespace {

constexpr int kAhead = 48;  // rows between the one that is read and the one that is fetched

template <class T>
class CacheSource {
 public:
  using Args = AttentionArgs;

  // Behind the K rows follow the first V rows, behind the V rows the next tile's first K rows: the row to fetch is
  // always kAhead slots further on.
  struct Tile : Positions {
    static constexpr int kSlots = kTile + kAhead;
    const char* k[kSlots];
    const char* v[kSlots];

    int end() const { return static_cast<int>(padded(n)); }
    // Kernels read whole groups of rows: the last row fills the gap.
    void pad() {
      for (int j = n; n > 0 && j < end(); ++j) k[j] = k[n - 1], v[j] = v[n - 1];
    }
    void link(const Tile& next) {
      for (int i = 0; i < kAhead; ++i) {
        k[end() + i] = v[i < n ? i : n - 1];
        v[end() + i] = next.n == 0 ? v[n - 1] : next.k[i < next.n ? i : next.n - 1];
      }
    }
  };
  static_assert(kTile % 16 == 0);

  static int64_t bytes(const Args&, int64_t) { return 0; }
  CacheSource(const Args& a, int64_t b, int64_t h, int64_t, Carver&)
      : k_(a.kv.k_cache, a.kv.block_table, b, h), v_(a.kv.v_cache, a.kv.block_table, b, h) {}

  void begin() {}
  void place(Tile& tile) const {
    for (int j = 0; j < tile.n; ++j) {
      const RowPlace row = k_.place(static_cast<uint32_t>(tile.pos[j]));
      tile.k[j] = k_.at(row);
      tile.v[j] = v_.at(row);
    }
    tile.pad();
  }
  SIC_MEMBER_INLINE void fetch_first(const Tile& tile, const Rows& rows) const {
    for (int j = 0; j < kAhead && j < tile.n; ++j) prefetch_row(tile.k[j], rows.Dk * static_cast<int64_t>(sizeof(T)));
  }
  void start(Tile& tile, const Tile& next) const { tile.link(next); }
  void logits(const Tile& tile, Rows& rows, int row, int count, int to) const {
    in_row_groups(count, [&](auto R, int r) {
      tile_logits<T, R(), kAhead>(rows.q + (row + r) * rows.Dkp, rows.Dkp, tile.k, to, rows.Dk,
                                  rows.logits + (row + r) * kTile, row + r == 0);
    });
  }
  void values(const Tile& tile, Rows& rows, int row, int count, int from, int to) const {
    in_row_groups(count, [&](auto R, int r) {
      tile_values<T, R(), kAhead>(rows.logits + (row + r) * kTile, rows.decay + row + r, tile.v, from, to, rows.Dv,
                                  rows.acc + (row + r) * rows.Dvp, rows.Dvp, row + r == 0);
    });
  }
  void finish(Rows&) const {}

 private:
  CacheRows k_, v_;
};

}  // namespace

void sliced_attention(const AttentionArgs& a, const Exec& exec) {
  with_float_type(a.kv.k_cache.dtype, [&](auto t) { run_attention<CacheSource<decltype(t)>>(a, a, exec); });
}

}  // namespace sic::cpu::SIC_ISA
