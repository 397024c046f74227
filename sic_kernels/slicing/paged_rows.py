"""Rows of pages: which pages every sequence of a batch owns, whatever is kept in them.

A page holds `page_size` tokens of one sequence in every layer. Rows (sequences) own lists of pages; a full page may be
shared by several rows and is written once, the partly filled last page never is. What a layer keeps is up to its store.
"""

from __future__ import annotations

import heapq
import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from ..runtime import native
from ..runtime.arguments import integer
from ..runtime.errors import ArgumentError
from .index import calibrate
from .types import KeySketch, SketchParams

Tensor = torch.Tensor


class PagePool:
    """Page numbers with reference counts. The lowest free number is given out first, so that rows stay contiguous."""

    def __init__(self) -> None:
        self.refs: list[int] = []
        self._free: list[int] = []
        self.freed: list[int] | None = None  # pages that became free, where somebody asks for them

    @property
    def used(self) -> int:
        return len(self.refs) - len(self._free)

    @property
    def available(self) -> int:
        return len(self._free)

    def grow(self, pages: int) -> None:
        """Make the pool hold `pages` pages."""
        for page in range(len(self.refs), pages):
            heapq.heappush(self._free, page)
            self.refs.append(0)

    def take(self) -> int:
        page = heapq.heappop(self._free)
        self.refs[page] = 1
        return page

    def share(self, page: int) -> int:
        self.refs[page] += 1
        return page

    def drop(self, page: int) -> None:
        self.refs[page] -= 1
        if self.refs[page] == 0:
            heapq.heappush(self._free, page)
            if self.freed is not None:
                self.freed.append(page)


def _whole_numbers(op: str, arg: str, values: Any) -> list[int]:
    """A list, tensor or array of integers as plain ones; booleans and floats are mistakes."""
    plain = values.tolist() if hasattr(values, "tolist") else values
    try:
        if any(isinstance(n, bool) for n in plain):
            raise TypeError
        return [operator.index(n) for n in plain]
    except TypeError:
        raise ArgumentError.of(op, arg, repr(values), "whole numbers") from None


