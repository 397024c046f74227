"""`SlicedKVCache`: keys, values and their selection index in pages, for all layers of one model.

    cache = sic.slicing.SlicedKVCache(layers=30, kv_heads=3, head_dim=64)
    cache.append(layer, k, v)                       # k, v [B,Hkv,T,D]: written and indexed in one launch
    result = sic.slicing.attend(q, *cache.tensors(layer), policy=policy, layer=layer)

The arrays of a layer are stored head first, `[Hkv,P,page,D]`, and handed out transposed to the `[P,Hkv,page,D]` of the
contract: a sequence in consecutive pages is then one contiguous `[Hkv,S,D]` array, which hardware prefetching likes and
which dense prefill reads in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..runtime.arguments import code_of
from ..runtime.errors import ArgumentError
from .attention import append_kv
from .index import key_sketch, page_summary
from .paged_rows import LayerStore, PagedRows, count
from .types import UNITS, SketchParams

Tensor = torch.Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
SKETCH_MAX_DIM = 1024  # of `key_sketch`
CALIBRATION_TOKENS = 64  # fewer keys give no useful centre; until then attention is dense
MASSIVE_TOKENS = 4  # the first keys of a sequence are outliers and would drag the centre


class _LayerPages(LayerStore):
    """The arrays of one layer: rows as they are, grown by whole chunks of pages."""

    owner: SlicedKVCache

    def __init__(self, owner: SlicedKVCache) -> None:
        super().__init__(owner)
        self.k = self.v = self.summary = None  # type: Tensor | None

    def arrays(self) -> list[Tensor]:
        return [array for array in (self.k, self.v, self.bits, self.norm, self.summary) if array is not None]

    def parts(self) -> dict[str, int]:
        keys, values = (0 if array is None else array.nbytes for array in (self.k, self.v))
        return {"keys": keys, "values": values, "index": sum(a.nbytes for a in self.arrays()) - keys - values}

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
        if o.unit == "token":
            return super().grow_index(pages)
        dtype = torch.float32 if o.dtype == torch.float8_e4m3fn else o.dtype
        self.summary = self._grown(self.summary, pages, (2, o.head_dim), dtype, zero=True)

    def forget_index(self) -> None:
        super().forget_index()
        self.summary = None

    def copy_page(self, source: int, target: int) -> None:
        for array in self.arrays():
            array[:, target] = array[:, source]


class SlicedKVCache(PagedRows):
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
        batch, capacity = self._set_sizes(
            "SlicedKVCache", layers, kv_heads, head_dim, v_head_dim, batch, page_size, capacity
        )
        self.planes = count("SlicedKVCache", "planes", planes, 1)
        self.dtype, self.device, self.unit = dtype, torch.device(device), unit
        code_of("SlicedKVCache", "unit", unit, UNITS)
        self._check_kind()
        given = self._checked_params("SlicedKVCache", params)
        self._store = [_LayerPages(self) for _ in range(layers)]
        for store, layer_params in zip(self._store, given):
            store.params = layer_params
        self._start(batch, capacity)

    def _check_kind(self) -> None:
        """What the operations could not store or index."""
        if self.dtype not in DTYPES:
            names = "|".join(str(t).removeprefix("torch.") for t in DTYPES)
            raise ArgumentError.of("SlicedKVCache", "dtype", str(self.dtype).removeprefix("torch."), names)
        if self.planes > 2:
            raise ArgumentError.of("SlicedKVCache", "planes", self.planes, "1 or 2")
        if self.unit == "token" and self.head_dim > SKETCH_MAX_DIM:
            raise ArgumentError.of("SlicedKVCache", "head_dim", self.head_dim, f"1 to {SKETCH_MAX_DIM} for a sketch")

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
        return store.sketch()

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

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
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

    def _calibration_keys(self, layer: int) -> Tensor | None:
        for row, n in enumerate(self._lengths):
            if n >= MASSIVE_TOKENS + CALIBRATION_TOKENS:
                return self.row(layer, row)[0][:, MASSIVE_TOKENS:].transpose(0, 1)
        return None

    def _index_all(self, layer: int) -> None:
        self._rebuild(layer, [0] * self.batch)

    def _rows_cut(self, start: list[int]) -> None:
        for layer in range(self.layers):  # the keys of a page that was cut
            self._rebuild(layer, start)

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

    def _array(self, layer: int, name: str) -> Tensor:
        store = self._store[layer]
        if store.k is None:
            store.grow(len(self._pool.refs))
        return store.k if name == "k" else store.v
