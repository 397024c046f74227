"""The ops on coded pages: encode, decode, attention."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..runtime import backends
from ..runtime.backends import call
from ..runtime.errors import ArgumentError
from ..runtime.fallback import report, strict_on
from ..runtime.log import get_logger
from ..slicing.attention import selection_inputs, with_tokens, without_tokens
from ..slicing.types import Array, KeySketch, Selection
from .codec import Codec
from .pages import DeltaPages
from .reference_decode import DTYPES


class RawTail(NamedTuple):
    """The newest tokens of every sequence, not coded yet: positions start[b], start[b] + 1, ..

    k: [B,Hkv,R,Dk], rotated to their positions.  v: [B,Hkv,R,Dv].  start: i32|i64 [B].
    """

    k: Array
    v: Array
    start: Array


def encode(
    codec: Codec,
    k: Array,
    v: Array,
    positions: Array,
    slots: Array,
    pages: DeltaPages,
    *,
    index: KeySketch | None = None,
    workspace: Array | None = None,
    backend: str | None = None,
) -> None:
    """Write rows into coded pages, one token of a decode step or a whole prefill, in one pass.

    k, v: [N,Hkv,Dk], [N,Hkv,Dv], f32|f16|bf16; with `codec.rope` k is rotated to `positions` and turned back (within rounding).
    positions: i32|i64 [N], counted from the first real token of a sequence, not from its padding.
    slots: i32|i64 [N], page * page_size + offset; -1 is skipped; of two rows for one slot the later one stays.
    index: a KeySketch with the same pages; takes the keys as given.

    Kept raw, key and value of one head together: rows at the first `codec.sinks` positions, rows with values that are not
    finite, rows whose squared error exceeds the codec's bound. Each takes the lowest free entry of the raw table, in the order
    of the rows; without room it is coded all the same and counted in `pages.raw_state[1]`: under SIC_STRICT=1 a `SicError`
    (which waits for the device to look).
    Raises ArgumentError for a slot outside the pages or a position outside the RoPE's tables, before anything is written; on a
    CUDA device only with SIC_CHECK=1, which reads them back: otherwise they are taken as right.

    In place. On cpu and cuda nothing is allocated with `workspace`, and nothing synchronises. Every backend writes the same bits
    (payloads of NaN apart).
    Source: the residual from the nearest template, rotated (QuIP#, Tseng et al. 2024) and rounded to Lloyd-Max levels.
    """
    sketch = (None,) * 3 if index is None else (index.bits, index.norm, index.params.centre)
    inputs = (
        k,
        v,
        positions,
        slots,
        _codec("delta_encode", codec),
        codec.sinks,
        _pages("delta_encode", pages, codec),
        *sketch,
    )
    if not strict_on(pages.raw_state):
        call("delta", "delta_encode", inputs, (), workspace, backend)
        return
    before = int(pages.raw_state[1])
    call("delta", "delta_encode", inputs, (), workspace, backend)
    report_lost_rows(int(pages.raw_state[1]) - before)


def report_lost_rows(rows: int) -> None:
    """Into the log how many rows were coded that were to be kept raw, if any; under SIC_STRICT=1 a `SicError`."""
    if rows:
        message = "%d rows were to be kept raw and were coded: the raw table was full"
        report(get_logger("delta"), message, rows, level=logging.WARNING)


def decode(
    codec: Codec,
    pages: DeltaPages,
    block_table: Array | None,
    seq_lens: Array,
    *,
    positions: Array | None = None,
    max_seq_len: int | None = None,
    dtype: torch.dtype = torch.float32,
    out: tuple[Array, Array] | None = None,
    workspace: Array | None = None,
    backend: str | None = None,
) -> tuple[Array, Array]:
    """Rows of coded pages as numbers: k [B,S,Hkv,Dk], v [B,S,Hkv,Dv] in `dtype` (f32|f16|bf16); 0 from seq_len on.

    positions: i32[B,S], of RoPE; None: 0, 1, 2, .. Keys are rotated to them, so that a page can be read at another place than
    it was written at.  max_seq_len: S, default M * page.
    Deterministic; within 1e-6 (relative to the row) of the exact value, then rounded to `dtype`.
    """
    if dtype not in DTYPES:
        raise ArgumentError.of("delta_decode", "dtype", dtype, "float32|float16|bfloat16")
    inputs = (
        seq_lens, block_table, _pages("delta_decode", pages, codec), _codec("delta_decode", codec), positions, max_seq_len,
        DTYPES.index(dtype),
    )  # fmt: skip
    return call("delta", "delta_decode", inputs, _pair("delta_decode", out), workspace, backend)


def delta_attention(
    q: Array,
    codec: Codec,
    pages: DeltaPages,
    block_table: Array | None,
    seq_lens: Array,
    selection: Selection | None = None,
    *,
    positions: Array | None = None,
    raw_tail: RawTail | tuple[Array, Array, Array] | None = None,
    scale: float | None = None,
    key_bias: Array | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Array | None = None,
    max_seq_len: int | None = None,
    out: tuple[Array, Array] | None = None,
    workspace: Array | None = None,
    backend: str | None = None,
) -> tuple[Array, Array]:
    """Attention straight on coded pages, over the selected tokens or pages; dense with `selection=None`.

    Returns out [B,T,Hq,Dv] (q's type), lse f32[B,T,Hq]: `sliced_attention` over what `decode` gives, within
    2e-3 (f32), 4e-3 and 0.1 % (f16), 8e-3 and 0.8 % (bf16).
    q: [B,T,Hq,Dk] or [B,Hq,Dk], f32|f16|bf16.  positions: i32[B,S], of RoPE only; what a query sees goes by the index.
    raw_tail: rows from start[b] on, which `seq_lens` and the selection count like all others; the block table has entries for
    their positions, which are not read.
    scale, key_bias, softcap, window, sinks, max_seq_len: as in `sliced_attention`.

    Accumulation in f32, in a fixed order: bitwise equal from run to run, whatever the batch. With `out` and `workspace` it
    neither allocates nor synchronises and can be captured in a CUDA graph.
    Method: values are summed as codes in the rotated space, template by template, and rotated back once.
    """
    q4, flat = with_tokens(q)
    given, lse = _pair("delta_attention", out)
    outs = (None, None) if given is None else (with_tokens(given)[0], lse[:, None] if flat else lse)
    tail = _tail(raw_tail)
    inputs = (
        q4, _pages("delta_attention", pages, codec), _codec("delta_attention", codec), block_table, seq_lens,
        *selection_inputs("delta_attention", selection), positions, *tail, scale, key_bias, softcap or None, window or None,
        sinks, max_seq_len,
    )  # fmt: skip
    return without_tokens(flat, *call("delta", "delta_attention", inputs, outs, workspace, backend))


def _pair(op: str, out: Any) -> tuple:
    if out is None:
        return None, None
    if not isinstance(out, (tuple, list)) or len(out) != 2 or any(not hasattr(x, "dtype") for x in out):
        raise ArgumentError.of(op, "out", type(out).__name__, "two arrays")
    return tuple(out)


def _codec(op: str, codec: Any) -> tuple:
    if not isinstance(codec, Codec):
        raise ArgumentError.of(op, "codec", type(codec).__name__, "a Codec")
    return codec.inputs()


def _pages(op: str, pages: Any, codec: Any) -> tuple:
    if not isinstance(pages, DeltaPages):
        raise ArgumentError.of(op, "pages", type(pages).__name__, "DeltaPages")
    if isinstance(codec, Codec) and pages.codec not in (None, codec.fingerprint):
        raise ArgumentError.of(op, "codec", codec.fingerprint, f"{pages.codec}, which the pages are for")
    return pages.inputs()


def _tail(raw_tail: Any) -> tuple:
    if raw_tail is None:
        return None, None, None
    if not isinstance(raw_tail, tuple) or len(raw_tail) != 3:
        raise ArgumentError.of("delta_attention", "raw_tail", type(raw_tail).__name__, "RawTail(k, v, start)")
    return raw_tail


_OPS: dict[str, Callable[..., Any]] = {"encode": encode, "decode": decode, "delta_attention": delta_attention}


def workspace_bytes(op: str, *args: Any, **kwargs: Any) -> int:
    """Bytes of `workspace` that "encode", "decode" or "delta_attention" needs for its own arguments, in the same order.

    They are checked and nothing runs; as `slicing.workspace_bytes`.
    """
    if op not in _OPS:
        raise ArgumentError.of("workspace_bytes", "op", repr(op), "|".join(_OPS))
    return backends.workspace_bytes(_OPS[op], *args, **kwargs)
