// delta_encode on the GPU: rows are coded in parallel, entries of the side table handed out in order, raw rows copied.
//
// Floor: rows read once, codes and tags written once: 646 B a token and head at D = 128, bf16, 4 bits; with 64
// templates a row's search is 4 mma a warp. What bounds it are the instructions of a row, about 900 a warp for two rows
// of 128 channels, three quarters of them rotation, ordered sums and packing.
#include "delta/encode_rows_cuda.cuh"
#include "delta/encode_table_cuda.cuh"

namespace sic::gpu {
namespace {

using delta::EncodeArgs;

constexpr int kThreads = 32 * kEncodeWarps;

struct EncodeParams {
  Winners winners;
  EncodeSide side[2];  // keys, values
  DevicePages pages;
  DeviceRope rope;
  KeyRotation rotation;
  IntVector positions;
  DeviceSketch sketch;
  const float* centre = nullptr;  // of the sketch
  int64_t centre_stride = 0, sinks = 0;
  int32_t* fates = nullptr;    // [row][head], by the keys
  uint8_t* misfits = nullptr;  // [row][head], by the values
  int32_t heads = 0, planes = 0, first_side = 0;
  DType type = DType::f32;
};

// What the steps of a block leave for each other, beside EncodeRoom.
struct EncodeShared {
  int64_t slots[kScanRows], slot[kEncodeRows];
  Score best[kEncodeWarps][kEncodeRows];
  float factor[kEncodeRows];
  bool finite[kEncodeRows];
  int32_t D;
};

// One block's share: kEncodeRows rows of a head.
template <int R, bool Uniform>
struct RowsEncoder {
  const EncodeParams& p;
  const EncodeSide& side;
  EncodeShared& s;
  const EncodeRoom& room;
  const bool keys;
  const int64_t first, h;
  const SketchRow<R, Uniform> row;

  __device__ __forceinline__ RowsEncoder(const EncodeParams& params, EncodeShared& shared, const EncodeRoom& rows,
                                         int which, int D)
      : p(params),
        side(params.side[which]),
        s(shared),
        room(rows),
        keys(which == 0),
        first(blockIdx.x / params.heads * int64_t{kEncodeRows}),
        h(blockIdx.x % params.heads),
        row(D, side.lanes) {}

  // Calls body(row of the block) for the rows of this warp; every lane of a warp takes part.
  template <class Body>
  __device__ __forceinline__ void each_row(Body body) const {
    const int per_warp = 32 / side.lanes;
    for (int r = warp_id() * per_warp; r < kEncodeRows; r += kEncodeWarps * per_warp) body(r + lane_id() / side.lanes);
  }
  __device__ __forceinline__ int64_t page_of(int64_t slot) const { return slot / p.winners.page; }

  __device__ __forceinline__ void load(int64_t i, bool live, float (&x)[R][kGroup]) const {
#pragma unroll
    for (int g = 0; g < R; ++g)
      load_floats(p.type, side.rows.at(i, h, 0), row.group(g), live ? row.size(g) : 0, side.wide_rows, x[g]);
  }

  // The sketch takes a key as it is given.
  __device__ __forceinline__ void write_sketch(int64_t i, int64_t slot) const {
    float z[R][kGroup];
    load(i, slot >= 0, z);
    const float* centre = p.centre + h * p.centre_stride;
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int c = 0; c < kGroup; ++c)
        z[r][c] = c < row.size(r) ? sub_rn(z[r][c], centre[row.group(r) * kGroup + c]) : 0.0f;
    const SketchEntry<R> e = sketch_entry(row, z, p.planes);
    if (slot < 0) return;
    const int64_t id = page_of(slot);
    store_entry(row, e, p.planes, static_cast<uint32_t>(p.winners.page),
                static_cast<uint32_t>(slot - id * p.winners.page), p.sketch.page_bits(id, h),
                p.sketch.page_norm(id, h));
  }

