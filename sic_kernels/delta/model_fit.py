"""Fitting the templates of all layers of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..runtime.errors import ArgumentError
from ..slicing.index import calibrate
from .fit import ITERATIONS, fit_templates
from .model_shape import ModelShape, weights_digest
from .model_templates import ModelTemplates
from .rope import Rope
from .templates import Templates

Tensor = torch.Tensor


class LayerSamples(NamedTuple):
    """Keys as the cache holds them (rotated), values: [N,Hkv,D]; positions int64[N]."""

    keys: Tensor
    values: Tensor
    positions: Tensor


class ResidualNorms(NamedTuple):
    """Mean norm of what is left after the nearest template, over the mean norm of the rows, one entry a layer."""

    keys: list[float]
    values: list[float]


def fit_model_templates(
    model: Any,
    samples: Sequence[LayerSamples],
    *,
    count: int = 256,
    seed: int = 0,
    iterations: int = ITERATIONS,
    name: str | None = None,
    interleaved: bool = False,
    meta: Mapping[str, str] | None = None,
    advance: Callable[[int], None] | None = None,
) -> tuple[ModelTemplates, ResidualNorms]:
    """Templates of every layer of a transformers model from samples of its cache, one entry a layer.

    count, seed, iterations: as in `fit_templates`; equal samples give equal bits.  name, meta: what to remember.
    advance(1) is called after every layer.
    """
    shape = ModelShape.of(model, name=name, interleaved=interleaved)
    if len(samples) != shape.layers:
        raise ArgumentError.of("fit_model_templates", "samples", f"{len(samples)} layers", f"{shape.layers} layers")
    keys, values, params, norms = [], [], [], ResidualNorms([], [])
    for layer, (sample, rope) in enumerate(zip(samples, shape.ropes)):
        about = {"model": shape.name, "layer": str(layer)}
        options: dict[str, Any] = {"count": count, "seed": seed, "iterations": iterations}
        k = plain_keys(sample, rope)
        keys.append(fit_templates(k, meta={**about, "part": "k"}, **options))
        values.append(fit_templates(sample.values, meta={**about, "part": "v"}, **options))
        params.append(calibrate(sample.keys))
        norms.keys.append(residual_norm(keys[-1], k))
        norms.values.append(residual_norm(values[-1], sample.values))
        if advance is not None:
            advance(1)
    return ModelTemplates(
        shape, tuple(keys), tuple(values), tuple(params), weights_digest(model), dict(meta or {})
    ), norms


def plain_keys(sample: LayerSamples, rope: Rope | None) -> Tensor:
    """Keys before RoPE."""
    return sample.keys.float() if rope is None else rope.undo(sample.keys, sample.positions)


def residual_norm(templates: Templates, x: Tensor) -> float:
    """Mean distance of rows [N,Hkv,D] to their nearest template over their mean norm."""
    rows = x.float().transpose(0, 1)
    centres = templates.centres.float()
    distance = torch.stack([torch.cdist(r, c).amin(-1) for r, c in zip(rows, centres)])
    return (distance.mean() / rows.norm(dim=-1).mean()).item()
