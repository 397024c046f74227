"""The coded cache inside Hugging Face transformers 5: `model.generate(...)` with a cache of a quarter of the size.

    from sic_kernels.integrations import delta
    from sic_kernels.integrations.transformers import enable
    enable(model)
    codecs = delta.codecs(model, "k4v4")                       # templates that come with the package, or `templates=`
    model.generate(**inputs, cache=delta.DeltaCache(model.config, codecs))

transformers gives keys rotated; the codec turns them back exactly, positions counted without padding. Prefill computes with
the new keys and values as they are (with softcap, a window or sinks it reads codes, too); what comes later reads codes. With a
`policy` a decode step reads only what it selects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import delta, slicing
from ..delta import codecs as codecs
from ..delta.ops import report_lost_rows
from ..runtime import config, metrics
from ..runtime.arguments import instance
from ..runtime.errors import ArgumentError
from ._keep import Spans
from ._stats import DENSE_LAYER, DENSE_SHORT
from .transformers import PendingKV, SlicedCache

Tensor = torch.Tensor


class DeltaCache(SlicedCache):
    """A transformers `Cache` on `DeltaKVCache` pages.

    config: the model's (or the model).  codecs: one a layer.  policy: what a decode step reads, by tokens; None: all.
    dtype: of raw rows and of the raw tail (None: that of the keys).  page_size, params, capacity, keep: as in `SlicedCache`.
    """

    def __init__(
        self,
        config: Any,
        codecs: Sequence[delta.Codec],
        policy: slicing.SlicePolicy | None = None,
        *,
        page_size: int = 16,
        params: Any = None,
        capacity: int = 0,
        dtype: torch.dtype | None = None,
        keep: Spans | None = None,
    ) -> None:
        if policy is not None:
            instance("DeltaCache", "policy", policy, slicing.SlicePolicy)
        if policy is not None and policy.unit != "token":
            raise ArgumentError.of("DeltaCache", "policy.unit", repr(policy.unit), "'token': the index is a key sketch")
        if policy is not None and policy.max_omitted_mass is not None:
            raise ArgumentError.of("DeltaCache", "policy.max_omitted_mass", policy.max_omitted_mass, "None")
        if isinstance(codecs, str):
            raise ArgumentError.of("DeltaCache", "codecs", repr(codecs), f"Codecs: codecs(model, {codecs!r})")
        if not isinstance(codecs, Sequence) or not all(isinstance(codec, delta.Codec) for codec in codecs):
            raise ArgumentError.of("DeltaCache", "codecs", type(codecs).__name__, "one Codec for each layer")
        self.selects = policy is not None
        self.codecs = list(codecs)
        super().__init__(config, policy, page_size=page_size, params=params, capacity=capacity, dtype=dtype, keep=keep)
        if len(self.codecs) != len(self.layers):
            raise ArgumentError.of(
                "DeltaCache", "codecs", len(self.codecs), f"one for each of {len(self.layers)} layers"
            )
        if policy is not None and policy.recent < page_size:
            got = f"{policy.recent} tokens"
            raise ArgumentError.of(
                "DeltaCache", "policy.recent", got, f"{page_size} or more: the raw tail has no index"
            )

    def _new_pages(self, k: Tensor, v: Tensor) -> delta.DeltaKVCache:
        return delta.DeltaKVCache(
            self.codecs, batch=k.shape[0], page_size=self.page_size, dtype=self.dtype or k.dtype, params=self._given_params,
            capacity=self.capacity, indexed=self.selects,
        )  # fmt: skip

    def _fresh(self, pending: PendingKV) -> tuple[Tensor, Tensor]:
        return pending.k, pending.v

    def _decode(self, layer: int, q: Tensor, options: dict[str, Any]) -> Tensor:
        pages: Any = self.pages
        index = pages.index(layer) if self.selects else None
        long = q.shape[1] > self.policy.max_sliced_T
        if long or index is None or options["window"] is not None or layer in self.policy.dense_layers:
            why = DENSE_SHORT if self.selects and index is None else DENSE_LAYER
            self._recorder.dense(layer, q, self.policy, why)
            return pages.attention(layer, q, **options)[0]
        chosen = {name: options[name] for name in ("scale", "softcap", "window")}
        selection, log_unread = slicing.select_slice(
            q, index, pages.block_table, pages.seq_lens, policy=self.policy, keep=self._keep_now(q), **chosen
        )
        out, lse = pages.attention(layer, q, selection, **options)
        omitted = torch.sigmoid(log_unread - lse)
        status = torch.zeros(omitted.shape, dtype=torch.uint8, device=omitted.device)
        self._recorder.sliced(layer, slicing.SliceResult(out, lse, selection, omitted, status), pages, self.policy)
        return out

    def _report_fallbacks(self) -> None:
        super()._report_fallbacks()
        if config.current().strict:  # reads the device
            self._report_pages()

    def stats(self) -> Any:
        self._report_pages()
        return super().stats()

    def _report_pages(self) -> None:
        """Size and lost outliers into the metrics; rows that found no room into the log."""
        pages: Any = self.pages
        if pages is None or not sum(pages.lengths):
            return
        row = (pages.head_dim + pages.v_head_dim) * torch.float16.itemsize
        plain = sum(pages.lengths) * pages.layers * pages.kv_heads * row
        metrics.get("sic_delta_size_ratio").set(pages.nbytes() - pages.nbytes_by_part()["index"], plain)
        lost = pages.rows_without_room()
        metrics.get("sic_delta_lost_raw_ratio").set(lost, sum(pages.coded) * pages.layers * pages.kv_heads)
        report_lost_rows(lost)
