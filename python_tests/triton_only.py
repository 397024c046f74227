"""What only the Triton kernels have: number formats, borders of their own, tiles of prompts.  Run by triton_small.py."""

import pytest
import torch
import triton
import triton.language as tl
from slicing_helpers import compare, listing

from sic_kernels.slicing import cases, reference_sketch, triton_kernels
from sic_kernels.slicing import triton_common as common
from sic_kernels.slicing.triton_common import STEP_LOG2E, exp_weight, from_f32, log_steps, round_even, to_f32
from sic_kernels.testing import TOLERANCE, assert_same_bits, generator, paged_cache, randn, run

KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float8_e4m3fn: 3}


@triton.jit
def decode_kernel(x, y, KIND: tl.constexpr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + i, to_f32(tl.load(x + i), KIND))


@triton.jit
def encode_kernel(x, y, KIND: tl.constexpr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + i, from_f32(tl.load(x + i), KIND))


@triton.jit
def weight_kernel(x, y, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + i, exp_weight(tl.load(x + i), STEP_LOG2E))


@triton.jit
def log_kernel(x, y, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + i, log_steps(tl.load(x + i)))


@triton.jit
def round_kernel(x, y, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + i, round_even(tl.load(x + i)))


def mapped(kernel, x, dtype, **constants):
    """kernel over all elements of x, a multiple of 256 of them."""
    y = torch.empty(x.shape, dtype=dtype)
    kernel[(x.numel() // 256,)](common.raw(x), common.raw(y), N=256, **constants)
    return y


# --- number formats -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.bfloat16])
def test_every_code_is_decoded(dtype):
    """All 256 bytes, all 65536 halves."""
    bits = torch.uint8 if dtype == torch.float8_e4m3fn else torch.int16
    codes = torch.arange(1 << 8 * dtype.itemsize).to(bits).view(dtype)
    got, want = mapped(decode_kernel, codes, torch.float32, KIND=KINDS[dtype]), codes.float()
    assert torch.equal(got.isnan(), want.isnan())
    assert_same_bits(got.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.bfloat16])
def test_rounding_is_to_nearest_ties_to_even(dtype):
    """Every number of the format, and the f32 half-way to the next and next to that, both signs."""
    codes = torch.arange(1 << (8 * dtype.itemsize - 1))
    exact = codes.to(torch.uint8 if dtype.itemsize == 1 else torch.int16).view(dtype).float()
    exact = exact[exact.isfinite()]
    half = (exact[:-1] + exact[1:]) / 2
    parts = (exact, half, half.nextafter(torch.tensor(0.0)), half.nextafter(torch.tensor(torch.inf)))
    x = torch.cat((*parts, *(-part for part in parts), torch.tensor([torch.nan, 0.0, -0.0])))
    x = torch.cat((x, torch.zeros(-x.numel() % 256)))
    got, want = mapped(encode_kernel, x, dtype, KIND=KINDS[dtype]), x.to(dtype)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.float().nan_to_num(), want.float().nan_to_num())


def test_f8_saturates():
    x = torch.full((256,), 448.0) * torch.linspace(1.0, 9.0, 256)
    x[7] = torch.inf
    assert mapped(encode_kernel, torch.cat((x, -x)), torch.float8_e4m3fn, KIND=3).float().abs().eq(448.0).all()


def test_round_even():
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 0.49999997, 2**21 + 0.5, -(2.0**21) - 1.5]).repeat(32)
    assert torch.equal(mapped(round_kernel, x, torch.float32), x.round())


def test_weights_and_logs_are_those_of_the_definition():
    """All distances that weigh anything, and some beyond; logs of sums of weights."""
    distance = torch.cat((torch.arange(4608), torch.tensor([1 << 15, 65534, 1 << 20, 1 << 24]))).to(torch.int32)
    distance = torch.cat((distance, torch.zeros(-distance.numel() % 256, dtype=torch.int32)))
    got = mapped(weight_kernel, distance, torch.int32)
    assert torch.equal(got.long(), reference_sketch.weights(distance.long()))
    p = torch.cat((got.float() / got.sum(), torch.rand(1024, generator=generator(1)), torch.zeros(256)))
    assert torch.equal(mapped(log_kernel, p, torch.int32).long(), reference_sketch.log_steps(p))


