"""Sliced attention inside Hugging Face transformers 5: `model.generate(...)` with a cache that is read in slices.

    from sic_kernels.integrations.transformers import SlicedCache, enable
    enable(model)                                    # registers and selects attn_implementation="sic_sliced"
    model.generate(**inputs, cache=SlicedCache(model.config, policy=sic.slicing.SlicePolicy(ratio=0.12)))

Three parts, all needed: the cache's layers return a *handle* in place of keys and values; the attention function takes
the handle, writes the new tokens into the pages and attends; the mask function hands the two-dimensional padding mask
through, because only there is it known which of the new tokens are padding. Padding takes no place in the cache, so a
left-padded row gives the same result as the row alone.

Prefill (more query tokens than `policy.max_sliced_T`) is dense; give `prefill_chunk_size` to bound its memory. Beam
search, crop (assisted decoding) and batch selection work on pages: full pages are shared, never copied.
"""

from __future__ import annotations

import dataclasses
import logging
import numbers
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from .. import slicing
from ..runtime import config, fallback, metrics, trace
from ..runtime.arguments import INTS, flag, instance, integer, tensor
from ..runtime.errors import ArgumentError, SicError
from ..runtime.log import get_logger
from ..slicing.cache import SlicedKVCache
from ..slicing.types import report_fallbacks
from ._keep import KeptSpans, Spans
from ._prefill import prefill_attention
from ._stats import DENSE_LAYER, DENSE_SHORT, AttentionStats, StatsRecorder

Tensor = torch.Tensor

NAME = "sic_sliced"  # attn_implementation
PUBLISH_EVERY = 32  # steps between additions to the process-wide metrics

_log = get_logger("transformers")


def register() -> None:
    """Make `attn_implementation="sic_sliced"` known to transformers. Safe to call again."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, padding_mask)


def enable(model: Any) -> Any:
    """`register`, then switch `model` (all its parts) to sliced attention. Returns the model.

    Without a `SlicedCache` the model still answers as before, through torch's own dense attention; with another cache that
    is counted as a fallback.
    """
    if not hasattr(model, "set_attn_implementation"):
        raise ArgumentError.of("enable", "model", type(model).__name__, "a model of transformers 5")
    register()
    model.set_attn_implementation(NAME)
    return model


# --- the handle and the cache -----------------------------------------------------------------------------------------


@dataclasses.dataclass
class PendingKV:
    """New keys and values `[B,Hkv,T,D]` on their way to the attention function that stores them in `cache`."""

    cache: SlicedCache
    layer: int
    k: Tensor
    v: Tensor

    def __getattr__(self, name: str) -> Any:
        # Reached for everything a tensor has and this has not: some other attention function got the handle.
        raise AttributeError(
            f"SlicedCache returned a handle without {name!r}: it works only with attn_implementation={NAME!r}; "
            "call sic_kernels.integrations.transformers.enable(model) first"
        )


class _Layer(CacheLayerMixin):
    """One layer's view of the cache; what concerns all layers at once is done by `SlicedCache`."""

    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: SlicedCache, layer: int) -> None:
        super().__init__()
        self.cache, self.layer, self.seen = cache, layer, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.is_initialized = True
        self.seen += key_states.shape[2]
        handle = PendingKV(self.cache, self.layer, key_states, value_states)
        return handle, handle

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        """Columns seen, padding included: what transformers counts positions by."""
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def _whole_cache_only(self, *args: Any, **kwargs: Any) -> None:
        raise SicError("SlicedCache keeps one block table for all layers: call this on the cache, not on one layer")

    crop = reorder_cache = batch_repeat_interleave = batch_select_indices = reset = offload = prefetch = (
        _whole_cache_only
    )


