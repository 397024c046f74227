"""logits_stats, logits_part and merge_stats in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..runtime.triton_common import kind, power, raw, scale_args, to_f32
from .triton_finish import finish, merge_stats_kernel, packed, result_outs, unpack
from .triton_tiles import store_tile, wanted

COLUMNS = 2048  # of a tile


@triton.jit
def logits_kernel(
    x, x_row, V, columns, tiles, bias, mask_bits, mask_row, cap, watch_ids, watch_row, watch_step, W, target_ids, target_step,
    start, temperature, temperature_step, m, sums, faults, keys, watch, target,
    KIND: tl.constexpr, K: tl.constexpr, WATCHED: tl.constexpr, TARGETED: tl.constexpr, TEMPERATURE: tl.constexpr,
    CAPPED: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One tile of one row."""
    row, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    first = tile * N
    column = first + tl.arange(0, N)[None, :]
    z = to_f32(tl.load(x + row * x_row + column, mask=column < V, other=0), KIND)
    row = tl.zeros((1, 1), tl.int64) + row
    store_tile(
        z, row, row >= 0, column, first, tile, V, columns, tiles, bias, mask_bits, mask_row, cap, watch_ids, watch_row,
        watch_step, W, target_ids, target_step, start, temperature, temperature_step, m, sums, faults, keys, watch, target,
        K, WATCHED, TARGETED, TEMPERATURE, CAPPED, 1, N,
    )  # fmt: skip


def _on_logits(logits, options: tuple, outs: tuple | None, part: bool) -> tuple[torch.Tensor, ...]:
    B, V = logits.shape
    w = wanted(B, V, COLUMNS, logits.device, *options)
    outs = outs or result_outs(w.dims, part, logits.device)
    if B == 0:
        return outs
    logits_kernel[(B * w.tiles,)](
        raw(logits), logits.stride(0), V, *w.tile_args, KIND=kind(logits), **w.flags, CAPPED=w.capped, N=COLUMNS
    )
    return finish(w, outs, part)


def logits_stats(
    logits, temperature, bias, softcap, valid_vocab, mask_bits, k, watch_ids, target_ids, vocab_start, *, outs=None
) -> tuple[torch.Tensor, ...]:
    """lse, entropy, varentropy, argmax, topk_ids, topk_logprobs, watch_logprobs, target_logprob, status."""
    options = (temperature, bias, softcap, valid_vocab, mask_bits, k, watch_ids, target_ids, vocab_start)
    return _on_logits(logits, options, outs, False)


def logits_part(
    logits, temperature, bias, softcap, valid_vocab, mask_bits, k, watch_ids, target_ids, vocab_start, *, outs=None
) -> tuple[torch.Tensor, ...]:
    """m, s, t, u, top_ids, top, watch, target, status of a shard."""
    options = (temperature, bias, softcap, valid_vocab, mask_bits, k, watch_ids, target_ids, vocab_start)
    return _on_logits(logits, options, outs, True)


def merge_stats(m, s, t, u, top_ids, top, watch, target, status, temperature, *, outs=None) -> tuple[torch.Tensor, ...]:
    """Parts [n,B,..] become the nine results of `logits_stats`."""
    (n, B), k, W, targets = m.shape, top.shape[2], watch.shape[2], target.shape[1]
    outs = outs or result_outs((B, k, W, targets), False, m.device)
    if B == 0:
        return outs
    parts = (x.contiguous() for x in (m, s, t, u, top_ids, top, watch, target, status))
    *value, mode = scale_args(temperature)
    into = packed(outs)
    merge_stats_kernel[(B,)](
        *parts, *value, n, B, k, W, *into, K=power(k), WATCHED=power(W) if W else 0, TARGETED=targets > 0, TEMPERATURE=mode,
    )  # fmt: skip
    return unpack(into, outs)
