"""What device_check.py runs inside the package that it has built: each a short list, for a sanitizer or for a graph.

    python bench/device_cases.py cases --backend cuda    small cases of every op against their definitions, twice each
    python bench/device_cases.py cases --part 2/8        a part of them, to share them among processes
    python bench/device_cases.py graphs                  every benchmark captured, replayed, and replayed on other inputs

The last line of the output counts what passed and what failed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sic_kernels.delta import benches as delta_benches
from sic_kernels.delta import cases as delta_cases
from sic_kernels.head import benches as head_benches
from sic_kernels.head import cases as head_cases
from sic_kernels.ragged import benches as ragged_benches
from sic_kernels.ragged import cases as ragged_cases
from sic_kernels.replay import cases as replay_cases
from sic_kernels.runtime import clocks
from sic_kernels.runtime.bench_report import Bench
from sic_kernels.slicing import benches as slicing_benches
from sic_kernels.slicing import cases as slicing_cases
from sic_kernels.testing import Case, assert_same_bits

LISTS = (slicing_cases, delta_cases, head_cases, ragged_cases, replay_cases)
EACH = 3  # cases of a list
# Of a case, at most: a sanitizer is a hundred times slower.
LONGEST = 2200  # tokens, or scores of a row
MOST_WEIGHTS = 1 << 22  # of an LM head

# Benchmarks and how their inputs are made, at a small shape and where a row takes several blocks, splits or segments.
CACHES = (slicing_cases.BenchShape(2048, B=2, heads=2, D=64), slicing_cases.BenchShape(20000, heads=2))
BENCHES = (
    (slicing_benches, slicing_benches.Inputs, CACHES),
    (delta_benches, delta_benches.CodedInputs, CACHES),
    (head_benches, head_benches.Inputs, (head_cases.HeadShape(2, 1000, 70), head_cases.HeadShape(8, 49152, 576))),
    (
        ragged_benches,
        ragged_benches.Inputs,
        (ragged_cases.RaggedShape(3, 40, 24), ragged_cases.RaggedShape(8, 1024, 576)),
    ),
)
# What a decoder also changes between two replays, and the benchmarks that do not mind: the others' selections are given.
SHORTER = 17
FOLLOW_LENGTHS = (
    "attend 12 %", "attend 6 %", "attend pages 12 %", "dense", "score_tokens", "select", "delta dense", "delta 12 %",
    "delta 6 %", "decode",
)  # fmt: skip

Tensor = torch.Tensor
Capture = Callable[[Callable[[int], Any], int], Any]  # -> something with replay()


# --- cases --------------------------------------------------------------------------------------------------------------


def is_short(case: Case) -> bool:
    """Few tokens, scores, weights; not none."""
    shape = case.shape
    lengths = str(shape.get("lens", shape.get("len", shape.get("n", 1))))
    tokens = sum(int(n) for n in lengths.split("_") if n)
    return 0 < tokens <= LONGEST and shape.get("D", 0) * shape.get("V", 0) <= MOST_WEIGHTS


def chosen(grid: list[Case]) -> list[Case]:
    """A few short cases of a list: its first, its last, some in between."""
    short = [case for case in grid if is_short(case)]
    last = len(short) - 1
    return [short[n] for n in sorted({i * last // (EACH - 1) for i in range(EACH)})]


def check_case(case: Case, backend: str) -> None:
    """Against the definition, and the same bits again."""
    want = case.expected(case.inputs())
    got, again = (case.run(case.inputs(), backend) for _ in range(2))
    for i, (g, a) in enumerate(zip(got, again, strict=True)):
        assert_same_bits(a, g, f"{case.op} {case.name}: result {i}, a second time")
    case.compare(got, want)


def all_cases(backend: str, device: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Name and check of every case: those of the families' lists, then each benchmark's own check of its results."""
    for family in LISTS:
        for case in itertools.chain.from_iterable(chosen(family.grid(name)) for name in family.grids()):
            yield f"{case.op} {case.name}", lambda case=case: check_case(case, backend)
    inputs = slicing_benches.Inputs(slicing_cases.BenchShape(700, B=2, heads=2, D=64), sets=2, device=device)
    for name in slicing_benches.NAMES:
        yield name, lambda name=name: slicing_benches.build(name, inputs).verify()


