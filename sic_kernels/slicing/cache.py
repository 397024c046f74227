"""`SlicedKVCache`: keys, values and their selection index in pages, for all layers of one model.

    cache = sic.slicing.SlicedKVCache(layers=30, kv_heads=3, head_dim=64)
    cache.append(layer, k, v)                       # k, v [B,Hkv,T,D]: written and indexed in one launch
    result = sic.slicing.attend(q, *cache.tensors(layer), policy=policy, layer=layer)

A page holds `page_size` tokens of one sequence in every layer. Rows (sequences) own lists of pages; a full page may be
shared by several rows and is written once, the partly filled last page never is. The arrays of a layer are stored head
first, `[Hkv,P,page,D]`, and handed out transposed to the `[P,Hkv,page,D]` of the contract: a sequence in consecutive
pages is then one contiguous `[Hkv,S,D]` array, which hardware prefetching likes and which dense prefill reads in place.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Sequence
from typing import Any

import torch

from ..runtime import native
from ..runtime.errors import ArgumentError
from .attention import append_kv
from .index import calibrate, key_sketch, page_summary
from .types import UNITS, KeySketch, SketchParams, code_of, integer

Tensor = torch.Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
SKETCH_MAX_DIM = 1024  # of `key_sketch`
CALIBRATION_TOKENS = 64  # fewer keys give no useful centre; until then attention is dense
MASSIVE_TOKENS = 4  # the first keys of a sequence are outliers and would drag the centre


class PagePool:
    """Page numbers with reference counts. The lowest free number is given out first, so that rows stay contiguous."""

    def __init__(self) -> None:
        self.refs: list[int] = []
        self._free: list[int] = []

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


def _whole_numbers(op: str, arg: str, values: Any) -> list[int]:
    """A list, tensor or array of integers as plain ones; booleans and floats are mistakes."""
    plain = values.tolist() if hasattr(values, "tolist") else values
    try:
        if any(isinstance(n, bool) for n in plain):
            raise TypeError
        return [operator.index(n) for n in plain]
    except TypeError:
        raise ArgumentError.of(op, arg, repr(values), "whole numbers") from None


class _LayerPages:
    """The arrays of one layer, head first, grown by whole chunks of pages."""

    def __init__(self, owner: SlicedKVCache) -> None:
        self.owner = owner
        self.k = self.v = self.bits = self.norm = self.summary = None  # type: Tensor | None
        self.pages = 0  # that every array of the layer has room for
        self.params: SketchParams | None = None

    def arrays(self) -> dict[str, Tensor]:
        named = {"keys": self.k, "values": self.v, "bits": self.bits, "norm": self.norm, "summary": self.summary}
        return {name: array for name, array in named.items() if array is not None}

    def grow(self, pages: int) -> None:
        """Room for `pages` pages in every array, or, when memory runs out, in none."""
        o = self.owner
        k = self._grown(self.k, pages, (o.page_size, o.head_dim), o.dtype)
        v = self._grown(self.v, pages, (o.page_size, o.v_head_dim), o.dtype)
        if self.bits is not None or self.summary is not None:
            self.grow_index(pages)
        self.k, self.v, self.pages = k, v, pages

    def grow_index(self, pages: int) -> None:
        o = self.owner
        if o.unit == "page":
            dtype = torch.float32 if o.dtype == torch.float8_e4m3fn else o.dtype
            self.summary = self._grown(self.summary, pages, (2, o.head_dim), dtype, zero=True)
            return
        row = o.planes * o.page_size * -(-o.head_dim // 8)
        bits = self._grown(self.bits, pages, (row,), torch.uint8, zero=True)
        self.norm = self._grown(self.norm, pages, (o.page_size,), torch.bfloat16, zero=True)
        self.bits = bits

    def forget_index(self) -> None:
        self.bits = self.norm = self.summary = None

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

    def copy_page(self, source: int, target: int) -> None:
        for array in self.arrays().values():
            array[:, target] = array[:, source]


def _count(name: str, value: Any, low: int) -> int:
    return integer("SlicedKVCache", name, value, low, f"an integer of {low} or more, below 2^31")


class SlicedKVCache:
    """Paged keys and values of `layers` layers with a key sketch (unit="token") or page summaries (unit="page").

    Shapes: B rows, T new tokens, Hkv KV heads, Dk = head_dim, Dv = v_head_dim. Rows may have different lengths.

    * `capacity`: tokens to reserve at once, over all `batch` rows and however they are spread over them. While the
      rows hold no more, arrays are never moved or copied (`fork`, `repeat`, `reorder` copy partly filled pages, and
      may add rows). On the CPU reserved memory costs nothing until it is written. Beyond it the arrays grow by half,
      one layer at a time, so that the passing peak is one layer, never the whole cache.
    * `params`: one `SketchParams` per layer (or None for a layer that shall calibrate itself). A layer without is
      calibrated once, at the end of the first `append` after which some row holds `MASSIVE_TOKENS +
      CALIBRATION_TOKENS` tokens, on the first such row alone: that row's params are those it would have without
      neighbours. Results of the other rows then depend on that row; where they must not, give `params`, for example
      those of an earlier cache. `index(layer)` is None until then.
    * dtype: float32, float16, bfloat16, or float8_e4m3fn (values as they are, saturating at 448; its page summaries are
      float32). head_dim: up to 1024 with unit "token".
    * Deterministic; every method raises `ArgumentError` before anything is changed. An `append` that fails in any other
      way (memory, say) leaves lengths, pages and index as they were. Not thread-safe.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        *,
        batch: int = 1,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        unit: str = "token",
        planes: int = 2,
        params: Sequence[SketchParams | None] | None = None,
        capacity: int = 0,
    ) -> None:
        self.layers = _count("layers", layers, 1)
        self.kv_heads, self.head_dim = _count("kv_heads", kv_heads, 1), _count("head_dim", head_dim, 1)
        self.v_head_dim = self.head_dim if v_head_dim is None else _count("v_head_dim", v_head_dim, 1)
        self.page_size, self.planes = _count("page_size", page_size, 1), _count("planes", planes, 1)
        batch, capacity = _count("batch", batch, 0), _count("capacity", capacity, 0)
        self.dtype, self.device, self.unit = dtype, torch.device(device), unit
        code_of("SlicedKVCache", "unit", unit, UNITS)
        self._check_kind()
        given = self._checked_params(params)
        self._pool = PagePool()
        self._pages: list[list[int]] = [[] for _ in range(batch)]
        self._lengths: list[int] = [0] * batch
        self._store = [_LayerPages(self) for _ in range(layers)]
        for store, layer_params in zip(self._store, given):
            store.params = layer_params
        self._behind: set[int] = set()  # layers that the current step has not been written to yet
        self._slots: Tensor | None = None
        self._table: Tensor | None = None
        self._seq_lens: Tensor | None = None
        # Worst case: every row but one ends in a page with a single token.
        size = self.page_size
        self._grow_pool(min(capacity, (capacity + batch * (size - 1)) // size))

    def _check_kind(self) -> None:
        """What the operations could not store or index."""
        if self.dtype not in DTYPES:
            names = "|".join(str(t).removeprefix("torch.") for t in DTYPES)
            raise ArgumentError.of("SlicedKVCache", "dtype", str(self.dtype).removeprefix("torch."), names)
        if self.planes > 2:
            raise ArgumentError.of("SlicedKVCache", "planes", self.planes, "1 or 2")
        if self.unit == "token" and self.head_dim > SKETCH_MAX_DIM:
            raise ArgumentError.of("SlicedKVCache", "head_dim", self.head_dim, f"1 to {SKETCH_MAX_DIM} for a sketch")

    def _checked_params(self, params: Sequence[SketchParams | None] | None) -> list[SketchParams | None]:
        """One entry a layer, on the cache's device."""
        given = [None] * self.layers if params is None else list(params)
        if len(given) != self.layers:
            want = f"one for each of {self.layers} layers"
            raise ArgumentError.of("SlicedKVCache", "params", f"{len(given)} entries", want)
        return [self._checked_layer_params(layer, p) for layer, p in enumerate(given)]

    def _checked_layer_params(self, layer: int, params: SketchParams | None) -> SketchParams | None:
        if params is None:
            return None
        name, want = f"params[{layer}]", f"SketchParams with centre float32[{self.kv_heads},{self.head_dim}]"
        if not isinstance(params, SketchParams) or not isinstance(params.centre, Tensor):
            raise ArgumentError.of("SlicedKVCache", name, type(params).__name__, want)
        centre = params.centre
        if tuple(centre.shape) != (self.kv_heads, self.head_dim) or centre.dtype != torch.float32:
            got = f"centre {str(centre.dtype).removeprefix('torch.')}{list(centre.shape)}"
            raise ArgumentError.of("SlicedKVCache", name, got, want)
        return params if centre.device.type == self.device.type else params.to(self.device)

    # --- what it holds ------------------------------------------------------------------------------------------

    @property
    def batch(self) -> int:
        return len(self._lengths)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens held by each row."""
        return tuple(self._lengths)

    @property
    def params(self) -> list[SketchParams | None]:
        """Per layer: what the sketch was calibrated with, None before calibration."""
        return [store.params for store in self._store]

    def pages(self, row: int) -> tuple[int, ...]:
        """Page numbers of a row, in order."""
        return tuple(self._pages[row])

    def nbytes(self) -> int:
        """Bytes allocated: keys, values, index and tables of all layers (`nbytes_by_part` itemises)."""
        return sum(self.nbytes_by_part().values())

    def nbytes_by_part(self) -> dict[str, int]:
        """Bytes allocated for "keys", "values", "index" and "tables". Pages in use: `pages_used`."""
        parts = {"keys": 0, "values": 0, "index": 0, "tables": 0}
        for store in self._store:
            for name, array in store.arrays().items():
                parts[name if name in parts else "index"] += array.numel() * array.element_size()
        for table in (self._table, self._seq_lens, self._slots):
            parts["tables"] += 0 if table is None else table.numel() * table.element_size()
        return parts

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

    def keys(self, layer: int) -> Tensor:
        """`[P,Hkv,page,Dk]`, a view."""
        return self._array(layer, "k").transpose(0, 1)

    def values(self, layer: int) -> Tensor:
        """`[P,Hkv,page,Dv]`, a view."""
        return self._array(layer, "v").transpose(0, 1)

    def index(self, layer: int) -> Any:
        """The layer's `KeySketch` or page summary `[P,Hkv,2,Dk]`; None before calibration."""
        store = self._store[layer]
        if store.summary is not None:
            return store.summary.transpose(0, 1)
        if store.bits is None or store.norm is None or store.params is None:
            return None
        return KeySketch(
            store.bits.transpose(0, 1), store.norm.transpose(0, 1), store.params, self.head_dim, self.page_size
        )

    def tensors(self, layer: int) -> tuple[Tensor, Tensor, Any, Tensor, Tensor]:
        """(k_cache, v_cache, index, block_table, seq_lens): the arguments that `attend` takes after `q`."""
        return self.keys(layer), self.values(layer), self.index(layer), self.block_table, self.seq_lens

    def row(self, layer: int, row: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[Hkv,n,D]` of one row: views if its pages are consecutive, else copies."""
        n, pages = self._lengths[row], self._pages[row]
        first = pages[0] if pages else 0
        consecutive = all(page == first + i for i, page in enumerate(pages))
        parts = []
        for array in (self._array(layer, "k"), self._array(layer, "v")):
            part = array[:, first : first + len(pages)] if consecutive else array[:, pages]
            parts.append(part.reshape(self.kv_heads, len(pages) * self.page_size, array.shape[-1])[:, :n])
        return parts[0], parts[1]

    # --- growing -------------------------------------------------------------------------------------------------

    def append(self, layer: int, k: Tensor, v: Tensor, live: Tensor | None = None) -> None:
        """Write T new tokens of every row and bring the index up to date.

        k `[B,Hkv,T,Dk]`, v `[B,Hkv,T,Dv]`; live bool `[B,T]`: False is padding, which takes no place in the cache
        (keys carry their positions already). Every layer gets each step once, with the same `live`; the first one
        allocates. A row's keys are indexed by the same launch.
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

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keys, values and index of the step's tokens in one layer."""
        store = self._store[layer]
        if store.pages < len(self._pool.refs) or store.k is None:
            store.grow(len(self._pool.refs))
        rows = [self._storable(x).transpose(1, 2).flatten(0, 1) for x in (k, v)]  # copies only if B > 1 and T > 1
        append_kv(rows[0], rows[1], self.keys(layer), self.values(layer), self._slots, index=self.index(layer))
        if store.bits is None and store.summary is None:
            self._first_index(layer)

    def _storable(self, x: Tensor) -> Tensor:
        """In the cache's type; for an f8 cache in float32, as `append_kv` saturates where torch's cast may not."""
        return x.to(torch.float32 if self.dtype == torch.float8_e4m3fn else self.dtype)

    def _check_append(self, layer: int, k: Tensor, v: Tensor, live: Tensor | None) -> None:
        if not 0 <= layer < self.layers:
            raise ArgumentError.of("append", "layer", layer, f"0 to {self.layers - 1}")
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
        if live is not None and tuple(live.shape) != (self.batch, k.shape[2]):
            raise ArgumentError.of("append", "live", list(live.shape), f"[{self.batch},{k.shape[2]}]")
        if self._behind and layer not in self._behind:
            raise ArgumentError.of(
                "append", "layer", layer, f"one that this step has not reached: {sorted(self._behind)}"
            )
        if self._behind and self._slots is not None and self._slots.numel() != self.batch * k.shape[2]:
            raise ArgumentError.of("append", "k", f"{k.shape[2]} tokens", "as many as the first layer of this step")

    def _begin_step(self, T: int, live: Tensor | None) -> None:
        """Allocate pages for the step and work out the slot of every token."""
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
            self._rebuild(layer, [0] * self.batch)
        except BaseException:
            store.forget_index()
            store.params = params
            raise

    def _calibration_keys(self, layer: int) -> Tensor | None:
        """`[N,Hkv,D]` of the first row that has enough, so that its neighbours do not change its params."""
        for row, n in enumerate(self._lengths):
            if n >= MASSIVE_TOKENS + CALIBRATION_TOKENS:
                return self.row(layer, row)[0][:, MASSIVE_TOKENS:].transpose(0, 1)
        return None

    def _rebuild(self, layer: int, start: list[int]) -> None:
        """Index entries of every row from token start[row] on, rounded down to its page."""
        index = self.index(layer)
        if index is None or not any(self._lengths):
            return
        first = torch.tensor(start, dtype=torch.int32, device=self.device)
        if self.unit == "page":
            page_summary(self.keys(layer), self.block_table, self.seq_lens, start=first, out=index)
        else:
            key_sketch(
                self.keys(layer),
                self.block_table,
                self.seq_lens,
                index.params,
                planes=self.planes,
                start=first,
                out=index,
            )

    # --- cutting, copying, reordering ----------------------------------------------------------------------------

    def crop(self, lengths: int | Sequence[int]) -> None:
        """Cut every row to its entry of `lengths` (an int: the same for all; longer than the row: no change).

        Pages behind the cut are given back. The page that is cut gets its index rebuilt, in a copy of its own if
        another row shares it.
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
        start = [n if row in cut else before[row] for row, n in enumerate(wanted)]
        for layer in range(self.layers):
            self._rebuild(layer, start)

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
                if store.k is not None:
                    store.grow(len(self._pool.refs))

    def _copy_page(self, source: int, target: int) -> None:
        for store in self._store:
            if store.k is not None:
                if store.pages < len(self._pool.refs):
                    store.grow(len(self._pool.refs))
                store.copy_page(source, target)

    def _check_between_steps(self, op: str) -> None:
        if self._behind:
            raise ArgumentError.of(op, "state", f"layers {sorted(self._behind)} not written yet", "a finished step")

    def _forget_tables(self) -> None:
        self._table = self._seq_lens = self._slots = None

    def _array(self, layer: int, name: str) -> Tensor:
        store = self._store[layer]
        if store.k is None:
            store.grow(len(self._pool.refs))
        return store.k if name == "k" else store.v  # type: ignore[return-value]
