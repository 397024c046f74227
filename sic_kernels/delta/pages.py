"""Coded pages: where rows are kept."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..runtime import native
from ..runtime.errors import ArgumentError
from ..slicing.types import integer
from .codec import Codec
from .reference_layout import RAW_SCALE, TAG_BYTES, from_little_endian, little_endian

Tensor = torch.Tensor

RAW_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROWS_PER_ESCAPE = 256  # of the coded rows, for one raw row of room


@dataclasses.dataclass(frozen=True, eq=False)
class DeltaPages:
    """A coded cache: P pages of `page_size` tokens for Hkv heads. Written by `encode`, in place.

    k_codes, v_codes: u8[P,Hkv,page,bytes], rows of codes.  tags: u8[P,Hkv,page,6], little-endian f16 k_scale, f16 v_scale, u8
    template ids of key and value.
    raw: [E,Dk+Dv], rows that are kept as they are, the key before RoPE.  raw_owner: i64[E], slot * Hkv + head of the row that
    an entry belongs to, -1 where it is free.  raw_state: i32[2], entries in use, rows so far that found no room and were coded
    all the same.
    The layout byte by byte: docs/delta.md.
    """

    k_codes: Tensor
    v_codes: Tensor
    tags: Tensor
    raw: Tensor
    raw_owner: Tensor
    raw_state: Tensor

    @classmethod
    def allocate(
        cls,
        codec: Codec,
        num_pages: int,
        page_size: int,
        Hkv: int,
        Dk: int,
        Dv: int,
        device: torch.device | str = "cpu",
        raw_rows: int | None = None,
        raw_dtype: torch.dtype = torch.float16,
    ) -> DeltaPages:
        """Empty pages for a codec; head first in memory, so that consecutive pages of a head lie together.

        raw_rows: room in the raw table, in rows of one token and head; default: the sinks of one sequence and one row in 256,
        or every row if the codec keeps all raw.  raw_dtype: float16, bfloat16 or float32.
        """
        if not isinstance(codec, Codec):
            raise ArgumentError.of("DeltaPages.allocate", "codec", type(codec).__name__, "a Codec")
        given = {
            "num_pages": (num_pages, 0),
            "page_size": (page_size, 1),
            "Hkv": (Hkv, 1),
            "Dk": (Dk, 1),
            "Dv": (Dv, 1),
        }
        P, page, Hkv, Dk, Dv = (_count(name, *value) for name, value in given.items())
        for name, got, expected in (("Hkv", Hkv, codec.heads), ("Dk", Dk, codec.Dk), ("Dv", Dv, codec.Dv)):
            if got != expected:
                raise ArgumentError.of("DeltaPages.allocate", name, got, f"{expected} as in the codec's templates")
        if raw_dtype not in RAW_DTYPES:
            raise ArgumentError.of("DeltaPages.allocate", "raw_dtype", raw_dtype, "float32|float16|bfloat16")
        rows = P * page * Hkv
        if raw_rows is None:
            raw_rows = rows if codec.keeps_all_raw else min(rows, Hkv * codec.sinks + -(-rows // ROWS_PER_ESCAPE))
        E = _count("raw_rows", raw_rows, 0)
        k_codes, v_codes, tags = (_zeros(Hkv, P, page, width, device=device).transpose(0, 1) for width in codec.widths)
        raw = torch.zeros(E, Dk + Dv, dtype=raw_dtype, device=device)
        owner = torch.full((E,), -1, dtype=torch.int64, device=device)
        return cls(k_codes, v_codes, tags, raw, owner, torch.zeros(2, dtype=torch.int32, device=device))

    @property
    def page_size(self) -> int:
        return self.k_codes.shape[2]

    def inputs(self) -> tuple:
        """The tensors as the ops take them."""
        return self.k_codes, self.v_codes, self.tags, self.raw, self.raw_owner, self.raw_state

    def to(self, device: torch.device | str) -> DeltaPages:
        """The same pages on another device."""
        return DeltaPages(*[x.to(device) for x in self.inputs()])

    def sizes(self) -> dict[str, int]:
        """Bytes of every part, all pages."""
        codes = {"k_codes": self.k_codes.nbytes, "v_codes": self.v_codes.nbytes}
        rows = self.tags.nbytes // TAG_BYTES
        raw = {"raw": self.raw.nbytes, "raw_index": self.raw_owner.nbytes + self.raw_state.nbytes}
        return {**codes, "scales": 4 * rows, "ids": 2 * rows, **raw}

    def raw_rows(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The rows of pages `ids` that are kept raw: index into ids, head, offset, entry; in this order."""
        tags = self.tags[ids]
        low, high = RAW_SCALE & 0xFF, RAW_SCALE >> 8
        page, head, offset = ((tags[..., 0] == low) & (tags[..., 1] == high)).nonzero().unbind(1)
        entry = from_little_endian(self.k_codes[ids[page], head, offset, :4])
        return page, head, offset, entry

    def copy_from(self, source: DeltaPages, source_ids: Tensor, ids: Tensor) -> None:
        """Pages `source_ids` of `source` (which may be these pages) into the pages `ids`, raw rows into entries of their own.

        ids, source_ids: i64 [n]; none of `ids` twice. `ArgumentError` if the raw table has no room, before anything is
        written. Not for capture: it waits for the device.
        """
        page, head, offset, entry = source.raw_rows(source_ids)
        rows = self.page_size * self.k_codes.shape[1]  # of a page
        freed = torch.isin(self.raw_owner.div(rows, rounding_mode="floor"), ids) & (self.raw_owner >= 0)
        free = ((self.raw_owner < 0) | freed).nonzero()[:, 0]
        if free.numel() < entry.numel():
            raise ArgumentError.of("copy_from", "raw", f"{free.numel()} free entries", f"{entry.numel()} for raw rows")
        kept = source.raw[entry].to(self.raw.dtype)
        for name in ("k_codes", "v_codes", "tags"):
            getattr(self, name)[ids] = getattr(source, name)[source_ids]
        self.raw_owner[freed] = -1
        new = free[: entry.numel()]
        self.raw[new] = kept
        self.raw_owner[new] = (ids[page] * self.page_size + offset) * self.k_codes.shape[1] + head
        self.raw_state[0] = (self.raw_owner >= 0).sum()
        self.k_codes[ids[page], head, offset, :4] = little_endian(new, 4)

    def with_raw_room(self, entries: int) -> DeltaPages:
        """The same pages with room for so many raw rows more; the other arrays are shared."""
        raw = torch.cat((self.raw, self.raw.new_zeros(entries, self.raw.shape[1])))
        owner = torch.cat((self.raw_owner, self.raw_owner.new_full((entries,), -1)))
        return dataclasses.replace(self, raw=raw, raw_owner=owner)

    def nbytes(self) -> int:
        """Bytes of everything; templates belong to the model and are counted there."""
        return sum(self.sizes().values())


def _count(name: str, value: Any, low: int) -> int:
    return integer("DeltaPages.allocate", name, value, low, f"an integer of {low} or more, below 2^31")


def _zeros(*shape: int, device: torch.device | str) -> Tensor:
    new = torch.empty(*shape, dtype=torch.uint8, device=device)
    if new.device.type == "cpu":
        native.module().advise_huge_pages(new)  # a hint; scattered rows otherwise miss the TLB at every read
    return new.zero_()
