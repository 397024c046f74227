"""What the delta benchmarks run: the inputs of the slicing benchmarks, coded; the same peers.

`coded` is everything a decode step does with a coded cache: selection by the key sketch, attention on the codes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..runtime.bench_report import Bench, Family, Target
from ..runtime.roofline import Launch, Work
from ..slicing import SlicePolicy, select_slice, sliced_attention
from ..slicing import work as slicing_work
from ..slicing.bench_peers import PEERS, Peers, as_rows
from ..slicing.benches import MAIN, QUICK_SHAPES, Inputs
from ..slicing.cases import BENCH_SHAPES, BenchShape
from ..testing import assert_close, assert_same_bits, generator, randn
from . import work
from .codec import Codec
from .ops import decode, delta_attention, encode
from .pages import DeltaPages
from .rope import Rope
from .templates import Templates

Tensor = torch.Tensor

TEMPLATES = 256
TOLERANCE = 3e-2  # of half types, against the definition in float64
PREFILL = 2048  # tokens of a prompt that `encode` takes at once


class CodedInputs(Inputs):
    """`Inputs` and the same rows coded. Random templates: what the bits say changes no time."""

    def __init__(self, shape: BenchShape, sets: int | None = None, device: str = "cpu") -> None:
        super().__init__(shape, sets=sets, device=device)
        gen = generator(11)
        made = [0.1 * randn(gen, shape.heads, TEMPLATES, shape.D).half() for _ in range(2)]
        spread = torch.full((shape.heads,), 1e30)  # no row is an outlier
        templates = [Templates(t.half().to(self.device), spread.to(self.device)) for t in made]
        rope = Rope(5e5, shape.D, max_position=max(1 << 17, shape.length))
        self.codec = Codec(4, 4, templates[0], templates[1], rope, sinks=0)
        self.pages = DeltaPages.allocate(
            self.codec, self.k_cache.shape[0], shape.page, shape.heads, shape.D, shape.D, self.device, raw_rows=0
        )
        for table in self.tables.flatten(0, 1):
            self._encode(table)

    def _encode(self, table: Tensor) -> None:
        s = self.shape
        for first in range(0, len(table), PREFILL // s.page):
            ids = table[first : first + PREFILL // s.page].long()
            k, v = (c[ids].transpose(1, 2).flatten(0, 1) for c in (self.k_cache, self.v_cache))
            at = torch.arange(len(k), device=self.device)
            encode(self.codec, k, v, first * s.page + at, ids[at // s.page] * s.page + at % s.page, self.pages)

    def coded(self, i: int) -> tuple[Codec, DeltaPages, Tensor, Tensor]:
        return self.codec, self.pages, self.tables[i], self.seq_lens

    def prompt(self, tokens: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """For each set: k, v [tokens,Hkv,D], positions and slots of rows in consecutive pages."""
        found = []
        for i in range(self.sets):
            ids = self.tables[i, 0, : -(-tokens // self.shape.page)].long()
            k, v = (c[ids].transpose(1, 2).flatten(0, 1)[:tokens].contiguous() for c in (self.k_cache, self.v_cache))
            at = torch.arange(tokens, device=self.device)
            found.append((k, v, at, ids[at // self.shape.page] * self.shape.page + at % self.shape.page))
        return found


def _small(inputs: CodedInputs) -> CodedInputs:
    """The same kind of inputs, small enough for the definition."""
    shape = dataclasses.replace(inputs.shape, length=333, B=min(inputs.shape.B, 2))
    return CodedInputs(shape, sets=2, device=str(inputs.device))


def _attention(inputs: CodedInputs) -> Bench:
    s, peers = inputs.shape, Peers(inputs)
    out = delta_attention(inputs.q[0], *inputs.coded(0))
    plain = sliced_attention(inputs.q[0], *inputs.cache(0))

    def verify() -> None:
        small = _small(inputs)
        got, want = (delta_attention(small.q[1], *small.coded(1), backend=b)[0] for b in (None, "ref"))
        assert_close(got, want, atol=TOLERANCE, what="delta dense: out")
        full = delta_attention(inputs.q[0], *inputs.coded(0))[0]
        assert_close(as_rows(full, s.heads), peers.p2(0), atol=0.1, what="delta dense: out at full length")

    return Bench(
        "delta dense", s, lambda i: delta_attention(inputs.q[i], *inputs.coded(i), out=out), out,
        {**peers.dense(), "dense": lambda i: sliced_attention(inputs.q[i], *inputs.cache(i), out=plain)},
        verify, work.coded_bytes(s), "ns per row", s.rows,
    )  # fmt: skip


def _sliced(inputs: CodedInputs, ratio: float) -> Bench:
    s, peers, policy = inputs.shape, Peers(inputs), SlicePolicy(ratio=ratio)

    def choose(x: CodedInputs, i: int, **options: Any) -> Any:
        return select_slice(x.q[i], x.sketch, x.tables[i], x.seq_lens, policy=policy, **options)

    selection, unread = choose(inputs, 0)
    lists = (selection.indices, selection.counts, unread)
    out = delta_attention(inputs.q[0], *inputs.coded(0), selection)

    def run(i: int) -> None:
        chosen, _ = choose(inputs, i, out=lists)
        delta_attention(inputs.q[i], *inputs.coded(i), chosen, out=out)

    def verify() -> None:
        small = _small(inputs)
        picked = [choose(small, 1, backend=b)[0] for b in (None, "ref")]
        assert_same_bits(picked[0].indices, picked[1].indices, "delta sliced: indices")
        got, want = (delta_attention(small.q[1], *small.coded(1), picked[0], backend=b)[0] for b in (None, "ref"))
        assert_close(got, want, atol=TOLERANCE, what="delta sliced: out")

    read = s.sketch_bytes(2) + int(ratio * work.coded_bytes(s))
    name = f"delta {ratio:.0%}".replace("%", " %")
    return Bench(name, s, run, out, peers.dense(), verify, read)


def _decode(inputs: CodedInputs) -> Bench:
    s = inputs.shape

    def run(x: CodedInputs, i: int, **options: Any) -> tuple[Tensor, Tensor]:
        codec, pages, table, lens = x.coded(i)
        return decode(codec, pages, table, lens, max_seq_len=x.shape.length, dtype=x.shape.dtype, **options)

    out = run(inputs, 0)

    def verify() -> None:
        small = _small(inputs)
        for a, b, what in zip(run(small, 1), run(small, 1, backend="ref"), "kv"):
            assert_close(a, b, atol=TOLERANCE, what=f"decode: {what}")

    return Bench(
        "decode", s, lambda i: run(inputs, i, out=out), out, {}, verify, work.of(work.decode(s)).nbytes,
        "ns per row", s.rows,
    )  # fmt: skip


def _encode(inputs: CodedInputs, tokens: int, name: str) -> Bench:
    s, rows = inputs.shape, inputs.prompt(tokens)
    pages = inputs.pages

    def verify() -> None:
        small = _small(inputs)
        before = [x.clone() for x in small.pages.inputs()]
        for backend in (None, "ref"):
            encode(small.codec, *small.prompt(333)[1], small.pages, backend=backend)
            for x, was in zip(small.pages.inputs()[:3], before):
                assert_same_bits(x, was, f"encode on {backend}: the same rows again")

    return Bench(
        name, s, lambda i: encode(inputs.codec, *rows[i], pages), pages.inputs()[:3], {}, verify,
        work.of(work.encode(s, tokens)).nbytes, "ns per row", tokens * s.heads,
    )  # fmt: skip


_BUILDERS: dict[str, Callable[[CodedInputs], Bench]] = {
    "delta dense": _attention,
    "delta 12 %": lambda inputs: _sliced(inputs, 0.12),
    "delta 6 %": lambda inputs: _sliced(inputs, 0.06),
    "decode": _decode,
    "encode prompt": lambda inputs: _encode(inputs, PREFILL, "encode prompt"),
    "encode step": lambda inputs: _encode(inputs, 1, "encode step"),
}
NAMES = tuple(_BUILDERS)

SPEED = {  # the targets of the main shape on the CPU
    "delta dense": (Target("speedup", 1.8, "P2"), Target("speedup", 1.0, "dense")),
    "delta 6 %": (Target("speedup", 10, "P2"),),
}


def _sliced_work(s: BenchShape, ratio: float) -> Iterator[Launch]:
    """`select_slice`, which is `attend` without its attention, then attention on the codes."""
    launches = list(slicing_work.attend(s, ratio))
    attention = len(list(slicing_work.attention(s, slicing_work.listed_tokens(s, ratio), 0)))
    yield from launches[: len(launches) - attention]
    yield from work.attention(s, slicing_work.listed_tokens(s, ratio))


def work_of(name: str, s: BenchShape) -> Work:
    """What a GPU has to do."""
    launches = {
        "delta dense": lambda: work.attention(s, s.length),
        "delta 12 %": lambda: _sliced_work(s, 0.12),
        "delta 6 %": lambda: _sliced_work(s, 0.06),
        "decode": lambda: work.decode(s),
        "encode prompt": lambda: work.encode(s, PREFILL),
        "encode step": lambda: work.encode(s, 1),
    }[name]
    return work.of(launches())


def build(name: str, inputs: CodedInputs) -> Bench:
    """The benchmark of that name (`NAMES`) on some inputs, with its targets where the shape is the main one."""
    bench = _BUILDERS[name](inputs)
    aimed = inputs.shape == MAIN and inputs.device.type == "cpu"
    return dataclasses.replace(bench, targets=SPEED.get(name, ()) if aimed else ())


FAMILY = Family(
    "delta", NAMES, MAIN, BENCH_SHAPES, QUICK_SHAPES, lambda shape, device: CodedInputs(shape, device=device), build,
    work_of, ratios=tuple(("delta dense", name) for name in ("delta 12 %", "delta 6 %")),
    peers={**PEERS, "dense": "sliced_attention of all tokens on the same rows in bfloat16"},
)  # fmt: skip
