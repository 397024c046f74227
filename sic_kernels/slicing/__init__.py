"""Read only the part of the KV cache that the query needs.

    index = sic.slicing.key_sketch(k_cache, block_table, seq_lens, params)
    result = sic.slicing.attend(q, k_cache, v_cache, index, block_table, seq_lens)

Conventions of every op (shapes: B sequences, T query tokens, Hq query heads, Hkv KV heads, G = Hq/Hkv, P pages, M pages a
sequence, S = M * page positions, D head size):

* Arrays are torch tensors or anything with DLPack or `__cuda_array_interface__`; results have the kind of the first one.
* Caches are `[P,Hkv,page,D]` under `block_table` `[B,M]`, or `[B,Hkv,S,D]` with `block_table=None`; last dimension contiguous,
  the others free. f32, f16, bf16; f8_e4m3 caches with `k_scale`, `v_scale`. An NHD cache is passed as `cache.transpose(1, 2)`.
* `seq_lens` `[B]` counts the T new tokens; query t sees the first `seq_len - T + t + 1` positions.
* `max_seq_len` (default S) bounds grids, widths and workspace: nothing depends on device data.
* With `out=` and `workspace=` (`workspace_bytes` of u8, 256-byte aligned on CUDA) an op neither allocates nor synchronises and
  can be captured in a CUDA graph. On the CPU the workspace holds the partial results of splits and nothing else: scratch of the
  scan is kept by the calling threads, which allocate it in the first call of a size (up to 64 MiB, beyond that in every call).
* CUDA work goes to torch's (for CuPy arrays CuPy's) current stream and waits for the streams that other arrays name, except while
  a graph is captured. Lengths, page ids and lists on the device are taken as right; with `SIC_CHECK=1` they are read back and
  checked like those on the CPU.
* No output lies in the memory of an input or of another output, and the workspace in none of them: an error, where it is sure.
* Results are bitwise equal from run to run, for any thread count and any batch a row is in.
* `ArgumentError` (one format) before anything is read or written.
"""

from .attend import attend, select_slice
from .attention import append_kv, gather, merge_many, merge_states, sliced_attention
from .index import calibrate, key_sketch, page_summary
from .scoring import refine_tokens, score_pages, score_tokens, select
from .types import STATUS, KeySketch, Selection, SketchParams, SlicePolicy, SliceResult

__all__ = [
    "STATUS",
    "KeySketch",
    "Selection",
    "SketchParams",
    "SlicePolicy",
    "SliceResult",
    "SlicedKVCache",
    "append_kv",
    "attend",
    "calibrate",
    "gather",
    "key_sketch",
    "merge_many",
    "merge_states",
    "page_summary",
    "refine_tokens",
    "score_pages",
    "score_tokens",
    "select",
    "select_slice",
    "sliced_attention",
    "workspace_bytes",
]

from .cache import SlicedKVCache  # last: it is built on the ops above
from .workspace import workspace_bytes
