"""Indexes over a cache: the key sketch (tokens) and page summaries (pages)."""

from __future__ import annotations

import torch

from ..runtime.arguments import instance
from ..runtime.arrays import as_torch
from ..runtime.backends import call
from ..runtime.errors import ArgumentError
from .types import Array, KeySketch, SketchParams


def calibrate(samples: Array) -> SketchParams:
    """Sketch parameters of a layer from keys [N,Hkv,D] of any text (N >= 1; a few hundred are plenty).

    centre is their mean, scale the root mean square of what is left. Any stale centre stays valid: it costs about 1 % of
    perplexity to have none (docs/slicing.md). Deterministic; results are torch tensors on the samples' device.
    """
    x = as_torch(samples)
    if not isinstance(x, torch.Tensor) or x.ndim != 3 or not x.is_floating_point() or x.shape[0] == 0:
        got = f"{x.dtype}{list(x.shape)}".removeprefix("torch.") if isinstance(x, torch.Tensor) else type(x).__name__
        raise ArgumentError.of("calibrate", "samples", got, "float keys [N,Hkv,D] with N >= 1")
    x = x.detach().float()
    centre = x.mean(0)
    scale = (x - centre).pow(2).mean((0, 2)).sqrt()
    return SketchParams(centre.contiguous(), scale.contiguous())


def key_sketch(
    k_cache: Array,
    block_table: Array | None,
    seq_lens: Array,
    params: SketchParams,
    *,
    planes: int = 2,
    start: Array | None = None,
    k_scale: Array | float | None = None,
    out: KeySketch | None = None,
    workspace: Array | None = None,
    backend: str | None = None,
) -> KeySketch:
    """The sketch of every live key of a cache; entries beyond seq_lens keep what they hold (0 when allocated here).

    start: i32|i64 [B], refresh from that token on, rounded down to its page's first token; equal bits to a full rebuild.
    planes: 1 or 2.  D <= 1024.  out: a sketch to update.
    Every backend makes the same bits: additions in a fixed order and single IEEE operations.
    Method: random signs and a Hadamard transform, then 1- and 2-bit codes with one norm per key (RaBitQ, Gao & Long 2024).
    """
    instance("key_sketch", "params", params, SketchParams)
    if out is not None:
        instance("key_sketch", "out", out, KeySketch)
    outs = (None, None) if out is None else (out.bits, out.norm)
    if out is not None and out.params.id != params.id:
        raise ArgumentError.of("key_sketch", "params", f"id {params.id}", f"{out.params.id} as in out")
    inputs = (k_cache, block_table, seq_lens, params.centre, k_scale, planes, start)
    bits, norm = call("slicing", "key_sketch", inputs, outs, workspace, backend)
    return KeySketch(bits, norm, params, int(k_cache.shape[3]), int(k_cache.shape[2]))


def page_summary(
    k_cache: Array,
    block_table: Array | None,
    seq_lens: Array,
    *,
    start: Array | None = None,
    k_scale: Array | float | None = None,
    out: Array | None = None,
    workspace: Array | None = None,
    backend: str | None = None,
) -> Array:
    """Centre and radius of each page's live keys: [P,Hkv,2,D] in the cache's type (f32 for f8 caches).

    Rounded outward: centre +- radius contains every key. start and out as in `key_sketch`.
    """
    inputs = (k_cache, block_table, seq_lens, k_scale, start)
    return call("slicing", "page_summary", inputs, (out,), workspace, backend)[0]