class LayerStore(ABC):
    """The arrays of one layer, and the key sketch that goes with them. Arrays are head first, `[Hkv,P,...]`.

    pages: how many there is room for; 0 until the first `grow`.  params: of the sketch, None before calibration.
    """

    def __init__(self, owner: PagedRows) -> None:
        self.owner = owner
        self.pages = 0
        self.params: SketchParams | None = None
        self.bits: Tensor | None = None
        self.norm: Tensor | None = None

    @abstractmethod
    def grow(self, pages: int) -> None:
        """Room for `pages` pages in every array, or, when memory runs out, in none."""

    @abstractmethod
    def copy_page(self, source: int, target: int) -> None: ...

    @abstractmethod
    def parts(self) -> dict[str, int]:
        """Bytes allocated, by the names of `nbytes_by_part`."""

    def grow_index(self, pages: int) -> None:
        o = self.owner
        bits = self._grown(self.bits, pages, (o.planes * o.page_size * -(-o.head_dim // 8),), torch.uint8, zero=True)
        self.norm = self._grown(self.norm, pages, (o.page_size,), torch.bfloat16, zero=True)
        self.bits = bits

    def forget_index(self) -> None:
        self.bits = self.norm = None

    def sketch(self) -> KeySketch | None:
        """None before calibration."""
        if self.bits is None or self.norm is None or self.params is None:
            return None
        o = self.owner
        return KeySketch(self.bits.transpose(0, 1), self.norm.transpose(0, 1), self.params, o.head_dim, o.page_size)

    def _grown(
        self, old: Tensor | None, pages: int, row: tuple[int, ...], dtype: torch.dtype, zero: bool = False
    ) -> Tensor:
        new = torch.empty(self.owner.kv_heads, pages, *row, dtype=dtype, device=self.owner.device)
        if new.device.type == "cpu":
            native.module().advise_huge_pages(new)  # a hint; scattered rows otherwise miss the TLB at every read
        if zero:
            new.zero_()
        if old is not None:
            new[:, : old.shape[1]] = old
        return new


class PagedRows(ABC):
    """The base of the caches: rows, their lengths and pages, and one step after another into all layers.

    A subclass fills `_store` with one `LayerStore` a layer and writes the step's tokens in `_write`.
    """

    layers: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    page_size: int
    device: torch.device
    dtype: torch.dtype  # of rows that are kept as they are
    unit: str  # what the index selects: "token" or "page"
    planes: int  # of a key sketch
    _store: Sequence[Any]

    def _set_sizes(
        self, op: str, layers: int, kv_heads: int, head_dim: int, v_head_dim: int | None, batch: int, page_size: int,
        capacity: int,
    ) -> tuple[int, int]:  # fmt: skip
        """Check and note the sizes; returns batch and capacity."""
        self.layers, self.kv_heads = count(op, "layers", layers, 1), count(op, "kv_heads", kv_heads, 1)
        self.head_dim = count(op, "head_dim", head_dim, 1)
        self.v_head_dim = self.head_dim if v_head_dim is None else count(op, "v_head_dim", v_head_dim, 1)
        self.page_size = count(op, "page_size", page_size, 1)
        return count(op, "batch", batch, 0), count(op, "capacity", capacity, 0)

    def _checked_params(self, op: str, params: Sequence[SketchParams | None] | None) -> list[SketchParams | None]:
        """One entry a layer, on the cache's device."""
        given = [None] * self.layers if params is None else list(params)
        if len(given) != self.layers:
            want = f"one for each of {self.layers} layers"
            raise ArgumentError.of(op, "params", f"{len(given)} entries", want)
        return [self._checked_layer_params(op, layer, p) for layer, p in enumerate(given)]

    def _checked_layer_params(self, op: str, layer: int, params: SketchParams | None) -> SketchParams | None:
        if params is None:
            return None
        name, want = f"params[{layer}]", f"SketchParams with centre float32[{self.kv_heads},{self.head_dim}]"
        if not isinstance(params, SketchParams) or not isinstance(params.centre, Tensor):
            raise ArgumentError.of(op, name, type(params).__name__, want)
        centre = params.centre
        if tuple(centre.shape) != (self.kv_heads, self.head_dim) or centre.dtype != torch.float32:
            got = f"centre {str(centre.dtype).removeprefix('torch.')}{list(centre.shape)}"
            raise ArgumentError.of(op, name, got, want)
        return params if centre.device.type == self.device.type else params.to(self.device)

    def _start(self, batch: int, capacity: int) -> None:
        """No tokens; pages for `capacity` of them, over all rows and however they are spread."""
        self._pool = PagePool()
        self._pages: list[list[int]] = [[] for _ in range(batch)]
        self._lengths: list[int] = [0] * batch
        self._behind: set[int] = set()  # layers that the current step has not been written to yet
        self._slots: Tensor | None = None
        self._table: Tensor | None = None
        self._seq_lens: Tensor | None = None
        # Worst case: every row but one ends in a page with a single token.
        size = self.page_size
        self._grow_pool(min(capacity, (capacity + batch * (size - 1)) // size))

    @abstractmethod
    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keys, values and index of the step's tokens in one layer."""

    @abstractmethod
    def row(self, layer: int, row: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[Hkv,n,D]` of one row."""

    @abstractmethod
    def _calibration_keys(self, layer: int) -> Tensor | None:
        """`[N,Hkv,D]` of the first row that has enough, so that its neighbours do not change its params."""

    @abstractmethod
    def _index_all(self, layer: int) -> None:
        """Index entries of all that the layer holds, in arrays that have room."""

    def _rows_cut(self, start: list[int]) -> None:  # noqa: B027 (most have nothing to do)
        """After `crop`: row r's last page is to be looked at from token start[r] on (its length: nothing is)."""

    def _rows_reordered(self, chosen: list[int]) -> None:  # noqa: B027 (most have nothing to do)
        """After `reorder`: new row i was row chosen[i]."""

    # --- what it holds ------------------------------------------------------------------------------------------

    @property
    def plain_row_bytes(self) -> int:
        """Bytes of key and value of one token and head in `dtype`."""
        return (self.head_dim + self.v_head_dim) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """The same as they are stored."""
        return self.plain_row_bytes

    @property
    def params(self) -> list[SketchParams | None]:
        """Per layer: what the sketch was calibrated with, None before calibration."""
        return [store.params for store in self._store]

    @property
    def batch(self) -> int:
        return len(self._lengths)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens held by each row."""
        return tuple(self._lengths)

    def pages(self, row: int) -> tuple[int, ...]:
        """Page numbers of a row, in order."""
        return tuple(self._pages[row])

    def nbytes(self) -> int:
        """Bytes allocated: everything, of all layers (`nbytes_by_part` itemises)."""
        return sum(self.nbytes_by_part().values())

    def nbytes_by_part(self) -> dict[str, int]:
        """Bytes allocated for each kind of array and for "tables". Pages in use: `pages_used`."""
        parts: dict[str, int] = {}
        for store in self._store:
            for name, size in store.parts().items():
                parts[name] = parts.get(name, 0) + size
        tables = (self._table, self._seq_lens, self._slots)
        return {**parts, "tables": sum(0 if t is None else t.numel() * t.element_size() for t in tables)}

    @property
    def pages_used(self) -> int:
        """Pages that some row owns; a shared page counts once."""
        return self._pool.used

    @property
    def block_table(self) -> Tensor:
        """int32 `[B,M]`, M = pages of the longest row; the tails of shorter rows are 0."""
        if self._table is None:
            width = max((len(p) for p in self._pages), default=0)
            rows = [pages + [0] * (width - len(pages)) for pages in self._pages]
            self._table = torch.tensor(rows, dtype=torch.int32, device=self.device).reshape(self.batch, width)
        return self._table

    @property
    def seq_lens(self) -> Tensor:
        """int32 `[B]`."""
        if self._seq_lens is None:
            self._seq_lens = torch.tensor(self._lengths, dtype=torch.int32, device=self.device)
        return self._seq_lens

    # --- growing -------------------------------------------------------------------------------------------------

    def append(self, layer: int, k: Tensor, v: Tensor, live: Tensor | None = None) -> None:
        """Write T new tokens of every row and bring the index up to date.

        k `[B,Hkv,T,Dk]`, v `[B,Hkv,T,Dv]`; live bool `[B,T]`: False is padding, which takes no place in the cache
        (keys carry their positions already). Every layer gets each step once; the first one allocates, and its `live`
        counts for all. A row's keys are indexed by the same launch.
        """
        self._check_append(layer, k, v, live)
        lengths = None if self._behind else list(self._lengths)
        try:
            if lengths is not None:
                self._begin_step(k.shape[2], live)
            self._write(layer, k, v)
        except BaseException:
            if lengths is not None:
                self._undo_step(lengths)
            raise
        self._behind.discard(layer)

    def _check_append(self, layer: int, k: Tensor, v: Tensor, live: Tensor | None) -> None:
        self._checked_layer("append", layer)
        for name, x, width in (("k", k, self.head_dim), ("v", v, self.v_head_dim)):
            if not isinstance(x, Tensor) or not x.is_floating_point() or x.device.type != self.device.type:
                got = (
                    f"{x.dtype} on {x.device.type}".removeprefix("torch.")
                    if isinstance(x, Tensor)
                    else type(x).__name__
                )
                raise ArgumentError.of("append", name, got, f"a float tensor on {self.device.type}")
            if x.ndim != 4 or (x.shape[0], x.shape[1], x.shape[3]) != (self.batch, self.kv_heads, width):
                raise ArgumentError.of("append", name, list(x.shape), f"[{self.batch},{self.kv_heads},T,{width}]")
        if k.shape[2] != v.shape[2]:
            raise ArgumentError.of("append", "v", f"{v.shape[2]} tokens", f"{k.shape[2]} as in k")
        if live is not None:
            shape = (self.batch, k.shape[2])
            if not isinstance(live, Tensor) or live.dtype != torch.bool or live.shape != shape:
                got = f"{live.dtype}{list(live.shape)}" if isinstance(live, Tensor) else type(live).__name__
                raise ArgumentError.of("append", "live", got.removeprefix("torch."), f"bool{list(shape)}")
        if self._behind and layer not in self._behind:
            raise ArgumentError.of(
                "append", "layer", layer, f"one that this step has not reached: {sorted(self._behind)}"
            )
        if self._behind and self._slots is not None and self._slots.numel() != self.batch * k.shape[2]:
            raise ArgumentError.of("append", "k", f"{k.shape[2]} tokens", "as many as the first layer of this step")

    def _checked_layer(self, op: str, layer: Any) -> int:
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < self.layers:
            raise ArgumentError.of(op, "layer", layer, f"0 to {self.layers - 1}")
        return layer

    def _checked_row(self, op: str, row: Any) -> int:
        if isinstance(row, bool) or not isinstance(row, int) or not 0 <= row < self.batch:
            raise ArgumentError.of(op, "row", row, f"0 to {self.batch - 1}")
        return row

    def _first_index(self, layer: int) -> None:
        """Calibrate on what the layer holds, if that is enough, and index all of it."""
        store, params = self._store[layer], self._store[layer].params
        if self.unit == "token" and params is None:
            samples = self._calibration_keys(layer)
            if samples is None:
                return
            store.params = calibrate(samples)
        try:
            store.grow_index(len(self._pool.refs))
            self._index_all(layer)
        except BaseException:
            store.forget_index()
            store.params = params
            raise

    def _begin_step(self, T: int, live: Tensor | None) -> list[int]:
        """Allocate pages for the step and work out the slot of every token `[B*T]`, which is returned."""
        mask = [[True] * T] * self.batch if live is None else live.bool().tolist()
        new = [sum(row) for row in mask]
        needed = sum(-(-(n + add) // self.page_size) - len(p) for n, add, p in zip(self._lengths, new, self._pages))
        if needed > self._pool.available:
            total = len(self._pool.refs)
            self._grow_pool(max(total + needed - self._pool.available, total + total // 2))
        slots: list[int] = []
        for row, alive in enumerate(mask):
            slots += self._place(row, alive)
        self._slots = torch.tensor(slots, dtype=torch.int64, device=self.device)
        self._seq_lens = None
        if needed:
            self._table = None
        self._behind = set(range(self.layers))
        return slots

    def _undo_step(self, lengths: list[int]) -> None:
        """After a failed first layer: rows as they were. (The pool may have grown, which nobody sees.)"""
        self._lengths = lengths
        for pages, n in zip(self._pages, lengths):
            keep = -(-n // self.page_size)
            for page in pages[keep:]:
                self._pool.drop(page)
            del pages[keep:]
        self._behind = set()
        self._forget_tables()

    def _place(self, row: int, alive: list[bool]) -> list[int]:
        pages, position, size, slots = self._pages[row], self._lengths[row], self.page_size, []
        for is_live in alive:
            if not is_live:
                slots.append(-1)
                continue
            if position == len(pages) * size:
                pages.append(self._pool.take())
            slots.append(pages[position // size] * size + position % size)
            position += 1
        self._lengths[row] = position
        return slots

    def _grow_pool(self, pages: int) -> None:
        self._pool.grow(pages)  # the arrays follow when each layer is next written

    # --- cutting, copying, reordering ----------------------------------------------------------------------------

    def crop(self, lengths: int | Sequence[int]) -> None:
        """Cut every row to its entry of `lengths` (an int: the same for all; longer than the row: no change).

        Pages behind the cut are given back. The page that is cut becomes a copy of its own if another row shares it.
        """
        single = isinstance(lengths, int)
        wanted = _whole_numbers("crop", "lengths", [lengths] * self.batch if single else lengths)
        if len(wanted) != self.batch or any(n < 0 for n in wanted):
            raise ArgumentError.of("crop", "lengths", wanted, f"{self.batch} lengths of 0 or more")
        self._check_between_steps("crop")
        before = list(self._lengths)
        wanted = [min(n, old) for n, old in zip(wanted, before)]
        if wanted == before:
            return
        cut = [row for row, n in enumerate(wanted) if n < before[row] and n % self.page_size]
        self._reserve(
            sum(
                self._pool.refs[self._pages[row][n // self.page_size]] > 1 for row, n in enumerate(wanted) if row in cut
            )
        )
        for row, n in enumerate(wanted):
            self._cut_row(row, n, row in cut)
        self._forget_tables()
        self._rows_cut([n if row in cut else before[row] for row, n in enumerate(wanted)])

    def _cut_row(self, row: int, n: int, partly: bool) -> None:
        pages, keep = self._pages[row], -(-n // self.page_size)
        for page in pages[keep:]:
            self._pool.drop(page)
        del pages[keep:]
        self._lengths[row] = n
        if partly and self._pool.refs[pages[-1]] > 1:
            shared, pages[-1] = pages[-1], self._pool.take()
            self._copy_page(shared, pages[-1])
            self._pool.drop(shared)

    def fork(self, row: int) -> int:
        """A new row that continues from `row`; returns its number. Full pages are shared, the last one is copied."""
        if not 0 <= row < self.batch:
            raise ArgumentError.of("fork", "row", row, f"0 to {self.batch - 1}")
        self.reorder([*range(self.batch), row])
        return self.batch - 1

    def repeat(self, times: int) -> None:
        """Every row `times` times, copies side by side (as torch.repeat_interleave)."""
        if times < 1:
            raise ArgumentError.of("repeat", "times", times, "at least 1")
        self.reorder([row for row in range(self.batch) for _ in range(times)])

    def reorder(self, rows: Sequence[int] | Tensor) -> None:
        """New row i is old row rows[i]; any number of rows, repeated or left out. Full pages are shared."""
        chosen = _whole_numbers("reorder", "rows", rows)
        if any(not 0 <= row < self.batch for row in chosen):
            raise ArgumentError.of("reorder", "rows", chosen, f"numbers from 0 to {self.batch - 1}")
        self._check_between_steps("reorder")
        if chosen == list(range(self.batch)):
            return
        partly = [row for row in chosen if self._lengths[row] % self.page_size]
        old_pages, old_lengths = self._pages, self._lengths
        self._reserve(len(partly) - len(set(partly)))
        taken: set[int] = set()  # rows whose partly filled page has found its new owner
        self._pages = []
        for row in chosen:
            self._pages.append(self._shared_pages(old_pages[row], old_lengths[row], copy_last=row in taken))
            taken.add(row)
        self._lengths = [old_lengths[row] for row in chosen]
        for pages in old_pages:
            for page in pages:
                self._pool.drop(page)
        self._forget_tables()
        self._rows_reordered(chosen)

    def _shared_pages(self, pages: list[int], length: int, copy_last: bool) -> list[int]:
        """The pages of one more owner; with `copy_last` a partly filled page in a copy of its own."""
        if not (copy_last and length % self.page_size):
            return [self._pool.share(page) for page in pages]
        own = self._pool.take()
        self._copy_page(pages[-1], own)
        return [*(self._pool.share(page) for page in pages[:-1]), own]

    def reset(self) -> None:
        """Empty every row. Memory and calibration are kept."""
        self._behind = set()
        self.crop(0)

    def _reserve(self, pages: int) -> None:
        if pages > self._pool.available:
            self._grow_pool(len(self._pool.refs) + pages - self._pool.available)
            for store in self._store:
                if store.pages:
                    store.grow(len(self._pool.refs))

    def _copy_page(self, source: int, target: int) -> None:
        for store in self._store:
            if store.pages:
                if store.pages < len(self._pool.refs):
                    store.grow(len(self._pool.refs))
                store.copy_page(source, target)

    def _check_between_steps(self, op: str) -> None:
        if self._behind:
            raise ArgumentError.of(op, "state", f"layers {sorted(self._behind)} not written yet", "a finished step")

    def _forget_tables(self) -> None:
        self._table = self._seq_lens = self._slots = None


def count(op: str, name: str, value: Any, low: int) -> int:
    return integer(op, name, value, low, f"an integer of {low} or more, below 2^31")
