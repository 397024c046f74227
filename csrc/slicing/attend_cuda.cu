// attend on CUDA, one chain of launches on one stream:
//   tokens: scan (both planes), join by maximum, shortlist, join of the shortlist by policy.pool, selection
//   pages:  score_pages, selection
//   then the estimate of the unread mass, attention over the selection, and, where the policy has a limit, attention
//   over everything for the heads above it (blocks of other heads leave at once).
// For tokens all between scan and attention is one launch, where a row's scores fit the shared memory of a block, or of
// a cluster of blocks on devices that have them.
// Scores stay in the workspace between kernels; nothing comes back to the host.
#include <algorithm>

#include "slicing/attend_rows_cuda.cuh"
#include "slicing/attention_cuda.h"
#include "slicing/scan_cuda.cuh"
#include "slicing/validate.h"

namespace sic::gpu {

void score_pages(const slicing::ScorePagesArgs&, const Exec&);
int64_t score_pages_workspace(const slicing::ScorePagesArgs&);

namespace {

using slicing::AttendArgs;
using slicing::AttentionArgs;
using slicing::ceil_div;
using slicing::Pool;
using slicing::SelectArgs;

constexpr int kThreads = 256;

// The selection's scores where they lie in the workspace: [B,T,Hkv,units], rows `stride` elements apart.
SelectArgs selection_of(const AttendArgs& a, void* scores, DType type, int64_t stride) {
  SelectArgs s = slicing::attend_selection(a);
  TensorView v = view_of(scores, type, s.scores.shape[0], s.scores.shape[1], s.scores.shape[2], s.scores.shape[3]);
  v.stride[2] = stride, v.stride[1] = v.shape[2] * stride, v.stride[0] = v.shape[1] * v.stride[1];
  v.device = Device::cuda;
  s.scores = v;
  return s;
}

// ---- tokens, by the sketch ----

// The scan, which is the beginning of either way to a selection.
struct TokenScan {
  const AttendArgs& a;
  ScanTask scan;
  HeadScores scores;
  char* scan_memory;

  TokenScan(const AttendArgs& args, Carver& parts) : a(args), scan(scan_task(scan_args(args))) {
    scores = head_scores(scan, args.attention.max_seq_len, true, true, parts);
    scan_memory = parts.take<char>(scan_scratch(scan));
  }

  static slicing::SketchScoreArgs scan_args(const AttendArgs& a) {
    const AttentionArgs& c = a.attention;
    slicing::SketchScoreArgs s;
    s.q = c.q, s.bits = a.bits, s.norm = a.norm, s.block_table = c.kv.block_table, s.seq_lens = c.kv.seq_lens;
    s.page = c.kv.k_cache.shape[2], s.planes = a.planes, s.scale = c.scale, s.max_seq_len = c.max_seq_len;
    return s;
  }
  bool two_stage() const { return a.planes == 2; }
  int64_t rows() const { return int64_t{scan.B} * scan.T * scan.Hkv; }

  void launch(void* stream) const {
    HeadScores wanted = scores;
    if (!two_stage()) wanted.second = nullptr;
    launch_scan(scan, wanted, scan_memory, stream);
  }
  // Of the scores by plane 0.
  JoinTask first_join() const {
    const AttentionArgs& c = a.attention;
    JoinTask j = join_task(scan, scores, two_stage() ? Pool::max : a.pool);
    j.width = c.max_seq_len, j.window = c.window;
    if (c.key_bias.given()) j.bias = c.key_bias.as<const float>(), j.bias_stride = c.key_bias.stride[0];
    return j;
  }
  // joined: rows `scores.stride` apart.
  SelectTask selection(int16_t* joined) const {
    return select_task(selection_of(a, joined, DType::i16, scores.stride));
  }
  // The best candidates by plane 0; none is forced.
  SelectTask shortlist(int16_t* joined) const {
    SelectTask s = selection(joined);
    s.ratio = std::max(a.candidates, a.ratio), s.budget = -1, s.top_p = 1, s.sink = s.recent = s.min_len = 0;
    s.keep = {}, s.keep_count = 0;
    return s;
  }
  UnreadScores unread_scores() const {
    UnreadScores u;
    u.scores = scores.first, u.stride = scores.stride;
    u.centre = a.centre.as<const float>(), u.centre_stride = a.centre.stride[0];
    return u;
  }
};

// A block or a cluster a row: one launch does the rest.
struct RowChain {
  TokenScan tokens;
  SelectKeep keep;
  int64_t list_room = 0;
  int32_t* lists = nullptr;  // [B,T,Hkv][list_room]: the shortlists