class SlicedCache(Cache):
    """A transformers `Cache` on `SlicedKVCache` pages.

    * `config`: the model's config (or the model). `policy`: what each decode step reads. `params`: sketch calibration
      per layer, for example `other.params`; without it the first prompt calibrates.
    * `shadow=True` answers with dense attention, computes the sliced answer beside it and records how far apart they
      are (`stats().shadow_error`): the first stage of a roll-out.
    * A fallback is counted, logged at level info, and an error under SIC_STRICT=1.
    * `capacity`: tokens, over all rows, to reserve at once. `dtype`: of the cache (default: that of the keys).
    * `keep`: tokens that every sliced step reads; see the method of that name.
    """

    def __init__(
        self,
        config: Any,
        policy: Any = None,
        *,
        page_size: int = 16,
        params: Any = None,
        capacity: int = 0,
        dtype: torch.dtype | None = None,
        shadow: bool = False,
        keep: Spans | None = None,
    ) -> None:
        if policy is not None:
            instance(type(self).__name__, "policy", policy, slicing.SlicePolicy)
        flag(type(self).__name__, "shadow", shadow)
        config = getattr(config, "config", config)
        text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
        if not hasattr(text, "num_hidden_layers"):
            raise ArgumentError.of(type(self).__name__, "config", type(config).__name__, "the configuration of a model")
        self._check_options(page_size, params, capacity, dtype, text.num_hidden_layers)
        self.policy = slicing.SlicePolicy() if policy is None else policy
        self.page_size, self.capacity, self.dtype, self.shadow = page_size, capacity, dtype, shadow
        self._given_params = params
        self._kept = KeptSpans(keep)
        self.pages: SlicedKVCache | None = None
        self._live: Tensor | None = None  # bool [B, seen]: which columns are stored; None while all are
        self._step_live: Tensor | None = None  # of the current step, decided by its first layer
        self._step_layers: set[int] = set()
        self._steps = 0
        layers = [_Layer(self, i) for i in range(text.num_hidden_layers)]
        self._recorder = StatsRecorder(len(layers))
        super().__init__(layers=layers)

    def _check_options(self, page_size: Any, params: Any, capacity: Any, dtype: Any, layers: int) -> None:
        """What is used when the first keys come is refused here."""
        op = type(self).__name__
        integer(op, "page_size", page_size, 1, "1 or more tokens")
        integer(op, "capacity", capacity, 0, "0 or more tokens")
        if dtype is not None:
            instance(op, "dtype", dtype, torch.dtype)
        fits = params is None or (isinstance(params, Sequence) and len(params) == layers)
        if not fits or not all(p is None or isinstance(p, slicing.SketchParams) for p in params or ()):
            expected = f"a SketchParams or None for each of {layers} layers, or None"
            raise ArgumentError.of(op, "params", type(params).__name__, expected)

    # --- what must be read

    def keep(self, spans: Spans | None) -> None:
        """From the next sliced step on, read these tokens whatever the budget: an earlier point that a question is about, say.

        spans: for each row of the batch (beams are rows) a list of (begin, end) in columns of `input_ids`: padding counts, end is
        exclusive, columns to come may be named. One row's list is for all rows. None, or empty lists: nothing is kept.
        They stay until the next call or `reset`; `crop` cuts them where it cuts columns; reordered, repeated and selected rows
        take theirs along. Kept tokens count within the budget (`SlicePolicy.ratio`), as sinks and recent ones do.
        """
        kept = KeptSpans(spans)
        if self.pages is not None:
            kept.check(self.pages.batch)
        self._kept = kept

    # --- what happened

    @property
    def params(self) -> Any:
        """Sketch calibration per layer (None before the first prompt): give it to the next cache."""
        return self._given_params if self.pages is None else self.pages.params

    def stats(self) -> AttentionStats:
        """How the attention calls since the last `reset` were answered, also added to `sic.metrics`; synchronises a GPU."""
        return self._recorder.publish(metrics)

    def clear_stats(self) -> None:
        """Start counting anew (what was counted is in `sic.metrics`)."""
        self._recorder.publish(metrics)
        self._recorder.clear()

    def nbytes(self) -> int:
        """Bytes allocated for keys, values, index and tables."""
        return 0 if self.pages is None else self.pages.nbytes()

    # --- batch operations of transformers: once for all layers

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -`tokens_to_remove` columns (0 or negative, as in transformers)."""
        if not isinstance(tokens_to_remove, numbers.Integral) or tokens_to_remove > 0:
            got = repr(tokens_to_remove)
            raise ArgumentError.of("crop", "tokens_to_remove", got, "0 or a negative number of tokens")
        columns = min(-tokens_to_remove, self.get_seq_length())
        if columns == 0 or self.pages is None:
            return
        if self._live is None:
            self.pages.crop([n - columns for n in self.pages.lengths])
        else:
            removed = self._live[:, -columns:].sum(1).tolist()
            self.pages.crop([n - gone for n, gone in zip(self.pages.lengths, removed)])
            self._live = self._live[:, :-columns]
        for layer in self.layers:
            layer.seen -= columns
        self._kept.crop(self.get_seq_length())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select("reorder_cache", "beam_idx", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        integer("batch_repeat_interleave", "repeats", repeats, 1, "1 or more")
        if self.pages is not None:
            self.pages.repeat(repeats)
            self._live = None if self._live is None else self._live.repeat_interleave(repeats, dim=0)
            self._kept.repeat(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select("batch_select_indices", "indices", indices)

    def _select(self, op: str, arg: str, indices: Tensor) -> None:
        indices = tensor(op, arg, indices, (*INTS, torch.bool), (-1,))
        if self.pages is not None:
            if indices.dtype == torch.bool:
                indices = indices.nonzero()[:, 0]
            self.pages.reorder(indices)
            self._live = None if self._live is None else self._live[indices]
            self._kept.select(indices)

    def reset(self) -> None:
        """Forget all tokens and what was to be kept of them; memory and calibration stay."""
        if self.pages is not None:
            self._given_params = self.pages.params
            self.pages.reset()
        self._live = self._step_live = None
        self._kept = KeptSpans()
        self._step_layers = set()
        self.clear_stats()
        for layer in self.layers:
            layer.seen = 0

    # --- the work of one layer of one step

    def attend(self, pending: PendingKV, q: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
        """Store the pending tokens and answer q `[B,Hq,T,D]`; returns `[B,T,Hq,Dv]`.

        mask bool `[B,seen]` (True: a real token) or None; options: scale, softcap, window, sinks as in
        `sliced_attention`. The new tokens' part of the mask must be zeros, then ones in every row.
        """
        layer, T = pending.layer, q.shape[2]
        try:
            live = self._begin(pending, mask)
        except ArgumentError:
            self.layers[layer].seen -= T  # refused: as if it had never been offered
            raise
        pages = self.pages
        assert pages is not None
        pages.append(layer, pending.k, pending.v, live)
        plain = all(options[name] is None for name in ("softcap", "window", "sinks"))
        if plain and self.policy.max_sliced_T < T:
            out = prefill_attention(q, pages, layer, live, options["scale"], self._fresh(pending))
            self._recorder.dense(layer, out, self.policy)
        else:
            out = self._decode(layer, q.transpose(1, 2), options)
        self._end(layer)
        return out

    def _fresh(self, pending: PendingKV) -> tuple[Tensor, Tensor] | None:
        """The new keys and values, where the cache keeps something less exact."""
        return None

    def _begin(self, pending: PendingKV, mask: Tensor | None) -> Tensor | None:
        """Which of the new tokens are real (None: all). The first layer of a step decides for all."""
        if self._step_layers:
            return self._step_live
        B, _, T, _ = pending.k.shape
        self._kept.check(B)
        if self.pages is None:
            self.pages = self._new_pages(pending.k, pending.v)
        if self.pages.batch != B:
            raise ArgumentError.of(
                "SlicedCache", "keys", f"batch {B}", f"batch {self.pages.batch}, as the rows it holds"
            )
        self._step_live = self._new_live(mask, B, T)
        self._step_layers = set(range(len(self.layers)))
        return self._step_live

    def _new_pages(self, k: Tensor, v: Tensor) -> Any:
        """An empty cache for keys and values `[B,Hkv,T,D]` like these."""
        return SlicedKVCache(
            len(self.layers), k.shape[1], k.shape[3], v.shape[3], batch=k.shape[0], page_size=self.page_size,
            dtype=self.dtype or k.dtype, device=k.device, unit=self.policy.unit, params=self._given_params,
            capacity=self.capacity,
        )  # fmt: skip

    def _new_live(self, mask: Tensor | None, B: int, T: int) -> Tensor | None:
        """Check the mask `[B,seen+T]`, note its new part; bool `[B,T]`, None where no new token is padding."""
        seen = self.layers[0].seen - T
        new = None if mask is None else self._checked(mask, B, seen, T)
        like = self._live if new is None else new
        if like is not None:  # some column, old or new, is padding: from here on all are noted
            old = like.new_ones(B, seen) if self._live is None else self._live
            self._live = torch.cat([old, like.new_ones(B, T) if new is None else new], dim=1)
        if new is not None:  # columns taken for tokens to come are padding
            self._kept.changed()
        return new

    def _keep_now(self, q: Tensor) -> Tensor | None:
        """What `attend` is to keep for q `[B,T,Hq,D]`."""
        return self._kept.stored(q.shape[0], self._live, q.device)

    def _checked(self, mask: Tensor, B: int, seen: int, T: int) -> Tensor | None:
        if mask.shape != (B, seen + T):
            raise ArgumentError.of("SlicedCache", "attention_mask", list(mask.shape), f"[{B},{seen + T}]")
        before = mask.new_ones(B, seen) if self._live is None else self._live
        if not torch.equal(mask[:, :seen], before):
            got = "a change for tokens seen before"
            raise ArgumentError.of("SlicedCache", "attention_mask", got, "the mask given when they were new")
        new = mask[:, seen:]
        if (new[:, :-1] & ~new[:, 1:]).any():
            raise ArgumentError.of("SlicedCache", "attention_mask", "padding after real tokens", "left padding")
        return None if new.all() else new

    def _decode(self, layer: int, q: Tensor, options: dict[str, Any]) -> Tensor:
        pages = self.pages
        assert pages is not None
        k, v, index, table, lens = pages.tensors(layer)
        if index is None or options["window"] is not None:
            # too few tokens so far to calibrate an index, or a sliding window, which is a small slice already
            self._recorder.dense(layer, q, self.policy, DENSE_SHORT if index is None else DENSE_LAYER)
            return slicing.sliced_attention(q, k, v, table, lens, **options)[0]
        with fallback.looked_at_later():  # when the step is complete
            result = slicing.attend(
                q, k, v, index, table, lens, policy=self.policy, layer=layer, keep=self._keep_now(q), **options
            )
        self._recorder.sliced(layer, result, pages, self.policy)
        if trace.active():
            trace.record(
                "transformers.attend", layer=layer, seq_lens=lens, status=result.status, omitted=result.omitted_mass
            )
        if not self.shadow:
            return result.out
        dense, _ = slicing.sliced_attention(q, k, v, table, lens, **options)
        self._recorder.shadow(layer, result.out, dense)
        return dense

    def _end(self, layer: int) -> None:
        self._step_layers.discard(layer)
        if self._step_layers:
            return
        self._recorder.end_step()
        self._steps += 1
        self._report_fallbacks()
        # reading counts synchronises a GPU: there only `stats()` publishes
        if self._steps % PUBLISH_EVERY == 0 and self.pages is not None and self.pages.device.type == "cpu":
            self._recorder.publish(metrics)

    def _report_fallbacks(self) -> None:
        """The step's fallbacks into the log; under SIC_STRICT an error. Reads the device only if someone listens."""
        if config.current().strict or _log.isEnabledFor(logging.INFO):
            report_fallbacks(self._recorder.step_fallbacks())


