"""The values that slicing ops take and return."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from ..runtime import config, fallback, metrics
from ..runtime.arguments import code_of, integer, real
from ..runtime.arrays import as_torch
from ..runtime.errors import ArgumentError
from ..runtime.extras import extra
from ..runtime.log import get_logger

Array = Any  # torch, NumPy, CuPy or JAX
Unit = Literal["token", "page"]
Pool = Literal["max", "softmax"]

UNITS: dict[str, int] = {"token": 0, "page": 1}
POOLS: dict[str, int] = {"max": 0, "softmax": 1}


class Selection(NamedTuple):
    """What to read, per sequence, query token and KV head.

    indices: i32[B,T,Hkv,K], tokens or pages in ascending order, then -1.  counts: i32[B,T,Hkv], how many are listed.
    """

    indices: Array
    counts: Array
    unit: Unit = "token"


@dataclasses.dataclass(frozen=True, eq=False)
class SketchParams:
    """What a layer's key sketch is made with; immutable and part of the fingerprint of every page written with it.

    centre: f32[Hkv,D], subtracted from each key.
    scale: f32[Hkv], root mean square of a centred key's channels: for information only. The threshold of plane 1 is each
    token's own (1.25 mean |z|), which measured 5 to 6 % less KL than one per head (docs/slicing.md).
    id: digest of both; pages written under different ids are never mixed in one sequence. Equal ids are equal params.
    """

    centre: torch.Tensor
    scale: torch.Tensor
    id: str = ""

    def __post_init__(self) -> None:
        if not self.id:
            parts = [t.detach().cpu().contiguous().float().numpy().tobytes() for t in (self.centre, self.scale)]
            object.__setattr__(self, "id", hashlib.sha256(b"".join(parts)).hexdigest()[:16])

    def __eq__(self, other: object) -> bool:
        return self.id == other.id if isinstance(other, SketchParams) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.id)

    def to(self, device: torch.device | str) -> SketchParams:
        """The same parameters on another device."""
        return SketchParams(self.centre.to(device), self.scale.to(device), self.id)

    def save(self, path: str | Path) -> None:
        """Write a safetensors file (needs the package `safetensors`)."""
        save_file = extra("safetensors.torch", "files of sketch parameters", "blobs").save_file

        tensors = {"centre": self.centre.contiguous(), "scale": self.scale.contiguous()}
        save_file(tensors, str(path), metadata={"kind": "sic_kernels.SketchParams", "version": "1", "id": self.id})

    @classmethod
    def load(cls, path: str | Path) -> SketchParams:
        """Read what `save` wrote; `ArgumentError` if the file is something else or its digest does not match."""
        safetensors = extra("safetensors", "files of sketch parameters", "blobs")

        expected = "a file written by SketchParams.save"
        try:
            with safetensors.safe_open(str(path), "pt") as file:
                meta = file.metadata() or {}
                known = meta.get("kind") == "sic_kernels.SketchParams" and meta.get("version") == "1"
                if not known or set(file.keys()) != {"centre", "scale"}:
                    raise ArgumentError.of("SketchParams.load", "path", str(path), expected)
                centre, scale = file.get_tensor("centre"), file.get_tensor("scale")
        except (safetensors.SafetensorError, OSError) as error:
            raise ArgumentError.of("SketchParams.load", "path", f"{path} ({error})", expected) from error
        if (
            centre.dtype != torch.float32
            or centre.ndim != 2
            or scale.dtype != torch.float32
            or scale.shape != centre.shape[:1]
        ):
            raise ArgumentError.of("SketchParams.load", "path", str(path), "float32 centre [Hkv,D] and scale [Hkv]")
        params = cls(centre, scale)
        if params.id != meta.get("id"):
            raise ArgumentError.of("SketchParams.load", "path", f"digest {params.id}", f"{meta.get('id')} as recorded")
        return params


@dataclasses.dataclass(frozen=True, eq=False)
class KeySketch:
    """A 1- or 2-bit rotated sketch of every key.

    bits: u8[P,Hkv,bytes], planes * page * ceil(D/8) bytes a page and head (layout: docs/slicing.md).
    norm: bf16[P,Hkv,page].  Without a block table both are indexed by sequence instead of page.
    """

    bits: Array
    norm: Array
    params: SketchParams
    D: int
    page: int

    @property
    def planes(self) -> int:
        """1 (signs) or 2 (signs and magnitudes)."""
        return int(self.bits.shape[2]) // max(1, self.page * -(-self.D // 8))

    def nbytes(self) -> int:
        """Bytes of the sketch, all pages."""
        return int(self.bits.nbytes) + int(self.norm.nbytes)


@dataclasses.dataclass(frozen=True)
class SlicePolicy:
    """How `attend` reads a cache. Defaults were chosen by measurement (docs/slicing.md).

    unit: "token" (by a KeySketch) or "page" (by a page summary).
    ratio: share of the visible tokens read (None: SIC_SLICE_RATIO, 0.12), sink and recent tokens included.
    candidates: share shortlisted by plane 0 and ranked by both planes; at least `ratio`.
    top_p: stop early once the estimated softmax mass is covered.  sink, recent: tokens always read at both ends.
    beta: weight of the radius in page scores.  pool: how the heads of a group are joined for the final ranking.
    dense_layers: layers read whole.  max_omitted_mass: heads whose estimated unread softmax mass is above are recomputed
    dense (None: never).  max_sliced_T: calls with more query tokens run dense.  min_len: sequences up to so many tokens
    are read whole.
    """

    unit: Unit = "token"
    ratio: float | None = None
    candidates: float = 0.35
    top_p: float | None = None
    sink: int = 16
    recent: int = 32
    beta: float = 0.5
    pool: Pool = "softmax"
    dense_layers: tuple[int, ...] = ()
    max_omitted_mass: float | None = None
    max_sliced_T: int = 16
    min_len: int = 0

    def __post_init__(self) -> None:
        if self.ratio is None:
            object.__setattr__(self, "ratio", config.current().slice_ratio)
        code_of("SlicePolicy", "unit", self.unit, UNITS)
        code_of("SlicePolicy", "pool", self.pool, POOLS)
        for name in ("ratio", "candidates", "top_p"):
            self._check_number(name, "a number above 0, at most 1", lambda x: 0 < x <= 1)
        self._check_number("beta", "a finite number", math.isfinite)
        self._check_number("max_omitted_mass", "None, or a number of 0 or more", lambda x: x >= 0)
        for name in ("sink", "recent", "max_sliced_T", "min_len"):
            tokens = integer("SlicePolicy", name, getattr(self, name), 0, "0 or more tokens, an integer below 2^31")
            object.__setattr__(self, name, tokens)
        expected = "layer numbers, integers of 0 or more"
        if not isinstance(self.dense_layers, Iterable):
            raise ArgumentError.of("SlicePolicy", "dense_layers", repr(self.dense_layers), expected)
        layers = tuple(integer("SlicePolicy", "dense_layers", x, 0, expected) for x in self.dense_layers)
        object.__setattr__(self, "dense_layers", layers)

    def _check_number(self, name: str, expected: str, allowed: Callable[[float], bool]) -> None:
        """A real number (NaN is never allowed) becomes a float; None stays where it is the default."""
        value = getattr(self, name)
        if value is None and name in ("top_p", "max_omitted_mass"):
            return
        object.__setattr__(self, name, real("SlicePolicy", name, value, allowed, expected))


STATUS = ("sliced", "dense_layer", "dense_short", "dense_prefill", "fallback_mass")


class SliceResult(NamedTuple):
    """What `attend` returns.

    out: [B,T,Hq,Dv].  lse: f32[B,T,Hq].  selection: what was read (None when the whole call ran dense).
    omitted_mass: f32[B,T,Hq], estimated softmax mass not read.  status: u8[B,T,Hq], an index of `STATUS`.
    """

    out: Array
    lse: Array
    selection: Selection | None
    omitted_mass: Array
    status: Array

    def count(self, name: str) -> int:
        """Head-steps with that status; waits for the device."""
        return int((as_torch(self.status) == STATUS.index(name)).sum())

    def record(self) -> None:
        """Add what happened to `sic_slice_hit_ratio` and `sic_slice_fallback_ratio`, and fallbacks to the log; waits for a GPU.

        For a runner of its own; the transformers integration counts by itself.
        """
        sliced, again = (self.count(name) for name in ("sliced", "fallback_mass"))
        if sliced + again:
            metrics.get("sic_slice_hit_ratio").add(sliced, sliced + again)
            metrics.get("sic_slice_fallback_ratio").add(again, sliced + again, reason="omitted_mass")
        report_fallbacks(again)


def report_fallbacks(head_steps: int) -> None:
    """Into the log how many were recomputed dense, if any; under SIC_STRICT=1 a `SicError`."""
    if head_steps:
        message = "attend: %d head-steps were recomputed dense (estimated omitted mass above the limit)"
        fallback.report(get_logger("slicing"), message, head_steps)
