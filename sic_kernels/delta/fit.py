"""Fitting templates: k-means in exact integer arithmetic.

Samples become integers of at most 20 bits, so that every dot product and every sum is exact in float64 (or int64) in any
order: the result has the same bits for any number of threads, any BLAS and any machine.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import torch

from ..runtime.arguments import integer
from ..runtime.arrays import as_torch
from ..runtime.errors import ArgumentError
from ..slicing.reference_sketch import tree_sum
from .templates import MAX_DIM, MAX_TEMPLATES, Templates, describe, halving_sum

Tensor = torch.Tensor

SAMPLE_BITS = 20  # 2 * 20 bits of a product and 10 of up to 1024 channels leave room in the 53 of a float64
ITERATIONS = 25
CHUNK = 2048  # samples assigned at a time: their scores stay in the cache
WEIGHT_SHIFT = 14  # of squared distances, so that 2^24 of them can be summed in the 63 bits of an int64


def fit_templates(
    samples: Any,
    *,
    count: int = 64,
    seed: int = 0,
    iterations: int = ITERATIONS,
    meta: Mapping[str, str] | None = None,
) -> Templates:
    """Templates of a layer from keys before RoPE, or values, [N,Hkv,D] of any text (8K tokens are plenty).

    count: templates a head, at most 256 and N.  seed: of the starting points.  meta: what to remember of their origin
    (model, layer, text).

    k-means: seeded starting points far from each other, then a fixed number of iterations; a template that no sample is
    nearest to moves to the sample furthest from its own. Bit-reproducible. Source: k-means++, Arthur & Vassilvitskii 2007.
    """
    x = _checked(samples)
    N = x.shape[0]
    count = integer("fit_templates", "count", count, 1, f"1 to {MAX_TEMPLATES} templates")
    if count > min(N, MAX_TEMPLATES):
        raise ArgumentError.of("fit_templates", "count", count, f"at most {MAX_TEMPLATES} and the {N} samples")
    rounds = integer("fit_templates", "iterations", iterations, 0, "0 or more iterations")
    if not isinstance(seed, numbers.Integral) or not 0 <= int(seed) < 1 << 63:
        raise ArgumentError.of("fit_templates", "seed", repr(seed), "an integer of 0 or more, below 2^63")

    moved, mean, step = as_integers(x)
    centres = starting_points(moved, count, torch.Generator().manual_seed(int(seed)))
    nearest, distance = assign(moved, centres)
    for _ in range(rounds):
        centres = updated(moved, centres, nearest, distance)
        nearest, distance = assign(moved, centres)
    limit = torch.finfo(torch.float16).max
    fitted = (centres * step[:, None, None] + mean[:, None]).clamp(-limit, limit).to(torch.float16)
    return Templates(fitted, unseen_spread(moved, centres, nearest, distance, step), dict(meta or {}))


def _checked(samples: Any) -> Tensor:
    x = as_torch(samples)
    if not isinstance(x, Tensor) or x.ndim != 3 or not x.is_floating_point() or 0 in x.shape or x.shape[2] > MAX_DIM:
        expected = f"float rows [N,Hkv,D], N >= 1, D at most {MAX_DIM}"
        raise ArgumentError.of("fit_templates", "samples", describe(x), expected)
    if not bool(x.isfinite().all()):
        raise ArgumentError.of("fit_templates", "samples", "values that are not finite", "finite values")
    return x.detach()


def as_integers(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """samples [N,Hkv,D] -> integers f64[Hkv,N,D] within 2^20, mean f64[Hkv,D], step f64[Hkv]: x = mean + step * integer."""
    rows = x.double()
    mean = halving_sum(rows) / rows.shape[0]
    moved = rows - mean
    largest = moved.abs().amax((0, 2))
    exponent = torch.frexp(largest).exponent  # largest < 2^exponent
    step = torch.ldexp(torch.ones_like(largest), torch.where(largest > 0, exponent - SAMPLE_BITS, 0))
    return torch.round(moved / step[:, None]).transpose(0, 1).contiguous(), mean, step


def starting_points(x: Tensor, count: int, gen: torch.Generator) -> Tensor:
    """f64[Hkv,count,D]: samples, each drawn with a probability proportional to its squared distance from those before."""
    H, N, _ = x.shape
    heads = torch.arange(H)
    half = tree_sum(x * x) / 2
    first = torch.randint(N, (H,), generator=gen).to(x.device)
    chosen = [x[heads, first]]
    distance = torch.full((H, N), torch.inf, dtype=torch.float64, device=x.device)
    while len(chosen) < count:
        c = chosen[-1]
        dots = torch.bmm(x, c[:, :, None])[..., 0]
        distance = torch.minimum(distance, 2 * (half - dots + (tree_sum(c * c) / 2)[:, None]))
        weight = (distance.long() + (1 << WEIGHT_SHIFT) - 1 >> WEIGHT_SHIFT).cumsum(-1)  # 0 where the distance is
        draw = torch.rand(H, generator=gen, dtype=torch.float64).to(x.device)
        target = (draw * weight[:, -1]).floor().long().clamp(max=(weight[:, -1] - 1).clamp(min=0))
        chosen.append(x[heads, torch.searchsorted(weight, target[:, None], right=True)[:, 0].clamp(max=N - 1)])
    return torch.stack(chosen, 1)


def assign(x: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """nearest int64[Hkv,N] (the lowest of equals), its squared distance f64[Hkv,N]."""
    half = tree_sum(centres * centres) / 2
    nearest, distance = [], []
    for rows in x.split(CHUNK, dim=1):
        score = torch.baddbmm(half[:, None], rows, centres.transpose(1, 2), beta=-1)
        best = score.argmax(-1)
        nearest.append(best)
        distance.append(tree_sum(rows * rows) - 2 * score.gather(-1, best[..., None])[..., 0])
    return torch.cat(nearest, 1), torch.cat(distance, 1)


def updated(x: Tensor, centres: Tensor, nearest: Tensor, distance: Tensor) -> Tensor:
    """The rounded mean of every template's samples; one without samples takes the furthest sample that is left."""
    H, count, D = centres.shape
    flat = (nearest + count * torch.arange(H, device=x.device)[:, None]).flatten()
    sums = torch.zeros(H * count, D, dtype=torch.float64, device=x.device).index_add_(0, flat, x.flatten(0, 1))
    members = torch.bincount(flat, minlength=H * count).reshape(H, count)
    new = torch.round(sums.reshape(H, count, D) / members.clamp(min=1)[..., None])
    for h in (members == 0).any(-1).nonzero().flatten().tolist():
        empty = (members[h] == 0).nonzero().flatten()
        furthest = distance[h].argsort(descending=True, stable=True)[: len(empty)]
        new[h, empty] = x[h, furthest]
    return new