# --- borders of the kernels -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", [cases.MAX, cases.SOFTMAX])
def test_scores_of_several_tiles_of_heads_and_chunks(pool):
    """17 heads are two tiles of 16; 1100 positions two chunks of 1024; 300 candidates five of 64."""
    score = cases.score_case([1100, 900], 1, 1, 17, 16, 16, torch.float32, 2, pool)
    for case in (score, cases.refine_case(score)):
        inputs = case.inputs()
        compare(run(case.op, inputs, "triton"), case.expected(inputs), what=str(case))


def test_more_partial_results_than_are_combined_at_a_time():
    """4500 tokens are 18 splits of 256, combined 16 at a time; a full selection is the dense result bit for bit."""
    case = cases.attention_case([4500, 300], 1, 1, 2, 16, 16, torch.float32)
    inputs = case.inputs()
    dense = run(case.op, inputs, "triton")
    compare(dense, case.expected(inputs), case.tolerance, str(case))
    every = listing([list(range(4500)), list(range(300))], B=2)
    for got, want in zip(run(case.op, (*inputs[:5], *every, 0, *inputs[8:]), "triton"), dense):
        assert_same_bits(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("density", [None, 0.5])
def test_prompts_use_wide_tiles(density, dtype):
    """20 query tokens of 4 heads: dense, two tiles of 64 rows and one split; selected, a tile each."""
    case = cases.attention_case([300, 25], 20, 1, 4, 32, 16, dtype, density=density)
    inputs = case.inputs()
    compare(run(case.op, inputs, "triton"), case.expected(inputs), TOLERANCE[dtype], str(case))


def test_a_row_does_not_depend_on_its_batch():
    """A row alone equals the same row between a shorter and a longer one; max_seq_len changes nothing either."""
    gen = generator(5)
    cache = paged_cache(gen, [40, 700, 900], 2, 32, 16, torch.bfloat16)
    q = randn(gen, 3, 1, 6, 32, dtype=torch.bfloat16)
    inputs = cases.attention_inputs(q, cache)
    together = run("sliced_attention", inputs, "triton")
    row = slice(1, 2)
    alone = (q[row], *inputs[1:3], cache.block_table[row], cache.seq_lens[row], *inputs[5:-1], 720)
    for a, b in zip(together, run("sliced_attention", alone, "triton")):
        assert_same_bits(a[row].contiguous(), b)
    for a, b in zip(together, run("sliced_attention", inputs, "triton")):
        assert_same_bits(a, b, "again")


def test_of_two_rows_for_one_slot_the_later_stays():
    """Far apart among 600 rows, and their page's summary covers what stayed."""
    gen = generator(6)
    k, v = randn(gen, 600, 1, 16), randn(gen, 600, 1, 16)
    slots = torch.arange(600) % 300
    results = []
    for backend in ("cpu", "triton"):
        k_cache, v_cache = torch.zeros(20, 1, 16, 16), torch.zeros(20, 1, 16, 16)
        bits, norm = torch.zeros(20, 1, 64, dtype=torch.uint8), torch.zeros(20, 1, 16, dtype=torch.bfloat16)
        summary = torch.zeros(20, 1, 2, 16)
        index = (bits, norm, torch.zeros(1, 16), summary)
        run("append_kv", (k, v, k_cache, v_cache, slots, None, None, *index), backend)
        results.append((k_cache, v_cache, bits, norm, summary))
    for a, b in zip(*results):
        assert_same_bits(a, b)
    assert torch.equal(results[1][0][0, 0, 0], k[300, 0])


def test_gather_without_outputs():
    case = cases.gather_case([50, 0, 33], 2, 2, 16, 8, 16, torch.bfloat16, cases.PAGE)
    inputs = case.inputs()
    compare(triton_kernels.gather(*inputs), case.expected(inputs))
