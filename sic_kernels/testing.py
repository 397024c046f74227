"""What tests and benches of this library, and of runners that build on it, share.

* seeded inputs and random paged caches whose unused parts are full of junk,
* outputs prefilled and surrounded by guard bytes, so that a value left unwritten or a write out of bounds shows,
* comparisons whose message names the worst element,
* `run`, one way to call an op on any backend, and a timer.

Only torch is needed to import this file.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Tensor = torch.Tensor

GUARD = 64  # bytes on each side of a guarded output
_GUARD_BYTE = 0xA5
_INT_FILL = 0x5A  # every byte of an integer output before the op runs
JUNK = 1.0e4  # value of cache entries that must never be read
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def generator(seed: int) -> torch.Generator:
    """A CPU generator: the same inputs on every machine."""
    return torch.Generator().manual_seed(seed)


def randn(gen: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal values, drawn in f32 and rounded to dtype."""
    return torch.randn(*shape, generator=gen).to(dtype)


# --- guarded outputs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Guarded:
    """Output prefilled with NaN (integers: 0x5A bytes) between guard bytes.  Give `.tensor` to the op, then check."""

    tensor: Tensor
    buffer: Tensor
    first: int  # byte where the payload starts

    def untouched(self) -> Tensor:
        """bool, the tensor's shape: elements that still hold the prefilled value."""
        if self.tensor.dtype.is_floating_point:
            return self.tensor.isnan()
        raw = self.tensor.contiguous().view(torch.uint8).reshape(*self.tensor.shape, -1)
        return (raw == _INT_FILL).all(-1)

    def assert_guards(self, what: str = "output") -> None:
        """Fail if a byte outside the payload changed."""
        size = self.tensor.numel() * self.tensor.element_size()
        around = torch.cat((self.buffer[: self.first], self.buffer[self.first + size :]))
        hit = (around != _GUARD_BYTE).nonzero().flatten().tolist()
        assert not hit, (
            f"{what}: {len(hit)} guard bytes overwritten, first at byte {hit[0] - self.first} of the payload"
        )


def guarded(shape: Sequence[int], dtype: torch.dtype, *, skew: int = 0) -> Guarded:
    """A guarded output; `skew` elements shift its start, so that skew=1 is not 16-byte aligned."""
    item = torch.empty((), dtype=dtype).element_size()
    count = 1
    for n in shape:
        count *= int(n)
    first = GUARD + skew * item
    buffer = torch.full((first + count * item + GUARD,), _GUARD_BYTE, dtype=torch.uint8)
    payload = buffer[first : first + count * item]
    payload.fill_(_INT_FILL)
    tensor = payload.view(dtype).view(*shape) if count else torch.empty(*shape, dtype=dtype)
    if dtype.is_floating_point and count:
        tensor.fill_(torch.nan)
    return Guarded(tensor, buffer, first)


def guarded_like(tensors: Sequence[Tensor], *, skew: int = 0) -> list[Guarded]:
    """One guarded output for each tensor."""
    return [guarded(t.shape, t.dtype, skew=skew) for t in tensors]


# --- comparison -----------------------------------------------------------------------------------------------------


