"""How rows are coded: bits, templates, RoPE, what is kept raw."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import Any

import torch

from ..runtime.arguments import integer, real
from ..runtime.errors import ArgumentError
from .levels import BITS, DISTORTION
from .reference_layout import TAG_BYTES, code_bytes
from .rope import Rope
from .templates import Templates

Tensor = torch.Tensor

# Channels of a key rotated together: as good as all of them (docs/delta.md), and no shuffles within a vector.
K_ROTATION = 8

# name -> k_bits, v_bits, escape (None: the default)
PRESETS: dict[str, tuple[int, int, float | None]] = {
    "k4v4": (4, 4, None),
    "k3v3": (3, 3, None),
    "k2v2": (2, 2, None),
    "q8": (8, 8, None),
    "raw": (2, 2, -math.inf),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Codec:
    """How the rows of a layer are coded. Immutable; what it wrote is read with the same codec only (`fingerprint`).

    k_bits, v_bits: 2, 3, 4, 5 or 8 bits a channel.  k_templates, v_templates: `Templates` of the same KV heads.
    rope: keys are given and returned rotated, and are coded before RoPE; None: coded as they are.
    rotate: rotate the residuals of keys before they are rounded (those of values always are, as a whole).  k_rotation: channels
    of a key rotated together, a power of two that divides Dk (default: 8, or the largest below).
    sinks: rows at positions below are kept raw.  escape: rows whose error (its root mean square) is more than so many times
    that of a typical row are kept raw; inf: none, -inf: all.
    """

    k_bits: int = 4
    v_bits: int = 4
    k_templates: Templates = None  # type: ignore[assignment]  # checked below
    v_templates: Templates = None  # type: ignore[assignment]
    rope: Rope | None = None
    rotate: bool = True
    sinks: int = 4
    escape: float = 4.0
    k_rotation: int | None = None
    fingerprint: str = dataclasses.field(init=False)

    def __repr__(self) -> str:
        sizes = f"k_bits={self.k_bits}, v_bits={self.v_bits}, heads={self.heads}, Dk={self.Dk}, Dv={self.Dv}"
        return f"Codec({sizes}, {self.fingerprint})"

    def __post_init__(self) -> None:
        for name in ("k_bits", "v_bits"):
            bits = integer("Codec", name, getattr(self, name), 2, "|".join(map(str, BITS)))
            if bits not in BITS:
                raise ArgumentError.of("Codec", name, bits, "|".join(map(str, BITS)))
            object.__setattr__(self, name, bits)
        self._check_templates()
        if self.rope is not None and (not isinstance(self.rope, Rope) or self.rope.dim > self.Dk):
            got = f"{self.rope.dim} channels" if isinstance(self.rope, Rope) else type(self.rope).__name__
            raise ArgumentError.of("Codec", "rope", got, f"None, or a Rope of at most {self.Dk} channels")
        object.__setattr__(self, "sinks", integer("Codec", "sinks", self.sinks, 0, "0 or more positions below 2^31"))
        expected = "a number of 0 or more, inf (none) or -inf (all)"
        escape = real("Codec", "escape", self.escape, lambda x: x >= 0 or x == -math.inf, expected)
        object.__setattr__(self, "escape", escape)
        object.__setattr__(self, "k_rotation", self._rotation())
        object.__setattr__(self, "fingerprint", self._digest())

    def _check_templates(self) -> None:
        for name in ("k_templates", "v_templates"):
            if not isinstance(getattr(self, name), Templates):
                got = type(getattr(self, name)).__name__
                raise ArgumentError.of("Codec", name, got, "Templates (fit_templates, Templates.load, Templates.zero)")
        k, v = self.k_templates, self.v_templates
        if (k.heads, k.centres.device) != (v.heads, v.centres.device):
            got = f"{v.heads} heads on {v.centres.device}"
            raise ArgumentError.of(
                "Codec", "v_templates", got, f"{k.heads} heads on {k.centres.device}, as k_templates"
            )

    def _rotation(self) -> int:
        if not isinstance(self.rotate, bool):
            raise ArgumentError.of("Codec", "rotate", repr(self.rotate), "True or False")
        largest = self.Dk & -self.Dk
        if self.k_rotation is None:
            return min(K_ROTATION, largest) if self.rotate else 1
        expected = f"a power of two that divides {self.Dk}" if self.rotate else "1, since rotate is False"
        R = integer("Codec", "k_rotation", self.k_rotation, 1, expected)
        if R & (R - 1) or largest % R or (R > 1 and not self.rotate):
            raise ArgumentError.of("Codec", "k_rotation", R, expected)
        return R

    def _digest(self) -> str:
        r = self.rope
        rope = None if r is None else (r.dim, r.interleaved, r.attention_factor, r.inv_freq.tolist())
        text = repr((self.k_bits, self.v_bits, self.k_rotation, rope))
        parts = (text, self.k_templates.fingerprint, self.v_templates.fingerprint)
        return hashlib.sha256("|".join(parts).encode()).hexdigest()[:32]

    @classmethod
    def preset(
        cls, name: str, k_templates: Templates, v_templates: Templates, rope: Rope | None = None, **options: Any
    ):
        """A codec by name; `options` are further arguments of `Codec`, or in place of the preset's.

        "k4v4", "k3v3", "k2v2": bits of keys and values.  "q8": 8 bits each.  "raw": every row is kept raw, in the same pages:
        what a comparison runs on; it saves nothing.
        """
        if not isinstance(name, str) or name not in PRESETS:
            raise ArgumentError.of("Codec.preset", "name", repr(name), "|".join(PRESETS))
        k_bits, v_bits, escape = PRESETS[name]
        defaults: dict[str, Any] = {"k_bits": k_bits, "v_bits": v_bits}
        if escape is not None:
            defaults["escape"] = escape
        return cls(k_templates=k_templates, v_templates=v_templates, rope=rope, **{**defaults, **options})

    @property
    def heads(self) -> int:
        return self.k_templates.heads

    @property
    def Dk(self) -> int:
        return self.k_templates.dim

    @property
    def Dv(self) -> int:
        return self.v_templates.dim

    @property
    def device(self) -> torch.device:
        return self.k_templates.centres.device

    @property
    def widths(self) -> tuple[int, int, int]:
        """Bytes of a row's codes of key and value, and of its tag (scales, template ids)."""
        return code_bytes(self.Dk, self.k_bits), code_bytes(self.Dv, self.v_bits), TAG_BYTES

    @property
    def row_bytes(self) -> int:
        """Bytes of one token and KV head."""
        return sum(self.widths)

    @property
    def keeps_all_raw(self) -> bool:
        return self.escape == -math.inf

    def to(self, device: torch.device | str) -> Codec:
        """The same codec on another device."""
        return dataclasses.replace(
            self, k_templates=self.k_templates.to(device), v_templates=self.v_templates.to(device)
        )

    def bound(self, templates: Templates, bits: int) -> Tensor:
        """f32[Hkv]: the squared error above which a row is kept raw."""
        if math.isinf(self.escape):
            return torch.full_like(templates.spread, self.escape)
        return (templates.spread.double() * (self.escape**2 * DISTORTION[bits])).float()

    def inputs(self) -> tuple:
        """The codec as the ops take it: bits, rotation, template tensors, RoPE tables."""
        if "_inputs" not in self.__dict__:
            rope = (None,) * 3 if self.rope is None else self.rope.tables(self.device)
            k, v = self._tensors(self.k_templates, self.k_bits), self._tensors(self.v_templates, self.v_bits)
            made = (
                self.k_bits,
                self.v_bits,
                self.k_rotation,
                k,
                v,
                rope,
                self.rope is not None and self.rope.interleaved,
            )
            object.__setattr__(self, "_inputs", made)
        return self.__dict__["_inputs"]

    def _tensors(self, t: Templates, bits: int) -> tuple:
        return t.centres, t.search, t.half_norm, t.mean, t.step, self.bound(t, bits)
