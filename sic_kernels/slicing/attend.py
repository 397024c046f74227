"""Score, select and attend in one call."""

from __future__ import annotations

from ..runtime import trace
from ..runtime.backends import call
from ..runtime.errors import ArgumentError
from .attention import with_tokens, without_tokens
from .types import POOLS, Array, KeySketch, Selection, SlicePolicy, SliceResult, instance, outputs

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
    out: the six arrays (out, lse, indices, counts, omitted_mass, status).

    omitted_mass estimates the softmax mass that was not read, from the sketch of every unread token (its calibration and
    coverage: docs/slicing.md). Heads above `policy.max_omitted_mass` are recomputed dense; `status` says so.
    Bitwise deterministic and batch-invariant like its parts.
    """
    policy = _default_policy() if policy is None else policy
    instance("attend", "policy", policy, SlicePolicy)
    is_sketch = isinstance(index, KeySketch)
    if is_sketch != (policy.unit == "token"):
        got = "a KeySketch" if is_sketch else "a page summary" if hasattr(index, "shape") else type(index).__name__
        raise ArgumentError.of(
            "attend",
            "index",
            got,
            f"{'a KeySketch' if policy.unit == 'token' else 'a page summary'} for unit {policy.unit!r}",
        )
    q4, flat = with_tokens(q)
    bits, norm, centre, planes = (
        (index.bits, index.norm, index.params.centre, index.planes) if is_sketch else (None, None, None, 2)
    )
    dense_layer = layer is not None and layer in policy.dense_layers
    inputs = (
        q4, k_cache, v_cache, bits, norm, centre, planes, None if is_sketch else index, block_table, seq_lens,
        policy.ratio, policy.candidates, policy.top_p, policy.sink, policy.recent, policy.beta, POOLS[policy.pool],
        policy.max_omitted_mass, dense_layer, policy.max_sliced_T, policy.min_len, keep,
        scale, key_bias, softcap or None, window or None, sinks, k_scale, v_scale, max_seq_len,
    )  # fmt: skip
    outs = outputs("attend", out, _RESULTS, flat)
    results = call("slicing", "attend", inputs, outs, workspace, backend)
    result, lse, indices, counts, omitted, status = without_tokens(flat, *results)
    dense = dense_layer or q4.shape[1] > policy.max_sliced_T
    selection = None if dense else Selection(indices, counts, policy.unit)
    if trace.active():
        trace.record(
            "attend",
            layer=layer,
            unit=policy.unit,
            seq_lens=seq_lens,
            selection=indices,
            counts=counts,
            omitted_mass=omitted,
            status=status,
        )
    return SliceResult(result, lse, selection, omitted, status)


def _default_policy() -> SlicePolicy:
    global _DEFAULT
    if _DEFAULT is None:
        _DEFAULT = SlicePolicy()
    return _DEFAULT
