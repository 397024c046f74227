"""What the ops of the replay family mean.  Inputs in the order of the native ops."""

from __future__ import annotations

import torch

Tensor = torch.Tensor

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_STEPS = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox 4x32-10: the four numbers of 32 bits at a counter of four, under a key of two."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = _MULTIPLIERS[0] * c[0], _MULTIPLIERS[1] * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & _LOW, (a >> 32) ^ c[3] ^ k[1], a & _LOW]
        k = [(k[i] + _STEPS[i]) & _LOW for i in range(2)]
    return c


def uniform(key: Tensor, count: int) -> tuple[Tensor]:
    """out f32 [count]: the 24 high bits of each number, as a fraction; four numbers at each counter (block, layer, position)."""
    seed, position, layer = (int(x) & 0xFFFFFFFFFFFFFFFF for x in key)
    bits: list[int] = []
    for block in range(-(-count // 4)):
        counter = [block, layer & _LOW, position & _LOW, position >> 32]
        bits += philox(counter, [seed & _LOW, seed >> 32])
    return (torch.tensor([x >> 8 for x in bits[:count]], dtype=torch.float32, device=key.device) / (1 << 24),)
