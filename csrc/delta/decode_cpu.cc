// delta_decode on the CPU. A task is a run of positions of one sequence, all heads: rows lie head by head in the
// results.
#include "core/paged.h"
#include "core/parallel.h"
#include "core/scratch.h"
#include "delta/encode.h"
#include "delta/rows_cpu.h"

namespace sic::cpu::SIC_ISA {
namespace {

using delta::DecodeArgs;

// Results that no cache holds go past the caches: lines that are written whole need not be read first.
constexpr int64_t kStreamBytes = int64_t{16} << 20;

constexpr int kRun = 64;    // positions of a task
constexpr int kBlock = 16;  // rows decoded at a time

// row -> p, n elements, past the caches where lines are whole.
template <class T>
SIC_INLINE void stream_row(T* p, int64_t n, const float* row) {
#if defined(__AVX512BW__)
  constexpr int kLine = 64 / sizeof(T);
  if (reinterpret_cast<uintptr_t>(p) % 64 == 0 && n % kLine == 0) {
    for (int64_t i = 0; i < n; i += kLine) {
      alignas(64) T line[kLine];
      SIC_UNROLL for (int j = 0; j < kLine; j += W) store(line + j, load(row + i + j));
      _mm512_stream_si512(reinterpret_cast<__m512i*>(p + i), load_as<__m512i>(line));
    }
    return;
  }
#endif
  int64_t i = 0;
  for (; i + W <= n; i += W) store(p + i, load(row + i));
  for (; i < n; ++i) from_float(row[i], p[i]);
}

// One head's rows of a run. Behind the keys follow the first values, behind the values the next head's first keys.
struct Run {
  int n = 0;
  const uint8_t *k[kRun + CodeRows::kAhead], *v[kRun + CodeRows::kAhead], *tag[kRun];
  float k_scale[kRun], v_scale[kRun];
  int32_t k_id[kRun], v_id[kRun], position[kRun];
  bool raw[kRun];

  void link(const Run& next) {
    for (int i = 0; i < CodeRows::kAhead; ++i) {
      k[n + i] = v[i < n ? i : n - 1];
      v[n + i] = next.n == 0 ? v[n - 1] : next.k[i < next.n ? i : next.n - 1];
    }
  }
};

class Decoder {
 public:
  explicit Decoder(const DecodeArgs& a)
      : a_(a), stream_((a.k.size() + a.v.size()) * itemsize(a.k.dtype) >= kStreamBytes) {}

  void run(int64_t b, int64_t begin, int64_t end) const {
    const int64_t Hkv = a_.k.shape[2], seq_len = index_at(a_.seq_lens, b * a_.seq_lens.stride[0]);
    const int64_t live = std::max(begin, std::min(end, seq_len));
    const int64_t floats = kBlock * std::max(CodedHead::stride(a_.k.shape[3]), CodedHead::stride(a_.v.shape[3]));
    Carver carve(thread_scratch(floats * int64_t{4} + 2 * int64_t{sizeof(Run)} + 256));
    float* buffer = carve.take<float>(floats);
    Run* runs = carve.take<Run>(2);
    if (live > begin) place(b, 0, begin, live, runs[0]);
    for (int64_t h = 0; h < Hkv && live > begin; ++h) {
      Run &run = runs[h % 2], &next = runs[(h + 1) % 2];
      next.n = 0;
      if (h + 1 < Hkv) place(b, h + 1, begin, live, next);
      run.link(next);
      read_tags(b, begin, run);
      keys(b, h, begin, run, buffer);
      values(b, h, begin, run, buffer);
    }
#if defined(__AVX512BW__)
    if (stream_) _mm_sfence();
#endif
    for (int64_t i = live; i < end; ++i)
      for (int64_t h = 0; h < Hkv; ++h)
        for (const TensorView* out : {&a_.k, &a_.v})
          std::memset(static_cast<char*>(out->data) + offset(*out, b, i, h) * itemsize(out->dtype), 0,
                      out->shape[3] * itemsize(out->dtype));
  }

 private:
  static int64_t offset(const TensorView& out, int64_t b, int64_t i, int64_t h) {
    return b * out.stride[0] + i * out.stride[1] + h * out.stride[2];
  }

  void place(int64_t b, int64_t h, int64_t begin, int64_t end, Run& run) const {
    const CacheRows k(a_.pages.k_codes, a_.block_table, b, h), v(a_.pages.v_codes, a_.block_table, b, h),
        tags(a_.pages.tags, a_.block_table, b, h);
    run.n = static_cast<int>(end - begin);
    for (int j = 0; j < run.n; ++j) {
      const RowPlace row = k.place(static_cast<uint32_t>(begin + j));
      run.k[j] = reinterpret_cast<const uint8_t*>(k.at(row));
      run.v[j] = reinterpret_cast<const uint8_t*>(v.at(row));
      run.tag[j] = reinterpret_cast<const uint8_t*>(tags.at(row));
      prefetch(run.tag[j]);
    }
  }

