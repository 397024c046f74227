"""What the attention calls of a cache did: counted on the device, read when asked."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..slicing.paged_rows import PagedRows

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
    """Keeps the results of a step and sums them up once per step, on the device; `read` and `publish` synchronise."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.clear()

    def clear(self) -> None:
        self._waiting: list[tuple[int, Any]] = []
        self._pages: PagedRows | None = None
        self._step_fallbacks: Tensor | None = None
        self._host = [[0] * len(STATUS_NAMES) for _ in range(self.layers)]
        self._counts: Tensor | None = None  # i64 [layers, Hq, status]
        self._read_rows: Tensor | None = None  # i64 []: rows of keys and values read
        self._omitted_sum: Tensor | None = None
        self._omitted_max: Tensor | None = None
        self._bytes_index = self._bytes_dense = self._row_bytes = 0
        self._shadow: list[Tensor | None] = [None] * self.layers
        self._published = [0] * (len(STATUS_NAMES) + 2)

    def dense(self, layer: int, q: Tensor, policy: Any, why: int = DENSE_LAYER) -> None:
        """Take note of queries `[B,T,Hq,D]` answered dense without `attend`."""
        B, T, Hq = q.shape[:3]
        self._host[layer][DENSE_PREFILL if policy.max_sliced_T < T else why] += B * T * Hq

    def sliced(self, layer: int, result: Any, pages: PagedRows, policy: Any) -> None:
        """Take note of one `SliceResult`."""
        if result.selection is None:
            self.dense(layer, result.out, policy)
            return
        self._pages = pages
        self._waiting.append((layer, result))

    def shadow(self, layer: int, sliced: Tensor, dense: Tensor) -> None:
        gap = ((sliced.float() - dense.float()).norm(dim=-1) / dense.float().norm(dim=-1).clamp_min(1e-20)).max()
        old = self._shadow[layer]
        self._shadow[layer] = gap if old is None else torch.maximum(old, gap)

    def end_step(self) -> None:
        """Sum up what the layers of a step reported: a handful of operations, however many layers there are."""
        self._step_fallbacks = None
        if not self._waiting or self._pages is None:
            return
        pages = self._pages
        results = [result for _, result in self._waiting]
        status = torch.stack([result.status for result in results])  # [n,B,T,Hq]
        n, B, T, Hq = status.shape
        codes = torch.arange(len(STATUS_NAMES), device=status.device)
        where = torch.tensor([layer for layer, _ in self._waiting], device=status.device)
        if self._counts is None:
            self._counts = torch.zeros(self.layers, Hq, len(STATUS_NAMES), dtype=torch.int64, device=status.device)
        self._counts.index_add_(0, where, (status.view(n, B * T, Hq, 1) == codes).sum(1))
        self._step_fallbacks = (status == FALLBACK_MASS).sum()
        again = (status == FALLBACK_MASS).view(n, B, T, pages.kv_heads, -1).any(-1)  # KV heads read in full as well
        selected = torch.stack([result.selection.counts for result in results]).sum()
        unit = pages.page_size if results[0].selection.unit == "page" else 1
        self._read_rows = _plus(self._read_rows, selected * unit + (again * pages.seq_lens.view(B, 1, 1)).sum())
        # where nothing was left out, or all was recomputed, the estimate says nothing about the answer
        omitted = torch.stack([result.omitted_mass for result in results]).masked_fill(status != SLICED, 0.0)
        self._omitted_sum = _plus(self._omitted_sum, omitted.double().sum())
        top = omitted.max()
        self._omitted_max = top if self._omitted_max is None else torch.maximum(self._omitted_max, top)
        self._waiting.clear()
        self._bytes(pages, T, n)

    def step_fallbacks(self) -> int:
        """Head-steps of the last step that were recomputed dense."""
        return 0 if self._step_fallbacks is None else int(self._step_fallbacks)

    def _bytes(self, pages: PagedRows, T: int, layers: int) -> None:
        self._row_bytes = pages.row_bytes
        visible = sum(max(0, length - T + t + 1) for length in pages.lengths for t in range(T)) * pages.kv_heads
        self._bytes_dense += layers * visible * pages.plain_row_bytes
        self._bytes_index += layers * _index_bytes(pages, visible)

    def read(self) -> AttentionStats:
        self.end_step()
        by_layer = [dict(zip(STATUS_NAMES, counts)) for counts in self._host]
        fallback: list[dict[int, int]] = [{} for _ in range(self.layers)]
        if self._counts is not None:
            for layer, heads in enumerate(self._counts.tolist()):
                for head, counts in enumerate(heads):
                    for name, count in zip(STATUS_NAMES, counts):
                        by_layer[layer][name] += count
                    if counts[FALLBACK_MASS]:
                        fallback[layer][head] = counts[FALLBACK_MASS]
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

    def publish(self, metrics: Any) -> AttentionStats:
        """Add what is new since the last call to the process-wide metrics; returns what was read."""
        stats = self.read()
        totals = stats.totals
        now = [totals[name] for name in STATUS_NAMES] + [stats.bytes_read, stats.bytes_dense]
        new = [a - b for a, b in zip(now, self._published)]
        self._published = now
        eligible = new[SLICED] + new[FALLBACK_MASS]
        if eligible:
            metrics.get("sic_slice_hit_ratio").add(new[SLICED], eligible)
            metrics.get("sic_slice_fallback_ratio").add(new[FALLBACK_MASS], eligible, reason="omitted_mass")
            metrics.get("sic_slice_read_ratio").add(new[-2], new[-1])
        return stats


def _plus(total: Tensor | None, more: Tensor) -> Tensor:
    return more if total is None else total + more


def _index_bytes(pages: PagedRows, tokens: int) -> int:
    """Index bytes that selection reads for `tokens` visible tokens (times KV heads): all planes, in one pass."""
    if pages.unit == "page":
        element = pages.dtype.itemsize
        return tokens * 2 * pages.head_dim * element // pages.page_size
    return tokens * (pages.planes * -(-pages.head_dim // 8) + 2)
