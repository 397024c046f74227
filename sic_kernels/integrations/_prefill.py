"""Dense attention of many new tokens over paged keys, through torch's own kernels."""

from __future__ import annotations

import torch

from ..slicing.paged_rows import PagedRows

Tensor = torch.Tensor

QUERY_CHUNK = 1024  # bounds the mask of a chunk that is not the first: QUERY_CHUNK x S bytes


def prefill_attention(
    q: Tensor,
    pages: PagedRows,
    layer: int,
    live: Tensor | None,
    scale: float | None,
    fresh: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """q `[B,Hq,T,D]` over each row's own tokens, causal; returns `[B,T,Hq,Dv]`, 0 where a token is padding.

    fresh: keys and values `[B,Hkv,T,D]` of the new tokens, for a cache that keeps something less exact.
    Row by row, so that a row's result does not depend on its batch. Keys are read in place when the row's pages are
    consecutive.
    """
    B, Hq, T, _ = q.shape
    out = torch.zeros(B, T, Hq, pages.v_head_dim, dtype=q.dtype, device=q.device)
    new = [T] * B if live is None else live.sum(1).tolist()
    for row in range(B):
        if new[row] == 0:
            continue
        k, v = (x.to(q.dtype)[None] for x in pages.row(layer, row))
        if fresh is not None:
            k, v = (
                torch.cat((x[:, :, : x.shape[2] - new[row]], f[row : row + 1, :, T - new[row] :].to(q.dtype)), dim=2)
                for x, f in zip((k, v), fresh)
            )
        for first in range(T - new[row], T, QUERY_CHUNK):
            last = min(first + QUERY_CHUNK, T)
            part = _causal_tail(q[row : row + 1, :, first:last], k, v, k.shape[2] - T + last, scale)
            out[row, first:last] = part[0].transpose(0, 1)
    return out


def _causal_tail(q: Tensor, k: Tensor, v: Tensor, end: int, scale: float | None) -> Tensor:
    """Queries that stand at positions end - n .. end - 1 of the keys; returns `[1,Hq,n,Dv]`."""
    n = q.shape[2]
    k, v = k[:, :, :end], v[:, :, :end]
    if n == end:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    mask = torch.ones(n, end, dtype=torch.bool, device=q.device).tril_(end - n)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
