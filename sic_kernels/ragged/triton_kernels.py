"""The ragged ops in Triton: where there is a GPU but no CUDA compiler, and a second implementation in tests.

Each function takes the inputs of the native op of its name, in the same order, and `outs`. It launches and returns, so that it
can be captured. A program takes some rows of one sequence; rows are moved as integers of up to 8 bytes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["pack", "unpack"]

WORDS = 4096  # of a program at a time
COLUMNS = 512  # of a row at a time, at most
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def place(bounds, longest, rows, N: tl.constexpr):
    """Of a program's N rows: their number in the sequence, whether they have a packed row, and that row.

    The bounds are taken as right, but nothing outside the packed rows is touched for them.
    """
    b = tl.program_id(0)
    begin = tl.load(bounds + b).to(tl.int64)
    end = tl.minimum(tl.load(bounds + b + 1).to(tl.int64), rows)
    row = tl.program_id(1).to(tl.int64) * N + tl.arange(0, N)
    live = (row < longest) & (begin >= 0) & (begin + row < end)
    return row, live, begin + row


@triton.jit
def pack_rows_kernel(
    padded, sequence_stride, row_stride, packed, packed_stride, bounds, longest, rows, words,
    N: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The live rows of a program, from their sequence to the packed tensor."""
    row, live, target = place(bounds, longest, rows, N)
    source = tl.program_id(0).to(tl.int64) * sequence_stride + row * row_stride
    for first in range(0, words, COLUMNS):
        at = (first + tl.arange(0, COLUMNS))[None, :]
        mask = live[:, None] & (at < words)
        value = tl.load(padded + source[:, None] + at, mask=mask, other=0)
        tl.store(packed + (target * packed_stride)[:, None] + at, value, mask=mask)


@triton.jit
def unpack_rows_kernel(
    packed, packed_stride, padded, sequence_stride, row_stride, bounds, longest, rows, words, fill,
    N: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The places of a program: rows from the packed tensor, and `fill` where the sequence has ended."""
    row, live, source = place(bounds, longest, rows, N)
    target = tl.program_id(0).to(tl.int64) * sequence_stride + row * row_stride
    for first in range(0, words, COLUMNS):
        at = (first + tl.arange(0, COLUMNS))[None, :]
        inside = (row < longest)[:, None] & (at < words)
        value = tl.load(packed + (source * packed_stride)[:, None] + at, mask=inside & live[:, None], other=fill)
        tl.store(padded + target[:, None] + at, value, mask=inside)


def pack(padded: torch.Tensor, cu_seqlens: torch.Tensor, rows: int | None, *, outs: Any) -> None:
    """out [N,...]: the rows of all sequences, one behind the other."""
    (out,) = outs
    wide, tight, _ = _words(padded.flatten(2) if padded.ndim > 2 else padded[..., None], _rows(out))
    if wide.numel() and tight.numel():
        N, columns = _block(wide.shape[2])
        pack_rows_kernel[(wide.shape[0], triton.cdiv(wide.shape[1], N))](
            wide, *wide.stride()[:2], tight, tight.stride(0), cu_seqlens, wide.shape[1], tight.shape[0], wide.shape[2],
            N=N, COLUMNS=columns,
        )  # fmt: skip


def unpack(packed: torch.Tensor, cu_seqlens: torch.Tensor, max_len: int, fill: int, *, outs: Any) -> None:
    """out [B,max_len,...]: the sequences side by side, `fill` behind each."""
    (out,) = outs
    wide, tight, item = _words(out.flatten(2) if out.ndim > 2 else out[..., None], _rows(packed))
    if wide.numel():
        N, columns = _block(wide.shape[2])
        unpack_rows_kernel[(wide.shape[0], triton.cdiv(wide.shape[1], N))](
            tight, tight.stride(0), wide, *wide.stride()[:2], cu_seqlens, wide.shape[1], tight.shape[0], wide.shape[2],
            _repeated(fill, item, wide.element_size()), N=N, COLUMNS=columns,
        )  # fmt: skip


def _rows(packed: torch.Tensor) -> torch.Tensor:
    return packed.flatten(1) if packed.ndim > 1 else packed[:, None]


def _words(padded: torch.Tensor, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Both as the widest integers, up to 8 bytes, that all of their rows are whole numbers of; and the bytes of an element."""
    item = padded.element_size()
    marks: list[Any] = [padded.shape[-1] * item, padded.data_ptr(), packed.data_ptr()]
    marks += [stride * item for x in (padded, packed) for stride in x.stride()[:-1]]
    marks += [x.storage_offset() * item for x in (padded, packed)]
    size = next(n for n in (8, 4, 2, 1) if all(mark % n == 0 for mark in marks))
    return padded.view(_BITS[size]), packed.view(_BITS[size]), item


def _repeated(fill: int, item: int, size: int) -> int:
    """The bits of an element as often as a word has it, as a signed integer."""
    return int.from_bytes(
        (fill & ((1 << 8 * item) - 1)).to_bytes(item, "little") * (size // item), "little", signed=True
    )


def _block(words: int) -> tuple[int, int]:
    """Rows and columns that a program has in hand at a time."""
    columns = min(COLUMNS, triton.next_power_of_2(words))
    return max(1, WORDS // columns), columns
