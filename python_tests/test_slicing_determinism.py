"""Acceptance grids 9 and 10: bitwise equal from run to run, for any thread count, instruction set and batch."""

import contextlib

import pytest
import torch
from slicing_helpers import compare, listing, native_backend, thinned

from sic_kernels.runtime import config
from sic_kernels.runtime.native import module
from sic_kernels.slicing import cases, cases_inputs, cases_select
from sic_kernels.slicing.reference_layout import visible
from sic_kernels.testing import (
    TOLERANCE,
    assert_same_bits,
    generator,
    paged_cache,
    randn,
    random_selection,
    reference,
    run,
)

BF16, F32 = torch.bfloat16, torch.float32


def attend_inputs(lens, T, heads, group, D, page, dtype, **policy):
    """Inputs of attend with a two-plane sketch."""
    gen = generator(len(lens))
    cache = paged_cache(gen, lens, heads, D, page, dtype)
    centre = 0.3 * randn(gen, heads, D)
    sketch = reference("key_sketch")(cache.k_cache, cache.block_table, cache.seq_lens, centre, None, 2, None)
    q = randn(gen, len(lens), T, heads * group, D, dtype=dtype)
    return cases_inputs.attend_inputs(q, cache, (*sketch, centre, 2, None), **policy)


def long_attention(density, unit, dtype=BF16):
    return cases.attention_case([5000, 33, 2100], 2, 2, 4, 64, 16, dtype, density=density, unit=unit).inputs()


# One call of every op, long enough to be divided among threads.
CALLS = {
    "dense": ("sliced_attention", lambda: long_attention(None, 0)),
    "dense_f32": ("sliced_attention", lambda: long_attention(None, 0, F32)),
    "tokens": ("sliced_attention", lambda: long_attention(0.4, 0)),
    "pages": ("sliced_attention", lambda: long_attention(0.4, 1, torch.float16)),
    "key_sketch": ("key_sketch", lambda: cases.sketch_case([3000, 700], 4, 96, 16, BF16, 2).inputs()),
    "score_max": ("score_tokens", lambda: cases.score_case([5000, 800], 1, 2, 4, 128, 16, BF16, 2, 0).inputs()),
    "score_softmax": ("score_tokens", lambda: cases.score_case([5000, 800], 1, 2, 4, 80, 7, BF16, 1, 1).inputs()),
    "refine": (
        "refine_tokens",
        lambda: cases.refine_case(cases.score_case([5000, 800], 1, 2, 4, 128, 16, BF16, 2, 1)).inputs(),
    ),
    "page_summary": ("page_summary", lambda: cases.summary_case([3000, 800], 16, 128, BF16).inputs()),
    "score_pages": ("score_pages", lambda: cases.page_score_case([5000, 800], 1, 2, 4, 128, 16, BF16, 0.5, 1).inputs()),
    "select": ("select", lambda: cases_select.topk_case(8, 8192, 512, F32, None).inputs()),
    "gather": ("gather", lambda: cases.gather_case([3000, 800], 1, 2, 128, 64, 16, BF16, 0).inputs()),
    "merge": ("merge_states", lambda: cases.merge_case((200, 8), 128, BF16).inputs()),
    "attend": ("attend", lambda: attend_inputs([5000, 33, 2100], 1, 2, 4, 128, 16, BF16)),
    "attend_fallback": ("attend", lambda: attend_inputs([3000, 900], 2, 2, 4, 64, 16, F32, max_omitted_mass=0.3)),
    "attend_keep": (
        "attend",
        lambda: attend_inputs([3000, 900], 2, 2, 4, 64, 16, F32, keep=cases_select.kept("several")),
    ),
}
every_call = pytest.mark.parametrize("name", CALLS)


@contextlib.contextmanager
def threads(n):
    """The CPU backend on n threads."""
    module().set_num_threads(n)
    try:
        yield
    finally:
        module().set_num_threads(config.current().num_threads)


@contextlib.contextmanager
def instruction_set(name):
    before = module().isa()
    module().force_isa(name)
    try:
        yield
    finally:
        module().force_isa(before)


@native_backend
@every_call
def test_20_runs_are_bitwise_equal(name, backend):
    op, build = CALLS[name]
    inputs = build()
    first = run(op, inputs, backend)
    for _ in thinned(range(19), backend, 10):  # the emulator's schedules are test_slicing_simt.py's
        for a, b in zip(run(op, inputs, backend), first):
            assert_same_bits(a, b, op)


@every_call
def test_thread_count_does_not_matter(name):
    """1, 2 and 3 threads (more than there may be cores)."""
    op, build = CALLS[name]
    inputs = build()
    results = []
    for n in (1, 2, 3):
        with threads(n):
            results.append(run(op, inputs, "cpu"))
    for other in results[1:]:
        for a, b in zip(results[0], other):
            assert_same_bits(a, b, op)


INTEGER_OPS = ["key_sketch", "score_max", "score_softmax", "refine", "page_summary", "select", "gather"]


