"""Score, select and attend in one call."""

from __future__ import annotations

from ..runtime import trace
from ..runtime.arguments import instance, outputs
from ..runtime.arrays import as_torch
from ..runtime.backends import call
from ..runtime.errors import ArgumentError
from ..runtime.fallback import strict_on
from .attention import with_tokens, without_tokens
from .traced import record_attend
from .types import POOLS, Array, KeySketch, Selection, SlicePolicy, SliceResult, report_fallbacks

_DEFAULT: SlicePolicy | None = None
_RESULTS = ("out", "lse", "indices", "counts", "omitted_mass", "status")


def attend(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    index: KeySketch | Array,
    block_table: Array | None,
    seq_lens: Array,
    *,
    policy: SlicePolicy | None = None,
    layer: int | None = None,
    keep: Array | None = None,
    scale: float | None = None,
    key_bias: Array | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Array | None = None,
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    max_seq_len: int | None = None,
    out: tuple[Array, ...] | None = None,
    workspace: Array | None = None,
    backend: str | None = None,
) -> SliceResult:
    """Attention that reads only what the query needs, as one launch chain.

    index: a KeySketch (policy.unit "token") or a page summary [P,Hkv,2,D] (policy.unit "page"); like the cache, it already
    holds the T new tokens: `attend` never writes either.
    All tokens are scored with plane 0; the best `policy.candidates` of them are ranked with both planes; the best
    `policy.ratio`, sinks, recent tokens and `keep` spans are read. The shortlist is joined over a group by the maximum, the
    ranking by `policy.pool`. `key_bias` enters both. The other arguments are those of `sliced_attention`.
    keep: i32|i64 [B,n,2], tokens [begin, end) of each sequence that are read whatever their scores, as in `select`: within
    the budget, or as many as they are. Lists then have room for all of a sequence (K = N). None changes nothing.
    out: the six arrays (out, lse, indices, counts, omitted_mass, status).

    omitted_mass estimates the softmax mass that was not read, from the sketch of every unread token (its calibration and
    coverage: docs/slicing.md). Heads above `policy.max_omitted_mass` are recomputed dense; `status` says so, and under
    SIC_STRICT=1 a `SicError` (it waits for the device to look). `SliceResult.record()` adds the counts to the metrics.
    Bitwise deterministic and batch-invariant like its parts.
    """
    policy = _default_policy() if policy is None else policy
    instance("attend", "policy", policy, SlicePolicy)
    q4, flat = with_tokens(q)
    sketch = _index_inputs("attend", index, policy)
    dense_layer = layer is not None and layer in policy.dense_layers
    inputs = (
        q4, k_cache, v_cache, *sketch, block_table, seq_lens,
        policy.ratio, policy.candidates, policy.top_p, policy.sink, policy.recent, policy.beta, POOLS[policy.pool],
        policy.max_omitted_mass, dense_layer, policy.max_sliced_T, policy.min_len, keep,
        scale, key_bias, softcap or None, window or None, sinks, k_scale, v_scale, max_seq_len,
    )  # fmt: skip
    outs = outputs("attend", out, _RESULTS, flat)
    results = call("slicing", "attend", inputs, outs, workspace, backend)
    result, lse, indices, counts, omitted, status = without_tokens(flat, *results)
    dense = dense_layer or q4.shape[1] > policy.max_sliced_T
    selection = None if dense else Selection(indices, counts, policy.unit)
    answer = SliceResult(result, lse, selection, omitted, status)
    if not dense and strict_on(as_torch(status)):
        report_fallbacks(answer.count("fallback_mass"))
    if trace.active():
        options = {"scale": scale, "max_seq_len": max_seq_len, "backend": backend}
        record_attend(layer, policy, q4, index, block_table, seq_lens, k_cache, results, dense, **options)
    return answer


def select_slice(
    q: Array,
    index: KeySketch | Array,
    block_table: Array | None,
    seq_lens: Array,
    *,
    page_size: int | None = None,
    policy: SlicePolicy | None = None,
    keep: Array | None = None,
    scale: float | None = None,
    key_bias: Array | None = None,
    softcap: float | None = None,
    window: int | None = None,
    max_seq_len: int | None = None,
    out: tuple[Array, Array, Array] | None = None,
    workspace: Array | None = None,
    backend: str | None = None,
) -> tuple[Selection, Array]:
    """The first half of `attend`, for a cache that it does not read itself: what a query needs, from the index alone.

    Returns the selection (indices i32[B,T,Hkv,K], counts i32[B,T,Hkv]) that `attend` makes with the same arguments, bit for
    bit, and log_unread f32[B,T,Hq]: the log of the sum of exp(estimated logit) over what was not selected, -inf if nothing.
    With the lse of attention over the selection, the share of the mass that was not read is sigmoid(log_unread - lse).
    policy: its dense_layers, max_sliced_T and max_omitted_mass are the caller's business.  keep: as in `attend`.
    page_size: of the cache; only a page summary needs it.
    Deterministic and batch-invariant; with `out` and `workspace` it can be captured in a CUDA graph.
    """
    policy = _default_policy() if policy is None else policy
    instance("select_slice", "policy", policy, SlicePolicy)
    q4, flat = with_tokens(q)
    sketch = _index_inputs("select_slice", index, policy)
    page = index.page if isinstance(index, KeySketch) else page_size
    if page is None:
        raise ArgumentError.of("select_slice", "page_size", "None", "that of the cache, for a page summary")
    inputs = (
        q4, *sketch, block_table, seq_lens, page, policy.ratio, policy.candidates, policy.top_p, policy.sink, policy.recent,
        policy.beta, POOLS[policy.pool], policy.min_len, keep, scale, key_bias, softcap or None, window or None, max_seq_len,
    )  # fmt: skip
    outs = (None,) * 3 if out is None else tuple(o[:, None] for o in out) if flat else out
    results = call("slicing", "select_slice", inputs, outs, workspace, backend)
    indices, counts, log_unread = without_tokens(flat, *results)
    return Selection(indices, counts, policy.unit), log_unread


def _index_inputs(op: str, index: KeySketch | Array, policy: SlicePolicy) -> tuple:
    """bits, norm, centre, planes and summary, of the kind that the policy selects by."""
    is_sketch = isinstance(index, KeySketch)
    if is_sketch != (policy.unit == "token"):
        got = "a KeySketch" if is_sketch else "a page summary" if hasattr(index, "shape") else type(index).__name__
        want = "a KeySketch" if policy.unit == "token" else "a page summary"
        raise ArgumentError.of(op, "index", got, f"{want} for unit {policy.unit!r}")
    if isinstance(index, KeySketch):
        return index.bits, index.norm, index.params.centre, index.planes, None
    return None, None, None, 2, index


def _default_policy() -> SlicePolicy:
    global _DEFAULT
    if _DEFAULT is None:
        _DEFAULT = SlicePolicy()
    return _DEFAULT
