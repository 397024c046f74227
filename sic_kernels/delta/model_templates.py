"""Templates of a whole model: every layer's, in one file, with what says which model they belong to.

templates = sic.delta.ModelTemplates.of(model)             # those that come with the package, or `load(path)`
codecs = templates.codecs("k4v4")
cache = sic.delta.DeltaKVCache(codecs, params=templates.params)
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..runtime import metrics
from ..runtime.errors import ArgumentError
from ..runtime.extras import extra
from ..runtime.fallback import report
from ..runtime.log import get_logger
from ..slicing.types import SketchParams
from .codec import PRESETS, Codec
from .model_shape import ModelShape, weights_digest
from .templates import Templates, describe

Tensor = torch.Tensor

KIND, VERSION = "sic_kernels.delta.ModelTemplates", "1"
SHIPPED = Path(__file__).parent / "data"
# name -> (trailing dimensions beyond layers and heads, type)
TENSORS = {
    "k_centres": (2, torch.float16),
    "v_centres": (2, torch.float16),
    "k_spread": (0, torch.float32),
    "v_spread": (0, torch.float32),
    "sketch_centre": (1, torch.float32),
    "sketch_scale": (0, torch.float32),
}

_log = get_logger("delta")


@dataclasses.dataclass(frozen=True, eq=False)
class ModelTemplates:
    """Templates and sketch parameters of all layers of one model. Immutable.

    shape: the model's layers, heads, head sizes and RoPE; what does not agree is refused.  weights: digest of a sample of the
    model's weights ("" unknown); templates serve other weights of the same shape too, only less well.
    keys (before RoPE), values: `Templates`, one a layer.  params: `SketchParams`, one a layer, so that a cache needs no
    calibration.  meta: strings about their origin, the command that made them among them.
    """

    shape: ModelShape
    keys: tuple[Templates, ...]
    values: tuple[Templates, ...]
    params: tuple[SketchParams, ...]
    weights: str = ""
    meta: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        s = self.shape
        for name, dim in (("keys", s.k_dim), ("values", s.v_dim)):
            layers = tuple(getattr(self, name))
            sizes = [(t.heads, t.dim) for t in layers]
            if sizes != [(s.kv_heads, dim)] * s.layers:
                expected = f"Templates of {s.kv_heads} heads of {dim} for each of {s.layers} layers"
                raise ArgumentError.of("ModelTemplates", name, f"{len(layers)} layers, {sorted(set(sizes))}", expected)
            object.__setattr__(self, name, layers)
        object.__setattr__(self, "params", tuple(self.params))
        shapes = [tuple(p.centre.shape) for p in self.params]
        if shapes != [(s.kv_heads, s.k_dim)] * s.layers:
            expected = f"SketchParams of [{s.kv_heads},{s.k_dim}] for each of {s.layers} layers"
            raise ArgumentError.of("ModelTemplates", "params", f"{len(shapes)} of {sorted(set(shapes))}", expected)
        object.__setattr__(self, "meta", {str(k): str(v) for k, v in self.meta.items()})

    @property
    def count(self) -> int:
        """Templates of a head, at most."""
        return max(t.count for t in (*self.keys, *self.values))

    def nbytes(self) -> int:
        """Bytes of what is kept, shared by all sequences: templates and sketch parameters."""
        sketch = sum(p.centre.nbytes + p.scale.nbytes for p in self.params)
        return sketch + sum(t.nbytes() for t in (*self.keys, *self.values))

    def codecs(
        self,
        preset: str = "k4v4",
        *,
        k_bits: int | Sequence[int] | None = None,
        v_bits: int | Sequence[int] | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> list[Codec]:
        """A `Codec` for every layer. k_bits, v_bits: in place of the preset's, one number or one a layer; options: of `Codec`."""
        if not isinstance(preset, str) or preset not in PRESETS:
            raise ArgumentError.of("codecs", "preset", repr(preset), "|".join(PRESETS))
        k_default, v_default, _ = PRESETS[preset]
        layers = self.shape.layers
        k_each, v_each = (
            _per_layer("k_bits", k_bits, k_default, layers),
            _per_layer("v_bits", v_bits, v_default, layers),
        )
        ropes = self.shape.ropes
        made = []
        for layer in range(layers):
            k, v = (t[layer] if device is None else t[layer].to(device) for t in (self.keys, self.values))
            bits = {"k_bits": k_each[layer], "v_bits": v_each[layer]}
            made.append(Codec.preset(preset, k, v, ropes[layer], **bits, **options))
        return made

    def check_model(self, model: Any) -> None:
        """`ArgumentError` naming the field in which `model` (or its configuration) is of another shape."""
        self.shape.check(ModelShape.of(model, interleaved=self.shape.interleaved))
        found = weights_digest(model)
        if found and self.weights:
            other = found != self.weights
            metrics.get("sic_delta_other_weights_ratio").add(other, 1)
            if other:
                report(_log, "templates of %s were fitted on other weights than this model's", self.shape.name)

    # --- files --------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write one safetensors file (needs the package `safetensors`)."""
        save_file = extra("safetensors.torch", "files of templates", "blobs").save_file

        tensors = self._tensors()
        about = {
            "kind": KIND, "version": VERSION, "shape": json.dumps(self.shape.fields()), "weights": self.weights,
            "meta": json.dumps(dict(self.meta)),
        }  # fmt: skip
        save_file(tensors, str(path), metadata={**about, "digest": _digest(tensors, about)})

    def _tensors(self) -> dict[str, Tensor]:
        def stack(parts: Any) -> Tensor:
            return torch.stack([part.cpu() for part in parts]).contiguous()

        return {
            "k_centres": stack(t.centres for t in self.keys), "v_centres": stack(t.centres for t in self.values),
            "k_spread": stack(t.spread for t in self.keys), "v_spread": stack(t.spread for t in self.values),
            "sketch_centre": stack(p.centre for p in self.params), "sketch_scale": stack(p.scale for p in self.params),
        }  # fmt: skip

    @classmethod
    def load(cls, path: str | Path) -> ModelTemplates:
        """Read what `save` wrote; `ArgumentError` if the file is something else, incomplete or altered."""
        tensors, about = _read(path)
        try:
            shape, meta = ModelShape.from_fields(json.loads(about["shape"])), json.loads(about["meta"])
            _check_tensors(tensors, shape)
            k, v = (tuple(_layers(tensors, part, shape, meta)) for part in ("k", "v"))
            params = tuple(SketchParams(c, s) for c, s in zip(tensors["sketch_centre"], tensors["sketch_scale"]))
            return cls(shape, k, v, params, about["weights"], meta)
        except (ValueError, TypeError, AttributeError, KeyError) as error:  # ArgumentError is a ValueError
            raise ArgumentError.of("ModelTemplates.load", "path", f"{path} ({error})", _EXPECTED) from error

    @classmethod
    def of(cls, model: Any, templates: ModelTemplates | str | Path | None = None) -> ModelTemplates:
        """`templates` (or the file of that name) for a model or its configuration; None: those that come with the package."""
        if templates is None:
            return cls._shipped_for(model)
        found = templates if isinstance(templates, ModelTemplates) else cls.load(templates)
        found.check_model(model)
        return found

    @classmethod
    def _shipped_for(cls, model: Any) -> ModelTemplates:
        wanted, nearest = ModelShape.of(model), []
        for path in shipped_files():
            shape = shipped_shape(path)
            differing = shape.differing(wanted)
            if not differing:
                found = shipped(path)
                found.check_model(model)
                return found
            nearest.append(f"{shape.name}: differs in {', '.join(differing)}")
        got = (
            f"{wanted.name or 'a model'} of another shape than those that come with the package ({'; '.join(nearest)})"
        )
        expected = "templates=, a file that `python -m sic_kernels fit-templates` wrote"
        raise ArgumentError.of("codecs", "model", got, expected)


