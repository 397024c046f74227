"""attend's ways through the CUDA kernels, a cluster of blocks a row, one block a row and step by step: the same results,
whichever the device allows."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_slicing_attend import POOLS, Problem, assert_attend, fuzzed

from sic_kernels.runtime import native
from sic_kernels.slicing import cases
from sic_kernels.testing import assert_close, assert_same_bits, generator, randn, reference, run

pytestmark = pytest.mark.backend("simt")
ALL_OF_IT = 227 * 1024  # bytes that a block may have on the devices with the most


@contextlib.contextmanager
def device(shared=ALL_OF_IT, clusters=True):
    module = native.simt_module()
    module.set_shared_memory(shared)
    module.set_clusters(clusters)
    try:
        yield module.counters
    finally:
        module.set_shared_memory(ALL_OF_IT)
        module.set_clusters(True)


def launches_on(inputs, **has):
    with device(**has) as counters:
        before = counters()
        outs = run("attend", inputs, "simt")
        return outs, *(counters()[key] - before[key] for key in ("launches", "threads"))


def assert_same(inputs):
    """Bits are equal but for the estimate, whose sums are taken in another order."""
    rows, few, _ = launches_on(inputs)
    for has in ({"clusters": False}, {"shared": 8 * 1024}):
        others, launches, _ = launches_on(inputs, **has)
        assert launches == few if "clusters" in has else launches > few
        for i, what in enumerate(("out", "lse", "indices", "counts")):
            assert_same_bits(rows[i], others[i], what)
        assert_close(rows[4], others[4], atol=1e-5, what="omitted_mass")
        assert_same_bits(rows[5], others[5], "status")
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
def test_one_launch_gives_what_the_steps_give(name, planes):
    p = Problem([700, 90], T=2, planes=planes)
    inputs = p.inputs(**CALLS[name])
    assert_attend(assert_same(inputs), reference("attend")(*inputs), torch.float32)


@pytest.mark.parametrize("pool", [cases.MAX, cases.SOFTMAX])
@pytest.mark.parametrize("candidates", [0.7, 1.0])
def test_shortlists_that_a_block_holds_and_longer_ones(candidates, pool):
    """32 KB of their scores stay in shared memory; beyond, they are read again."""
    p = Problem([9700], H=1, G=4, D=32)
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
    assert launches_on(inputs, shared=52 * 1024)[1] == 4
    assert launches_on(inputs, shared=44 * 1024)[1] > 4


# Blocks of a row, by its width: 1 of 1024 threads, then 2, 4 and 8 of 512.
BLOCKS = {8192: 1024, 8208: 2 * 512, 16384: 2 * 512, 16400: 4 * 512, 32768: 4 * 512, 32784: 8 * 512}


@pytest.mark.parametrize("width", BLOCKS)
def test_rows_of_every_number_of_blocks(width):
    """A long row and short ones, of which some blocks have nothing; the width alone says how many blocks there are."""
    lens = [width, 0, 1, 9, 70, width - 17]
    p = Problem(lens, H=1, G=1, D=32, seed=width)
    inputs = p.inputs(ratio=0.02, candidates=0.1, max_seq_len=width)
    outs = assert_same(inputs)
    assert_attend(outs, run("attend", inputs, "cpu"), torch.float32)
    steps, one, many = (launches_on(inputs, **has)[2] for has in ({"shared": 8 * 1024}, {"clusters": False}, {}))
    assert many - one == len(lens) * (BLOCKS[width] - 1024), steps


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("planes", [1, 2])
def test_calls_in_clusters(name, planes):
    p = Problem([8500, 300], H=1, G=2, D=32, planes=planes)
    args = dict(CALLS[name])
    if name == "keep":
        args["keep"] = torch.tensor([[[100, 4310], [7000, 8400]]] * 2, dtype=torch.int32)
    if name == "window":
        args["window"] = 5000
    inputs = p.inputs(**args)
    assert_attend(assert_same(inputs), run("attend", inputs, "cpu"), torch.float32)


def test_clusters_in_every_schedule():
    """The same bits, the estimate's too."""
    inputs = Problem([16500, 40], H=1, G=2, D=32).inputs(ratio=0.03)
    module = native.simt_module()
    expected = run("attend", inputs, "simt")
    try:
        for schedule, seed in (("reverse", 1), ("random", 1), ("random", 2)):
            module.set_schedule(schedule, seed)
            for got, want in zip(run("attend", inputs, "simt"), expected, strict=True):
                assert_same_bits(got, want, f"{schedule} {seed}")
    finally:
        module.set_schedule("forward")


@pytest.mark.parametrize("width", [8208, 16400])
def test_a_row_alone_and_in_a_batch(width):
    """The same bits, whatever else is in the batch."""
    p = Problem([width, 5000, width - 3], H=1, G=2, D=32)
    inputs = p.inputs(ratio=0.03)
    together = run("attend", inputs, "simt")
    for b in range(3):
        own = [x[b : b + 1] if i in (0, 8, 9) else x for i, x in enumerate(inputs)]  # q, block table, lengths
        alone = run("attend", own, "simt")
        for got, want in zip(alone, together, strict=True):
            assert_same_bits(got[0], want[b], f"sequence {b}")


def spans(*choices):
    """Two kept spans a row, or none: one of these, and tokens 7 and 8."""
    kept = st.sampled_from(choices)
    return st.none() | kept.map(lambda span: torch.tensor([[span, (7, 9)]], dtype=torch.int32))


def kept_by_all(p, keep):
    return None if keep is None else keep.repeat(len(p.q), 1, 1)


@settings(max_examples=25)
@given(fuzz=fuzzed(sizes={"T": st.just(2)}, pool=POOLS), keep=spans((0, 0), (31, 33), (50, 120), (0, 300)))
def test_fuzz_both_ways(fuzz, keep):
    p, args = fuzz
    assert_same(p.inputs(**args, keep=kept_by_all(p, keep)))


@settings(max_examples=12)
@given(
    fuzz=fuzzed(
        sizes={
            "lens": st.tuples(st.sampled_from([8200, 9001, 16500]), st.integers(0, 9000)),
            **{name: st.just(n) for name, n in (("T", 1), ("H", 1), ("D", 32), ("page", 16))},
            "G": st.integers(1, 4),
        },
        ratio=st.floats(0.001, 0.1),
        candidates=st.floats(0.001, 0.6),
        forced=st.sampled_from([(0, 0), (5000, 20), (16, 6000)]),
        window=st.none(),
        bias=st.just(False),
        pool=POOLS,
    ),
    keep=spans((3000, 4200), (8000, 8199)),
)
def test_fuzz_clusters(fuzz, keep):
    p, args = fuzz
    assert_same(p.inputs(**args, keep=kept_by_all(p, keep)))
