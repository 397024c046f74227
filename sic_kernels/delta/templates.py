"""Templates: typical keys or values of a layer, that others are stored as differences from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch

from ..runtime.errors import ArgumentError
from ..runtime.extras import extra
from ..slicing.reference_sketch import tree_sum

Tensor = torch.Tensor

MAX_TEMPLATES = 256  # an id is a byte
MAX_DIM = 1024  # integer dot products of the search stay exact in float32
KIND, VERSION = "sic_kernels.delta.Templates", "1"
LANES, QUAD = 16, 4  # templates and channels that the search takes at a time


@dataclasses.dataclass(frozen=True, eq=False)
class Templates:
    """Up to 256 templates of each KV head of a layer, of its keys before RoPE or of its values. Immutable.

    centres: f16[Hkv,n,D].  spread: f32[Hkv], mean squared norm of the residuals of rows like those they were fitted on, the
    measure for what is an outlier.  meta: strings about their origin.
    fingerprint: digest of all of these; what was coded with templates of one fingerprint is decoded with the same only.

    Derived, for the search: mean f32[Hkv,D] of the centres; step f32[Hkv]; search i8[Hkv,n/16,D/4,16,4] = (centre - mean) / step,
    rounded, template 16 g + i and channel 4 j + c at [g, j, i, c], 0 beyond n and D; half_norm f32[Hkv,16 ceil(n/16)] =
    |centre - mean|^2 / 2, +inf beyond n.
    """

    centres: Tensor
    spread: Tensor
    meta: Mapping[str, str] = dataclasses.field(default_factory=dict)
    mean: Tensor = dataclasses.field(init=False, repr=False)
    step: Tensor = dataclasses.field(init=False, repr=False)
    search: Tensor = dataclasses.field(init=False, repr=False)
    half_norm: Tensor = dataclasses.field(init=False, repr=False)
    fingerprint: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self._check()
        for name in ("centres", "spread"):
            object.__setattr__(self, name, getattr(self, name).detach().contiguous())
        object.__setattr__(self, "meta", {str(k): str(v) for k, v in self.meta.items()})
        for name, tensor in derived(self.centres).items():
            object.__setattr__(self, name, tensor)
        object.__setattr__(self, "fingerprint", self._digest())

    def _check(self) -> None:
        c = self.centres
        H, n, D = c.shape if isinstance(c, Tensor) and c.ndim == 3 else (0, 0, 0)
        if H < 1 or not 1 <= n <= MAX_TEMPLATES or not 1 <= D <= MAX_DIM or c.dtype != torch.float16:
            expected = f"float16 [Hkv,n,D], n at most {MAX_TEMPLATES}, D at most {MAX_DIM}"
            raise ArgumentError.of("Templates", "centres", describe(c), expected)
        s = self.spread
        if not isinstance(s, Tensor) or s.dtype != torch.float32 or s.shape != (H,) or s.device != c.device:
            raise ArgumentError.of("Templates", "spread", describe(s), f"float32[{H}] on {c.device}")
        if not bool((s.isfinite() & (s >= 0)).all()):
            raise ArgumentError.of("Templates", "spread", "values out of range", "finite values of 0 or more")
        if not bool(c.isfinite().all()):
            raise ArgumentError.of("Templates", "centres", "values that are not finite", "finite values")
        if not isinstance(self.meta, Mapping):
            raise ArgumentError.of("Templates", "meta", type(self.meta).__name__, "a mapping of strings")

    def _digest(self) -> str:
        digest = hashlib.sha256(json.dumps([VERSION, sorted(self.meta.items())]).encode())
        for tensor in (self.centres, self.spread):
            digest.update(repr(tuple(tensor.shape)).encode())
            digest.update(tensor.cpu().numpy().tobytes())
        return digest.hexdigest()[:32]

    def __eq__(self, other: object) -> bool:
        return self.fingerprint == other.fingerprint if isinstance(other, Templates) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    @property
    def heads(self) -> int:
        return self.centres.shape[0]

    @property
    def count(self) -> int:
        return self.centres.shape[1]

    @property
    def dim(self) -> int:
        return self.centres.shape[2]

    def nbytes(self) -> int:
        """Bytes of what is kept (centres, spread), shared by all sequences."""
        return self.centres.nbytes + self.spread.nbytes

    @classmethod
    def zero(cls, heads: int, dim: int, device: torch.device | str = "cpu") -> Templates:
        """One template of zeros: rows are coded as they are, and none is an outlier."""
        centres = torch.zeros(heads, 1, dim, dtype=torch.float16, device=device)
        return cls(centres, torch.full((heads,), torch.finfo(torch.float32).max, device=device))

    def to(self, device: torch.device | str) -> Templates:
        """The same templates on another device."""
        return Templates(self.centres.to(device), self.spread.to(device), self.meta)

    def save(self, path: str | Path) -> None:
        """Write a safetensors file (needs the package `safetensors`)."""
        save_file = extra("safetensors.torch", "files of templates", "blobs").save_file

        tensors = {"centres": self.centres.cpu(), "spread": self.spread.cpu()}
        about = {"kind": KIND, "version": VERSION, "fingerprint": self.fingerprint, "meta": json.dumps(dict(self.meta))}
        save_file(tensors, str(path), metadata=about)

    @classmethod
    def load(cls, path: str | Path) -> Templates:
        """Read what `save` wrote; `ArgumentError` if the file is something else, incomplete or altered."""
        tensors, about = _read(path)
        try:
            meta = json.loads(about.get("meta", ""))
            templates = cls(tensors["centres"], tensors["spread"], meta)
        except (ValueError, AttributeError, KeyError) as error:  # ArgumentError is a ValueError
            raise ArgumentError.of("Templates.load", "path", f"{path} ({error})", _EXPECTED) from error
        if templates.fingerprint != about.get("fingerprint"):
            got, recorded = f"fingerprint {templates.fingerprint}", f"{about.get('fingerprint')} as recorded"
            raise ArgumentError.of("Templates.load", "path", got, recorded)
        return templates


_EXPECTED = "a file written by Templates.save"


def _read(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file of the right kind."""
    safetensors = extra("safetensors", "files of templates", "blobs")

    try:
        with safetensors.safe_open(str(path), "pt") as file:
            about = file.metadata() or {}
            names = set(file.keys())
            if (about.get("kind"), about.get("version")) != (KIND, VERSION) or names != {"centres", "spread"}:
                raise ArgumentError.of("Templates.load", "path", str(path), _EXPECTED)
            return {name: file.get_tensor(name).clone() for name in names}, about
    except (safetensors.SafetensorError, OSError) as error:
        raise ArgumentError.of("Templates.load", "path", f"{path} ({error})", _EXPECTED) from error


