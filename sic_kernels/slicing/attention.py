"""Rows in, rows out: append, gather, attention over a selection, merging of partial results."""

from __future__ import annotations

from typing import Any

import torch

from ..runtime.arguments import code_of, outputs
from ..runtime.arrays import as_torch, has_negative_strides
from ..runtime.backends import call
from ..runtime.errors import ArgumentError
from .types import UNITS, Array, KeySketch, Selection


def selection_inputs(op: str, selection: Selection | None) -> tuple[Any, Any, int]:
    """indices, counts and unit as the native layer takes them; a selection of a 3-D call gets its T dimension back."""
    if selection is None:
        return None, None, 0
    if not isinstance(selection, tuple) or len(selection) != 3:
        raise ArgumentError.of(op, "selection", type(selection).__name__, "a Selection")
    indices, counts, unit = selection
    if getattr(indices, "ndim", 4) == 3:
        indices, counts = indices[:, None], counts[:, None]
    return indices, counts, code_of(op, "selection.unit", unit, UNITS)


def with_tokens(q: Array) -> tuple[Array, bool]:
    """q as [B,T,Hq,D]; True if it came as [B,Hq,D]."""
    flat = getattr(q, "ndim", 4) == 3
    return (q[:, None] if flat else q), flat


def without_tokens(flat: bool, *results: Any) -> tuple:
    """Results of a 3-D q without their T dimension."""
    return tuple(r[:, 0] for r in results) if flat else results


def append_kv(
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    slots: Array,
    *,
    index: KeySketch | Array | None = None,
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    workspace: Array | None = None,
    backend: str | None = None,
) -> None:
    """Write rows into a cache, and their entries into its index, in one launch.

    k, v: [N,Hkv,Dk], [N,Hkv,Dv] in the cache's type; any float type for an f8 cache (stored as x / scale, saturating).
    slots: i32|i64 [N], page * page_size + offset; -1 is skipped; of two rows for one slot the later one stays.
    index: a KeySketch, or a page summary [P,Hkv,2,Dk] (a page's live keys are then those up to the last slot written).
    Raises ArgumentError for a slot outside the cache, before any row is written. In place; allocates nothing.
    """
    sketch, summary = (
        ((index.bits, index.norm, index.params.centre), None) if isinstance(index, KeySketch) else ((None,) * 3, index)
    )
    inputs = (k, v, k_cache, v_cache, slots, k_scale, v_scale, *sketch, summary)
    call("slicing", "append_kv", inputs, (), workspace, backend)


def gather(
    k_cache: Array,
    v_cache: Array,
    block_table: Array | None,
    seq_lens: Array,
    selection: Selection,
    *,
    out: tuple[Array, Array, Array] | None = None,
    workspace: Array | None = None,
    backend: str | None = None,
) -> tuple[Array, Array, Array]:
    """Copy the selected rows, bit for bit: k [N,Dk], v [N,Dv], indptr i64[B*T*Hkv+1].

    Row r = (b * T + t) * Hkv + h owns rows indptr[r] to indptr[r+1]; invisible positions of a listed page are left out.
    out: buffers of at least N rows (B*T*Hkv*K always suffice); without it N is read from the counts.
    """
    inputs = (k_cache, v_cache, block_table, seq_lens, *selection_inputs("gather", selection))
    return call("slicing", "gather", inputs, outputs("gather", out, ("k", "v", "indptr")), workspace, backend)


def sliced_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_table: Array | None,
    seq_lens: Array,
    selection: Selection | None = None,
    *,
    scale: float | None = None,
    key_bias: Array | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Array | None = None,
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    max_seq_len: int | None = None,
    out: tuple[Array, Array] | None = None,
    workspace: Array | None = None,
    backend: str | None = None,
) -> tuple[Array, Array]:
    """Attention over the selected tokens or pages; dense with `selection=None`. Returns out [B,T,Hq,Dv], lse f32[B,T,Hq].

    q: [B,T,Hq,Dk] or [B,Hq,Dk], f32|f16|bf16.  V may be a strided view of K.  Listed tokens must be distinct and visible.
    scale: default 1/sqrt(Dk).  key_bias: f32[B,S], added to the logits.  softcap: c * tanh(logit / c), before the bias.
    window: each query sees its last `window` positions.  sinks: f32[Hq], extra logits in the denominator.
    k_scale, v_scale: f32, a number or [Hkv], for f8 caches.
    lse is the natural log of the softmax denominator. A row that sees nothing has out 0 and lse -inf. A value that is not finite
    makes its channel infinite or NaN, maybe also in other rows of the call that share its block.

    Accumulation in f32, in a fixed order: a full selection equals the dense result bit for bit.
    Method: split-KV online softmax (Milakov & Gimelshein 2018; FlashDecoding), each K and V row read once per GQA group.
    """
    q4, flat = with_tokens(q)
    outs = outputs("sliced_attention", out, ("out", "lse"), flat)
    inputs = (
        q4, k_cache, v_cache, block_table, seq_lens, *selection_inputs("sliced_attention", selection),
        scale, key_bias, softcap or None, window or None, sinks, k_scale, v_scale, max_seq_len,
    )  # fmt: skip
    return without_tokens(flat, *call("slicing", "sliced_attention", inputs, outs, workspace, backend))