def codecs(
    model: Any, preset: str = "k4v4", templates: ModelTemplates | str | Path | None = None, **options: Any
) -> list[Codec]:
    """A `Codec` for every layer of a transformers model (or configuration).

    templates: None for those that come with the package, `ModelTemplates`, or the file of some; of another model they are
    refused with the name of the field that differs.  options: k_bits, v_bits (a number, or one a layer), device, and further
    arguments of `Codec`.
    """
    return ModelTemplates.of(model, templates).codecs(preset, **options)


# --- what comes with the package ------------------------------------------------------------------------------------


def shipped_files() -> list[Path]:
    return sorted(SHIPPED.glob("*.safetensors"))


@functools.cache
def shipped_shape(path: Path) -> ModelShape:
    """The shape alone: finding the right file reads no templates."""
    return ModelShape.from_fields(json.loads(_metadata(path)["shape"]))


@functools.cache
def shipped(path: Path) -> ModelTemplates:
    """Read once a process."""
    return ModelTemplates.load(path)


def preload() -> tuple[str, ...]:
    """Read the templates that come with the package now and not at their first use; returns the models' names.

    For the start of a server: the first request then waits for nothing.
    """
    return tuple(shipped(path).shape.name for path in shipped_files())


# --- parts of a file ------------------------------------------------------------------------------------------------