def describe(x: object) -> str:
    """A tensor as errors name it: dtype[shape]."""
    return f"{x.dtype}{list(x.shape)}".removeprefix("torch.") if isinstance(x, Tensor) else type(x).__name__


def halving_sum(x: Tensor) -> Tensor:
    """Sum over the first dimension by halves: additions in a fixed order, whatever the number of threads."""
    while x.shape[0] > 1:
        half = x.shape[0] // 2
        joined = x[:half] + x[half : 2 * half]
        x = torch.cat((joined, x[2 * half :])) if x.shape[0] % 2 else joined
    return x[0]


def derived(centres: Tensor) -> dict[str, Tensor]:
    """mean, step, search and half_norm of centres f16[Hkv,n,D]; the same bits everywhere."""
    H, n, D = centres.shape
    mean = (halving_sum(centres.double().transpose(0, 1)) / n).float()
    moved = centres.float() - mean[:, None]
    largest = moved.abs().amax((1, 2))
    step = largest / torch.full_like(largest, 127.0)
    levels = torch.round(moved / torch.where(step > 0, step, 1.0)[:, None, None]).clamp(-127, 127).to(torch.int8)
    groups, quads = -(-n // LANES), -(-D // QUAD)
    padded = torch.nn.functional.pad(levels, (0, QUAD * quads - D, 0, LANES * groups - n))
    search = padded.reshape(H, groups, LANES, quads, QUAD).transpose(2, 3).contiguous()
    half = (tree_sum(moved.double() ** 2) / 2).float()
    half_norm = torch.nn.functional.pad(half, (0, LANES * groups - n), value=torch.inf)
    return {"mean": mean.contiguous(), "step": step, "search": search, "half_norm": half_norm.contiguous()}
