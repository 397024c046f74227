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

constexpr int kRun = 128;   // positions of a task
constexpr int kBlock = 16;  // rows decoded at a time

#if defined(__AVX512BW__)
// A line of numbers of type T, in one register all along: a load behind two stores that it covers would wait for both.
template <class T>
SIC_INLINE __m512i line_of(const float* row) {
  if constexpr (std::is_same_v<T, float>)
    return __m512i(load(row));
  else
    return narrow(load(row), load(row + W), T{});
}
#endif

// Rows of D floats, `from_stride` apart, become rows of T that are `stride` apart; past the caches if `stream` and
// lines are whole.
template <class T>
void put_rows(int rows, int64_t D, const float* from, int64_t from_stride, T* to, int64_t stride,
              [[maybe_unused]] bool stream) {
#if defined(__AVX512BW__)
  constexpr int kLine = 64 / sizeof(T);
  if (stream && reinterpret_cast<uintptr_t>(to) % 64 == 0 && stride % kLine == 0 && D % kLine == 0) {
    for (int r = 0; r < rows; ++r, from += from_stride, to += stride)
      for (int64_t i = 0; i < D; i += kLine)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), line_of<T>(from + i));
    return;
  }
#endif
  for (int r = 0; r < rows; ++r, from += from_stride, to += stride) {
    int64_t i = 0;
    for (; i + W <= D; i += W) store(to + i, load(from + i));
    for (; i < D; ++i) from_float(from[i], to[i]);
  }
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
    for (int j = 0, end; j < run.n; j = end) {  // page by page
      const RowPlace first = k.place(static_cast<uint32_t>(begin + j));
      end = static_cast<int>(std::min<int64_t>(run.n, j + k.split.page - first.offset));
      const char *k_at = k.at(first), *v_at = v.at(first), *tag_at = tags.at(first);
      for (int i = j; i < end; ++i, k_at += k.row_stride, v_at += v.row_stride, tag_at += tags.row_stride) {
        run.k[i] = reinterpret_cast<const uint8_t*>(k_at), run.v[i] = reinterpret_cast<const uint8_t*>(v_at);
        run.tag[i] = reinterpret_cast<const uint8_t*>(tag_at);
        prefetch(tag_at);
      }
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
      if (run.raw[j]) tag = {};
      k_scale[j].bits = tag.k_scale, v_scale[j].bits = tag.v_scale;
      run.k_id[j] = tag.k_id < k_templates ? tag.k_id : 0, run.v_id[j] = tag.v_id < v_templates ? tag.v_id : 0;
      run.position[j] = positions ? positions[begin + j] : static_cast<int32_t>(begin + j);
    }
    for (int j = 0; j < kRun; j += W)
      store(run.k_scale + j, load(k_scale + j)), store(run.v_scale + j, load(v_scale + j));
  }

  void put(const TensorView& out, int64_t at, int rows, const float* from) const {
    const int64_t D = out.shape[3];
    with_float_type(out.dtype, [&](auto t) {
      using T = decltype(t);
      if constexpr (!std::is_same_v<T, f8_t>)
        put_rows(rows, D, from, CodedHead::stride(D), out.as<T>() + at, out.stride[1], stream_);
    });
  }

  // False if the entry is none: then the row stays what its tag of zeros says, template 0.
  bool load_raw(const uint8_t* k_code, int64_t first, int64_t D, float* out) const {
    const TensorView& raw = a_.pages.raw;
    const int32_t entry = delta::entry_of(delta::kRawScale, k_code, raw.shape[0]);
    if (entry >= 0) load_row(raw, entry * raw.stride[0] + first, D, 1, out);
    return entry >= 0;
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
        if (!run.raw[j + i] || !load_raw(run.k[j + i], 0, head.D, row)) continue;
        if (head.rope) apply_rope(row, *head.rope, run.position[j + i]);
      }
      put(a_.k, offset(a_.k, b, begin + j, h), rows.n, buffer);
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
      }
      put(a_.v, offset(a_.v, b, begin + j, h), rows.n, buffer);
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