  void read_tags(int64_t b, int64_t begin, Run& run) const {
    const int k_templates = static_cast<int>(a_.codec.k.centres.shape[1]),
              v_templates = static_cast<int>(a_.codec.v.centres.shape[1]);
    const int32_t* positions =
        a_.positions.given() ? a_.positions.as<const int32_t>() + b * a_.positions.stride[0] : nullptr;
    f16_t k_scale[kRun] = {}, v_scale[kRun] = {};
    for (int j = 0; j < run.n; ++j) {
      delta::Tag tag;
      std::memcpy(&tag, run.tag[j], sizeof tag);
      run.raw[j] = tag.k_scale == delta::kRawScale;
      k_scale[j].bits = run.raw[j] ? 0 : tag.k_scale, v_scale[j].bits = tag.v_scale;
      run.k_id[j] = tag.k_id < k_templates ? tag.k_id : 0, run.v_id[j] = tag.v_id < v_templates ? tag.v_id : 0;
      run.position[j] = positions ? positions[begin + j] : static_cast<int32_t>(begin + j);
    }
    for (int j = 0; j < kRun; j += W)
      store(run.k_scale + j, load(k_scale + j)), store(run.v_scale + j, load(v_scale + j));
  }

  void put(const TensorView& out, int64_t at, const float* row) const {
    if (!stream_) return store_row(out, at, out.shape[3], row, 1);
    with_float_type(out.dtype, [&](auto t) { stream_row(out.as<decltype(t)>() + at, out.shape[3], row); });
  }

  // An entry that is none reads as zeros.
  void load_raw(const uint8_t* k_code, int64_t first, int64_t D, float* out) const {
    const TensorView& raw = a_.pages.raw;
    const int32_t entry = delta::entry_of(delta::kRawScale, k_code, raw.shape[0]);
    if (entry < 0) return void(std::fill(out, out + D, 0.0f));
    load_row(raw, entry * raw.stride[0] + first, D, 1, out);
  }

  void keys(int64_t b, int64_t h, int64_t begin, const Run& run, float* buffer) const {
    const KeyHead head(a_.codec, h);
    const KeyDecoder decode = key_decoder(head);
    for (int j = 0; j < run.n; j += kBlock) {
      KeyRows rows;
      rows.codes = run.k + j, rows.bytes = a_.pages.k_codes.shape[3], rows.n = std::min(kBlock, run.n - j);
      rows.fetch = true;
      rows.scale = run.k_scale + j, rows.id = run.k_id + j, rows.position = run.position + j;
      decode(head, rows, buffer);
      for (int i = 0; i < rows.n; ++i) {
        float* row = buffer + i * CodedHead::stride(head.D);
        if (run.raw[j + i]) {
          load_raw(run.k[j + i], 0, head.D, row);
          if (head.rope) apply_rope(row, *head.rope, run.position[j + i]);
        }
        put(a_.k, offset(a_.k, b, begin + j + i, h), row);
      }
    }
  }

  void values(int64_t b, int64_t h, int64_t begin, const Run& run, float* buffer) const {
    const CodedHead head(a_.codec.v, a_.codec.v_bits, h);
    const ValueDecoder decode = value_decoder(head);
    for (int j = 0; j < run.n; j += kBlock) {
      ValueRows rows;
      rows.codes = run.v + j, rows.bytes = a_.pages.v_codes.shape[3], rows.n = std::min(kBlock, run.n - j);
      rows.fetch = true;
      rows.scale = run.v_scale + j, rows.id = run.v_id + j;
      decode(head, rows, buffer);
      for (int i = 0; i < rows.n; ++i) {
        float* row = buffer + i * CodedHead::stride(head.D);
        if (run.raw[j + i]) load_raw(run.k[j + i], a_.k.shape[3], head.D, row);
        put(a_.v, offset(a_.v, b, begin + j + i, h), row);
      }
    }
  }

  const DecodeArgs& a_;
  const bool stream_;
};

}  // namespace

void delta_decode(const DecodeArgs& a, const Exec&) {
  const Decoder decoder(a);
  const int64_t S = a.max_seq_len, runs = (S + kRun - 1) / kRun;
  parallel_for(a.k.shape[0] * runs, [&](int64_t task) {
    const int64_t begin = task % runs * kRun;
    decoder.run(task / runs, begin, std::min(S, begin + kRun));
  });
}

}  // namespace sic::cpu::SIC_ISA
