"""Coded pages: where rows are kept."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..runtime import native
from ..runtime.arguments import integer
from ..runtime.errors import ArgumentError
from ..runtime.log import describe
from .codec import Codec
from .reference_layout import RAW_SCALE, TAG_BYTES, from_little_endian, little_endian

Tensor = torch.Tensor

RAW_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ARRAYS = ("k_codes", "v_codes", "tags", "raw", "raw_owner", "raw_state")
ROWS_PER_ESCAPE = 256  # of the coded rows, for one raw row of room


@dataclasses.dataclass(frozen=True, eq=False)
class DeltaPages:
    """A coded cache: P pages of `page_size` tokens for Hkv heads. Written by `encode`, in place.

    k_codes, v_codes: u8[P,Hkv,page,bytes], rows of codes.  tags: u8[P,Hkv,page,6], little-endian f16 k_scale, f16 v_scale, u8
    template ids of key and value.
    raw: [E,Dk+Dv], rows that are kept as they are, the key before RoPE.  raw_owner: i64[E], slot * Hkv + head of the row that
    an entry belongs to, -1 where it is free.  raw_state: i32[2], entries in use, rows so far that found no room and were coded
    all the same.
    codec: fingerprint of the codec that they are for; the ops refuse another one. None: nobody has said.
    The layout byte by byte: docs/delta.md.
    """

    k_codes: Tensor
    v_codes: Tensor
    tags: Tensor
    raw: Tensor
    raw_owner: Tensor
    raw_state: Tensor
    codec: str | None = None

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
        sequences: int = 1,
    ) -> DeltaPages:
        """Empty pages for a codec; head first in memory, so that consecutive pages of a head lie together.

        raw_rows: room in the raw table, in rows of one token and head; default: the sinks of so many `sequences` and one row in
        256, or every row if the codec keeps all raw.  raw_dtype: float16, bfloat16 or float32; a raw row is rounded to it, and
        what is beyond its range becomes infinite: take the model's.
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
            raw_rows = (
                rows
                if codec.keeps_all_raw
                else min(rows, _count("sequences", sequences, 0) * Hkv * codec.sinks + -(-rows // ROWS_PER_ESCAPE))
            )
        E = _count("raw_rows", raw_rows, 0)
        k_codes, v_codes, tags = (_zeros(Hkv, P, page, width, device=device).transpose(0, 1) for width in codec.widths)
        raw = torch.zeros(E, Dk + Dv, dtype=raw_dtype, device=device)
        owner = torch.full((E,), -1, dtype=torch.int64, device=device)
        state = torch.zeros(2, dtype=torch.int32, device=device)
        return cls(k_codes, v_codes, tags, raw, owner, state, codec.fingerprint)

    @property
    def page_size(self) -> int:
        return self.k_codes.shape[2]

    def inputs(self) -> tuple:
        """The tensors as the ops take them."""
        return self.k_codes, self.v_codes, self.tags, self.raw, self.raw_owner, self.raw_state

    def to(self, device: torch.device | str) -> DeltaPages:
        """The same pages on another device."""
        moved = {name: x.to(device) for name, x in zip(ARRAYS, self.inputs())}
        return dataclasses.replace(self, **moved)

    def sizes(self) -> dict[str, int]:
        """Bytes of every part, all pages."""
        codes = {"k_codes": self.k_codes.nbytes, "v_codes": self.v_codes.nbytes}
        rows = self.tags.nbytes // TAG_BYTES
        raw = {"raw": self.raw.nbytes, "raw_index": self.raw_owner.nbytes + self.raw_state.nbytes}
        return {**codes, "scales": 4 * rows, "ids": 2 * rows, **raw}

    def raw_rows(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The rows of pages `ids` that are kept raw: index into ids, head, offset, entry; in this order.

        A row that is marked so, but whose entry is not its own, is none of them.
        """
        page, head, offset, entry, own = self._marked(ids)
        return page[own], head[own], offset[own], entry[own]

    def _marked(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The same of all that are marked raw, and whether their entry is their own."""
        tags = self.tags[ids]
        low, high = RAW_SCALE & 0xFF, RAW_SCALE >> 8
        page, head, offset = ((tags[..., 0] == low) & (tags[..., 1] == high)).nonzero().unbind(1)
        entry = from_little_endian(self.k_codes[ids[page], head, offset, :4])
        own = (entry >= 0) & (entry < self.raw.shape[0])
        owner = (ids[page] * self.page_size + offset) * self.k_codes.shape[1] + head
        own[own.clone()] = self.raw_owner[entry[own]] == owner[own]
        return page, head, offset, entry, own

    def copy_from(self, source: DeltaPages, source_ids: Tensor, ids: Tensor) -> None:
        """Pages `source_ids` of `source` (which may be these pages) into the pages `ids`, raw rows into entries of their own.

        ids, source_ids: i64 [n]; none of `ids` twice. Both of one codec and one type of raw rows. `ArgumentError` before anything
        is written, also if the raw table has no room. Not for capture: it waits for the device.
        """
        self._check_copy(source, source_ids, ids)
        page, head, offset, entry, own = source._marked(source_ids)
        lost = [x[~own] for x in (page, head, offset)]
        page, head, offset, entry = (x[own] for x in (page, head, offset, entry))
        rows = self.page_size * self.k_codes.shape[1]  # of a page
        freed = torch.isin(self.raw_owner.div(rows, rounding_mode="floor"), ids) & (self.raw_owner >= 0)
        free = ((self.raw_owner < 0) | freed).nonzero()[:, 0]
        if free.numel() < entry.numel():
            raise ArgumentError.of("copy_from", "raw", f"{free.numel()} free entries", f"{entry.numel()} for raw rows")
        kept = source.raw[entry]
        for name in ("k_codes", "v_codes", "tags"):
            getattr(self, name)[ids] = getattr(source, name)[source_ids]
        self.raw_owner[freed] = -1
        new = free[: entry.numel()]
        self.raw[new] = kept
        self.raw_owner[new] = (ids[page] * self.page_size + offset) * self.k_codes.shape[1] + head
        self.raw_state[0] = (self.raw_owner >= 0).sum()
        self.k_codes[ids[page], head, offset, :4] = little_endian(new, 4)
        for name in ("tags", "k_codes", "v_codes"):  # what they pointed to belongs to others
            getattr(self, name)[ids[lost[0]], lost[1], lost[2]] = 0

    def _check_copy(self, source: DeltaPages, source_ids: Tensor, ids: Tensor) -> None:
        if not isinstance(source, DeltaPages):
            raise ArgumentError.of("copy_from", "source", type(source).__name__, "DeltaPages")
        if None not in (source.codec, self.codec) and source.codec != self.codec:
            raise ArgumentError.of("copy_from", "source", f"pages of codec {source.codec}", f"of codec {self.codec}")
        for name, x in zip(ARRAYS, self.inputs()):
            y = getattr(source, name)
            got, want = (
                f"{str(t.dtype).removeprefix('torch.')}{list(t.shape[1:])} a page on {t.device}" for t in (y, x)
            )
            if got != want:
                raise ArgumentError.of("copy_from", f"source.{name}", got, want)
        n = len(ids) if isinstance(ids, Tensor) and ids.ndim == 1 else -1
        for name, x, pages in (("ids", ids, self), ("source_ids", source_ids, source)):
            P, device = pages.k_codes.shape[0], self.k_codes.device
            if not isinstance(x, Tensor) or (x.dtype, x.ndim, x.device) != (torch.int64, 1, device) or len(x) != n:
                raise ArgumentError.of("copy_from", name, describe(x), f"int64[{max(n, 0)}] on {device}")
            if bool(((x < 0) | (x >= P)).any()) or (x is ids and x.unique().numel() != len(x)):
                raise ArgumentError.of("copy_from", name, x.tolist(), f"different pages from 0 to {P - 1}")

    def release(self, ids: Tensor) -> None:
        """Free the raw entries of pages `ids` i64 [n] that nobody will read again. Does not wait for a device."""
        rows = self.page_size * self.k_codes.shape[1]
        free = torch.zeros(self.k_codes.shape[0], dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)
        gone = free[self.raw_owner.clamp(min=0).div(rows, rounding_mode="floor")] & (self.raw_owner >= 0)
        self.raw_owner.masked_fill_(gone, -1)
        self.raw_state[0] -= gone.sum()

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