  // By the row alone, never by how many there are: the two chains sum the unread mass in different orders.
  static bool fits(const AttendArgs& a) {
    return rows_fit(a.attention.max_seq_len, a.attention.q.shape[2] / a.attention.kv.k_cache.shape[1]);
  }

  RowChain(const AttendArgs& args, Carver& parts) : tokens(args, parts) {
    const int64_t S = args.attention.max_seq_len;
    if (args.keep.given() && args.keep.shape[1] > 0) {
      const int64_t queries = int64_t{tokens.scan.B} * tokens.scan.T;
      keep.forced = parts.take<int32_t>(queries);
      keep.bits = parts.take<uint32_t>(queries * ceil_div(S, 32));
    }
    if (!tokens.two_stage()) return;
    const double share = std::max(args.candidates, args.ratio) * static_cast<double>(S);
    list_room = std::max<int64_t>(1, static_cast<int64_t>(share));
    lists = parts.take<int32_t>(tokens.rows() * list_room);
  }

  void run(void* stream) const {
    RowsTask rows;
    rows.selection = tokens.selection(nullptr);
    rows.keep = keep;
    if (keep.forced) {
      memset_async(keep.forced, 0, sizeof(int32_t) * tokens.scan.B * tokens.scan.T, stream);
      launch_select_keep(rows.selection, keep, stream);
    }
    tokens.launch(stream);
    rows.join = tokens.first_join();
    rows.pool = tokens.a.pool;
    if (tokens.two_stage()) {
      rows.fine = tokens.scores.second;
      rows.shortlist = tokens.shortlist(nullptr);
      rows.shortlist.K = list_room;
      rows.shortlist.out = {};
      rows.shortlist.out.indices = lists;
      int64_t stride = list_room;
      for (int i = 2; i >= 0; --i)
        rows.shortlist.out.indices_stride[i] = stride, stride *= i == 2 ? tokens.scan.Hkv : tokens.scan.T;
    }
    rows.unread = UnreadTask::of(tokens.a), rows.coarse = tokens.unread_scores();
    launch_rows(rows, stream);
  }
};

// Rows too long for that: step by step, many blocks a row.
struct TokenChain {
  TokenScan tokens;
  int32_t* fine_top;  // of the shortlist's scores by both planes
  unsigned long long* fine_weight;
  int16_t* joined;  // [B,T,Hkv][stride]
  uint8_t* marks;   // [B,T,Hkv,S]: the shortlist
  char *select_memory, *unread_memory;

  TokenChain(const AttendArgs& args, Carver& parts) : tokens(args, parts) {
    const int64_t S = args.attention.max_seq_len, heads = tokens.scan.head_rows();
    fine_top = parts.take<int32_t>(heads);
    fine_weight = parts.take<unsigned long long>(heads);
    joined = parts.take<int16_t>(tokens.rows() * tokens.scores.stride);
    marks = parts.take<uint8_t>(tokens.rows() * S);
    select_memory = parts.take<char>(std::max(select_scratch(shortlist()), select_scratch(selection())));
    unread_memory = parts.take<char>(unread_scratch(UnreadTask::of(args), S));
  }

  SelectTask selection() const { return tokens.selection(joined); }
  SelectTask shortlist() const {
    SelectTask s = tokens.shortlist(joined);
    s.marks = marks;
    return s;
  }
  JoinTask with_output(JoinTask j) const {
    const int64_t stride = tokens.scores.stride;
    j.out = joined;
    j.out_stride[2] = stride, j.out_stride[1] = j.Hkv * stride, j.out_stride[0] = j.T * j.out_stride[1];
    return j;
  }

  void run(void* stream) const {
    tokens.launch(stream);
    launch_join(with_output(tokens.first_join()), stream);
    if (tokens.two_stage()) {
      launch_select(shortlist(), select_memory, stream);
      rank_shortlist(stream);
    }
    launch_select(selection(), select_memory, stream);
    launch_unread_tokens(UnreadTask::of(tokens.a), tokens.unread_scores(), unread_memory, stream);
  }

