"""Benchmarks on pytest-benchmark: verify, then time against peers in turn, then say how near to the machine's limits.

    make bench                          the whole, about 5 minutes
    python -m pytest bench --quick      one short and one long context, less than a minute

Each benchmark checks its results first and is not timed if they are wrong. Before every timed call its peers run on other
inputs and 128 MiB are copied and read, so that nothing is found in the processor's cache and all share the same disturbances.
The JSON (`--benchmark-json=FILE`) holds the machine, its bandwidth, the commit, and the table's `rows` under `extra_info`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sic_kernels.runtime import bench_report, measure
from sic_kernels.runtime.bench_report import Family

SECONDS = {False: 5.0, True: 0.6}  # for one benchmark, peers included
FEWEST = {False: 7, True: 5}  # turns

measure.ask_for_huge_pages()  # before any tensor

rows: list[dict[str, Any]] = []  # of this session, for the table at its end


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="two context lengths and few rounds: a check, not a measurement"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "shape" in metafunc.fixturenames:
        family = metafunc.module.FAMILY
        shapes = family.quick if metafunc.config.getoption("quick") else family.shapes
        metafunc.parametrize("shape", shapes, ids=lambda s: s.name, scope="module")


@functools.cache
def bandwidth() -> dict[str, float]:
    """Of this machine, at the start of the session."""
    return measure.bandwidth()


@functools.cache
def memory() -> measure.Memory:
    return measure.Memory()


_inputs: dict[tuple[str, Any], Any] = {}


def inputs_of(family: Family, shape: Any) -> Any:
    """One shape at a time: the long ones take gigabytes."""
    if (family.name, shape) not in _inputs:
        _inputs.clear()
        _inputs[family.name, shape] = family.inputs(shape, "cpu")
    return _inputs[family.name, shape]


@pytest.fixture
def inputs(request: pytest.FixtureRequest, shape: Any) -> Any:
    return inputs_of(request.module.FAMILY, shape)


@pytest.fixture
def quick(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("quick"))


@pytest.fixture
def run(benchmark: Any, quick: bool) -> Callable[..., dict[str, Any]]:
    """Verify and time a `Bench`: run(bench, sets) -> its row."""

    def run_bench(bench: bench_report.Bench, sets: int, **more: Any) -> dict[str, Any]:
        bench.verify()
        turns = bench.turns(memory(), sets)
        rounds = measure.rounds_for(bench.function, turns, SECONDS[quick], FEWEST[quick])
        benchmark.group = bench.shape.name
        benchmark.pedantic(bench.function, setup=lambda: ((turns.turn(),), {}), rounds=rounds)
        if benchmark.stats is None:  # --benchmark-disable: checked, not timed
            return {}
        times = measure.Times.of(benchmark.stats.stats.data)
        line = bench_report.row(bench, times, turns.times(), memory()) | more
        _keep(benchmark, line)
        return line

    return run_bench


def _keep(benchmark: Any, line: dict[str, Any]) -> None:
    benchmark.extra_info.setdefault("rows", []).append(line)
    rows.append(line)


@pytest.fixture
def fact(benchmark: Any) -> Callable[..., None]:
    """Report one number: fact(name, "2.1 us", target="<= 3 us", reached=True, **numbers)."""

    def report(name: str, measured: str, *, target: str = "", reached: bool | None = None, **numbers: Any) -> None:
        _keep(benchmark, {"fact": name, "measured": measured, "target": target, "reached": reached, **numbers})

    return report


@pytest.fixture
def absent(fact: Callable[..., None]) -> Callable[[str, str, str], None]:
    """Say in the table that a peer is not measured, and why: absent("redis", what, reason). SIC_REQUIRE=redis: it fails."""

    def report(peer: str, what: str, reason: str) -> None:
        if peer in os.environ.get("SIC_REQUIRE", "").split(","):
            pytest.fail(f"{peer} is required: {reason}", pytrace=False)
        fact(what, f"not measured: {reason}")

    return report


@pytest.fixture
def microseconds(benchmark: Any, fact: Callable[..., None]) -> Callable[..., None]:
    """Report what was timed against a bound: microseconds(name, bound, each), `each` calls in a round."""

    def report(name: str, bound: float, each: int = 1) -> None:
        if benchmark.stats is not None:
            us = 1e6 * benchmark.stats.stats.median / each
            fact(name, f"{us:.2f} us", target=f"<= {bound:g} us", reached=us <= bound, us=us)

    return report


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    machine_info["sic"] = measure.machine() | {"bandwidth": bandwidth(), "quick": bool(config.getoption("quick"))}


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if rows:
        terminalreporter.write_line("")
        info = measure.machine() | {"bandwidth": bandwidth()}
        terminalreporter.write(bench_report.text_table(rows, info))


@pytest.fixture(autouse=True, scope="session")
def no_autograd() -> Any:
    with torch.inference_mode():
        yield
