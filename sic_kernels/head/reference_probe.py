"""probe: a small network on a hidden state."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def probe(
    hidden: Tensor, projection: Tensor, vector: Tensor, bias: Tensor, activation: int, link: int
) -> tuple[Tensor]:
    """score f32 [B,n] = link(vector . activation(projection . hidden) + bias); activation 1: relu, link 0: sigmoid."""
    inner = hidden.double() @ projection.double().T
    if activation == 1:
        inner = inner.clamp(min=0)
    score = inner @ vector.double().T + bias.double()
    return ((score.sigmoid() if link == 0 else score).float(),)