  // Joined scores of the shortlist by both planes; kInvisible for all others.
  void rank_shortlist(void* stream) const {
    const auto heads = static_cast<size_t>(tokens.scan.head_rows());
    memset_async(fine_top, 0x80, heads * sizeof(int32_t), stream);  // below any score
    memset_async(fine_weight, 0, heads * sizeof(unsigned long long), stream);
    JoinTask fine = with_output(tokens.first_join());
    fine.scores = tokens.scores.second, fine.top = fine_top, fine.weight = fine_weight;
    fine.pool = tokens.a.pool, fine.window = 0, fine.marks = marks;
    launch_join_tops(fine, stream);
    launch_join(fine, stream);
  }
};

// ---- pages, by their summaries ----

// A page outside the window has nothing to offer; a page's bias is the largest of its visible positions.
__global__ void __launch_bounds__(kThreads)
    adjust_page_scores(UnreadTask a, float* scores, int64_t M, int32_t page, int64_t chunks) {
  const int64_t row = blockIdx.x / chunks, m = blockIdx.x % chunks * kThreads + threadIdx.x;
  const int64_t t = row / a.Hkv % a.T, b = row / a.Hkv / a.T, visible = a.seq_lens.visible(b, a.T, t, a.positions);
  if (m >= M || m * page >= visible) return;
  const int64_t end = (m + 1) * page < visible ? (m + 1) * page : visible;
  float& score = scores[row * M + m];
  if (a.window > 0 && end <= visible - a.window) score = -INFINITY;
  if (!a.bias) return;
  float bias = -INFINITY;
  for (int64_t i = m * page; i < end; ++i) bias = larger(bias, a.bias[b * a.bias_stride + i]);
  score += bias;
}

struct PageChain {
  const AttendArgs& a;
  int64_t M;
  float* scores;  // [B,T,Hkv,M]
  char *score_memory, *select_memory, *unread_memory;
  int64_t score_bytes;

  PageChain(const AttendArgs& args, Carver& parts) : a(args) {
    const TensorView& q = args.attention.q;
    M = ceil_div(args.attention.max_seq_len, page());
    scores = parts.take<float>(q.shape[0] * q.shape[1] * args.attention.kv.k_cache.shape[1] * M);
    score_bytes = score_pages_workspace(score_args());
    score_memory = parts.take<char>(score_bytes);
    select_memory = parts.take<char>(select_scratch(selection()));
    unread_memory = parts.take<char>(unread_scratch(UnreadTask::of(args), M));
  }

  int64_t page() const { return a.attention.kv.k_cache.shape[2]; }
  SelectTask selection() const { return select_task(selection_of(a, scores, DType::f32, M)); }
  slicing::ScorePagesArgs score_args() const {
    const AttentionArgs& c = a.attention;
    return {c.q,    a.summary, c.kv.block_table, c.kv.seq_lens, page(),
            a.beta, a.pool,    c.scale,          c.max_seq_len, selection_of(a, scores, DType::f32, M).scores};
  }

