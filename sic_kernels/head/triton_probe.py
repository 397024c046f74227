"""probe in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..runtime.triton_common import device, kind, power, raw, to_f32

CHANNELS = 128  # of hidden states, at a time


@device
def pair_sum(x, R: tl.constexpr, N: tl.constexpr):
    """Sums of rows [R,N] as [R]: of neighbours, of their sums, and so on. N is a power of two."""
    for i in tl.static_range(1, 16):
        if (N >> i) > 0:
            a, b = tl.split(tl.reshape(x, (R, N >> i, 2)))
            x = a + b
    return tl.reshape(x, (R,))


@triton.jit
def probe_kernel(
    hidden, hidden_row, projection, projection_row, vector, vector_row, bias, score, score_row, D, R, n,
    KIND: tl.constexpr, PROJECTION: tl.constexpr, RELU: tl.constexpr, SIGMOID: tl.constexpr, RP: tl.constexpr,
    NP: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The scores of one row."""
    row = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, RP)[:, None]
    sums = tl.zeros((RP, N), tl.float32)
    for first in range(0, D, N):
        d = first + tl.arange(0, N)[None, :]
        h = to_f32(tl.load(hidden + row * hidden_row + d, mask=d < D, other=0), KIND)
        p = tl.load(projection + r.to(tl.int64) * projection_row + d, mask=(r < R) & (d < D), other=0)
        sums += to_f32(p, PROJECTION) * h
    inner = tl.reshape(pair_sum(sums, RP, N), (1, RP))
    if RELU:
        inner = tl.where(inner < 0, 0.0, inner)
    i, r = tl.arange(0, NP), tl.arange(0, RP)[None, :]
    v = tl.load(vector + i[:, None] * vector_row + r, mask=(i < n)[:, None] & (r < R), other=0.0)
    x = pair_sum(v * inner, NP, RP) + tl.load(bias + i, mask=i < n, other=0.0)
    if SIGMOID:
        x = 1.0 / (1.0 + tl.exp(-x))
    tl.store(score + row * score_row + i, x, mask=i < n)


def probe(hidden, projection, vector, bias, activation, link, *, outs=None) -> tuple[torch.Tensor]:
    """score f32 [B,n] = link(vector . activation(projection . hidden) + bias)."""
    (B, D), R, n = hidden.shape, projection.shape[0], vector.shape[0]
    score = torch.empty(B, n, device=hidden.device) if outs is None else outs[0]
    if score.numel():
        probe_kernel[(B,)](
            raw(hidden), hidden.stride(0), raw(projection), projection.stride(0), vector, vector.stride(0), bias,
            score, score.stride(0), D, R, n, KIND=kind(hidden), PROJECTION=kind(projection), RELU=activation == 1,
            SIGMOID=link == 0, RP=power(R, 2), NP=power(n), N=CHANNELS,
        )  # fmt: skip
    return (score,)
