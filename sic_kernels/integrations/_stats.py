"""What the attention calls of a cache did: counted on the device, read when asked."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..slicing.cache import SlicedKVCache

Tensor = torch.Tensor

STATUS_NAMES = ("sliced", "dense_layer", "dense_short", "dense_prefill", "fallback_mass")
SLICED, DENSE_LAYER, DENSE_SHORT, DENSE_PREFILL, FALLBACK_MASS = range(len(STATUS_NAMES))


@dataclasses.dataclass(frozen=True)
class AttentionStats:
    """Counts since the last reset. A head-step is one query head answering one token in one layer.

    by_layer[l][name]: head-steps of layer l by how they were answered (`STATUS_NAMES`);
    fallback_heads[l][h]: how often query head h of layer l was recomputed dense;
    bytes_read, bytes_dense: of keys, values and index, in the steps eligible for slicing, and what dense attention
    would have read; omitted_max, omitted_mean: estimated softmax mass not read, over sliced head-steps (None: none);
    shadow_error: largest |sliced - dense| over the norm of dense, per layer (None: not in shadow mode).
    """

    by_layer: list[dict[str, int]]
    fallback_heads: list[dict[int, int]]
    bytes_read: int
    bytes_dense: int
    omitted_max: float | None
    omitted_mean: float | None
    shadow_error: list[float] | None

    @property
    def totals(self) -> dict[str, int]:
        return {name: sum(layer[name] for layer in self.by_layer) for name in STATUS_NAMES}

    @property
    def hit_ratio(self) -> float | None:
        """Head-steps answered sliced over those eligible; None when none was eligible."""
        eligible = self.totals["sliced"] + self.totals["fallback_mass"]
        return self.totals["sliced"] / eligible if eligible else None


class StatsRecorder:
    """Accumulates per layer without reading a device tensor; `read` and `publish` do read."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.clear()

    def clear(self) -> None:
        self._host = [[0] * len(STATUS_NAMES) for _ in range(self.layers)]
        self._counts: list[Tensor | None] = [None] * self.layers  # i64 [Hq, status]
        self._read_rows: Tensor | None = None  # i64 []: keys and values rows read
        self._bytes_index = self._bytes_dense = self._row_bytes = 0
        self._omitted_sum: Tensor | None = None
        self._omitted_max: Tensor | None = None
        self._shadow: list[Tensor | None] = [None] * self.layers
        self._published = [0] * (len(STATUS_NAMES) + 2)

    def prefill(self, layer: int, head_steps: int) -> None:
        self._host[layer][DENSE_PREFILL] += head_steps

    def dense(self, layer: int, head_steps: int) -> None:
        self._host[layer][DENSE_SHORT] += head_steps

    def sliced(self, layer: int, result: Any, pages: SlicedKVCache, policy: Any) -> None:
        """Count one `SliceResult`; all arithmetic stays on the device."""
        status = result.status.long()  # [B,T,Hq]
        Hq = status.shape[2]
        codes = torch.arange(len(STATUS_NAMES), device=status.device)
        counts = (status.reshape(-1, Hq, 1) == codes).sum(0)
        old = self._counts[layer]
        self._counts[layer] = counts if old is None else old + counts
        self._bytes(status, result, pages, policy)
        # NaN-proof: where nothing was left out the estimate may be anything
        omitted = torch.where(status == SLICED, result.omitted_mass, 0.0)
        total, top = omitted.double().sum(), omitted.max()
        self._omitted_sum = total if self._omitted_sum is None else self._omitted_sum + total
        self._omitted_max = top if self._omitted_max is None else torch.maximum(self._omitted_max, top)

    def _bytes(self, status: Tensor, result: Any, pages: SlicedKVCache, policy: Any) -> None:
        """Bytes that were read and that dense attention would have read, for calls that were eligible."""
        if result.selection is None:  # dense by policy
            return
        B, T, _ = status.shape
        element = torch.empty((), dtype=pages.dtype).element_size()
        self._row_bytes = (pages.head_dim + pages.v_head_dim) * element
        visible = sum(max(0, n - T + t + 1) for n in pages.lengths for t in range(T)) * pages.kv_heads
        unit = pages.page_size if result.selection.unit == "page" else 1
        again = (status == FALLBACK_MASS).view(B, T, pages.kv_heads, -1).any(-1)  # KV heads read in full as well
        lens = pages.seq_lens.view(B, 1, 1)
        rows = result.selection.counts.sum() * unit + (again * lens).sum()
        self._read_rows = rows if self._read_rows is None else self._read_rows + rows
        self._bytes_dense += visible * self._row_bytes
        self._bytes_index += _index_bytes(pages, policy, visible)

    def shadow(self, layer: int, sliced: Tensor, dense: Tensor) -> None:
        gap = (sliced.float() - dense.float()).norm(dim=-1) / dense.float().norm(dim=-1).clamp_min(1e-20)
        old = self._shadow[layer]
        self._shadow[layer] = gap.max() if old is None else torch.maximum(old, gap.max())

    def read(self) -> AttentionStats:
        by_layer, fallback = [], []
        for layer in range(self.layers):
            counts = self._counts[layer]
            host = dict(zip(STATUS_NAMES, self._host[layer]))
            if counts is not None:
                for name, n in zip(STATUS_NAMES, counts.sum(0).tolist()):
                    host[name] += n
            by_layer.append(host)
            heads = [] if counts is None else counts[:, FALLBACK_MASS].tolist()
            fallback.append({head: n for head, n in enumerate(heads) if n})
        n_sliced = sum(layer["sliced"] for layer in by_layer)
        rows = 0 if self._read_rows is None else int(self._read_rows)
        measured = n_sliced > 0 and self._omitted_max is not None and self._omitted_sum is not None
        errors = [0.0 if e is None else float(e) for e in self._shadow]
        return AttentionStats(
            by_layer=by_layer,
            fallback_heads=fallback,
            bytes_read=rows * self._row_bytes + self._bytes_index,
            bytes_dense=self._bytes_dense,
            omitted_max=float(self._omitted_max) if measured else None,  # type: ignore[arg-type]
            omitted_mean=float(self._omitted_sum) / n_sliced if measured else None,  # type: ignore[arg-type]
            shadow_error=errors if any(e is not None for e in self._shadow) else None,
        )

    def publish(self, metrics: Any) -> None:
        """Add what is new since the last call to the process-wide metrics."""
        stats = self.read()
        now = [stats.totals[name] for name in STATUS_NAMES] + [stats.bytes_read, stats.bytes_dense]
        new = [a - b for a, b in zip(now, self._published)]
        self._published = now
        eligible = new[SLICED] + new[FALLBACK_MASS]
        if eligible:
            metrics.get("sic_slice_hit_ratio").add(new[SLICED], eligible)
            metrics.get("sic_slice_fallback_ratio").add(new[FALLBACK_MASS], eligible, reason="omitted_mass")
            metrics.get("sic_slice_read_ratio").add(new[-2], new[-1])


def _index_bytes(pages: SlicedKVCache, policy: Any, tokens: int) -> int:
    """Index bytes that selection reads for `tokens` visible tokens (times KV heads)."""
    plane = -(-pages.head_dim // 8)
    if pages.unit == "page":
        element = torch.empty((), dtype=pages.dtype).element_size()
        return tokens * 2 * pages.head_dim * element // pages.page_size
    refined = int(tokens * policy.candidates) * (pages.planes * plane + 2) if pages.planes > 1 else 0
    return tokens * (plane + 2) + refined