  // The row to shared memory, as numbers and as integers of the search.
  __device__ __forceinline__ void take(const SlotScan& scan, int r) const {
    const int64_t i = first + r, given = i < p.winners.rows ? p.winners.slots[i] : -1;
    const int64_t slot = counts(p.winners, scan, false, i, given, side.lanes) ? given : -1;
    if (keys && p.sketch.bits) write_sketch(i, slot);
    float x[R][kGroup];
    load(i, slot >= 0, x);
    if (keys && p.rope.lo)
      turn_key<false>(row, p.rope, p.rope.at(slot >= 0 ? p.positions[i] : 0, p.rope.undo), room.x_row(r), x);
    const bool finite = row.largest(x) < INFINITY;
#pragma unroll
    for (int g = 0; g < R; ++g)
#pragma unroll
      for (int c = 0; c < kGroup; ++c) x[g][c] = fabsf(x[g][c]) < INFINITY ? x[g][c] : 0.0f;
    const float unit = search_integers(row, side.templates, h, x, room.q_row(r), room.q_stride - 16);
    __syncwarp();
    put_row(row, x, room.x_row(r));
    if (row.lane != 0) return;
    s.slot[r] = slot, s.finite[r] = finite, s.factor[r] = mul_rn(unit, side.templates.step[h]);
  }

  // The row's residual from its template, rotated.
  __device__ __forceinline__ void residual(int r, int id, float (&x)[R][kGroup]) const {
    const DeviceTemplates& t = side.templates;
    const f16_t* centre = t.centre(h, id);
    get_row(row, room.x_row(r), x);
#pragma unroll
    for (int g = 0; g < R; ++g)
#pragma unroll
      for (int c = 0; c < kGroup; ++c) {
        const int d = row.group(g) * kGroup + c;
        x[g][c] = c < row.size(g) ? sub_rn(x[g][c], to_float(centre[d])) : 0.0f;
      }
    keys ? rotate_key(row, p.rotation, room.x_row(r), x) : row.rotate(x);
  }

