"""lm_head_stats and lm_head_part in Triton: products of tiles, and what a tile of logits says, without writing it.

A tile is always 16 rows by a fixed number of columns and channels are added in their order, so a row's bits depend neither on
the batch nor on its place in it. Tiles of rows that need the same weights run together: those come from memory once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..runtime.triton_common import cdiv, kind, operand, product, product_kind, raw
from .triton_finish import finish, result_outs
from .triton_probe import probe
from .triton_tiles import store_tile, wanted

ROWS = 16
COLUMNS = 256
CHANNELS = {True: 32, False: 64}  # at a time: of f32 products, of others


@triton.jit(do_not_specialize=["B", "row_tiles"])
def lm_head_kernel(
    hidden, hidden_row, weight, weight_row, B, D, row_tiles, V, columns, tiles, bias, mask_bits, mask_row, cap, watch_ids,
    watch_row, watch_step, W, target_ids, target_step, start, temperature, temperature_step, m, sums, faults, keys, watch,
    target,
    HKIND: tl.constexpr, WKIND: tl.constexpr, DOT: tl.constexpr, K: tl.constexpr, WATCHED: tl.constexpr,
    TARGETED: tl.constexpr, TEMPERATURE: tl.constexpr, CAPPED: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """One tile of rows and columns."""
    tile = tl.program_id(0) // row_tiles
    row = (tl.program_id(0) % row_tiles * R + tl.arange(0, R)[:, None]).to(tl.int64)
    first = tile * N
    column = first + tl.arange(0, N)
    x = tl.zeros((R, N), tl.float32)
    for begin in range(0, D, C):
        d = begin + tl.arange(0, C)[None, :]
        h = tl.load(hidden + row * hidden_row + d, mask=(row < B) & (d < D), other=0)
        w = tl.load(
            weight + column[:, None].to(tl.int64) * weight_row + d, mask=(column < V)[:, None] & (d < D), other=0
        )
        x += product(operand(h, HKIND, DOT), tl.trans(operand(w, WKIND, DOT)))
    store_tile(
        x, row, row < B, column[None, :], first, tile, V, columns, tiles, bias, mask_bits, mask_row, cap, watch_ids, watch_row,
        watch_step, W, target_ids, target_step, start, temperature, temperature_step, m, sums, faults, keys, watch, target,
        K, WATCHED, TARGETED, TEMPERATURE, CAPPED, R, N,
    )  # fmt: skip


def _on_hidden(hidden, weight, options: tuple, outs: tuple | None, part: bool) -> tuple[torch.Tensor, ...]:
    (B, D), V = hidden.shape, weight.shape[0]
    w = wanted(B, V, COLUMNS, hidden.device, *options)
    outs = outs or result_outs(w.dims, part, hidden.device)
    if B == 0:
        return outs
    dot, row_tiles = product_kind(hidden, weight), cdiv(B, ROWS)
    lm_head_kernel[(row_tiles * w.tiles,)](
        raw(hidden), hidden.stride(0), raw(weight), weight.stride(0), B, D, row_tiles, V, *w.tile_args, HKIND=kind(hidden),
        WKIND=kind(weight), DOT=dot, **w.flags, CAPPED=w.capped, R=ROWS, N=COLUMNS, C=CHANNELS[dot == 0], num_warps=8,
        num_stages=3,
    )  # fmt: skip
    return finish(w, outs, part)


def lm_head_stats(
    hidden, weight, temperature, bias, softcap, valid_vocab, mask_bits, k, watch_ids, target_ids, vocab_start, of_probe, *,
    outs=None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The results of `logits_stats` of hidden . weight, and the score of a probe, or [B,0]."""
    options = (temperature, bias, softcap, valid_vocab, mask_bits, k, watch_ids, target_ids, vocab_start)
    stats = _on_hidden(hidden, weight, options, None if outs is None else outs[:9], False)
    if of_probe[0] is None:
        score = torch.empty(len(hidden), 0, device=hidden.device) if outs is None else outs[9]
    else:
        score = probe(hidden, *of_probe, outs=None if outs is None else outs[9:])[0]
    return (*stats, score)


def lm_head_part(
    hidden, weight, temperature, bias, softcap, valid_vocab, mask_bits, k, watch_ids, target_ids, vocab_start, *, outs=None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """`logits_part` of hidden . weight."""
    options = (temperature, bias, softcap, valid_vocab, mask_bits, k, watch_ids, target_ids, vocab_start)
    return _on_hidden(hidden, weight, options, outs, True)