# --- graphs -------------------------------------------------------------------------------------------------------------


def check_graph(bench: Bench, inputs: Any, capture: Capture) -> None:
    """A replay gives the bits of a call: on the inputs of the capture, and after they have changed in place."""
    graph = capture(bench.function, 0)
    compare(bench, graph, f"{bench.name}, {bench.shape.name}")
    for sets in vars(inputs).values():
        if isinstance(sets, list) and isinstance(sets[0], Tensor):
            sets[0].copy_(sets[1])
    follows = bench.name in FOLLOW_LENGTHS
    if follows:
        inputs.seq_lens.sub_(SHORTER)
    try:
        compare(bench, graph, f"{bench.name}, {bench.shape.name}, after other inputs")
    finally:
        if follows:
            inputs.seq_lens.add_(SHORTER)


def compare(bench: Bench, graph: Any, what: str) -> None:
    """Both into outputs of zeros, since a call need not write all of them; then the outputs are as they were."""
    before = [x.clone() for x in bench.out]
    want, got = (into_zeros(bench, call) for call in (lambda: bench.function(0), graph.replay))
    for x, kept in zip(bench.out, before):
        x.copy_(kept)
    for i, (g, w) in enumerate(zip(got, want)):
        assert_same_bits(g, w, f"{what}: output {i} of a replay")


def into_zeros(bench: Bench, call: Callable[[], Any]) -> list[Tensor]:
    for x in bench.out:
        x.zero_()
    call()
    return [x.cpu().clone() for x in bench.out]


def all_graphs(device: str, capture: Capture) -> Iterator[tuple[str, Callable[[], None]]]:
    for family, make, shapes in BENCHES:
        for shape in shapes:
            inputs = make(shape, sets=2, device=device)
            for name in family.NAMES:
                yield (
                    f"{name}, {shape.name}",
                    lambda f=family, n=name, i=inputs: check_graph(f.build(n, i), i, capture),
                )


# --- the command --------------------------------------------------------------------------------------------------------


def run_all(checks: Iterator[tuple[str, Callable[[], None]]]) -> int:
    """Every check, even after a failure; the last line counts them."""
    passed, failed = 0, 0
    for name, check in checks:
        try:
            check()
            passed += 1
        except Exception as error:  # a wrong result or a failed launch: said, and the others still run
            failed += 1
            print(f"FAILED {name}: {type(error).__name__}: {error}", flush=True)
    print(f"{passed} passed, {failed} failed", flush=True)
    return 1 if failed or not passed else 0


def part(text: str) -> tuple[int, int]:
    """ "2/8" -> (2, 8)."""
    n, of = map(int, text.split("/"))
    if not 1 <= n <= of:
        raise ValueError(text)
    return n, of


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cases", "graphs"))
    parser.add_argument("--backend", default="cuda", help="of the cases: cuda, triton, cpu or simt")
    parser.add_argument("--part", type=part, default=(1, 1), metavar="N/OF", help="of the cases (default: all)")
    args = parser.parse_args(arguments)
    device = "cuda" if args.backend in ("cuda", "triton") else "cpu"
    os.environ["SIC_BACKEND"] = args.backend if args.what == "cases" else "cuda"  # of what says no backend
    with torch.inference_mode():
        if args.what == "cases":
            n, of = args.part
            return run_all(itertools.islice(all_cases(args.backend, device), n - 1, None, of))
        return run_all(all_graphs("cuda", clocks.CudaClock(torch.device("cuda")).captured))


if __name__ == "__main__":
    sys.exit(main())