_EXPECTED = "a file written by ModelTemplates.save"


def _metadata(path: str | Path) -> dict[str, str]:
    return _read(path, tensors=False)[1]


def _read(path: str | Path, tensors: bool = True) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file of the right kind whose digest agrees."""
    safetensors = extra("safetensors", "files of templates", "blobs")

    try:
        with safetensors.safe_open(str(path), "pt") as file:
            about = file.metadata() or {}
            if (about.get("kind"), about.get("version")) != (KIND, VERSION) or set(file.keys()) != set(TENSORS):
                raise ArgumentError.of("ModelTemplates.load", "path", str(path), _EXPECTED)
            found = {name: file.get_tensor(name).clone() for name in TENSORS} if tensors else {}
    except (safetensors.SafetensorError, OSError) as error:
        raise ArgumentError.of("ModelTemplates.load", "path", f"{path} ({error})", _EXPECTED) from error
    if tensors and _digest(found, about) != about.get("digest"):
        got = f"{path} with digest {_digest(found, about)}"
        raise ArgumentError.of("ModelTemplates.load", "path", got, f"{about.get('digest')} as recorded")
    return found, about


def _digest(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> str:
    """Of all that a file holds but the digest itself."""
    digest = hashlib.sha256(json.dumps(sorted(pair for pair in about.items() if pair[0] != "digest")).encode())
    for name in sorted(tensors):
        digest.update(f"{name} {describe(tensors[name])}\n".encode())
        digest.update(tensors[name].cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


def _check_tensors(tensors: Mapping[str, Tensor], shape: ModelShape) -> None:
    for name, (more, dtype) in TENSORS.items():
        x = tensors[name]
        if x.dtype != dtype or x.ndim != 2 + more or tuple(x.shape[:2]) != (shape.layers, shape.kv_heads):
            expected = f"{dtype}[{shape.layers},{shape.kv_heads}{',..' * more}]".removeprefix("torch.")
            raise ArgumentError.of("ModelTemplates", name, describe(x), expected)


def _layers(tensors: Mapping[str, Tensor], part: str, shape: ModelShape, meta: Mapping[str, str]) -> list[Templates]:
    """One `Templates` a layer; its fingerprint names model, layer and part."""
    about = {"model": shape.name, "part": part}
    pairs = zip(tensors[f"{part}_centres"], tensors[f"{part}_spread"])
    return [Templates(c, s, meta={**about, "layer": str(layer)}) for layer, (c, s) in enumerate(pairs)]


def _per_layer(name: str, bits: int | Sequence[int] | None, default: int, layers: int) -> list[int]:
    if bits is None or not isinstance(bits, Sequence):
        return [default if bits is None else bits] * layers
    if len(bits) != layers:
        raise ArgumentError.of(
            "codecs", name, f"{len(bits)} numbers", f"one number, or one for each of {layers} layers"
        )
    return list(bits)