def merge_states(
    out_a: Array,
    lse_a: Array,
    out_b: Array,
    lse_b: Array,
    *,
    out: tuple[Array, Array] | None = None,
    workspace: Array | None = None,
    backend: str | None = None,
) -> tuple[Array, Array]:
    """Attention over two disjoint sets of keys from the results over each: out [...,H,D], lse f32[...,H].

    lse -inf (or +inf, as some stacks write it) marks an empty state; two empty ones give out 0, lse -inf.
    """
    outs = outputs("merge_states", out, ("out", "lse"))
    if getattr(out_a, "ndim", 3) == 3:
        return call("slicing", "merge_states", (out_a, lse_a, out_b, lse_b), outs, workspace, backend)
    for name, array, shape in (
        ("lse_a", lse_a, out_a.shape[:-1]), ("out_b", out_b, out_a.shape), ("lse_b", lse_b, out_a.shape[:-1])
    ):  # fmt: skip
        _check_shape("merge_states", name, array, shape)
    if out_a.ndim < 2:
        raise ArgumentError.of("merge_states", "out_a", list(out_a.shape), "[...,H,D]")
    H, D = out_a.shape[-2:]
    flat = (out_a.reshape(-1, H, D), lse_a.reshape(-1, H), out_b.reshape(-1, H, D), lse_b.reshape(-1, H))
    if out is not None:
        outs = (_flat_view("merge_states", outs[0], 2), _flat_view("merge_states", outs[1], 1))
    merged, lse = call("slicing", "merge_states", flat, outs, workspace, backend)
    return merged.reshape(out_a.shape), lse.reshape(lse_a.shape)


def merge_many(
    outs: Array,
    lses: Array,
    *,
    out: tuple[Array, Array] | None = None,
    workspace: Array | None = None,
    backend: str | None = None,
) -> tuple[Array, Array]:
    """`merge_states` of n results at once: outs [n,...,H,D], lses f32[n,...,H]."""
    results = outputs("merge_many", out, ("out", "lse"))
    if getattr(outs, "ndim", 4) in (0, 1, 2, 4):
        return call("slicing", "merge_many", (outs, lses), results, workspace, backend)
    _check_shape("merge_many", "lses", lses, outs.shape[:-1])
    n, H, D = outs.shape[0], outs.shape[-2], outs.shape[-1]
    rows = outs.numel() // max(1, n * H * D) if isinstance(outs, torch.Tensor) else outs.size // max(1, n * H * D)
    if out is not None:
        results = (_flat_view("merge_many", out[0], 2), _flat_view("merge_many", out[1], 1))
    merged, lse = call(
        "slicing", "merge_many", (outs.reshape(n, rows, H, D), lses.reshape(n, rows, H)), results, workspace, backend
    )
    return merged.reshape(outs.shape[1:]), lse.reshape(lses.shape[1:])


def _check_shape(op: str, arg: str, array: Array, shape: Any) -> None:
    """Leading dimensions are joined before the native layer sees them."""
    found = getattr(array, "shape", None)
    if found is None or tuple(found) != tuple(shape):
        raise ArgumentError.of(op, arg, type(array).__name__ if found is None else list(found), list(shape))


def _flat_view(op: str, array: Array, kept: int) -> Array:
    """[rows, last dimensions] over the same memory; what is no array is left to the native layer."""
    view = as_torch(array)
    if not isinstance(view, torch.Tensor):
        return array
    try:
        if has_negative_strides(array):
            raise RuntimeError("torch sees a copy")
        return view.view(-1, *view.shape[-kept:])
    except RuntimeError as error:
        raise ArgumentError.of(
            op, "out", "leading dimensions with gaps", "an output that can be viewed as rows"
        ) from error