@pytest.mark.parametrize("isa", ["plain", "avx2", "avx512", "neon"])
@pytest.mark.parametrize("name", CALLS)
def test_every_instruction_set(name, isa):
    """Grid 10: bits, integer scores and selections are those of the reference; attention is within its tolerance."""
    if isa not in module().supported_isas():
        pytest.skip(f"this machine has no {isa}: it has {', '.join(module().supported_isas())}")
    op, build = CALLS[name]
    inputs = build()
    with instruction_set(isa):
        assert module().isa() == isa
        got = run(op, inputs, "cpu")
    want = reference(op)(*inputs)
    if name in INTEGER_OPS:
        compare(got, want, what=f"{op} on {isa}")
    elif op == "attend":
        for i in (2, 3):
            assert_same_bits(got[i], want[i], f"attend: selection, on {isa}")
        compare(got[:2], want[:2], TOLERANCE[inputs[0].dtype], f"{op} on {isa}")
    elif op == "score_pages":
        torch.testing.assert_close(got[0], want[0], atol=1e-4, rtol=1e-5)
    else:
        compare(got, want, TOLERANCE[inputs[0].dtype], f"{op} on {isa}")


@pytest.mark.parametrize("grid", ["head_size", "sketch", "score", "page_score", "gather", "merge"])
@pytest.mark.parametrize("isa", ["plain", "avx2", "neon"])
def test_odd_sizes_on_every_instruction_set(grid, isa):
    """The grids of odd sizes, on the instruction sets that the other tests do not run on."""
    if isa not in module().supported_isas():
        pytest.skip(f"this machine has no {isa}: it has {', '.join(module().supported_isas())}")
    with instruction_set(isa):
        for case in cases.grid(grid):
            inputs = case.inputs()
            compare(run(case.op, inputs, "cpu"), case.expected(inputs), case.tolerance, f"{case} on {isa}")


# --- batch invariance -----------------------------------------------------------------------------------------------


@native_backend
@pytest.mark.parametrize("B", [2, 8, 32])
@pytest.mark.parametrize("mode", ["dense", "tokens", "pages", "attend"])
@pytest.mark.parametrize("length", [700, 5000])
def test_a_row_does_not_depend_on_its_batch(mode, B, length, backend):
    """A row alone equals the same row inside batches of 2, 8 and 32, with shorter and longer neighbours."""
    gen = generator(B)
    H, G, D, page, capacity = 2, 2, 64, 16, 6016
    pool = 380
    k_cache, v_cache = randn(gen, pool, H, page, D, dtype=BF16), randn(gen, pool, H, page, D, dtype=BF16)
    table = torch.randint(0, pool, (B, capacity // page), generator=gen, dtype=torch.int32)
    lens = torch.randint(0, capacity + 1, (B,), generator=gen, dtype=torch.int32)
    at = B - 1
    lens[at] = length
    q = randn(gen, B, 1, H * G, D, dtype=BF16)
    if mode == "attend":
        centre = torch.zeros(H, D)
        every = torch.arange(pool, dtype=torch.int32)[:, None]
        full = torch.full((pool,), page, dtype=torch.int32)
        bits, norm = reference("key_sketch")(k_cache, every, full, centre, None, 2, None)
        policy = (0.12, 0.25, None, 16, 32, 0.5, 1, None, False, 16, 0, None)

        def call(rows):
            where = (table[rows], lens[rows])
            inputs = (q[rows], k_cache, v_cache, bits, norm, centre, 2, None, *where, *policy, *[None] * 8)
            return run("attend", inputs, backend)
    else:
        unit, size = (cases.PAGE, page) if mode == "pages" else (cases.TOKEN, 1)
        seen = visible(lens, 1, capacity)
        chosen = random_selection(gen, seen, H, capacity // size, 0.5, size)

        def call(rows):
            listed = (None, None) if mode == "dense" else (chosen[0][rows], chosen[1][rows])
            where = (k_cache, v_cache, table[rows], lens[rows])
            return run("sliced_attention", (q[rows], *where, *listed, unit, *[None] * 8), backend)

    together, alone = call(slice(None)), call(slice(at, B))
    for a, b in zip(together, alone):
        assert_same_bits(a[at:].contiguous(), b, mode)


@native_backend
@pytest.mark.parametrize("mode", ["dense", "tokens"])
def test_a_query_token_does_not_depend_on_the_others(mode, backend):
    """The last of T query tokens equals the same token alone."""
    gen = generator(3)
    cache = paged_cache(gen, [3000], 2, 64, 16, BF16)
    q = randn(gen, 1, 5, 8, 64, dtype=BF16)
    lists = [sorted(torch.randperm(2990, generator=gen)[:400].tolist()) for _ in range(2)]
    many = listing(lists * 5, T=5, H=2) if mode == "tokens" else None
    one = listing(lists, H=2) if mode == "tokens" else None
    together = run("sliced_attention", cases.attention_inputs(q, cache, many), backend)
    alone = run("sliced_attention", cases.attention_inputs(q[:, 4:], cache, one), backend)
    for a, b in zip(together, alone):
        assert_same_bits(a[:, 4:].contiguous(), b)


@native_backend
def test_max_seq_len_does_not_matter(backend):
    """The bound on lengths changes widths and workspace, never a result."""
    inputs = cases.attention_case([900, 33], 1, 2, 4, 64, 16, BF16).inputs()
    wide = run("sliced_attention", inputs, backend)
    for bound in (900, 905):
        for a, b in zip(run("sliced_attention", (*inputs[:-1], bound), backend), wide):
            assert_same_bits(a, b)
