"""Rotary position embeddings as two small tables, with an exact way back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch

from ..runtime.arguments import integer, real
from ..runtime.arrays import as_torch
from ..runtime.errors import ArgumentError
from .reference_rotation import ROPE_BLOCK, apply_rope, undo_rope

Tensor = torch.Tensor

KINDS = ("default", "linear", "llama3", "yarn")
MAX_POSITION = 131072


@dataclasses.dataclass(frozen=True, eq=False)
class Rope:
    """RoPE of the first `dim` channels of a head; the others are left as they are.

    theta: base of the frequencies.  scaling: None, or the parameters of a configuration (`rope_type` "linear", "llama3" or
    "yarn", `factor`, ..); those whose frequencies depend on the length of the sequence are refused, since a position would
    not have one angle.  max_position: positions are below it (rounded up to a multiple of 64).
    interleaved: channels 2d and 2d + 1 make a pair, not d and d + dim/2.

    lo f32[64,2,dim/2], hi f32[max_position/64,2,dim/2]: cosines, then sines; position 64 i + j turns by lo[j], then by hi[i]
    (times `attention_factor`); undo is the inverse of hi. Computed in float64, so that all backends turn alike.
    """

    theta: float
    dim: int
    scaling: Mapping[str, Any] | None = None
    max_position: int = MAX_POSITION
    interleaved: bool = False
    inv_freq: Tensor = dataclasses.field(init=False, repr=False)
    attention_factor: float = dataclasses.field(init=False, repr=False)
    lo: Tensor = dataclasses.field(init=False, repr=False)
    hi: Tensor = dataclasses.field(init=False, repr=False)
    undo_hi: Tensor = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        _number("theta", self.theta, lambda x: x > 1, "a number above 1")
        dim = integer("Rope", "dim", self.dim, 2, "an even number of channels, 2 or more")
        if dim % 2:
            raise ArgumentError.of("Rope", "dim", dim, "an even number of channels, 2 or more")
        last = integer("Rope", "max_position", self.max_position, 1, "1 or more positions, an integer below 2^31")
        inv_freq, factor = frequencies(float(self.theta), dim, self.scaling)
        angle = inv_freq.double()
        lo = torch.arange(ROPE_BLOCK, dtype=torch.float64)[:, None] * angle
        hi = ROPE_BLOCK * torch.arange(-(-last // ROPE_BLOCK), dtype=torch.float64)[:, None] * angle
        hi_table = _table(hi)
        made = {
            "inv_freq": inv_freq, "attention_factor": factor, "lo": _table(lo).float(),
            "hi": (hi_table * factor).float(), "undo_hi": (hi_table / factor).float(),
        }  # fmt: skip
        for name, value in made.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_config(
        cls,
        config: Any,
        *,
        layer_type: str | None = None,
        max_position: int | None = None,
        interleaved: bool = False,
    ) -> Rope:
        """The RoPE of a transformers configuration.

        layer_type: which of the sets to take where layers differ.  max_position: default the configuration's, at least
        131072.  interleaved: configurations do not say it.
        """
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        given = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
        if any(isinstance(value, Mapping) for value in given.values()):
            if layer_type not in given:
                raise ArgumentError.of("Rope.from_config", "layer_type", repr(layer_type), "|".join(map(str, given)))
            given = given[layer_type]
        longest = getattr(text, "max_position_embeddings", None) or 0
        scaling = {**given, "rope_type": given.get("rope_type") or given.get("type") or "default"}
        if longest and scaling.get("original_max_position_embeddings") is None:
            scaling["original_max_position_embeddings"] = (
                getattr(text, "original_max_position_embeddings", None) or longest
            )
        if longest and scaling.get("factor") is None and scaling["rope_type"] != "default":
            scaling["factor"] = longest / scaling["original_max_position_embeddings"]
        theta = given.get("rope_theta") or getattr(text, "rope_theta", None) or 10000.0
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        share = given.get("partial_rotary_factor") or getattr(text, "partial_rotary_factor", None) or 1.0
        return cls(theta, int(head * share), scaling, max_position or max(longest, MAX_POSITION), interleaved)

    def apply(self, x: Any, positions: Any) -> Tensor:
        """x [N,..,D] turned to `positions` [N] (or as many of x's leading dimensions as it has): f32."""
        x, positions = self._checked("apply", x, positions)
        return apply_rope(x, positions, self.lo.to(x.device), self.hi.to(x.device), self.interleaved)

    def undo(self, x: Any, positions: Any) -> Tensor:
        """x turned back from `positions`: f32. Within rounding the inverse of `apply`."""
        x, positions = self._checked("undo", x, positions)
        return undo_rope(x, positions, self.lo.to(x.device), self.undo_hi.to(x.device), self.interleaved)

    def _checked(self, op: str, x: Any, positions: Any) -> tuple[Tensor, Tensor]:
        x, positions = as_torch(x), as_torch(positions)
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 1 or x.shape[-1] < self.dim:
            raise ArgumentError.of(f"Rope.{op}", "x", _what(x), f"float rows of {self.dim} channels or more")
        if (
            not isinstance(positions, Tensor)
            or positions.is_floating_point()
            or positions.shape != x.shape[: positions.ndim]
            or positions.ndim >= x.ndim
        ):
            got = _what(positions)
            raise ArgumentError.of(f"Rope.{op}", "positions", got, f"integers for leading dimensions of {_what(x)}")
        limit = self.hi.shape[0] * ROPE_BLOCK
        if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < limit:
            got = f"{int(positions.min())} to {int(positions.max())}"
            raise ArgumentError.of(f"Rope.{op}", "positions", got, f"0 to {limit - 1}")
        return x.float(), positions

    def tables(self, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
        """lo, hi, undo as the native layer takes them."""
        return self.lo.to(device), self.hi.to(device), self.undo_hi.to(device)


def _what(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}".removeprefix("torch.") if isinstance(x, Tensor) else type(x).__name__


def _table(angle: Tensor) -> Tensor:
    """Angles [n,dim/2] -> cosines and sines [n,2,dim/2]."""
    return torch.stack((angle.cos(), angle.sin()), 1)


def _number(name: str, value: Any, allowed: Any, expected: str) -> float:
    return real("Rope", name, value, lambda x: math.isfinite(x) and allowed(x), expected)


# --- frequencies ----------------------------------------------------------------------------------------------------


def frequencies(theta: float, dim: int, scaling: Mapping[str, Any] | None) -> tuple[Tensor, float]:
    """Inverse frequencies f32[dim/2], computed in float32 as models do, and the factor on what is turned."""
    if scaling is not None and not isinstance(scaling, Mapping):
        raise ArgumentError.of("Rope", "scaling", type(scaling).__name__, "None or a mapping of parameters")
    given = dict(scaling or {})
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in KINDS:
        raise ArgumentError.of("Rope", "scaling.rope_type", repr(kind), "|".join(KINDS))
    periods = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if kind == "default":
        return 1.0 / periods, 1.0
    if kind == "linear":
        return 1.0 / periods / _parameter(given, "factor"), 1.0
    return _llama3(1.0 / periods, given) if kind == "llama3" else _yarn(periods, theta, dim, given)


def _parameter(given: dict, name: str, default: float | None = None) -> float:
    value = given.get(name)
    if value is None and default is not None:
        return default
    return _number(f"scaling.{name}", value, lambda x: x > 0, "a number above 0")


def _llama3(inv_freq: Tensor, given: dict) -> tuple[Tensor, float]:
    """Long waves slowed by `factor`, short ones kept, those between blended (Llama 3.1)."""
    factor, context = _parameter(given, "factor"), _parameter(given, "original_max_position_embeddings")
    low, high = _parameter(given, "low_freq_factor"), _parameter(given, "high_freq_factor")
    if high <= low:
        raise ArgumentError.of("Rope", "scaling.high_freq_factor", high, f"more than low_freq_factor {low}")
    wave = 2 * math.pi / inv_freq
    share = (context / wave - low) / (high - low)  # of the unscaled frequency
    slowed = torch.where(wave > context / low, inv_freq / factor, inv_freq)
    between = (wave >= context / high) & (wave <= context / low)
    return torch.where(between, (1 - share) * slowed / factor + share * slowed, slowed), 1.0


def _yarn(periods: Tensor, theta: float, dim: int, given: dict) -> tuple[Tensor, float]:
    """A ramp over the channels from unscaled to slowed frequencies, and a temperature (YaRN, Peng et al. 2023)."""
    factor, context = _parameter(given, "factor"), _parameter(given, "original_max_position_embeddings")

    def channel(turns: float) -> float:
        """The channel pair that makes so many turns within the context."""
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = channel(_parameter(given, "beta_fast", 32.0)), channel(_parameter(given, "beta_slow", 1.0))
    if given.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    span = last - first or 0.001
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - first) / span).clamp(0, 1)
    inv_freq = (1.0 / (factor * periods)) * (1 - kept) + (1.0 / periods) * kept
    return inv_freq, _yarn_temperature(factor, given)


def _yarn_temperature(factor: float, given: dict) -> float:
    if given.get("attention_factor") is not None:
        return _parameter(given, "attention_factor")

    def grown(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if given.get("mscale") and given.get("mscale_all_dim"):
        return grown(_parameter(given, "mscale")) / grown(_parameter(given, "mscale_all_dim"))
    return grown(1.0)
