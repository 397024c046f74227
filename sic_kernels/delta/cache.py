"""`DeltaKVCache`: keys and values as codes in pages, for all layers of one model.

    cache = sic.delta.DeltaKVCache(codecs)                    # one `Codec` a layer
    cache.append(layer, k, v)                                 # k, v [B,Hkv,T,D], keys rotated
    out, lse = cache.attention(layer, q)                      # or with a selection of tokens or pages

Full pages are coded, the sinks among them kept raw; what does not fill a page yet waits as it is in a raw tail. A row is
coded once and never again, so that what a sequence reads does not depend on when it was read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..runtime.errors import ArgumentError
from ..runtime.fallback import looked_at_later
from ..slicing.cache import CALIBRATION_TOKENS
from ..slicing.index import key_sketch
from ..slicing.paged_rows import LayerStore, PagedRows
from ..slicing.types import KeySketch, SketchParams
from .codec import Codec
from .ops import RawTail, decode, delta_attention, encode
from .pages import RAW_DTYPES, DeltaPages

Tensor = torch.Tensor

PLANES = 2


class _LayerCodes(LayerStore):
    """The arrays of one layer: coded pages, the raw tail of every row, the key sketch."""

    owner: DeltaKVCache

    def __init__(self, owner: DeltaKVCache, codec: Codec) -> None:
        super().__init__(owner)
        self.codec = codec
        self.coded: DeltaPages | None = None
        self.k_tail, self.v_tail = (  # [B,page,Hkv,D]: rows as encode takes them
            torch.zeros(owner.batch, owner.page_size, owner.kv_heads, width, dtype=owner.dtype, device=owner.device)
            for width in (owner.head_dim, owner.v_head_dim)
        )

    def grow(self, pages: int) -> None:
        o, old = self.owner, self.coded
        new = DeltaPages.allocate(
            self.codec, pages, o.page_size, o.kv_heads, o.head_dim, o.v_head_dim, o.device, raw_dtype=o.dtype,
            raw_rows=self._raw_rows(pages),
        )  # fmt: skip
        if old is not None:
            for name in ("k_codes", "v_codes", "tags", "raw", "raw_owner"):
                getattr(new, name)[: getattr(old, name).shape[0]] = getattr(old, name)
            new.raw_state.copy_(old.raw_state)
        if self.bits is not None:
            self.grow_index(pages)
        self.coded, self.pages = new, pages

    def _raw_rows(self, pages: int) -> int:
        """Sinks of every row of the batch, and outliers: one row in `rows_per_outlier`."""
        o = self.owner
        rows = pages * o.page_size * o.kv_heads
        if self.codec.keeps_all_raw:
            return rows
        before = 0 if self.coded is None else self.coded.raw.shape[0]
        return max(before, min(rows, o.batch * o.kv_heads * self.codec.sinks + -(-rows // o.rows_per_outlier)))

    def copy_page(self, source: int, target: int) -> None:
        assert self.coded is not None
        ids = torch.tensor([source, target], dtype=torch.int64, device=self.owner.device)
        raw = self.coded.raw_rows(ids[:1])[0].numel()
        free = self.coded.raw.shape[0] - int(self.coded.raw_state[0])
        if raw > free:
            self.grow_raw(raw - free)
        self.coded.copy_from(self.coded, ids[:1], ids[1:])
        if self.bits is not None and self.norm is not None:
            self.bits[:, target], self.norm[:, target] = self.bits[:, source], self.norm[:, source]

    def grow_raw(self, entries: int) -> None:
        """Room for so many raw rows more, at least half as many again as there are."""
        assert self.coded is not None
        self.coded = self.coded.with_raw_room(max(entries, self.coded.raw.shape[0] // 2))

    def parts(self) -> dict[str, int]:
        sizes = {} if self.coded is None else self.coded.sizes()
        index = sum(0 if array is None else array.nbytes for array in (self.bits, self.norm))
        return {**sizes, "tail": self.k_tail.nbytes + self.v_tail.nbytes, "index": index}


class DeltaKVCache(PagedRows):
    """Coded keys and values of several layers in pages, with a key sketch.

    codecs: one `Codec` a layer, all of the same heads and head sizes; with `Codec.rope`, keys are given rotated, token i of a
    row at position i (padding takes no place). Shapes: B rows, T new tokens, Hkv KV heads.

    * dtype: of the raw tail and of raw rows (float16, bfloat16, float32): the model's, for what is beyond its range is lost.
    * rows_per_outlier: of the coded rows, for one raw row of room besides the sinks. The table grows when a row finds no room
      (on a CUDA device: only together with the pages, as reading its state would wait for the device; such a row is coded all
      the same and counted in `rows_without_room()`).
    * indexed: whether a key sketch is kept, for selections; False saves its bytes.
    * params: one `SketchParams` a layer; a layer without is calibrated once, as in `SlicedKVCache`, and what is coded by then is
      indexed by its decoded keys.
    * capacity: tokens to reserve at once, over all rows.
    * Deterministic; every method raises `ArgumentError` before anything is changed. Not thread-safe.
    """

    def __init__(
        self,
        codecs: Sequence[Codec],
        *,
        batch: int = 1,
        page_size: int = 16,
        dtype: torch.dtype = torch.float16,
        params: Sequence[SketchParams | None] | None = None,
        capacity: int = 0,
        rows_per_outlier: int = 512,
        indexed: bool = True,
    ) -> None:
        codecs = list(codecs)
        if not codecs or not all(isinstance(codec, Codec) for codec in codecs):
            raise ArgumentError.of(
                "DeltaKVCache", "codecs", [type(c).__name__ for c in codecs], "a Codec for each layer"
            )
        first = codecs[0]
        for layer, codec in enumerate(codecs):
            sizes, wanted = (codec.heads, codec.Dk, codec.Dv), (first.heads, first.Dk, first.Dv)
            if sizes != wanted or codec.device != first.device:
                raise ArgumentError.of("DeltaKVCache", f"codecs[{layer}]", sizes, f"{wanted} on {first.device}")
        batch, capacity = self._set_sizes(
            "DeltaKVCache", len(codecs), first.heads, first.Dk, first.Dv, batch, page_size, capacity
        )
        if dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise ArgumentError.of("DeltaKVCache", "dtype", dtype, "float16|bfloat16|float32")
        if rows_per_outlier < 1:
            raise ArgumentError.of("DeltaKVCache", "rows_per_outlier", rows_per_outlier, "1 or more")
        self.unit, self.planes = "token", PLANES
        self.dtype, self.device, self.rows_per_outlier = dtype, first.device, rows_per_outlier
        self.indexed = indexed
        self._start(batch, capacity)
        self._pool.freed = []
        self._coded = [0] * batch  # tokens of each row that are coded; the others wait in its tail
        self._before = self._coded
        self._moves: _Moves | None = None  # of the current step
        self._start_positions: Tensor | None = None
        self._store = [_LayerCodes(self, codec) for codec in codecs]
        for store, layer_params in zip(self._store, self._checked_params("DeltaKVCache", params)):
            store.params = layer_params

    # --- what it holds ------------------------------------------------------------------------------------------

    @property
    def coded(self) -> tuple[int, ...]:
        """Tokens of each row that are coded; the others are in its raw tail."""
        return tuple(self._coded)

    @property
    def row_bytes(self) -> int:
        return sum(store.codec.row_bytes for store in self._store) // self.layers

    def codec(self, layer: int) -> Codec:
        return self._store[self._checked_layer("codec", layer)].codec

    def coded_pages(self, layer: int) -> DeltaPages:
        """The layer's pages, with room for all that the rows own."""
        store = self._store[self._checked_layer("coded_pages", layer)]
        if store.coded is None or store.pages < len(self._pool.refs):
            store.grow(len(self._pool.refs))
        assert store.coded is not None
        return store.coded

    def tail(self, layer: int) -> RawTail:
        """The rows that are not coded yet: k, v `[B,Hkv,page,D]`, from position start[b] on."""
        store = self._store[self._checked_layer("tail", layer)]
        return RawTail(store.k_tail.transpose(1, 2), store.v_tail.transpose(1, 2), self._tail_start())

    def index(self, layer: int) -> KeySketch | None:
        """The layer's key sketch; None before calibration. Tokens of the tail have no entries."""
        store = self._store[self._checked_layer("index", layer)]
        if store.bits is not None:
            self.coded_pages(layer)  # as many pages as the block table speaks of
        return store.sketch()

    def rows_without_room(self) -> int:
        """Rows that were to be kept raw and were coded for want of room; synchronises a GPU."""
        return sum(0 if store.coded is None else int(store.coded.raw_state[1]) for store in self._store)

    def row(self, layer: int, row: int) -> tuple[Tensor, Tensor]:
        """Keys (rotated) and values `[Hkv,n,D]` of one row, decoded to float32; copies."""
        layer, row = self._checked_layer("row", layer), self._checked_row("row", row)
        n, tail = self._coded[row], self._lengths[row] - self._coded[row]
        store, coded = self._store[layer], self.coded_pages(layer)
        table = self.block_table[row : row + 1]
        rows = decode(store.codec, coded, table, self._lens([n]), max_seq_len=n)
        waiting = (store.k_tail[row, :tail], store.v_tail[row, :tail])
        k, v = (torch.cat((c[0], t.float())).transpose(0, 1) for c, t in zip(rows, waiting))
        return k, v

    # --- attention ----------------------------------------------------------------------------------------------

    def attention(self, layer: int, q: Tensor, selection: Any = None, **options: Any) -> tuple[Tensor, Tensor]:
        """`delta_attention` of q `[B,T,Hq,Dk]` over what the layer holds; options as there."""
        coded, codec = self.coded_pages(layer), self._store[layer].codec
        if codec.rope is not None:  # the last page may reach beyond its positions
            room = self.block_table.shape[1] * self.page_size
            options.setdefault("max_seq_len", min(room, codec.rope.max_position))
        return delta_attention(
            q, codec, coded, self.block_table, self.seq_lens, selection, raw_tail=self.tail(layer), **options
        )

    # --- growing ------------------------------------------------------------------------------------------------

    def _check_append(self, layer: int, k: Tensor, v: Tensor, live: Tensor | None) -> None:
        super()._check_append(layer, k, v, live)
        for name, x in (("k", k), ("v", v)):
            if x.dtype not in RAW_DTYPES or x.dtype != k.dtype:
                got = f"{x.dtype} (k: {k.dtype})".replace("torch.", "")
                raise ArgumentError.of("append", name, got, "float32|float16|bfloat16, k and v alike")
        limit = min((s.codec.rope.max_position for s in self._store if s.codec.rope is not None), default=None)
        if self._behind or limit is None or max(self._lengths, default=0) + k.shape[2] <= limit:
            return
        new = [k.shape[2]] * self.batch if live is None else live.sum(1).tolist()
        longest = max((n + add for n, add in zip(self._lengths, new)), default=0)
        if longest > limit:
            raise ArgumentError.of("append", "k", f"a row of {longest} tokens", f"at most {limit}, as the rope has")

    def _begin_step(self, T: int, live: Tensor | None) -> list[int]:
        self._before, before = self._coded, list(self._lengths)
        self._release_pages()
        slots = super()._begin_step(T, live)
        self._moves = _Moves(self, before, T, slots)
        self._coded = self._moves.coded
        self._start_positions = None
        return slots

    def _undo_step(self, lengths: list[int]) -> None:
        super()._undo_step(lengths)
        self._coded = self._before

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Code what now fills pages, oldest first; what is left waits in the tail."""
        store, moves = self._store[layer], self._moves
        assert moves is not None
        if self.indexed and store.bits is None and store.params is not None and not any(self._before):
            store.grow_index(len(self._pool.refs))  # nothing is coded yet: all keys are indexed as they come
        rows = [x.transpose(1, 2).flatten(0, 1) for x in (k, v)]  # copies only if B > 1 and T > 1
        if moves.tail_slots is not None:
            old = [x.flatten(0, 1) for x in (store.k_tail, store.v_tail)]
            self._encode(layer, old[0], old[1], moves.tail_positions, moves.tail_slots)
        if moves.slots is not None:
            self._encode(layer, rows[0], rows[1], moves.positions, moves.slots)
        if self.indexed and store.bits is None and (moves.slots is not None or moves.tail_slots is not None):
            self._first_index(layer)
        if moves.into_tail is not None:  # last: until then a step that fails can be made again
            for tail, x in zip((store.k_tail, store.v_tail), rows):
                tail.flatten(0, 1)[moves.into_tail] = x[moves.from_row].to(self.dtype)

    def _encode(self, layer: int, k: Tensor, v: Tensor, positions: Tensor, slots: Tensor) -> None:
        codec, coded = self._store[layer].codec, self.coded_pages(layer)
        index = self.index(layer)  # of as many pages
        before = int(coded.raw_state[1]) if self.device.type == "cpu" else 0
        with looked_at_later():  # on the CPU here, elsewhere by whoever asks for `rows_without_room`
            encode(codec, k, v, positions, slots, coded, index=index)
        if self.device.type != "cpu":
            return
        missing = int(coded.raw_state[1]) - before
        if missing:  # once more, with room: the same codes, and the rows that had none
            coded.raw_state[1] = before
            self._store[layer].grow_raw(missing)
            encode(codec, k, v, positions, slots, self.coded_pages(layer), index=index)

    def _release_pages(self) -> None:
        """Raw entries of pages that no row owns any more are free."""
        if self._pool.freed:
            ids = torch.tensor(self._pool.freed, dtype=torch.int64, device=self.device)
            for store in self._store:
                if store.coded is not None:
                    store.coded.release(ids)
            self._pool.freed.clear()

    def _copy_page(self, source: int, target: int) -> None:
        self._release_pages()
        super()._copy_page(source, target)

    def _calibration_keys(self, layer: int) -> Tensor | None:
        sinks = self._store[layer].codec.sinks
        for row, n in enumerate(self._coded):
            if n >= sinks + CALIBRATION_TOKENS:
                return self.row(layer, row)[0][:, sinks:n].transpose(0, 1)
        return None

    def _index_all(self, layer: int) -> None:
        for row, n in enumerate(self._coded):
            if n:
                self._index_row(layer, row, n)

    def _index_row(self, layer: int, row: int, n: int) -> None:
        """Sketch entries of a row's coded tokens, from its decoded keys."""
        store, size = self._store[layer], self.page_size
        pages = self._pages[row][: -(-n // size)]
        keys = torch.zeros(len(pages) * size, self.kv_heads, self.head_dim, device=self.device)
        keys[:n] = self.row(layer, row)[0][:, :n].transpose(0, 1)
        sketch = key_sketch(
            keys.view(len(pages), size, self.kv_heads, -1).transpose(1, 2),
            torch.arange(len(pages), dtype=torch.int32, device=self.device)[None], self._lens([n]), store.params, planes=PLANES,
        )  # fmt: skip
        index = self.index(layer)
        assert index is not None
        index.bits[pages], index.norm[pages] = sketch.bits, sketch.norm

    # --- tables -------------------------------------------------------------------------------------------------

    def _lens(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def _tail_start(self) -> Tensor:
        if self._start_positions is None:
            self._start_positions = self._lens(self._coded)
        return self._start_positions

    def _forget_tables(self) -> None:
        super()._forget_tables()
        self._start_positions = None

    def _rows_cut(self, start: list[int]) -> None:
        self._coded = [min(coded, n) for coded, n in zip(self._coded, self._lengths)]

    def _rows_reordered(self, chosen: list[int]) -> None:
        self._coded = [self._coded[row] for row in chosen]
        rows = torch.tensor(chosen, dtype=torch.int64, device=self.device)
        for store in self._store:
            store.k_tail, store.v_tail = store.k_tail[rows], store.v_tail[rows]


class _Moves:
    """Where the tokens of a step go, in every layer: `slots` of the new rows `[B*T]` that are coded at once, `tail_slots` of
    waiting rows `[B*page]` that now are; -1 for the others, None where there are none. New rows `from_row` become the rows
    `into_tail` of the tail.
    """

    def __init__(self, cache: DeltaKVCache, before: list[int], T: int, slots: list[int]) -> None:
        size = cache.page_size
        self.coded: list[int] = []
        tail_slots: list[int] = []
        tail_positions: list[int] = []
        slots = list(slots)
        positions, into_tail, from_row = [0] * len(slots), [], []
        for row, (old, new, coded) in enumerate(zip(before, cache._lengths, cache._coded)):
            full = max(coded, new // size * size)
            self.coded.append(full)
            waiting = range(coded, coded + size)
            pages = cache._pages[row]
            tail_slots += [pages[p // size] * size + p % size if p < min(old, full) else -1 for p in waiting]
            tail_positions += [p if p < old else 0 for p in waiting]
            position = old
            for i in range(row * T, row * T + T):
                if slots[i] < 0:
                    continue
                positions[i] = position
                if position >= full:
                    into_tail.append(row * size + position - full)
                    from_row.append(i)
                    slots[i] = -1
                position += 1
        long = lambda values: torch.tensor(values, dtype=torch.int64, device=cache.device)
        self.slots = long(slots) if any(s >= 0 for s in slots) else None
        self.positions = long(positions)
        self.tail_slots = long(tail_slots) if any(s >= 0 for s in tail_slots) else None
        self.tail_positions = long(tail_positions)
        self.into_tail = long(into_tail) if into_tail else None
        self.from_row = long(from_row)
