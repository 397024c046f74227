"""Ways to keep a cache in fewer bytes, for `eval delta`: what a later token reads of the rows that were given, and its size.

All take rows the same way: the tokens of a forward come raw, are attended to raw within it, and are given to the coder
afterwards. Parts that a method keeps raw are half precision. The peers are written from their descriptions.
"""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import torch

from .. import delta
from ..runtime.errors import SicError

Tensor = torch.Tensor

HALF = 2  # bytes of a half-precision number
GROUP = 32


class Rows(NamedTuple):
    """Keys (rotated) and values `[Hkv,n,D]` as they are read from token `start` on."""

    start: int
    k: Tensor
    v: Tensor


class NotHere(SicError):
    """A method that cannot run on this machine; the message says why."""


class RowCoder:
    """Each row by itself: `method` is a function of rows `[..,D]`, `row_bytes` the bytes of one."""

    def __init__(self, method: Any, row_bytes: Any) -> None:
        self.method, self.row_bytes = method, row_bytes
        self.seen: dict[int, int] = {}
        self.bytes = 0.0

    def code(self, layer: int, k: Tensor, v: Tensor) -> Rows:
        start = self.seen.get(layer, 0)
        self.seen[layer] = start + k.shape[1]
        self.bytes += sum(x.shape[0] * x.shape[1] * self.row_bytes(x.shape[2]) for x in (k, v))
        return Rows(start, self.method(k), self.method(v))

    def nbytes(self) -> float:
        return self.bytes


def fp8(x: Tensor) -> Tensor:
    """float8 e4m3 without a scale, as serving stacks keep it by default; beyond its range the largest number."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


def q8_0(x: Tensor) -> Tensor:
    """llama.cpp's q8_0: blocks of 32 channels, the largest magnitude is 127."""
    blocks = _groups(x)
    step = blocks.abs().amax(-1, keepdim=True) / 127
    codes = torch.round(blocks / step.where(step > 0, torch.ones_like(step)))
    return (codes * _half(step)).flatten(-2)


def q4_0(x: Tensor) -> Tensor:
    """llama.cpp's q4_0: blocks of 32 channels, the value of largest magnitude is -8, codes -8 to 7."""
    blocks = _groups(x)
    step = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -8
    codes = torch.floor(blocks / step.where(step != 0, torch.ones_like(step)) + 8.5).clamp(0, 15) - 8
    return (codes * _half(step)).flatten(-2)


