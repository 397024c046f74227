"""Where a position of a sequence lies, and who may see it: shared by every slicing reference.

Shapes: B sequences, T new query tokens, Hkv KV heads, P pages, M pages per sequence, S positions, D head size.
Every function is plain torch, allocates what it returns, and is deterministic.  None of it is meant to be fast.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def width(block_table: Tensor | None, page: int, max_seq_len: int | None) -> int:
    """Number of positions S that per-position results have: M * page, or max_seq_len where that is smaller.

    A contiguous cache (block_table None) is one page of S positions per sequence.
    """
    pages = 1 if block_table is None else block_table.shape[1]
    return pages * page if max_seq_len is None else min(pages * page, int(max_seq_len))


def visible(seq_lens: Tensor, T: int, S: int) -> Tensor:
    """int64[B,T]: how many positions query t of sequence b sees (causal among the T new tokens)."""
    t = torch.arange(T, device=seq_lens.device)
    return (seq_lens.long()[:, None] - T + t + 1).clamp(0, S)


def place(block_table: Tensor | None, seq_lens: Tensor, page: int, S: int) -> tuple[Tensor, Tensor, Tensor]:
    """page index int64[B,S], offset in the page int64[S], live bool[B,S] of every position.

    Entries of the block table that hold no live token are never used: their page index reads 0 here.
    """
    pos = torch.arange(S, device=seq_lens.device)
    live = pos < seq_lens.long()[:, None]
    if block_table is None:
        index = torch.arange(seq_lens.shape[0], device=seq_lens.device)[:, None].expand(-1, S)
    else:
        index = block_table.long()[:, pos // page]
    return torch.where(live, index, 0), pos % page, live


def live_slots(block_table: Tensor | None, seq_lens: Tensor, start: Tensor | None, pages: int, page: int) -> Tensor:
    """bool[P,page]: slots holding a live token at or after `start`, rounded down to its page's first token."""
    S = width(block_table, page, None)
    index, offset, live = place(block_table, seq_lens, page, S)
    if start is not None:
        live = live & (torch.arange(S, device=live.device) >= (start.long()[:, None] // page) * page)
    slots = torch.zeros(pages, page, dtype=torch.bool, device=live.device)
    slots[index[live], offset.expand_as(index)[live]] = True
    return slots


def per_position(paged: Tensor, block_table: Tensor | None, seq_lens: Tensor, page: int, S: int) -> Tensor:
    """[P,Hkv,page,...] -> [B,Hkv,S,...]: the values of every position; those of positions not live are zeroed."""
    index, offset, live = place(block_table, seq_lens, page, S)
    values = paged[index, :, offset.expand_as(index)].transpose(1, 2)  # [B,S,Hkv,...] -> [B,Hkv,S,...]
    dead = ~live[:, None].reshape(live.shape[0], 1, S, *[1] * (values.dim() - 3))
    return values.masked_fill(dead, 0)


def head_scale(scale: Tensor | float | None, heads: int) -> Tensor | None:
    """f32[Hkv] of a scale given as a number, a scalar tensor or one value per head."""
    if scale is None:
        return None
    return torch.as_tensor(scale, dtype=torch.float32).reshape(-1).expand(heads)


def scaled_keys(cache: Tensor, scale: Tensor | float | None) -> Tensor:
    """f32[P,Hkv,page,D]: cache values as numbers.  An f8 cache is multiplied by its scale, one f32 product."""
    keys = cache.float()
    per_head = head_scale(scale, cache.shape[1])
    return keys if per_head is None else keys * per_head[:, None, None].to(keys.device)


def softmax_scale(scale: float | None, D: int) -> float:
    """The factor on q.k: given, or 1/sqrt(D)."""
    return 1.0 / D**0.5 if scale is None else float(scale)


def selected_positions(indices: Tensor, counts: Tensor, unit: int, page: int, seen: Tensor, S: int) -> Tensor:
    """bool[B,T,Hkv,S]: the positions a selection names (unit 0: tokens, 1: pages) and its query can see."""
    K = indices.shape[-1]
    listed = torch.arange(K, device=indices.device) < counts[..., None]
    units = S if unit == 0 else -(-S // page)
    # One surplus column takes the entries that are not listed.
    target = torch.where(listed, indices.long(), units)
    chosen = torch.zeros(*indices.shape[:-1], units + 1, dtype=torch.bool, device=indices.device)
    chosen.scatter_(-1, target, True)
    chosen = chosen[..., :units]
    if unit == 1:
        chosen = chosen.repeat_interleave(page, dim=-1)[..., :S]
    return chosen & (torch.arange(S, device=indices.device) < seen[:, :, None, None])
