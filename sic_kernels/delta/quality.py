"""How much a codec loses on a model's own keys and values, and how many bits each layer needs.

    report = sic.delta.quality_report(codecs, keys, values, queries=queries)       # per layer and KV head
    choice = sic.delta.choose_bits(sic.delta.bit_report(codecs, keys, values), size=0.22)
    codecs = templates.codecs(k_bits=choice.k_bits, v_bits=choice.v_bits)

Errors are relative norms. That of attention outputs is what matters to the model: it sees which of the errors fall where
queries look.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..runtime.arguments import real
from ..runtime.errors import ArgumentError
from .codec import Codec
from .levels import BITS
from .ops import decode, encode
from .pages import DeltaPages
from .reference_layout import TAG_BYTES, code_bytes
from .templates import describe

Tensor = torch.Tensor

PAGE = 16
QUERIES = 64  # tokens at the end whose attention is compared
HALF = 2  # bytes


class QualityReport(NamedTuple):
    """Relative errors, f32[layers,Hkv]: of keys, of values, of attention outputs. raw: share of rows kept raw, f32[layers].

    size: bytes of codes, scales, ids and raw rows over those of half precision, f32[layers].
    """

    keys: Tensor
    values: Tensor
    outputs: Tensor
    raw: Tensor
    size: Tensor

    def worst(self) -> tuple[int, int]:
        """Layer and KV head with the largest error of attention outputs."""
        at = int(self.outputs.argmax())
        return at // self.outputs.shape[1], at % self.outputs.shape[1]

    def __str__(self) -> str:
        lines = ["layer   keys  values  outputs (largest head)   raw    size"]
        for layer, rows in enumerate(zip(self.keys, self.values, self.outputs, self.raw, self.size)):
            k, v, out, raw, size = rows
            lines.append(
                f"{layer:5} {k.mean():6.1%} {v.mean():7.1%} {out.mean():8.1%} ({out.max():.1%}, head {int(out.argmax())})"
                f"  {raw:7.2%} {size:7.1%}"
            )
        return "\n".join(lines)


def quality_report(
    codecs: Sequence[Codec],
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    *,
    queries: Sequence[Tensor] | None = None,
) -> QualityReport:
    """What coding with `codecs` does to the first tokens of a sequence, one entry a layer.

    keys: [N,Hkv,Dk] as a cache holds them (rotated to 0, 1, ..), values: [N,Hkv,Dv].  queries: [T,Hq,Dk] of the last T
    tokens; None: the last keys stand in for them, which tells layers apart less well.
    """
    layers = _checked("quality_report", codecs, keys, values, queries)
    columns: list[list[Tensor]] = [[] for _ in QualityReport._fields]
    for codec, k, v, q in layers:
        k_read, v_read, raw = coded(codec, k, v)
        rows = k.shape[0] * k.shape[1]
        half = HALF * (codec.Dk + codec.Dv)
        line = (
            relative(k_read, k), relative(v_read, v), relative(attention(q, k_read, v_read), attention(q, k, v)),
            torch.tensor(raw / rows), torch.tensor((codec.row_bytes + raw / rows * half) / half),
        )  # fmt: skip
        for column, value in zip(columns, line):
            column.append(value)
    return QualityReport(*map(torch.stack, columns))


# --- bits for each layer ----------------------------------------------------------------------------------------------


class BitReport(NamedTuple):
    """Relative errors of attention outputs, f32[layers,5], with only keys or only values coded in 2, 3, 4, 5 and 8 bits.

    k_bytes, v_bytes: of a row in as many bits; tag_bytes: of scales and ids; half_bytes: of a row in half precision.
    """

    keys: Tensor
    values: Tensor
    k_bytes: tuple[int, ...]
    v_bytes: tuple[int, ...]
    tag_bytes: int
    half_bytes: int


class BitChoice(NamedTuple):
    """k_bits, v_bits of every layer; size: of coded rows over half precision; error: as `choose_bits` counts it."""

    k_bits: list[int]
    v_bits: list[int]
    size: float
    error: float


def bit_report(
    codecs: Sequence[Codec],
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    *,
    queries: Sequence[Tensor] | None = None,
) -> BitReport:
    """What every number of bits costs in every layer; the arguments of `quality_report`. The codecs' own bits do not matter."""
    k_errors, v_errors = [], []
    for codec, k, v, q in _checked("bit_report", codecs, keys, values, queries):
        exact = attention(q, k, v)
        rows = [coded(dataclasses.replace(codec, k_bits=bits, v_bits=bits), k, v) for bits in BITS]
        k_errors.append(torch.stack([relative(attention(q, row[0], v), exact).mean() for row in rows]))
        v_errors.append(torch.stack([relative(attention(q, k, row[1]), exact).mean() for row in rows]))
    first = codecs[0]
    k_bytes, v_bytes = (tuple(code_bytes(dim, bits) for bits in BITS) for dim in (first.Dk, first.Dv))
    return BitReport(
        torch.stack(k_errors), torch.stack(v_errors), k_bytes, v_bytes, TAG_BYTES, HALF * (first.Dk + first.Dv)
    )


