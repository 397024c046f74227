"""What only the emulator can show of the CUDA kernels of this family: any order of threads gives the same bits, launchers
neither wait nor allocate, and the number of multiprocessors changes nothing."""

import functools

import pytest
import torch

from sic_kernels.head import cases
from sic_kernels.runtime import backends, native
from sic_kernels.testing import assert_same_bits, generator, randn, run

pytestmark = pytest.mark.backend("simt")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def logits(B, V, dtype, **given):
    return cases.logits_inputs((randn(generator(B), B, V) * 3).to(dtype), **given)


def lm_head(B, D, V, hidden, weight, **given):
    gen = generator(V)
    of_probe = (randn(gen, 5, D, dtype=hidden), randn(gen, 2, 5), randn(gen, 2), 1, 0)
    return cases.lm_head_inputs(
        randn(gen, B, D, dtype=hidden), (randn(gen, V, D) / D**0.5).to(weight), of_probe, **given
    )


def parts():
    x = logits(5, 300, F32, k=3, **{n: v for n, v in cases.all_extras(generator(1), 5, 300).items() if n != "k"})
    made = [run("logits_part", piece, "ref", family="head") for piece in cases.split(x, [64, 96, 256])]
    return (*(torch.stack(t) for t in zip(*made)), x[1])


CALLS = {
    "extras": ("logits_stats", lambda: logits(3, 4500, F32, **cases.all_extras(generator(0), 3, 4500))),
    "half": ("logits_stats", lambda: logits(2, 700, BF16, temperature=torch.tensor(0.5))),
    "long_list": ("logits_stats", lambda: logits(1, 1100, F16, k=64)),
    "part": ("logits_part", lambda: logits(2, 260, F32, k=4, vocab_start=7, watch_ids=torch.tensor([8, 900]))),
    # tensor cores; blocks of several tiles; hidden states in several pieces and blocks of rows; CUDA cores
    "head": ("lm_head_stats", lambda: lm_head(9, 80, 200, BF16, BF16, **cases.all_extras(generator(0), 9, 200))),
    "head_tiles": ("lm_head_stats", lambda: lm_head(2, 8, 264 * 128 + 5, F16, F16, k=3)),
    "head_pieces": ("lm_head_stats", lambda: lm_head(33, 1088, 20, BF16, BF16, k=8)),
    "head_mixed": ("lm_head_stats", lambda: lm_head(9, 131, 140, BF16, F32, k=2)),
    "head_part": ("lm_head_part", lambda: lm_head(2, 24, 140, F16, F16, k=2, vocab_start=3)[:-1]),
    "merge": ("merge_stats", parts),
    "probe": ("probe", lambda: next(iter(cases.probe_grid())).inputs()),
}
every_call = pytest.mark.parametrize("name", CALLS)


@functools.cache
def problem(name):
    op, build = CALLS[name]
    inputs = build()
    return op, inputs, run(op, inputs, "simt", family="head")


def call(name, outs=None, workspace=None):
    op, inputs, _ = problem(name)
    return run(op, inputs, "simt", outs=outs, workspace=workspace, family="head")


def assert_first(name, got, what):
    for i, (g, w) in enumerate(zip(got, problem(name)[2], strict=True)):
        assert_same_bits(g, w, f"{name}, {what}: result {i}")


@pytest.fixture
def simt():
    module = native.simt_module()
    yield module
    module.set_schedule("forward")
    module.set_multiprocessors(4)


@every_call
def test_schedules_and_multiprocessors_change_no_bit(name, simt):
    """Threads and blocks in reverse order on one multiprocessor, and in a random order on many."""
    problem(name)
    for schedule, multiprocessors in ((("reverse", 1), 1), (("random", 1), 132)):
        simt.set_schedule(*schedule)
        simt.set_multiprocessors(multiprocessors)
        assert_first(name, call(name), schedule)


def given_memory(name):
    """Overwritten outputs, and a dirty workspace of just the size that is asked for at a multiple of 256 and no more."""
    op, inputs, first = problem(name)
    outs = tuple(torch.full_like(t, 77) for t in first)
    size = backends.workspace_bytes(backends.call, "head", op, tuple(inputs), outs, None, "simt")
    room = torch.full((size + 1024,), 0xA5, dtype=torch.uint8)
    skew = -room.data_ptr() % 512 + 256
    return outs, room[skew : skew + size] if size else None


@every_call
def test_calls_neither_allocate_nor_wait_and_are_captured(name, simt):
    """With given memory a call only launches; while a graph is captured nothing runs; each replay gives the same bits."""
    problem(name)
    outs, workspace = given_memory(name)
    simt.set_device_checks(False)  # checks of values wait for the device
    try:
        before = simt.counters()
        graph = simt.Graph(lambda: call(name, outs, workspace))
        after = simt.counters()
    finally:
        simt.set_device_checks(True)
    assert all(bool((t == 77).all()) for t in outs)
    made = {key: after[key] - before[key] for key in ("allocations", "frees", "synchronisations", "copies")}
    assert made == dict.fromkeys(made, 0)
    launches = simt.counters()["launches"]
    graph.replay()
    assert simt.counters()["launches"] > launches
    assert_first(name, outs, "replayed")


@pytest.mark.parametrize("hidden, weight", [(BF16, BF16), (BF16, F32)])
def test_a_row_has_the_same_bits_in_any_batch(hidden, weight, simt):
    """Blocks of 8, 16 and 32 rows, and rows elsewhere in them; hidden states whole and in pieces."""
    gen, D = generator(3), 1032
    h, w = randn(gen, 40, D, dtype=hidden), (randn(gen, 150, D) / D**0.5).to(weight)
    whole = run("lm_head_stats", cases.lm_head_inputs(h, w, k=4), "simt", family="head")
    for first, count in ((0, 1), (3, 8), (30, 10), (7, 33)):
        some = run("lm_head_stats", cases.lm_head_inputs(h[first : first + count], w, k=4), "simt", family="head")
        for got, want in zip(some[:6], whole[:6]):
            assert_same_bits(got, want[first : first + count], f"rows {first} to {first + count}")


def test_segments_of_a_vocabulary_larger_than_their_number(simt):
    """Blocks go round several times; of equals the lowest id wins, wherever it lies."""
    x = torch.full((1, 65 * 4096 + 77), -5.0)
    x[0, [4095, 4096, 5000, 9000, 262_144]] = 1.0
    x[0, [700, 266_300]] = 2.0
    got = run("logits_stats", cases.logits_inputs(x, k=7), "simt", family="head")
    want = run("logits_stats", cases.logits_inputs(x, k=7), "ref", family="head")
    assert got[4].tolist() == want[4].tolist() == [[700, 266_300, 4095, 4096, 5000, 9000, 262_144]]
    torch.testing.assert_close(got[:3], want[:3], atol=1e-5, rtol=1e-6)