  __device__ __forceinline__ void code(int r) const {
    const int64_t i = first + r, slot = s.slot[r], id = slot >= 0 ? page_of(slot) : 0;
    const int64_t offset = slot >= 0 ? slot - id * p.winners.page : 0;
    const int nearest = nearest_template(s.best, r);
    char* const codes = side.codes.at(id, h, offset);
    char* const tag = p.pages.tags.at(id, h, offset);
    int32_t entry = -1;
    if (keys && row.lane == 0 && slot >= 0 && *reinterpret_cast<const uint16_t*>(tag) == delta::kRawScale)
      entry = load_entry(codes, p.pages.entries);
    float y[R][kGroup];
    residual(r, nearest, y);
    const RowCode coded = code_residual(row, side, side.templates.bound[h], room, r, y, codes, slot >= 0);
    if (row.lane != 0 || i >= p.winners.rows) return;
    const bool misfit = slot >= 0 && (!coded.fits || !s.finite[r]);
    if (keys) {
      const bool raw = misfit || (slot >= 0 && p.positions[i] < p.sinks);
      p.fates[i * p.heads + h] = delta::fate(entry, raw);
    } else {
      p.misfits[i * p.heads + h] = misfit;
    }
    if (slot < 0) return;
    reinterpret_cast<f16_t*>(tag)[keys ? 0 : 1] = coded.scale;
    tag[keys ? 4 : 5] = static_cast<char>(nearest);
  }
};

// blockIdx.y: keys or values.
template <int R, bool Uniform>
__global__ void __launch_bounds__(kThreads, Uniform ? 2 : 1) encode_rows(const __grid_constant__ EncodeParams p) {
  SIC_DYNAMIC_SHARED(char, shared);
  EncodeShared& s = *reinterpret_cast<EncodeShared*>(shared);
  const int which = p.first_side + static_cast<int>(blockIdx.y);
  EncodeRoom room;
  lay_out(shared + (sizeof(EncodeShared) + 15) / 16 * 16, p.side[which].templates.D, &room);
  const SlotScan scan = load_slots(p.winners, s.slots);
  if (threadIdx.x == 0) s.D = p.side[which].templates.D;
  {
    const RowsEncoder<R, Uniform> rows(p, s, room, which, p.side[which].templates.D);
    rows.each_row([&](int r) { rows.take(scan, r); });
  }
  __syncthreads();
  search_templates(p.side[which].templates, blockIdx.x % p.heads, room, s.factor, s.best);
  __syncthreads();
  // With a head size that the compiler has not seen: else it keeps what follows from it in registers all the way.
  const RowsEncoder<R, Uniform> rows(p, s, room, which, s.D);
  rows.each_row([&](int r) { rows.code(r); });
}

EncodeSide make_side(const TensorView& rows, const TensorView& codes, const delta::Templates& templates, int bits) {
  EncodeSide s;
  s.rows = Rows3::of(rows), s.codes = Rows3::of(codes);
  s.templates = DeviceTemplates::of(templates), s.levels = LevelSteps::of(bits);
  s.bits = bits, s.code_bytes = static_cast<int32_t>(codes.shape[3]);
  s.lanes = lanes_per_row(rows.shape[2]);
  s.wide_rows = groups_aligned(rows), s.wide_codes = row_access_bytes(codes) >= 4;
  return s;
}

struct EncodeParts {
  int32_t *tables, *fates;
  uint8_t* misfits;
};
int64_t carve(const EncodeArgs& a, char* base, EncodeParts* parts) {
  const int64_t items = a.k.shape[0] * a.k.shape[1];
  const int64_t tables = winner_bytes(a.k.shape[0], false), fates = items * int64_t{sizeof(int32_t)};
  if (parts) {
    parts->tables = reinterpret_cast<int32_t*>(base), parts->fates = reinterpret_cast<int32_t*>(base + tables);
    parts->misfits = reinterpret_cast<uint8_t*>(base + tables + fates);
  }
  return tables + fates + items;
}

EncodeParams make_params(const EncodeArgs& a, const EncodeParts& parts, const Winners& winners) {
  EncodeParams p;
  p.winners = winners;
  p.side[0] = make_side(a.k, a.pages.k_codes, a.codec.k, a.codec.k_bits);
  p.side[1] = make_side(a.v, a.pages.v_codes, a.codec.v, a.codec.v_bits);
  p.pages = DevicePages::of(a.pages, a.codec);
  p.rope = DeviceRope::of(a.codec.rope);
  p.rotation = KeyRotation::of(a.k.shape[2], a.codec.k_rotation);
  p.positions = IntVector::of(a.positions);
  p.sinks = a.sinks, p.type = a.k.dtype;
  p.heads = static_cast<int32_t>(a.k.shape[1]);
  p.fates = parts.fates, p.misfits = parts.misfits;
  if (a.bits.given()) {
    p.sketch = DeviceSketch::of(a.bits, a.norm);
    p.centre = a.centre.as<const float>(), p.centre_stride = a.centre.stride[0];
    p.planes = static_cast<int32_t>(a.bits.shape[2] / slicing::sketch_plane_bytes(p.winners.page, a.k.shape[2]));
  }
  return p;
}

// The sides from `side` to `last` in one launch.
void launch_rows(EncodeParams p, int side, int last, void* stream) {
  p.first_side = side;
  int64_t bytes = 0;
  for (int i = side; i <= last; ++i) {
    EncodeRoom room;
    bytes = std::max(bytes, lay_out(nullptr, p.side[i].templates.D, &room));
  }
  bytes += (int64_t{sizeof(EncodeShared)} + 15) / 16 * 16;
  const int64_t blocks = slicing::ceil_div(p.winners.rows, kEncodeRows) * p.heads;
  with_sketch_row(p.side[side].templates.D, [&](auto sets, auto uniform) {
    launch(encode_rows<decltype(sets)::value, decltype(uniform)::value>, dim3(grid_blocks(blocks), last - side + 1),
           kThreads, static_cast<size_t>(bytes), stream, p);
  });
}

// Which kernel with_sketch_row takes.
int row_class(int64_t D) { return D == 64 || D == 128 || D == 256 ? 0 : D <= 256 ? 1 : 2; }

}  // namespace

int64_t delta_encode_workspace(const EncodeArgs& a) { return carve(a, nullptr, nullptr); }

void delta_encode(const EncodeArgs& a, const Exec& exec) {
  EncodeParts parts;
  carve(a, exec.workspace.as<char>(), &parts);
  const EncodeParams p =
      make_params(a, parts, enter_rows(a.slots, a.pages.k_codes.shape[2], false, parts.tables, exec.stream));
  if (row_class(a.k.shape[2]) == row_class(a.v.shape[2])) {
    launch_rows(p, 0, 1, exec.stream);
  } else {
    launch_rows(p, 0, 0, exec.stream);
    launch_rows(p, 1, 1, exec.stream);
  }
  TableParams t;
  t.pages = p.pages, t.rope = p.rope, t.positions = p.positions, t.slots = p.winners.slots;
  t.k = p.side[0].rows, t.v = p.side[1].rows, t.type = p.type;
  t.fates = p.fates, t.misfits = p.misfits;
  t.rows = p.winners.rows, t.page = p.winners.page, t.heads = p.heads;
  launch_table(t, exec.stream);
}

}  // namespace sic::gpu