# --- what transformers calls ------------------------------------------------------------------------------------------


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """Mask function: the two-dimensional bool mask `[B,kv_length]`, or None when nothing is padding.

    Causality and sliding windows are the attention function's own. Any other pattern (prefix, block, packed without a
    cache) is refused: it would be ignored silently.
    """
    if use_vmap or (mask_function is not causal_mask_function and local_size is None):
        raise SicError(f"attn_implementation={NAME!r} knows causal and sliding-window masks only, not {mask_function}")
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask.bool()


def attention(
    module: Any,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function: query `[B,Hq,T,D]`; key and value are a `PendingKV` (without a `SlicedCache`: tensors).

    Keys of another cache are a fallback: dense, counted, logged, an error under SIC_STRICT=1.
    """
    if not isinstance(key, PendingKV):
        _report_other_cache(query, key)
        mask = _dense_mask(query, key, attention_mask, sliding_window)
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
    if dropout:
        raise SicError("sliced attention is for inference: dropout must be 0 (call model.eval())")
    sinks = None if s_aux is None else s_aux.float()
    options = {"scale": scaling, "softcap": softcap, "window": sliding_window, "sinks": sinks}
    return key.cache.attend(key, query, attention_mask, options), None


def _report_other_cache(query: Tensor, key: Tensor) -> None:
    """Tokens from some other cache are read in full although slices were asked for. Without a cache there is nothing to slice."""
    if key.shape[2] == query.shape[2]:
        return
    B, heads, T, _ = query.shape
    metrics.get("sic_slice_hit_ratio").add(0, B * heads * T)
    metrics.get("sic_slice_fallback_ratio").add(B * heads * T, B * heads * T, reason="no_sliced_cache")
    fallback.report(_log, "dense attention over %d tokens: the cache is not a SlicedCache", key.shape[2])


def _dense_mask(query: Tensor, key: Tensor, mask: Tensor | None, window: int | None) -> Tensor | None:
    """The four-dimensional mask that torch's attention needs, from the two-dimensional one."""
    T, S = query.shape[2], key.shape[2]
    if mask is not None and mask.ndim == 4:
        return mask
    if mask is None and window is None and (T == 1 or T == S):
        return None
    if window is not None:
        from transformers.masking_utils import sliding_window_causal_mask_function

        function = sliding_window_causal_mask_function(window)
    else:
        function = causal_mask_function
    return sdpa_mask(
        query.shape[0], T, S, q_offset=S - T, mask_function=function, attention_mask=mask,
        allow_is_causal_skip=False, device=query.device,
    )  # fmt: skip