def _groups(x: Tensor) -> Tensor:
    """Groups of 32 along the last dimension (one group where it is no multiple of that)."""
    D = x.shape[-1]
    size = GROUP if D % GROUP == 0 else D
    return x.reshape(*x.shape[:-1], D // size if size else 0, max(size, 1))


def _half(x: Tensor) -> Tensor:
    return x.half().to(x.dtype)


class Kivi:
    """KIVI (Liu et al. 2024): keys per channel over groups of 32 tokens, values per token over groups of 32 channels, codes
    between minimum and maximum, both in half precision; the last `window` tokens or more stay raw.
    """

    def __init__(self, bits: int, window: int) -> None:
        self.bits, self.window = bits, window
        self.raw: dict[int, tuple[int, Tensor, Tensor]] = {}
        self.coded_bytes: dict[int, float] = {}

    def code(self, layer: int, k: Tensor, v: Tensor) -> Rows:
        start, old_k, old_v = self.raw.get(layer, (0, k[:, :0], v[:, :0]))
        k, v = torch.cat((old_k, k), 1), torch.cat((old_v, v), 1)
        full = max(0, (k.shape[1] - self.window) // GROUP * GROUP)
        self.raw[layer] = start + full, k[:, full:], v[:, full:]
        numbers = k[:, :full].numel() + v[:, :full].numel()
        self.coded_bytes[layer] = self.coded_bytes.get(layer, 0) + numbers * (self.bits / 8 + 2 * HALF / GROUP)
        coded = (self._grouped(k[:, :full].transpose(1, 2)).transpose(1, 2), self._grouped(v[:, :full]))
        return Rows(start, *(torch.cat((c, _half(x[:, full:])), 1) for c, x in zip(coded, (k, v))))

    def _grouped(self, x: Tensor) -> Tensor:
        """Groups of 32 along the last dimension, coded and decoded."""
        groups = _groups(x)
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        step, zero = _half((high - low) / (2**self.bits - 1)), _half(low)
        codes = torch.round((groups - zero) / step.where(step > 0, torch.ones_like(step)))
        return (codes.clamp(0, 2**self.bits - 1) * step + zero).flatten(-2)

    def nbytes(self) -> float:
        raw = sum(k.numel() + v.numel() for _, k, v in self.raw.values())
        return raw * HALF + sum(self.coded_bytes.values())


class Quanto:
    """transformers' own QuantizedCache with the package optimum-quanto and its default groups and window, in half precision."""

    def __init__(self, config: Any, bits: int) -> None:
        if importlib.util.find_spec("optimum") is None or importlib.util.find_spec("optimum.quanto") is None:
            raise NotHere("the package optimum-quanto is not installed")
        from transformers.cache_utils import QuantizedCache

        try:
            self.cache = QuantizedCache("quanto", config, nbits=bits)
        except (ImportError, ValueError) as error:
            raise NotHere(str(error)) from error
        self.seen: dict[int, int] = {}
        self.coded: dict[int, int] = {}

    def code(self, layer: int, k: Tensor, v: Tensor) -> Rows:
        store, before = self.cache.layers[layer], self.seen.get(layer, 0)
        store.update(k[None].half(), v[None].half())
        waiting = store.keys.shape[-2] if store.keys.ndim == 4 else 0
        self.seen[layer] = before + k.shape[1]
        if waiting:
            return Rows(self.seen[layer] - waiting, *(x[0].to(k.dtype) for x in (store.keys, store.values)))
        coded = (store._dequantize(store._quantized_keys), store._dequantize(store._quantized_values))
        return Rows(0, *(x[0].to(k.dtype) for x in coded))

    def nbytes(self) -> float:
        return sum(_tensor_bytes(part) for store in self.cache.layers for part in (
            store._quantized_keys, store._quantized_values, store.keys, store.values))  # fmt: skip


def _tensor_bytes(x: Any) -> int:
    """Bytes of a tensor, or of the tensors that a quantised one is made of."""
    parts = [getattr(x, name, None) for name in ("_data", "_scale", "_shift")]
    found = [part for part in parts if isinstance(part, Tensor)]
    return sum(_tensor_bytes(part) for part in found) if found else x.numel() * x.element_size()


class Delta:
    """`DeltaKVCache`: whole pages are coded, the rest waits raw."""

    def __init__(self, codecs: list[Any], params: Any, tokens: int) -> None:
        self.cache = delta.DeltaKVCache(codecs, params=params, capacity=tokens)
        self.coded = [0] * len(codecs)

    def code(self, layer: int, k: Tensor, v: Tensor) -> Rows:
        cache, start = self.cache, self.coded[layer]
        cache.append(layer, k[None], v[None])
        stop = self.coded[layer] = cache.coded[0]
        page = cache.page_size
        parts = [x[0, :, : cache.lengths[0] - stop].to(k.dtype) for x in cache.tail(layer)[:2]]
        if stop > start:
            table = cache.block_table[:, start // page : stop // page].contiguous()
            lens = torch.tensor([stop - start], dtype=torch.int32)
            at = torch.arange(start, stop, dtype=torch.int32)[None]
            rows = delta.decode(cache.codec(layer), cache.coded_pages(layer), table, lens, positions=at)
            parts = [torch.cat((r[0].transpose(0, 1).to(k.dtype), t), 1) for r, t in zip(rows, parts)]
        return Rows(start, *parts)

    def nbytes(self) -> float:
        return self.cache.nbytes() - self.sketch_nbytes()

    def sketch_nbytes(self) -> int:
        return self.cache.nbytes_by_part()["index"]

    def raw_share(self) -> float:
        """Of the coded rows, those that are kept raw: sinks and outliers."""
        cache = self.cache
        raw = sum(int(cache.coded_pages(layer).raw_state[0]) for layer in range(cache.layers))
        return raw / (cache.layers * cache.kv_heads * cache.coded[0])