def unseen_spread(x: Tensor, centres: Tensor, nearest: Tensor, distance: Tensor, step: Tensor) -> Tensor:
    """f32[Hkv]: mean squared residual that the samples would have, had each been left out of its template's mean.

    Of m samples each is then m / (m - 1) times as far from the mean of the others; or goes to its second template.
    """
    H, count, _ = centres.shape
    flat = (nearest + count * torch.arange(H, device=x.device)[:, None]).flatten()
    members = torch.bincount(flat, minlength=H * count)[flat].reshape(nearest.shape).double()
    without = torch.where(members > 1, distance * (members / (members - 1).clamp(min=1)) ** 2, torch.inf)
    if count > 1:
        without = torch.minimum(without, second_distance(x, centres, nearest))
    spread = halving_sum(torch.where(without.isfinite(), without, 0.0).T) / x.shape[1]
    return (spread * step * step).float()


def second_distance(x: Tensor, centres: Tensor, nearest: Tensor) -> Tensor:
    """f64[Hkv,N]: squared distance of every sample from the nearest template but its own."""
    half = tree_sum(centres * centres) / 2
    found = []
    for rows, own in zip(x.split(CHUNK, dim=1), nearest.split(CHUNK, dim=1)):
        score = torch.baddbmm(half[:, None], rows, centres.transpose(1, 2), beta=-1)
        best = score.scatter(-1, own[..., None], -torch.inf).amax(-1)
        found.append(tree_sum(rows * rows) - 2 * best)
    return torch.cat(found, 1)
