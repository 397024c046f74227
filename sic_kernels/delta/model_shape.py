"""Which model templates belong to: the shape of its cache, and a digest of its weights."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from ..runtime.arguments import integer
from ..runtime.errors import ArgumentError
from .rope import Rope

SAMPLED = 64  # elements of every parameter that make the digest
NUMBERS = ("layers", "kv_heads", "k_dim", "v_dim", "hidden_size", "vocab_size")


@dataclasses.dataclass(frozen=True, eq=False)
class ModelShape:
    """What a cache of the model looks like.

    name: for people.  hidden_size, vocab_size: tell apart models whose caches look alike.  ropes: of every layer, None where
    keys are not rotated.
    """

    name: str
    layers: int
    kv_heads: int
    k_dim: int
    v_dim: int
    hidden_size: int
    vocab_size: int
    ropes: tuple[Rope | None, ...]

    def __post_init__(self) -> None:
        for name in NUMBERS:
            low = 0 if name in ("hidden_size", "vocab_size") else 1
            object.__setattr__(self, name, integer("ModelShape", name, getattr(self, name), low, f"{low} or more"))
        if len(self.ropes) != self.layers:
            raise ArgumentError.of("ModelShape", "ropes", len(self.ropes), f"one for each of {self.layers} layers")

    @classmethod
    def of(cls, model: Any, *, name: str | None = None, interleaved: bool = False) -> ModelShape:
        """The shape of a transformers model or configuration. interleaved: of its RoPE; configurations do not say it."""
        config = getattr(model, "config", model)
        text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
        try:
            layers, heads = text.num_hidden_layers, text.num_attention_heads
            hidden = text.hidden_size
        except AttributeError as error:
            raise ArgumentError.of(
                "codecs", "model", type(model).__name__, f"a transformers model or configuration ({error})"
            ) from error
        dim = getattr(text, "head_dim", None) or hidden // heads
        return cls(
            str(getattr(config, "_name_or_path", "") if name is None else name), layers,
            getattr(text, "num_key_value_heads", None) or heads, dim, getattr(text, "v_head_dim", None) or dim, hidden,
            getattr(text, "vocab_size", None) or 0, _ropes(text, layers, interleaved),
        )  # fmt: skip

    @property
    def interleaved(self) -> bool:
        return any(rope is not None and rope.interleaved for rope in self.ropes)

    def differing(self, other: ModelShape) -> list[str]:
        """Fields in which another model is of another shape; the name is none of them."""
        fields = [name for name in NUMBERS if getattr(self, name) != getattr(other, name)]
        alike = [_turns(rope) for rope in self.ropes] == [_turns(rope) for rope in other.ropes]
        return fields if alike else [*fields, "rope"]

    def check(self, model: ModelShape) -> None:
        """`ArgumentError` naming the first field in which `model` differs."""
        for name in self.differing(model):
            got, expected = (
                [_turns(rope) for rope in shape.ropes][:1] if name == "rope" else getattr(shape, name)
                for shape in (model, self)
            )
            raise ArgumentError.of("ModelTemplates", f"model.{name}", got, f"{expected}, as in the templates")

    # --- as JSON ------------------------------------------------------------------------------------------------

    def fields(self) -> dict[str, Any]:
        """Plain data; a RoPE that layers share is there once."""
        distinct = list({_turns(rope): rope for rope in self.ropes}.values())
        known = [_turns(rope) for rope in distinct]
        return {
            "name": self.name, **{name: getattr(self, name) for name in NUMBERS},
            "ropes": [None if rope is None else _rope_fields(rope) for rope in distinct],
            "rope_of_layer": [known.index(_turns(rope)) for rope in self.ropes],
        }  # fmt: skip

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> ModelShape:
        ropes = [None if rope is None else Rope(**rope) for rope in fields["ropes"]]
        numbers = {name: fields[name] for name in NUMBERS}
        return cls(name=str(fields["name"]), **numbers, ropes=tuple(ropes[i] for i in fields["rope_of_layer"]))


def _ropes(text: Any, layers: int, interleaved: bool) -> tuple[Rope | None, ...]:
    """Every layer's RoPE; layers whose configuration has none, or switches it off, have None."""
    given = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    if not given and getattr(text, "rope_theta", None) is None:
        return (None,) * layers
    types = getattr(text, "layer_types", None) or [None] * layers
    nested = isinstance(given, Mapping) and any(isinstance(value, Mapping) for value in given.values())
    wanted = [kind if nested else None for kind in types]
    made = {kind: Rope.from_config(text, layer_type=kind, interleaved=interleaved) for kind in set(wanted)}
    used = getattr(text, "no_rope_layers", None) or [1] * layers  # 0 where a layer has none
    return tuple(made[kind] if on else None for kind, on in zip(wanted, used))


def _turns(rope: Rope | None) -> str:
    """What a RoPE does, whatever it was made from."""
    if rope is None:
        return "no RoPE"
    digest = hashlib.sha256(repr((rope.attention_factor, rope.inv_freq.tolist())).encode()).hexdigest()[:8]
    return f"theta {rope.theta:g}, {rope.dim} channels{', interleaved' * rope.interleaved}, frequencies {digest}"


def _rope_fields(rope: Rope) -> dict[str, Any]:
    scaling = None if rope.scaling is None else dict(rope.scaling)
    return {
        "theta": float(rope.theta), "dim": rope.dim, "scaling": scaling, "max_position": rope.max_position,
        "interleaved": rope.interleaved,
    }  # fmt: skip


def weights_digest(model: Any) -> str:
    """Digest of some elements of every parameter, as bfloat16: the same whatever type a model was loaded in. "" of a
    configuration.
    """
    if not isinstance(model, torch.nn.Module):
        return ""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().flatten()
        at = torch.linspace(0, max(0, flat.numel() - 1), min(SAMPLED, flat.numel()), dtype=torch.float64).long()
        sample = flat[at.to(flat.device)].to(torch.bfloat16).cpu().view(torch.uint8)
        digest.update(f"{name} {tuple(parameter.shape)}\n".encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:32]