def choose_bits(report: BitReport, *, size: float | None = None, error: float | None = None) -> BitChoice:
    """Bits of keys and values of every layer: the smallest error within `size`, or the smallest size within `error`.

    size: of coded rows over half precision, for example 0.22 (raw rows come on top).  error: root mean square over the layers
    of the relative error of attention outputs, errors of keys and values taken as independent.
    Starts at 2 bits; whatever lowers the error most for its bytes gets more. Deterministic.
    """
    target = _target(size, error)
    errors = [[x.double().square().tolist() for x in part] for part in (report.keys, report.values)]
    widths = (report.k_bytes, report.v_bytes)
    layers = len(errors[0])
    chosen = [[0] * layers, [0] * layers]
    total = layers * report.half_bytes

    def bytes_now() -> int:
        codes = sum(width[index] for width, part in zip(widths, chosen) for index in part)
        return layers * report.tag_bytes + codes

    def error_now() -> float:
        squares = sum(errors[p][layer][chosen[p][layer]] for p in (0, 1) for layer in range(layers))
        return math.sqrt(squares / layers)

    while error is None or error_now() > target:
        room = math.inf if size is None else target * total - bytes_now()
        step = _best_step(errors, widths, chosen, room)
        if step is None:
            break
        part, layer, index = step
        chosen[part][layer] = index
    if size is not None and bytes_now() > target * total:
        raise ArgumentError.of("choose_bits", "size", size, f"{bytes_now() / total:.4f} or more: 2 bits everywhere")
    if error is not None and error_now() > target:
        raise ArgumentError.of("choose_bits", "error", error, f"{error_now():.6f} or more: 8 bits everywhere")
    k_bits, v_bits = ([BITS[index] for index in part] for part in chosen)
    return BitChoice(k_bits, v_bits, bytes_now() / total, error_now())


def _target(size: float | None, error: float | None) -> float:
    given = [(name, value) for name, value in (("size", size), ("error", error)) if value is not None]
    if len(given) != 1:
        raise ArgumentError.of("choose_bits", "size, error", f"{len(given)} of them", "one of the two")
    name, value = given[0]
    return real("choose_bits", name, value, lambda x: 0 < x < math.inf, "a number above 0")


def _best_step(errors: Any, widths: Any, chosen: list[list[int]], room: float) -> tuple[int, int, int] | None:
    """Part (0 keys, 1 values), layer and number of the bits whose error falls most for each byte that they add."""
    best, found = 0.0, None
    for part, layers in enumerate(chosen):
        for layer, now in enumerate(layers):
            for index in range(now + 1, len(BITS)):
                more = widths[part][index] - widths[part][now]
                gain = (errors[part][layer][now] - errors[part][layer][index]) / max(more, 1)
                if more <= room and gain > best:
                    best, found = gain, (part, layer, index)
    return found


# --- parts ------------------------------------------------------------------------------------------------------------


def coded(codec: Codec, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
    """Rows as they are read after coding, f32, and how many were kept raw."""
    N, H = k.shape[:2]
    P = -(-N // PAGE)
    pages = DeltaPages.allocate(
        codec, P, PAGE, H, codec.Dk, codec.Dv, k.device, raw_rows=P * PAGE * H, raw_dtype=torch.float32
    )
    at = torch.arange(N, device=k.device)
    encode(codec, k, v, at, at, pages)
    table = torch.arange(P, dtype=torch.int32, device=k.device)[None]
    rows = decode(codec, pages, table, torch.tensor([N], dtype=torch.int32, device=k.device), max_seq_len=N)
    return rows[0][0], rows[1][0], int(pages.raw_state[0])


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Outputs [T,Hq,Dv] of the queries q [T,Hq,Dk] of the last T tokens, causal; heads last but one, as in k and v."""
    T, Hq, D = q.shape
    N, H = k.shape[:2]
    grouped = q.float().view(T, H, Hq // H, D)
    logits = torch.einsum("thgd,nhd->hgtn", grouped, k.float()) * D**-0.5
    hidden = torch.ones(T, N, dtype=torch.bool, device=q.device).triu(N - T + 1)
    return torch.einsum("hgtn,nhd->thgd", logits.masked_fill(hidden, -math.inf).softmax(-1), v.float())


def relative(x: Tensor, exact: Tensor) -> Tensor:
    """f32[Hkv]: norm of the error over the norm, over everything but the heads (second dimension)."""

    def total(y: Tensor) -> Tensor:
        return y.double().square().transpose(0, 1).flatten(1).sum(-1).sqrt()

    size = total(exact)
    return (total(x - exact) / torch.where(size > 0, size, 1.0)).float()


def _checked(op: str, codecs: Any, keys: Any, values: Any, queries: Any) -> list[tuple[Codec, Tensor, Tensor, Tensor]]:
    codecs = list(codecs)
    if not codecs or not all(isinstance(codec, Codec) for codec in codecs):
        raise ArgumentError.of(op, "codecs", [type(codec).__name__ for codec in codecs], "a Codec for each layer")
    for name, layers in (("keys", keys), ("values", values), ("queries", queries)):
        if layers is not None and len(layers) != len(codecs):
            raise ArgumentError.of(op, name, f"{len(layers)} layers", f"{len(codecs)} as codecs")
    checked = []
    for layer, codec in enumerate(codecs):
        k, v = keys[layer], values[layer]
        for name, x, dim in ((f"keys[{layer}]", k, codec.Dk), (f"values[{layer}]", v, codec.Dv)):
            if (
                not isinstance(x, Tensor)
                or x.ndim != 3
                or tuple(x.shape) != (k.shape[0], codec.heads, dim)
                or not len(x)
            ):
                raise ArgumentError.of(op, name, describe(x), f"rows [N,{codec.heads},{dim}], N >= 1")
        q = k[-QUERIES:] if queries is None else queries[layer]
        if (not isinstance(q, Tensor) or q.ndim != 3 or q.shape[2] != codec.Dk or q.shape[1] % codec.heads
                or not 1 <= q.shape[0] <= k.shape[0]):  # fmt: skip
            expected = f"[T,Hq,{codec.Dk}], Hq a multiple of {codec.heads}, T at most {k.shape[0]}"
            raise ArgumentError.of(op, f"queries[{layer}]", describe(q), expected)
        checked.append((codec, k, v, q))
    return checked
