"""Random numbers that follow from where they are used."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def uniform(seed: int, position: int, layer: int, *, out: Tensor) -> Tensor:
    raise NotImplementedError
