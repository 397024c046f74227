"""What the ragged ops are tested and measured on: one description of a case feeds tests, benches and docs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from ..testing import SHORT_NAME, Build, Case, generator
from .lengths import bounds_of

Tensor = torch.Tensor

DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int16, torch.int32, torch.int64,
    torch.float64,
)  # fmt: skip
FILL = 0x0102030405060708  # a byte of its own in every place; its low bytes are the fill of smaller types

# Lengths of a batch, the padded length: empty sequences at both ends and in between, none full, all full, none at all.
BATCHES: tuple[tuple[tuple[int, ...], int], ...] = (
    ((3,), 3), ((0, 5, 0, 1, 9, 0), 9), ((7, 2, 4), 11), ((0, 0), 4), ((), 6), ((0, 0, 0), 0), ((33, 1, 64, 17), 64),
)  # fmt: skip
# What a token has behind it: nothing (a number), an odd row, rows of 16 bytes and more, an empty one.
ROWS: tuple[tuple[int, ...], ...] = ((), (1,), (3,), (2, 5), (8,), (4, 16), (0,), (129,))
# How rows lie: one behind the other, every second one of a larger tensor, all of them one element off.
LAYOUTS = ("dense", "gaps", "skew")


def _case(op: str, build: Build, **shape: Any) -> Case:
    words = [f"{k}{SHORT_NAME.get(v, v)}".replace("torch.", "") for k, v in shape.items()]
    return Case(op, "-".join(words), MappingProxyType(shape), build, family="ragged")


def random_bits(gen: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    """Any bits: NaNs with payloads, infinities, subnormal numbers."""
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), generator=gen, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def laid_out(gen: torch.Generator, layout: str, *shape: int, lead: int, dtype: torch.dtype) -> Tensor:
    """Random bits [shape]; its first `lead` dimensions are those of rows."""
    if layout == "gaps":
        wide = random_bits(gen, *shape[: lead - 1], 2 * shape[lead - 1] + 1, *shape[lead:], dtype=dtype)
        return wide.narrow(lead - 1, 1, 2 * shape[lead - 1]).unflatten(lead - 1, (-1, 2)).select(lead, 0)
    skew = int(layout == "skew")
    return random_bits(gen, math.prod(shape) + skew, dtype=dtype)[skew:].view(shape)


def fill_of(dtype: torch.dtype) -> int:
    """`FILL` in as many bytes as the type has."""
    return FILL & ((1 << 8 * dtype.itemsize) - 1)


def pack_case(
    lens: Sequence[int], S: int, row: Sequence[int], dtype: torch.dtype, layout: str = "dense", index=torch.int32
) -> Case:
    def build(gen: torch.Generator) -> tuple:
        padded = laid_out(gen, layout, len(lens), S, *row, lead=2, dtype=dtype)
        return padded, bounds_of(list(lens), "cpu", index), None

    return _case("pack", build, lens="_".join(map(str, lens)), S=S, row="x".join(map(str, row)), dt=dtype, lay=layout)


def unpack_case(
    lens: Sequence[int], S: int, row: Sequence[int], dtype: torch.dtype, layout: str = "dense", index=torch.int32
) -> Case:
    def build(gen: torch.Generator) -> tuple:
        packed = laid_out(gen, layout, sum(lens), *row, lead=1, dtype=dtype)
        return packed, bounds_of(list(lens), "cpu", index), S, fill_of(dtype)

    return _case("unpack", build, lens="_".join(map(str, lens)), S=S, row="x".join(map(str, row)), dt=dtype, lay=layout)


def grid(name: str) -> list[Case]:
    """The cases of a list: "pack" or "unpack"."""
    return list({"pack": _grid(pack_case), "unpack": _grid(unpack_case)}[name])


def grids() -> tuple[str, ...]:
    return ("pack", "unpack")


def _grid(make: Any) -> Iterator[Case]:
    """Every type with every row in one of the layouts, every batch in each; types, rows and layouts in turn."""
    for n, (dtype, row) in enumerate(itertools.product(DTYPES, ROWS)):
        lens, S = BATCHES[n % len(BATCHES)]
        yield make(lens, S, row, dtype, LAYOUTS[n % 3], (torch.int32, torch.int64)[n % 2])
    for n, ((lens, S), layout) in enumerate(itertools.product(BATCHES, LAYOUTS)):
        yield make(lens, S, ROWS[1 + n % 5], DTYPES[n % len(DTYPES)], layout, (torch.int64, torch.int32)[n % 2])


# --- shapes of the published table ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RaggedShape:
    """B sequences of up to `length` tokens; a token is `width` numbers."""

    B: int
    length: int
    width: int
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0

    @property
    def name(self) -> str:
        return f"B{self.B}-len{self.length}-D{self.width}-{SHORT_NAME[self.dtype]}"

    @property
    def lengths(self) -> list[int]:
        """Even over 1 to `length`; the longest is there."""
        drawn = torch.randint(1, self.length + 1, (self.B,), generator=generator(self.seed)).tolist()
        return [self.length, *drawn[1:]]

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def packed_bytes(self) -> int:
        """Of all tokens."""
        return sum(self.lengths) * self.row_bytes

    @property
    def padded_bytes(self) -> int:
        return self.B * self.length * self.row_bytes

    @property
    def pack_bytes(self) -> int:
        """Every row is read and written, and the bounds are read."""
        return 2 * self.packed_bytes + 4 * (self.B + 1)

    @property
    def unpack_bytes(self) -> int:
        """Every row is read, every place written."""
        return self.packed_bytes + self.padded_bytes + 4 * (self.B + 1)


BENCH_SHAPES = (RaggedShape(64, 1024, 576), RaggedShape(32, 2048, 1024), RaggedShape(8, 8192, 2048))
