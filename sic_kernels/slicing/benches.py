"""What the slicing benchmarks run: inputs too many for any cache, peers in torch, checks before timing, bytes, targets.

`Inputs(shape)` makes the inputs of a `BenchShape` of `cases.py`; `build(name, inputs)` one `Bench` on them.
bench/ runs all of them on pytest-benchmark, `python -m sic_kernels bench` either that or, without a checkout, one length.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from ..runtime.bench_report import Bench, Family, Target
from ..runtime.measure import last_level_cache
from ..testing import TOLERANCE, assert_close, assert_same_bits, generator, randn
from . import work
from .attend import attend
from .attention import gather, sliced_attention
from .bench_peers import PEERS, Peers, as_rows, index_of
from .cases import BENCH_SHAPES, BenchShape
from .index import calibrate, key_sketch, page_summary
from .scoring import score_tokens, select
from .types import KeySketch, Selection, SlicePolicy, SliceResult

Tensor = torch.Tensor

ROTATION_BYTES = 3 << 30  # memory that the rotated sets of one shape may take, torch's own copies included
CUDA_SETS = 4  # between two uses of one, the turns read many times the cache


class Inputs:
    """Several sets of inputs for decoding one token, as runners hold them: pages of one pool, shuffled, and a block table each.

    The sets share the pool; set i is `table(i)`. `rows` are the same keys and values in order, `[B,Hkv,S,D]`, for peers that
    cannot read pages; huge shapes have those of set 0 only. The values do not depend on the device.
    """

    def __init__(self, shape: BenchShape, sets: int | None = None, seed: int = 0, device: str = "cpu") -> None:
        self.shape, self.device, gen = shape, torch.device(device), generator(seed)
        self.sets = self._sets() if sets is None else sets
        self.M = -(-shape.length // shape.page)
        pages = self.sets * shape.B * self.M
        order = torch.randperm(pages, generator=gen).to(torch.int32)
        self.tables = order.view(self.sets, shape.B, self.M).to(self.device)
        self.seq_lens = torch.full((shape.B,), shape.length, dtype=torch.int32, device=self.device)
        noise = randn(gen, (1 << 22) + 4099, dtype=shape.dtype).to(self.device)
        self.k_cache, self.v_cache = (self._pool(pages, noise, first) for first in (0, 4099))
        self.q = [
            randn(gen, shape.B, 1, shape.heads * shape.group, shape.D, dtype=shape.dtype).to(self.device)
            for _ in range(self.sets)
        ]
        params = calibrate(self.k_cache[: min(pages, 64)].transpose(1, 2).reshape(-1, shape.heads, shape.D))
        lens = self.seq_lens.repeat(self.sets)
        self.sketch = key_sketch(self.k_cache, self.tables.view(-1, self.M), lens, params)
        copies = self.sets if self.sets * shape.kv_bytes * 2 <= ROTATION_BYTES else 1
        self.rows = [self._rows(i) for i in range(copies)]

    def on(self, device: str) -> Inputs:
        """The same inputs there."""
        twin, sketch = copy.copy(self), self.sketch
        twin.device = torch.device(device)
        for name in ("tables", "seq_lens", "k_cache", "v_cache"):
            setattr(twin, name, getattr(self, name).to(device))
        twin.q = [q.to(device) for q in self.q]
        twin.rows = [(k.to(device), v.to(device)) for k, v in self.rows]
        params = dataclasses.replace(
            sketch.params, centre=sketch.params.centre.to(device), scale=sketch.params.scale.to(device)
        )
        twin.sketch = dataclasses.replace(
            sketch, bits=sketch.bits.to(device), norm=sketch.norm.to(device), params=params
        )
        return twin

    def _sets(self) -> int:
        """So many that twice the last-level cache is read before the least op comes back to a set, as far as memory goes."""
        wanted = -(-2 * last_level_cache(self.device) // self.shape.attend_bytes(0.06))
        wanted = min(wanted, CUDA_SETS) if self.device.type == "cuda" else wanted
        return max(2, min(wanted, ROTATION_BYTES // (2 * self.shape.kv_bytes)))

    def _pool(self, pages: int, noise: Tensor, first: int) -> Tensor:
        """Normal values, repeated with a shift: drawing gigabytes of them would take longer than the benchmarks."""
        s = self.shape
        pool = torch.empty(pages, s.heads, s.page, s.D, dtype=s.dtype, device=self.device)
        for n, part in enumerate(pool.view(-1).split(1 << 22)):
            shift = (first + 17 * n) % 4099
            part.copy_(noise[shift : shift + part.numel()])
        return pool

    def _rows(self, i: int) -> tuple[Tensor, Tensor]:
        pages = self.tables[i].long()
        return tuple(c[pages].transpose(1, 2).flatten(2, 3)[:, :, : self.shape.length].contiguous()
                     for c in (self.k_cache, self.v_cache))  # type: ignore[return-value]  # fmt: skip

    def cache(self, i: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """k_cache, v_cache, block_table, seq_lens of set i."""
        return self.k_cache, self.v_cache, self.tables[i], self.seq_lens

    def in_order(self, i: int) -> tuple[Tensor, Tensor]:
        return self.rows[i % len(self.rows)]

    def random(self, ratio: float) -> list[Selection]:
        """For each set, floor(ratio * length) tokens chosen by normal scores: where they lie is the worst for a cache."""
        s = self.shape
        scores = (randn(generator(1), s.B, 1, s.heads, s.length) * 256).to(torch.int16).to(self.device)
        return [select(scores.roll(977 * i, -1), self.seq_lens, ratio=ratio) for i in range(self.sets)]


# --- the benchmarks ------------------------------------------------------------------------------------------------------

SPEED = {  # the targets of the main shape on the CPU
    "attend 12 %": (Target("speedup", 13, "P1"), Target("speedup", 7, "P2")),
    "attend 6 %": (Target("speedup", 18, "P1"), Target("speedup", 10, "P2")),
    "dense": (Target("speedup", 3, "P1"), Target("speedup", 1.8, "P2")),
    "sliced 12 %": (Target("read", 0.8),),
    "score_tokens": (Target("ns", 0.5),),
    "select": (Target("ns", 1.0),),
    "gather": (Target("speedup", 5, "torch.gather"),),
}
MAIN = BenchShape(32768)
QUICK_SHAPES = (BenchShape(4096), MAIN)


def _close(got: Tensor, want: Tensor, what: str) -> None:
    limit = TOLERANCE[got.dtype]
    assert_close(got.cpu(), want.cpu(), atol=limit.atol, rtol=limit.rtol, what=what)


def _same(got: Tensor, want: Tensor, what: str) -> None:
    assert_same_bits(got.cpu(), want.cpu(), what)


def _small(inputs: Inputs) -> tuple[tuple[Inputs, str | None], tuple[Inputs, str | None]]:
    """The same inputs twice, with the backend to run each: on the device, and for the definition on the CPU.

    Small enough for float64; the length is no multiple of the page.
    """
    shape = dataclasses.replace(inputs.shape, length=333, B=min(inputs.shape.B, 2))
    small = Inputs(shape, sets=2, device=str(inputs.device))
    return (small, None), (small.on("cpu"), "ref")


def _percent(name: str, ratio: float) -> str:
    return f"{name} {ratio:.0%}".replace("%", " %")


def _attend(inputs: Inputs, ratio: float) -> Bench:
    s, peers = inputs.shape, Peers(inputs)
    policy = SlicePolicy(ratio=ratio)
    first = [attend(inputs.q[i], *_with_sketch(inputs, i), policy=policy) for i in range(inputs.sets)]
    out, chosen = outputs_of(first[0]), [index_of(r.selection) for r in first if r.selection is not None]
    indices = out[2].clone()

    def verify() -> None:
        got, want = (attend(x.q[1], *_with_sketch(x, 1), policy=policy, backend=b) for x, b in _small(inputs))
        _close(got.out, want.out, "attend: out")
        for a, b, what in zip(outputs_of(got)[2:4], outputs_of(want)[2:4], ("indices", "counts")):
            _same(a, b, f"attend: {what}")
        full = attend(inputs.q[0], *_with_sketch(inputs, 0), policy=policy)
        _close(as_rows(full.out, s.heads), peers.gather_p2(0, chosen[0]), "attend: out at full length")
        _same(outputs_of(full)[2], indices, "attend: indices of a second run")

    return Bench(
        _percent("attend", ratio), s,
        lambda i: attend(inputs.q[i], *_with_sketch(inputs, i), policy=policy, out=out), out,
        {**peers.dense(), "gather+SDPA": lambda i: peers.gather_p2(i, chosen[i])},
        verify, s.attend_bytes(ratio),
    )  # fmt: skip


def _attend_pages(inputs: Inputs, ratio: float = 0.12) -> Bench:
    s, policy = inputs.shape, SlicePolicy(ratio=ratio, unit="page")

    def summary_of(x: Inputs, backend: str | None = None) -> Tensor:
        return page_summary(x.k_cache, x.tables.view(-1, x.M), x.seq_lens.repeat(x.sets), backend=backend)

    def run(x: Inputs, i: int, index: Tensor, **options: Any) -> SliceResult:
        k_cache, v_cache, table, lens = x.cache(i)
        return attend(x.q[i], k_cache, v_cache, index, table, lens, policy=policy, **options)

    summary = summary_of(inputs)
    out = outputs_of(run(inputs, 0, summary))

    def verify() -> None:
        got, want = (run(x, 1, summary_of(x, b), backend=b) for x, b in _small(inputs))
        _close(got.out, want.out, "attend pages: out")
        _same(outputs_of(got)[2], outputs_of(want)[2], "attend pages: indices")

    return Bench(
        "attend pages 12 %", s, lambda i: run(inputs, i, summary, out=out), out, {}, verify,
        work.of(work.attend_pages(s, ratio)).nbytes,
    )  # fmt: skip


def outputs_of(result: SliceResult) -> tuple[Tensor, ...]:
    """The six arrays of a sliced call, as `out=` takes them."""
    assert result.selection is not None
    return result.out, result.lse, result.selection.indices, result.selection.counts, result.omitted_mass, result.status


def _with_sketch(inputs: Inputs, i: int) -> tuple:
    k_cache, v_cache, table, lens = inputs.cache(i)
    return k_cache, v_cache, inputs.sketch, table, lens


def _dense(inputs: Inputs) -> Bench:
    s, peers = inputs.shape, Peers(inputs)
    out = sliced_attention(inputs.q[0], *inputs.cache(0))

    def verify() -> None:
        got, want = (sliced_attention(x.q[1], *x.cache(1), backend=b) for x, b in _small(inputs))
        _close(got[0], want[0], "dense: out")
        full = sliced_attention(inputs.q[0], *inputs.cache(0))[0]
        _close(as_rows(full, s.heads), peers.p2(0), "dense: out at full length")

    return Bench(
        "dense", s, lambda i: sliced_attention(inputs.q[i], *inputs.cache(i), out=out), out,
        peers.dense(), verify, work.of(work.dense(s)).nbytes, "ns per row", s.rows,
    )  # fmt: skip


def _sliced(inputs: Inputs, ratio: float) -> Bench:
    s, peers, chosen = inputs.shape, Peers(inputs), inputs.random(ratio)
    indices = [index_of(c) for c in chosen]
    out = sliced_attention(inputs.q[0], *inputs.cache(0), chosen[0])

    def verify() -> None:
        two = _small(inputs)
        listed, counts, unit = two[0][0].random(ratio)[1]
        some = [Selection(listed.to(x.device), counts.to(x.device), unit) for x, _ in two]
        got, want = (sliced_attention(x.q[1], *x.cache(1), c, backend=b) for c, (x, b) in zip(some, two))
        _close(got[0], want[0], "sliced_attention: out")
        full = sliced_attention(inputs.q[0], *inputs.cache(0), chosen[0])[0]
        _close(as_rows(full, s.heads), peers.gather_p2(0, indices[0]), "sliced_attention: out at full length")

    return Bench(
        _percent("sliced", ratio), s, lambda i: sliced_attention(inputs.q[i], *inputs.cache(i), chosen[i], out=out), out,
        {"gather+SDPA": lambda i: peers.gather_p2(i, indices[i])},
        verify, work.of(work.sliced(s, ratio)).nbytes, "ns per row", s.B * s.heads * work.listed_tokens(s, ratio),
    )  # fmt: skip


def _score(inputs: Inputs) -> Bench:
    s = inputs.shape

    def run(x: Inputs, i: int, **options: Any) -> Tensor:
        return score_tokens(x.q[i], x.sketch, x.tables[i], x.seq_lens, **options)

    def verify() -> None:
        got, want = (run(x, 1, backend=b) for x, b in _small(inputs))
        _same(got, want, "score_tokens")

    out = run(inputs, 0)
    return Bench(
        "score_tokens", s, lambda i: run(inputs, i, out=out), (out,), {}, verify, work.of(work.score_tokens(s)).nbytes,
        "ns per token, query head and thread", s.rows * s.group, per_thread=True,
    )  # fmt: skip


def _key_sketch(inputs: Inputs) -> Bench:
    """A full rebuild; a decode step appends one token a sequence instead."""
    s, sketch = inputs.shape, inputs.sketch

    def run(x: Inputs, i: int, **options: Any) -> KeySketch:
        return key_sketch(x.k_cache, x.tables[i], x.seq_lens, x.sketch.params, **options)

    def verify() -> None:
        got, want = (run(x, 1, backend=b) for x, b in _small(inputs))
        _same(got.bits, want.bits, "key_sketch: bits")
        _same(got.norm, want.norm, "key_sketch: norm")

    return Bench(
        "key_sketch", s, lambda i: run(inputs, i, out=sketch), (sketch.bits, sketch.norm), {}, verify,
        work.of(work.key_sketch(s)).nbytes, "ns per row", s.rows,
    )  # fmt: skip


def _select(inputs: Inputs) -> Bench:
    s, ratio = inputs.shape, 0.12
    scores = [score_tokens(inputs.q[i], inputs.sketch, inputs.tables[i], inputs.seq_lens) for i in range(inputs.sets)]
    chosen = select(scores[0], inputs.seq_lens, ratio=ratio)
    budget = chosen.indices.shape[-1]

    def verify() -> None:
        wanted = select(scores[0].cpu(), inputs.seq_lens.cpu(), ratio=ratio, backend="ref")
        got = select(scores[0], inputs.seq_lens, ratio=ratio)
        _same(got.indices, wanted.indices, "select: indices")
        _same(got.counts, wanted.counts, "select: counts")

    out = (chosen.indices, chosen.counts)
    return Bench(
        "select", s, lambda i: select(scores[i], inputs.seq_lens, ratio=ratio, out=out), out,
        {"torch.topk": lambda i: torch.topk(scores[i], budget, sorted=False)},
        verify, work.of(work.select(s, ratio)).nbytes, "ns per score", scores[0].numel(),
    )  # fmt: skip


def _gather(inputs: Inputs) -> Bench:
    s, peers, chosen = inputs.shape, Peers(inputs), inputs.random(0.12)
    indices = [index_of(c) for c in chosen]
    out = gather(*inputs.cache(0), chosen[0])

    def verify() -> None:
        got = gather(*inputs.cache(0), chosen[0])
        for a, b, what in zip(got, peers.gather(0, indices[0]), "kv"):
            _same(a, b.reshape(a.shape), f"gather: {what}")

    return Bench(
        "gather", s, lambda i: gather(*inputs.cache(i), chosen[i], out=out), out,
        {"torch.gather": lambda i: peers.gather(i, indices[i])},
        verify, work.of(work.gather(s)).nbytes, "ns per row", out[0].shape[0],
    )  # fmt: skip


_BUILDERS: dict[str, Callable[[Inputs], Bench]] = {
    "attend 12 %": lambda inputs: _attend(inputs, 0.12),
    "attend 6 %": lambda inputs: _attend(inputs, 0.06),
    "attend pages 12 %": _attend_pages,
    "dense": _dense,
    "sliced 12 %": lambda inputs: _sliced(inputs, 0.12),
    "score_tokens": _score,
    "select": _select,
    "gather": _gather,
    "key_sketch": _key_sketch,
}
NAMES = tuple(_BUILDERS)


def build(name: str, inputs: Inputs) -> Bench:
    """The benchmark of that name (`NAMES`) on some inputs, with its targets where the shape is the main one."""
    bench = _BUILDERS[name](inputs)
    aimed = inputs.shape == MAIN and inputs.device.type == "cpu"
    return dataclasses.replace(bench, targets=SPEED.get(name, ()) if aimed else ())


def at_ratio(op: str, ratio: float, inputs: Inputs) -> Bench:
    """`op` ("attend" or "sliced") at any share of the tokens, without peers: how cost grows with what is read."""
    bench = _attend(inputs, ratio) if op == "attend" else _sliced(inputs, ratio)
    return dataclasses.replace(
        bench, peers={}, unit="ns per row", count=int(ratio * inputs.shape.length) * inputs.shape.B * inputs.shape.heads
    )


FAMILY = Family(
    "slicing", NAMES, MAIN, BENCH_SHAPES, QUICK_SHAPES, lambda shape, device: Inputs(shape, device=device), build, work.work,
    ratios=tuple(("dense", name) for name in ("attend 12 %", "attend 6 %", "attend pages 12 %")), peers=PEERS,
)  # fmt: skip