def bits_of(x: Tensor) -> Tensor:
    """The tensor as integers of the same width: equal exactly where every bit is."""
    return x.contiguous().view(_BITS[x.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Same shape, dtype and bits (NaN equals the same NaN; -0 differs from +0)."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits_of(a), bits_of(b))


def _worst(error: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(error.flatten().argmax(), error.shape))


def assert_same_bits(got: Tensor, want: Tensor, what: str = "result") -> None:
    """Fail with the first differing element."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, expected {want.dtype}"
    differs = bits_of(got) != bits_of(want)
    if bool(differs.any()):
        at = tuple(int(i) for i in differs.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(differs.sum())} of {differs.numel()} elements differ, first at {list(at)}: "
            f"got {got[at].item()!r}, expected {want[at].item()!r}"
        )


def assert_close(got: Tensor, want: Tensor, *, atol: float, rtol: float = 0.0, what: str = "result") -> None:
    """Fail with the worst element unless |got - want| <= atol + rtol * |want|; infinities must be equal, NaN fails."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, expected {want.dtype}"
    g, w = got.double(), want.double()
    error = torch.where(g == w, 0.0, (g - w).abs() - (atol + rtol * w.abs()))
    bad = ~(error <= 0)
    if bool(bad.any()):
        at = _worst(error.nan_to_num(nan=torch.inf))
        raise AssertionError(
            f"{what}: {int(bad.sum())} of {bad.numel()} elements off by more than {atol:g} + {rtol:g} * |expected|, "
            f"worst at {list(at)}: got {g[at].item():.9g}, expected {w[at].item():.9g}"
        )


@dataclass(frozen=True)
class Tolerance:
    """Largest |got - want| allowed: atol + rtol * |want|; `lse` is the absolute one of log-sum-exps."""

    atol: float
    rtol: float
    lse: float


EXACT = Tolerance(0.0, 0.0, 0.0)


def compare(got: Sequence[Tensor], want: Sequence[Tensor], tolerance: Tolerance = EXACT, what: str = "result") -> None:
    """Results against the reference: bit for bit, or the first within the tolerance, other floats as an LSE, integers exact."""
    assert len(got) == len(want), f"{what}: {len(got)} results, expected {len(want)}"
    if tolerance == EXACT:
        for i, (g, w) in enumerate(zip(got, want)):
            assert_same_bits(g, w, f"{what}: result {i}")
        return
    assert_close(got[0], want[0], atol=tolerance.atol, rtol=tolerance.rtol, what=f"{what}: result 0")
    for i, (g, w) in enumerate(zip(got[1:], want[1:]), 1):
        if w.is_floating_point():
            assert_close(g, w, atol=tolerance.lse, rtol=1e-6, what=f"{what}: result {i}")
        else:
            assert_same_bits(g, w, f"{what}: result {i}")


# Attention outputs by dtype of q, as peers test them (shared acceptance grid).
TOLERANCE = {
    torch.float32: Tolerance(1e-5, 1e-5, 1e-5),
    torch.float16: Tolerance(5e-3, 0.0, 1e-3),
    torch.bfloat16: Tolerance(3e-2, 2e-2, 1e-3),
}


def copies(inputs: Sequence[Any]) -> list[Any]:
    """Copies of the tensors among the inputs, for `assert_unchanged`."""
    return [x.clone() if isinstance(x, Tensor) else x for x in inputs]


def assert_unchanged(inputs: Sequence[Any], before: Sequence[Any]) -> None:
    """Fail if an op wrote to an input."""
    for i, (x, old) in enumerate(zip(inputs, before, strict=True)):
        if isinstance(x, Tensor):
            assert_same_bits(x, old, f"input {i}")


# --- running an op --------------------------------------------------------------------------------------------------


def reference(op: str, family: str = "slicing") -> Callable[..., tuple[Tensor, ...]]:
    """The definition of an op."""
    return getattr(importlib.import_module(f".{family}.reference", __package__), op)


# How many results each op has: one `None` or output for each goes to the native op.
RESULTS = {
    "append_kv": 0,
    "key_sketch": 2,
    "score_tokens": 1,
    "refine_tokens": 1,
    "page_summary": 1,
    "score_pages": 1,
    "select": 2,
    "gather": 3,
    "sliced_attention": 2,
    "merge_states": 2,
    "merge_many": 2,
    "attend": 6,
    "select_slice": 3,
    "delta_encode": 0,
    "delta_decode": 2,
    "delta_attention": 2,
    "logits_stats": 9,
    "lm_head_stats": 10,
    "logits_part": 9,
    "lm_head_part": 9,
    "merge_stats": 9,
    "probe": 1,
    "termination_step": 2,
    "pack": 1,
    "unpack": 1,
    "uniform": 1,
}


class Mirror:
    """CPU tensors on another device, and back.

    Whole storages move, so that strides, offsets, guard bytes and memory that two views share are there as they are here.
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __call__(self, x: Any) -> Any:
        """The tensor there; anything else as it is."""
        if not isinstance(x, Tensor):
            return x
        here = x.untyped_storage()
        if here.data_ptr() not in self._storages:
            there = torch.UntypedStorage(here.nbytes(), device=self.device)
            there.copy_(here)
            self._storages[here.data_ptr()] = (here, there)
        there = self._storages[here.data_ptr()][1]
        return torch.empty(0, dtype=x.dtype, device=self.device).set_(there, x.storage_offset(), x.shape, x.stride())

    def bring_back(self) -> None:
        """Whatever was written there is written here, where it should not have been too."""
        for here, there in self._storages.values():
            here.copy_(there)


def device_of(backend: str) -> str:
    """Where a backend's tensors are: the GPU's for those that run on one and not in an interpreter."""
    return "cuda" if backend in ("cuda", "triton") and torch.cuda.is_available() else "cpu"


def map_tensors(function: Callable[[Tensor], Any], x: Any) -> Any:
    """The nested tuples of an op's inputs with `function` of every tensor."""
    if isinstance(x, (tuple, list)):
        return tuple(map_tensors(function, part) for part in x)
    return function(x) if isinstance(x, Tensor) else x


def preserve(x: Tensor) -> Tensor:
    """A copy that lies as the original does, strides and memory between its rows included."""
    base = x.untyped_storage().clone()
    return torch.empty(0, dtype=x.dtype).set_(base, x.storage_offset(), x.shape, x.stride())


def leaves(inputs: Any) -> list[Tensor]:
    """All tensors of nested tuples, in order."""
    found: list[Tensor] = []
    map_tensors(found.append, inputs)
    return found


def run(
    op: str,
    inputs: Sequence[Any],
    backend: str,
    *,
    outs: Sequence[Tensor | None] | None = None,
    workspace=None,
    family: str = "slicing",
) -> tuple[Tensor, ...]:
    """Call an op with its native inputs, in order.  `ref` without outs is the definition itself.

    Tensors are the CPU's; for a backend of a GPU they go there and come back.
    """
    if backend == "ref" and outs is None:
        return reference(op, family)(*inputs)
    from .runtime import backends

    given = (None,) * RESULTS[op] if outs is None else tuple(outs)
    device = device_of(backend)
    if device == "cpu":
        return backends.call(family, op, tuple(inputs), given, workspace, backend)
    there = Mirror(device)
    results = backends.call(
        family, op, map_tensors(there, inputs), map_tensors(there, given), there(workspace), backend
    )
    there.bring_back()
    return tuple(r.cpu() if out is None else out for r, out in zip(results, given))


def run_guarded(
    op: str,
    inputs: Sequence[Any],
    backend: str,
    like: Sequence[Tensor],
    *,
    skew: int = 0,
    family: str = "slicing",
):
    """Run into guarded outputs shaped as `like`; check guards and inputs; return the guarded outputs."""
    outs = guarded_like(like, skew=skew)
    before = copies(inputs)
    run(op, inputs, backend, outs=[g.tensor for g in outs], family=family)
    assert_unchanged(inputs, before)
    for i, g in enumerate(outs):
        g.assert_guards(f"{op}: output {i}")
    return outs


# --- cases ----------------------------------------------------------------------------------------------------------

Build = Callable[[torch.Generator], tuple]
SHORT_NAME = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "f8"}


@dataclass(frozen=True)
class Case:
    """One call of one op, how it is made and how its results are judged.

    shape: the sizes that matter, by name.  tolerance: of the first result against the reference (EXACT: bit for bit).
    bytes_moved: what the op must read and write at least, for GB/s; 0 where nobody measures.
    """

    op: str
    name: str
    shape: Mapping[str, Any]
    build: Build = field(repr=False, compare=False)
    tolerance: Tolerance = EXACT
    bytes_moved: int = 0
    seed: int = 0
    family: str = "slicing"

    def inputs(self, seed: int | None = None) -> tuple:
        """Fresh inputs; the same seed gives the same bits."""
        return self.build(generator(self.seed if seed is None else seed))

    def written(self, inputs: tuple) -> tuple[Tensor, ...]:
        """The inputs that the op writes to."""
        return ()

    def run(self, inputs: tuple, backend: str) -> tuple[Tensor, ...]:
        """The op's results on a backend, then the inputs that it has written to."""
        return (*run(self.op, inputs, backend, family=self.family), *self.written(inputs))

    def expected(self, inputs: tuple) -> tuple[Tensor, ...]:
        """What the definition says; the inputs are left as they are."""
        return self.run(map_tensors(preserve, inputs) if self.written(inputs) else inputs, "ref")

    def compare(self, got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
        """Fail unless these are the expected results, within the tolerance."""
        compare(got, want, self.tolerance, f"{self.op} {self.name}")

    def __str__(self) -> str:
        return self.name


# --- paged caches ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PagedCache:
    """A paged cache [P,Hkv,page,D] and the same rows in order, k [B,Hkv,S,Dk] and v [B,Hkv,S,Dv].

    Whatever no sequence owns is junk: spare pages, the free slots of last pages, and block-table entries past the end.
    """

    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor  # [B,M]
    seq_lens: Tensor  # [B]
    k: Tensor
    v: Tensor

    @property
    def page(self) -> int:
        return self.k_cache.shape[2]

    @property
    def heads(self) -> int:
        return self.k_cache.shape[1]


def empty_cache(
    pages: int, heads: int, page: int, D: int, dtype: torch.dtype, *, layout: str = "HND", skew: int = 0
) -> Tensor:
    """[P,Hkv,page,D] full of junk.  layout NHD lies as [P,page,Hkv,D]; skew shifts the start by that many elements."""
    value = min(JUNK, torch.finfo(dtype).max)
    flat = torch.full((pages * heads * page * D + skew,), value, dtype=torch.float32).to(dtype)[skew:]
    if layout == "HND":
        return flat.view(pages, heads, page, D)
    return flat.view(pages, page, heads, D).transpose(1, 2)


def paged_cache(
    gen: torch.Generator,
    lens: Sequence[int],
    heads: int,
    Dk: int,
    page: int,
    dtype: torch.dtype,
    *,
    Dv: int | None = None,
    layout: str = "HND",
    skew: int = 0,
    spare_pages: int = 3,
    spare_entries: int = 1,
    table_dtype: torch.dtype = torch.int32,
    lens_dtype: torch.dtype = torch.int32,
) -> PagedCache:
    """Random keys and values of the given lengths in shuffled pages among `spare_pages` that nobody owns.

    Block tables have `spare_entries` more columns than the longest sequence needs; entries past a sequence's end hold
    an impossible page id.
    """
    Dv = Dk if Dv is None else Dv
    B, longest = len(lens), max(lens, default=0)
    M = -(-longest // page) + spare_entries
    needed = [-(-n // page) for n in lens]
    P = sum(needed) + spare_pages
    order = torch.randperm(P, generator=gen)
    table = torch.full((B, M), torch.iinfo(torch.int32).max, dtype=table_dtype)
    k = randn(gen, B, heads, M * page, Dk).to(dtype)
    v = randn(gen, B, heads, M * page, Dv).to(dtype)
    k_cache = empty_cache(P, heads, page, Dk, dtype, layout=layout, skew=skew)
    v_cache = empty_cache(P, heads, page, Dv, dtype, layout=layout, skew=skew)
    first = 0
    for b, n in enumerate(lens):
        ids = order[first : first + needed[b]]
        first += needed[b]
        table[b, : len(ids)] = ids.to(table_dtype)
        pos = torch.arange(n)
        k_cache[ids[pos // page], :, pos % page] = k[b, :, :n].transpose(0, 1)
        v_cache[ids[pos // page], :, pos % page] = v[b, :, :n].transpose(0, 1)
    return PagedCache(k_cache, v_cache, table, torch.tensor(list(lens), dtype=lens_dtype), k, v)


def random_selection(
    gen: torch.Generator, seen: Tensor, heads: int, units: int, keep: float | int, size: int = 1
) -> tuple[Tensor, Tensor]:
    """indices i32[B,T,Hkv,K], counts i32[B,T,Hkv]: a random subset of each row's visible units of `size` tokens.

    `seen` int[B,T] visible tokens; `keep` a share of them (float) or a number of units (int).
    """
    B, T = seen.shape
    n = (-(-seen.long() // size))[:, :, None].expand(B, T, heads)
    count = (n * keep).ceil().long() if isinstance(keep, float) else n.clamp(max=keep)
    noise = torch.rand(B, T, heads, units, generator=gen)
    noise = noise.masked_fill(torch.arange(units) >= n[..., None], 2.0)
    chosen = torch.zeros(B, T, heads, units, dtype=torch.bool)
    chosen.scatter_(-1, noise.argsort(-1), torch.arange(units) < count[..., None])
    K = max(1, int(count.max())) if count.numel() else 1
    pos = torch.where(chosen, torch.arange(units), units).sort(-1).values[..., :K]
    pos = torch.nn.functional.pad(pos, (0, K - pos.shape[-1]), value=units)
    return torch.where(pos < units, pos, -1).to(torch.int32), count.to(torch.int32)


# --- timing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """Seconds per call: smallest, median, 99th percentile, of `calls` calls."""

    best: float
    median: float
    p99: float
    calls: int


def time_calls(fn: Callable[..., Any], inputs: Sequence[tuple], *, calls: int = 50, warmup: int = 3) -> Timing:
    """Time fn(*inputs[i]), going round the list: give enough inputs that none is still in the cache when it returns."""
    for i in range(warmup):
        fn(*inputs[i % len(inputs)])
    seconds = []
    for i in range(calls):
        args = inputs[i % len(inputs)]
        begin = time.perf_counter()
        fn(*args)
        seconds.append(time.perf_counter() - begin)
    seconds.sort()
    return Timing(seconds[0], seconds[calls // 2], seconds[min(calls - 1, int(calls * 0.99))], calls)