  void run(void* stream) const {
    Exec exec;
    exec.device = Device::cuda, exec.stream = stream;
    exec.workspace = view_of(score_memory, DType::u8, score_bytes);
    score_pages(score_args(), exec);
    const UnreadTask unread = UnreadTask::of(a);
    if (unread.window > 0 || unread.bias) {
      const int64_t chunks = ceil_div(M, kThreads);
      launch(adjust_page_scores, dim3(grid_blocks(unread.rows() * chunks)), dim3(kThreads), 0, stream, unread, scores,
             M, static_cast<int32_t>(page()), chunks);
    }
    launch_select(selection(), select_memory, stream);
    launch_unread_pages(unread,
                        {Rows3::of(a.summary), a.summary.dtype, PageMap::of(a.attention.kv.block_table, page())},
                        unread_memory, stream);
  }
};

// ---- the result ----

AttentionArgs dense(const AttendArgs& a) {
  AttentionArgs c = a.attention;
  c.selected = {};
  return c;
}

OmittedMass omitted_mass(const AttendArgs& a) {
  OmittedMass m;
  m.log_unread = a.omitted_mass.as<float>();
  for (int i = 0; i < 3; ++i) m.stride[i] = a.omitted_mass.stride[i];
  m.status = RowBytes::of(a.status);
  m.limit = a.max_omitted_mass;
  return m;
}

// A call that is dense by policy: no list, nothing omitted. A block a (sequence, query token).
__global__ void __launch_bounds__(kThreads)
    fill_dense(DeviceSelection list, OmittedMass mass, int32_t T, int32_t Hq, int32_t Hkv, int32_t K, uint8_t status) {
  const int64_t b = blockIdx.x / T, t = blockIdx.x % T;
  for (int i = static_cast<int>(threadIdx.x); i < Hq; i += kThreads) {
    mass.log_unread[b * mass.stride[0] + t * mass.stride[1] + i * mass.stride[2]] = 0;
    mass.status.data[b * mass.status.stride[0] + t * mass.status.stride[1] + i * mass.status.stride[2]] = status;
  }
  for (int h = static_cast<int>(threadIdx.x); h < Hkv; h += kThreads) list.count(b, t, h) = 0;
  for (int h = 0; h < Hkv; ++h)
    for (int i = static_cast<int>(threadIdx.x); i < K; i += kThreads) list.row(b, t, h)[i] = -1;
}

void attend_dense(const AttendArgs& a, const Exec& exec) {
  run_attention(dense(a), {}, exec.workspace.data, exec.stream);
  const TensorView& q = a.attention.q;
  launch(fill_dense, dim3(grid_blocks(q.shape[0] * q.shape[1])), dim3(kThreads), 0, exec.stream,
         DeviceSelection::of(a.indices, a.counts), omitted_mass(a), static_cast<int32_t>(q.shape[1]),
         static_cast<int32_t>(q.shape[2]), static_cast<int32_t>(a.attention.kv.k_cache.shape[1]),
         static_cast<int32_t>(a.indices.shape[3]),
         static_cast<uint8_t>(a.dense_layer ? slicing::kDenseLayer : slicing::kDensePrefill));
}

// The chain's own parts, then the partial results of attention.
template <class Chain>
void attend_sliced(const AttendArgs& a, const Exec& exec) {
  Carver parts(exec.workspace.data, kWorkspaceAlignment);
  const Chain chain(a, parts);
  void* partials = parts.take<char>(0);
  chain.run(exec.stream);
  AttentionExtras extras;
  extras.mass = omitted_mass(a);
  run_attention(slicing::attend_attention(a), extras, partials, exec.stream);
  if (a.max_omitted_mass > 1) return;
  AttentionExtras again;
  again.only = {RowBytes::of(a.status), slicing::kFallbackMass};
  run_attention(dense(a), again, partials, exec.stream);
}

template <class Chain>
int64_t sliced_bytes(const AttendArgs& a) {
  Carver parts(nullptr, kWorkspaceAlignment);
  const Chain chain(a, parts);
  const int64_t again = a.max_omitted_mass > 1 ? 0 : attention_partials(dense(a));
  return parts.used() + std::max(attention_partials(slicing::attend_attention(a)), again);
}

template <class Chain>
void run_chain(const AttendArgs& a, const Exec& exec) {
  Carver parts(exec.workspace.data, kWorkspaceAlignment);
  Chain(a, parts).run(exec.stream);
}
template <class Chain>
int64_t chain_bytes(const AttendArgs& a) {
  Carver parts(nullptr, kWorkspaceAlignment);
  Chain(a, parts);
  return parts.used();
}

}  // namespace

int64_t select_slice_workspace(const AttendArgs& a) {
  if (a.summary.given()) return chain_bytes<PageChain>(a);
  return RowChain::fits(a) ? chain_bytes<RowChain>(a) : chain_bytes<TokenChain>(a);
}

void select_slice(const AttendArgs& a, const Exec& exec) {
  if (a.summary.given()) return run_chain<PageChain>(a, exec);
  RowChain::fits(a) ? run_chain<RowChain>(a, exec) : run_chain<TokenChain>(a, exec);
}

int64_t attend_workspace(const AttendArgs& a) {
  if (slicing::attend_is_dense(a)) return attention_partials(dense(a));
  if (a.summary.given()) return sliced_bytes<PageChain>(a);
  return RowChain::fits(a) ? sliced_bytes<RowChain>(a) : sliced_bytes<TokenChain>(a);
}

void attend(const AttendArgs& a, const Exec& exec) {
  if (slicing::attend_is_dense(a)) return attend_dense(a, exec);
  if (a.summary.given()) return attend_sliced<PageChain>(a, exec);
  RowChain::fits(a) ? attend_sliced<RowChain>(a, exec) : attend_sliced<TokenChain>(a, exec);
}

}  // namespace sic::gpu
