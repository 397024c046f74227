"""attend's two ways through the CUDA kernels, a block a row and step by step: the same results, whichever the shared memory of
the device allows."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_slicing_attend import Problem, assert_attend

from sic_kernels.runtime import native
from sic_kernels.slicing import cases
from sic_kernels.testing import assert_close, assert_same_bits, generator, randn, reference, run

pytestmark = pytest.mark.backend("simt")
ALL_OF_IT = 227 * 1024  # bytes that a block may have on the devices with the most


@contextlib.contextmanager
def shared_memory(size):
    module = native.simt_module()
    module.set_shared_memory(size)
    try:
        yield module.counters
    finally:
        module.set_shared_memory(ALL_OF_IT)


def both_ways(inputs):
    """The results in one block a row and step by step, and how many kernels each took."""
    results = []
    for size in (ALL_OF_IT, 8 * 1024):
        with shared_memory(size) as counters:
            before = counters()["launches"]
            outs = run("attend", inputs, "simt")
            results.append((outs, counters()["launches"] - before))
    return results


def assert_same(inputs):
    """Bits are equal but for the estimate, whose sums are taken in another order."""
    (rows, few), (steps, many) = both_ways(inputs)
    assert few < many
    for i, what in enumerate(("out", "lse", "indices", "counts")):
        assert_same_bits(rows[i], steps[i], what)
    assert_close(rows[4], steps[4], atol=1e-5, what="omitted_mass")
    assert_same_bits(rows[5], steps[5], "status")
    return rows


CALLS = {
    "plain": {},
    "maximum": {"pool": cases.MAX},
    "top_p": {"top_p": 0.5},
    "keep": {"keep": torch.tensor([[[100, 110], [300, 340]]] * 2, dtype=torch.int32), "sink": 0},
    "min_len": {"min_len": 100},
    "window": {"window": 50},
    "softcap": {"softcap": 5.0},
    "all_candidates": {"candidates": 1.0, "ratio": 0.5},
    "one_candidate": {"candidates": 0.001, "ratio": 0.001, "sink": 0, "recent": 0},
    "fallback": {"max_omitted_mass": 0.2},
}


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_one_block_a_row_gives_what_the_steps_give(name, planes):
    p = Problem([700, 90], T=2, planes=planes)
    inputs = p.inputs(**CALLS[name])
    assert_attend(assert_same(inputs), reference("attend")(*inputs), torch.float32)


@pytest.mark.parametrize("pool", [cases.MAX, cases.SOFTMAX])
@pytest.mark.parametrize("candidates", [0.7, 1.0])
def test_shortlists_that_a_block_holds_and_longer_ones(candidates, pool):
    """12288 candidates stay in registers; beyond, they are read again."""
    p = Problem([12700], H=1, G=2, D=32)
    inputs = p.inputs(
        candidates=candidates, pool=pool, key_bias=randn(generator(1), 1, p.cache.block_table.shape[1] * 16)
    )
    assert_attend(assert_same(inputs), run("attend", inputs, "cpu"), torch.float32)


def test_many_heads_a_group():
    p = Problem([300], H=1, G=37, D=32)
    inputs = p.inputs()
    assert_attend(assert_same(inputs), reference("attend")(*inputs), torch.float32)


def test_the_longest_rows_that_fit():
    """The limit follows from what the device has: joined scores take two bytes a position."""
    inputs = Problem([2000], H=1, G=2, D=32).inputs(ratio=0.05)
    launches = []
    for size in (48 * 1024, 38 * 1024):
        with shared_memory(size) as counters:
            before = counters()["launches"]
            run("attend", inputs, "simt")
            launches.append(counters()["launches"] - before)
    assert launches[0] == 4
    assert launches[1] > 4


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    lens=st.lists(st.integers(0, 260), min_size=1, max_size=3),
    G=st.integers(1, 8),
    page=st.sampled_from([1, 7, 16, 32]),
    planes=st.sampled_from([1, 2]),
    ratio=st.floats(0.01, 1.0),
    candidates=st.floats(0.01, 1.0),
    top_p=st.sampled_from([None, 0.5, 0.9]),
    forced=st.sampled_from([(0, 0), (1, 2), (16, 32)]),
    pool=st.sampled_from([cases.MAX, cases.SOFTMAX]),
    window=st.sampled_from([None, 50]),
    bias=st.booleans(),
)
def test_fuzz_both_ways(seed, lens, G, page, planes, ratio, candidates, top_p, forced, pool, window, bias):
    p = Problem(lens, 2, 2, G, 64, page, planes=planes, seed=seed)
    args = {"ratio": ratio, "candidates": candidates, "top_p": top_p, "sink": forced[0], "recent": forced[1]}
    args |= {"pool": pool, "window": window}
    if bias:
        args["key_bias"] = randn(generator(seed + 1), len(lens), p.cache.block_table.shape[1] * page)
    assert_same(p.inputs(**args))
