"""uniform: published answers, the cases on every backend, keys that a graph follows, wrong arguments."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slicing_helpers import by_case, every_backend, native_backend

from sic_kernels import ArgumentError
from sic_kernels.replay import cases, reference
from sic_kernels.replay.random import uniform
from sic_kernels.runtime import native
from sic_kernels.testing import assert_same_bits, assert_unchanged, copies, guarded, run, run_guarded

OF_ZERO = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]  # Random123: counter 0, key 0
OF_ONES = [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
OF_PI = [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_the_definition_gives_the_published_answers():
    ones = 0xFFFFFFFF
    assert reference.philox([0] * 4, [0, 0]) == OF_ZERO
    assert reference.philox([ones] * 4, [ones] * 2) == OF_ONES
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    assert reference.philox(pi, [0xA4093822, 0x299F31D0]) == OF_PI


@every_backend
def test_golden(backend):
    """Four numbers of the first block, then the second."""
    out = uniform((0, 0, 0), out=torch.full((2, 3), 9.0), backend=backend)
    second = reference.philox([1, 0, 0, 0], [0, 0])
    assert out.flatten().tolist() == [(x >> 8) / 2**24 for x in [*OF_ZERO, *second[:2]]]


@native_backend
@by_case(cases.grid())
def test_grid(case, backend):
    """Bit for bit, between guard bytes, where a store of four numbers is aligned and where it is not."""
    inputs = case.inputs()
    want = case.expected(inputs)
    for skew in (0, 1):
        outs = run_guarded("uniform", inputs, backend, want, skew=skew, family="replay")
        assert_same_bits(outs[0].tensor, want[0], str(case))
    assert_same_bits(run("uniform", inputs, backend, family="replay")[0], want[0], "an output of its own")


@native_backend
@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**28 - 1),
    layer=st.integers(0, 4095),
    count=st.integers(0, 40),
    more=st.integers(0, 9),
)
def test_the_longer_begins_with_the_shorter(seed, position, layer, count, more, backend):
    key = (seed, position, layer)
    out = uniform(key, out=torch.empty(count), backend=backend)
    longer = uniform(key, out=torch.empty(count + more, 1), backend=backend)
    assert_same_bits(longer[:count, 0].contiguous(), out)
    signed = seed - 2**64 if seed >= 2**63 else seed
    want = reference.uniform(torch.tensor([signed, position, layer]), count)[0]
    assert_same_bits(out, want)


@native_backend
def test_other_keys_give_other_numbers(backend):
    keys = [(s, p, layer) for s in (0, 1, 2**63) for p in (0, 1, 2**20) for layer in (0, 1)]
    rows = [tuple(uniform(key, out=torch.empty(8), backend=backend).tolist()) for key in keys]
    assert len(set(rows)) == len(keys)


def test_numbers_are_spread_evenly():
    """Mean and variance of a million, and of neighbours; five standard deviations."""
    x = uniform((7, 1, 2), out=torch.empty(1 << 20)).double()
    assert x.min() >= 0
    assert x.max() < 1
    assert abs(x.mean() - 0.5) < 5 * (1 / 12 / 2**20) ** 0.5
    assert abs(x.var() - 1 / 12) < 5 * (1 / 180 / 2**20) ** 0.5
    assert abs(((x[1:] - 0.5) * (x[:-1] - 0.5)).mean()) < 5 / 12 / 2**10


def test_any_number_of_threads():
    before, results = native.module().num_threads(), []
    try:
        for threads in (1, 2, 5):
            native.module().set_num_threads(threads)
            results.append(uniform((3, 5, 9), out=torch.empty(100_003), backend="cpu"))
    finally:
        native.module().set_num_threads(before)
    for other in results[1:]:
        assert_same_bits(other, results[0])


@pytest.mark.parametrize("isa", native.module().supported_isas())
def test_every_instruction_set(isa):
    case = cases.uniform_case((-9, 77, 3), 4099)
    try:
        native.module().force_isa(isa)
        got = run("uniform", case.inputs(), "cpu", family="replay")
    finally:
        native.module().force_isa("auto")
    assert_same_bits(got[0], case.expected(case.inputs())[0])


@pytest.mark.backend("simt")
def test_any_order_of_threads():
    simt, case = native.simt_module(), cases.uniform_case((5, 6, 7), 4099)
    want = case.expected(case.inputs())[0]
    try:
        for schedule in ("reverse", "random"):
            simt.set_schedule(schedule)
            assert_same_bits(run("uniform", case.inputs(), "simt", family="replay")[0], want)
    finally:
        simt.set_schedule("forward")


@pytest.mark.backend("simt")
def test_a_graph_follows_the_key():
    """One launch, no wait, no memory; a replay reads the key of the moment."""
    simt = native.simt_module()
    key, out = torch.tensor([1, 2, 3]), torch.zeros(3, 7)
    graph = simt.Graph(lambda: uniform(key, out=out, backend="simt"))
    assert not out.any()
    before = simt.counters()
    for values in ((1, 2, 3), (1, 9, 3), (-1, 9, 4095)):
        key.copy_(torch.tensor(values))
        graph.replay()
        assert_same_bits(out.view(-1), reference.uniform(key, 21)[0])
    after = simt.counters()
    assert after["launches"] - before["launches"] == 3
    assert all(after[name] == before[name] for name in ("synchronisations", "allocations", "copies", "fills"))


# --- wrong arguments ------------------------------------------------------------------------------------------------

GOOD = torch.tensor([0, 0, 0])
WRONG = {
    "out: got float64[8], expected float32 of rank 1": lambda: (GOOD, torch.zeros(8, dtype=torch.float64)),
    "out: got float32[8,2] with gaps, expected a contiguous": lambda: (GOOD, torch.zeros(8, 4)[:, :2]),
    "out: got list, expected a contiguous float32 tensor": lambda: (GOOD, [0.0]),
    "key: got (0, 1), expected three integers": lambda: ((0, 1), torch.zeros(8)),
    "key: got (0, 1, 2.0), expected three integers": lambda: ((0, 1, 2.0), torch.zeros(8)),
    "key: got (18446744073709551616, 0, 0), expected": lambda: ((1 << 64, 0, 0), torch.zeros(8)),
    "key: got (True, 0, 0), expected three integers": lambda: ((True, 0, 0), torch.zeros(8)),
    "key: got int32[3], expected int64 of rank 1": lambda: (GOOD.int(), torch.zeros(8)),
    "key: got int64[4], expected shape [3]": lambda: (torch.zeros(4, dtype=torch.int64), torch.zeros(8)),
    "key: got int64[3] with stride 2": lambda: (torch.zeros(6, dtype=torch.int64)[::2], torch.zeros(8)),
    "inputs: got a tensor that requires grad": lambda: (GOOD, torch.zeros(8, requires_grad=True)),
}


@every_backend
@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments(message, backend):
    key, out = WRONG[message]()
    tensors = [x for x in (key, out) if isinstance(x, torch.Tensor)]
    before = copies(tensors)
    with pytest.raises(ArgumentError) as error:
        uniform(key, out=out, backend=backend)
    assert str(error.value).startswith(f"uniform: {message}"), error.value
    assert_unchanged(tensors, before)


@native_backend
def test_an_output_in_the_memory_of_its_key(backend):
    memory = torch.zeros(8, dtype=torch.int64)
    out = memory.view(torch.float32)[2:7]
    with pytest.raises(ArgumentError, match=r"^uniform: out: got float32\[5\] in the memory of an input"):
        uniform(memory[:3], out=out, backend=backend)
    outs = guarded((0,), torch.float32)
    uniform((1, 2, 3), out=outs.tensor, backend=backend)  # nothing to do
