"""key_sketch and append_kv: bits worked by hand, loops in NumPy scalars, incremental equals full rebuild."""

import pytest
import slicing_naive as naive
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slicing_helpers import by_case, compare, every_backend, native_backend

from sic_kernels.slicing import cases
from sic_kernels.testing import (
    assert_same_bits,
    assert_unchanged,
    copies,
    empty_cache,
    generator,
    guarded_like,
    paged_cache,
    randn,
    reference,
    run,
)

F8 = torch.float8_e4m3fn


# --- golden values --------------------------------------------------------------------------------------------------


@every_backend
def test_golden_two_channels(backend):
    """D = 2, signs (-1, +1).  Key (3, 1): x = (-3, 1), butterfly (-2, -4), y = (-1.41, -2.83).

    Plane 0 is 0 for both.  Mean |y| is 2.12, the threshold 2.65: channel 1 is large.  Plane 1 = (plane 0 == large)
    = (1, 0).  Norm sum y^2 / sum |y| * level = 10 / (1.41 + 3 * 2.83) = 1.0102, as bf16 1.0078125.
    Key (-3, -1): everything mirrored, plane 0 is (1, 1), plane 1 (0, 1).
    """
    assert [naive.sign_of(d) for d in range(8)] == [-1, 1, -1, 1, -1, 1, -1, 1]
    k = torch.tensor([[3.0, 1.0], [-3.0, -1.0]]).reshape(1, 1, 2, 2)
    lens = torch.tensor([2], dtype=torch.int32)
    centre = torch.zeros(1, 2)
    bits, norm = run("key_sketch", (k, None, lens, centre, None, 2, None), backend)
    assert bits.flatten().tolist() == [0b00, 0b11, 0b01, 0b10]
    assert norm.flatten().tolist() == [1.0078125, 1.0078125]
    # One plane: 10 / (1.41 + 2.83) = 2.357, as bf16 2.359375.
    bits, norm = run("key_sketch", (k, None, lens, centre, None, 1, None), backend)
    assert bits.flatten().tolist() == [0b00, 0b11]
    assert norm.flatten().tolist() == [2.359375, 2.359375]


@every_backend
def test_golden_centre(backend):
    """A key that equals the centre has z = 0: all signs are set, nothing is large and the norm is 0."""
    k = torch.full((1, 1, 1, 3), 0.7)
    centre = torch.full((1, 3), 0.7)
    bits, norm = run("key_sketch", (k, None, torch.tensor([1], dtype=torch.int32), centre, None, 2, None), backend)
    # |z| = 0 reaches the threshold 0: both planes are set.
    assert bits.flatten().tolist() == [0b111, 0b111]
    assert norm.flatten().tolist() == [0.0]


@every_backend
def test_golden_layout(backend):
    """Page 18, D = 10: two channel bytes; a block of 16 tokens, then one of 2; surplus bits are 0."""
    gen = generator(4)
    k = randn(gen, 1, 1, 18, 10)
    bits, norm = run(
        "key_sketch", (k, None, torch.tensor([18], dtype=torch.int32), torch.zeros(1, 10), None, 2, None), backend
    )
    assert bits.shape == (1, 1, 2 * 18 * 2)
    want = [0] * 72
    for token in range(18):
        planes, _ = naive.sketch_key(k[0, 0, token].tolist(), [0.0] * 10, 2)
        for plane in range(2):
            base = 36 * plane + (token if token < 16 else 32 + token - 16)
            width = 16 if token < 16 else 2
            want[base] = sum(bit << c for c, bit in enumerate(planes[plane][:8]))
            want[base + width] = sum(bit << c for c, bit in enumerate(planes[plane][8:]))
    assert bits.flatten().tolist() == want
    assert norm.shape == (1, 1, 18)


# --- loops ----------------------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("D, page", [(1, 3), (3, 5), (46, 17), (64, 16), (80, 16), (96, 33), (100, 7), (128, 16)])
def test_loops_make_the_same_bits(D, page, planes, backend):
    """The definition written as loops over NumPy float32 scalars."""
    gen = generator(D)
    k, centre = randn(gen, 1, 2, page, D), 0.5 * randn(gen, 2, D)
    lens = torch.tensor([page], dtype=torch.int32)
    bits, norm = run("key_sketch", (k, None, lens, centre, None, planes, None), backend)
    want_bits = torch.zeros_like(bits)
    for h in range(2):
        for token in range(page):
            levels, want_norm = naive.sketch_key(k[0, h, token].numpy(), centre[h].numpy(), planes)
            assert norm[0, h, token].item() == float(want_norm), (h, token)
            for plane in range(planes):
                for channel in range(D):
                    byte, bit = naive.byte_of(plane, token, channel, page, D)
                    want_bits[0, h, byte] |= levels[plane][channel] << bit
    assert_same_bits(bits, want_bits)


@every_backend
@pytest.mark.parametrize("D", [64, 80, 128])
def test_planes_are_signs_of_the_hadamard_transform(D, backend):
    """Plane 0 against a matrix product in float64, wherever the product is clearly not 0."""
    gen = generator(D)
    k = randn(gen, 1, 1, 50, D)
    bits, _ = run(
        "key_sketch", (k, None, torch.tensor([50], dtype=torch.int32), torch.zeros(1, D), None, 1, None), backend
    )
    rows = []
    for first, n in naive.block_ranges(D):
        h = torch.ones(1, 1, dtype=torch.float64)
        while h.shape[0] < n:
            h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)), 0)
        part = torch.zeros(n, D, dtype=torch.float64)
        part[:, first : first + n] = h
        rows.append(part)
    signs = torch.tensor([float(naive.sign_of(d)) for d in range(D)], dtype=torch.float64)
    z = (k[0, 0].double() * signs) @ torch.cat(rows).T
    for token in range(50):
        for channel in range(D):
            if z[token, channel].abs() > 1e-3:
                byte, bit = naive.byte_of(0, token, channel, 50, D)
                assert bool(bits[0, 0, byte] >> bit & 1) == bool(z[token, channel] > 0)


# --- grid 11 and variants -------------------------------------------------------------------------------------------


@native_backend
@by_case(cases.grid("sketch"))
def test_sketch_grid(case, backend):
    """Every size; entries of tokens that are not live read 0 where the op allocates."""
    inputs = case.inputs()
    before = copies(inputs)
    compare(run(case.op, inputs, backend), case.expected(inputs), what=str(case))
    assert_unchanged(inputs, before)


@native_backend
@pytest.mark.parametrize("layout, skew", [("HND", 1), ("NHD", 0), ("NHD", 3)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_layouts(layout, skew, dtype, backend):
    case = cases.sketch_case([70, 3], 3, 96, 16, dtype, 2, layout=layout, skew=skew)
    inputs = case.inputs()
    compare(run(case.op, inputs, backend), case.expected(inputs), what=str(case))


@native_backend
@pytest.mark.parametrize("scale", [torch.tensor(0.3), torch.tensor([0.3, 1.7])])
def test_f8_cache(scale, backend):
    gen = generator(8)
    cache = paged_cache(gen, [37], 2, 64, 16, F8)
    inputs = (cache.k_cache, cache.block_table, cache.seq_lens, randn(gen, 2, 64), scale, 2, None)
    compare(run("key_sketch", inputs, backend), reference("key_sketch")(*inputs))


@native_backend
def test_strange_keys(backend):
    """Infinities, NaN, huge and tiny keys: the same bits everywhere, whatever they mean."""
    k = torch.randn(1, 1, 6, 32, generator=generator(1))
    k[0, 0, 0, 3] = torch.inf
    k[0, 0, 1] *= 1e30
    k[0, 0, 2] *= 1e-30
    k[0, 0, 3] = 0.0
    k[0, 0, 4] = -0.0
    inputs = (k, None, torch.tensor([6], dtype=torch.int32), torch.zeros(1, 32), None, 2, None)
    bits, norm = run("key_sketch", inputs, backend)
    want_bits, want_norm = reference("key_sketch")(*inputs)
    assert_same_bits(bits, want_bits)
    assert torch.equal(norm.isnan(), want_norm.isnan())
    assert torch.equal(norm.nan_to_num(), want_norm.nan_to_num())


@native_backend
@pytest.mark.parametrize("start", [0, 1, 15, 16, 17, 40, 41])
def test_start_writes_only_from_its_page_on(start, backend):
    """Entries before start's page and of tokens not live keep what they held; the rest equals a full rebuild."""
    gen = generator(start)
    cache = paged_cache(gen, [41, 20], 2, 48, 16, torch.float32)
    centre = randn(gen, 2, 48)
    starts = torch.tensor([start, 16])
    full = (cache.k_cache, cache.block_table, cache.seq_lens, centre, None, 2)
    want = reference("key_sketch")(*full, None)
    outs = guarded_like(want)
    run("key_sketch", (*full, starts), backend, outs=[g.tensor for g in outs])
    for g in outs:
        g.assert_guards("key_sketch")
    bits, norm = (g.tensor for g in outs)
    written = torch.zeros(norm.shape[0], 16, dtype=torch.bool)
    for b, n in enumerate([41, 20]):
        for s in range(int(starts[b]) // 16 * 16, n):
            written[cache.block_table[b, s // 16], s % 16] = True
    offsets = torch.tensor(
        [[[naive.byte_of(p, s, 8 * j, 16, 48)[0] for j in range(6)] for p in (0, 1)] for s in range(16)]
    )
    touched = written[:, None].expand(-1, 2, -1)
    assert torch.equal(norm[touched], want[1][touched])
    assert outs[1].untouched()[~touched].all()
    got_bytes, want_bytes = bits[:, :, offsets], want[0][:, :, offsets]  # [P,H,token,plane,byte]
    assert torch.equal(got_bytes[touched], want_bytes[touched])
    assert outs[0].untouched()[:, :, offsets][~touched].all()


# --- append_kv ------------------------------------------------------------------------------------------------------


def empty_index(P, H, page, D, planes, dtype):
    """bits, norm, summary of an empty cache."""
    bits = torch.zeros(P, H, planes * page * ((D + 7) // 8), dtype=torch.uint8)
    summary = torch.zeros(P, H, 2, D, dtype=torch.float32 if dtype == F8 else dtype)
    return bits, torch.zeros(P, H, page, dtype=torch.bfloat16), summary


@native_backend
@by_case(cases.grid("append"))
def test_append_grid(case, backend):
    case.compare(case.run(case.inputs(), backend), case.expected(case.inputs()))


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, F8])
@pytest.mark.parametrize(
    "D, page, planes",
    [(32, 16, 2), (64, 16, 2), (80, 33, 2), (96, 7, 1), (128, 1, 2), (256, 16, 2), (46, 7, 1), (1, 3, 2)],
)
def test_append_equals_rebuild(D, page, planes, dtype, backend):
    """Grid 11 and 6: rows appended one, three or many at a time leave the index that a full rebuild makes."""
    gen = generator(D)
    H, N = 2, 3 * page + page // 2 + 1
    pages = torch.randperm(6, generator=gen)
    slots = pages[torch.arange(N) // page] * page + torch.arange(N) % page
    rows_dtype = torch.bfloat16 if dtype == F8 else dtype
    k, v = randn(gen, N, H, D, dtype=rows_dtype), randn(gen, N, H, 24, dtype=rows_dtype)
    centre = 0.2 * randn(gen, H, D)
    k_scale = torch.tensor([0.5, 0.25]) if dtype == F8 else None
    k_cache, v_cache = (empty_cache(6, H, page, d, dtype) for d in (D, 24))
    bits, norm, summary = empty_index(6, H, page, D, planes, dtype)
    first, step = 0, [1, 3, N]
    while first < N:
        rows = slice(first, first + step[first % 3])
        target = torch.cat((slots[rows], torch.tensor([-1])))  # a skipped row each time
        pad = lambda x: torch.cat((x[rows], torch.full_like(x[:1], 7.0)))  # noqa: B023
        run(
            "append_kv", (pad(k), pad(v), k_cache, v_cache, target, k_scale, k_scale, bits, norm, centre, summary),
            backend,
        )  # fmt: skip
        first = rows.stop
    table, lens = pages[None].to(torch.int32), torch.tensor([N], dtype=torch.int32)
    want = reference("key_sketch")(k_cache, table, lens, centre, k_scale, planes, None)
    assert_same_bits(bits, want[0], "bits")
    assert_same_bits(norm, want[1], "norm")
    assert_same_bits(summary, reference("page_summary")(k_cache, table, lens, k_scale, None)[0], "summary")
    # The rows themselves, and nothing else, were written.
    stored_k = k if k_scale is None else k.float() / k_scale[:, None]
    stored_v = v if k_scale is None else v.float() / k_scale[:, None]
    for cache, rows in ((k_cache, stored_k), (v_cache, stored_v)):
        where = cache[slots // page, :, slots % page]
        assert torch.equal(where.float(), rows.to(dtype).float())
        rest = torch.ones(6, page, dtype=torch.bool)
        rest[slots // page, slots % page] = False
        junk = empty_cache(1, 1, 1, 1, dtype).float().item()
        assert cache.float().transpose(1, 2)[rest].eq(junk).all()


@every_backend
def test_append_saturates_f8(backend):
    """Values beyond the range of f8 are stored as its largest, 448."""
    k_cache, v_cache = torch.zeros(1, 1, 2, 2).to(F8), torch.zeros(1, 1, 2, 1).to(F8)
    k, v = torch.tensor([[[1e6, -500.0]]]), torch.tensor([[[3.0]]])
    run("append_kv", (k, v, k_cache, v_cache, torch.tensor([1]), None, None, None, None, None, None), backend)
    assert k_cache.float().flatten().tolist() == [0.0, 0.0, 448.0, -448.0]
    assert v_cache.float().flatten().tolist() == [0.0, 3.0]


@every_backend
def test_append_without_index(backend):
    """Only the cache is written; all slots -1 writes nothing."""
    gen = generator(9)
    k, v = randn(gen, 3, 2, 8), randn(gen, 3, 2, 4)
    k_cache, v_cache = torch.zeros(2, 2, 4, 8), torch.zeros(2, 2, 4, 4)
    none = (None,) * 6
    run("append_kv", (k, v, k_cache, v_cache, torch.full((3,), -1), *none), backend)
    assert k_cache.eq(0).all()
    run("append_kv", (k, v, k_cache, v_cache, torch.tensor([6, -1, 0]), *none), backend)
    assert torch.equal(k_cache[1, :, 2], k[0])
    assert torch.equal(v_cache[0, :, 0], v[2])
    assert int(k_cache.ne(0).sum()) == 2 * k[0].numel()


@native_backend
def test_append_into_an_nhd_cache(backend):
    """Strided caches and rows; the index equals that of a packed cache."""
    gen = generator(10)
    N, H, D, page = 21, 2, 64, 8
    fused = randn(gen, N, 3, H, D, dtype=torch.bfloat16)  # rows as a projection leaves them
    slots = torch.randperm(4 * page, generator=gen)[:N].sort().values
    centre = randn(gen, H, D)
    results = []
    for layout in ("HND", "NHD"):
        k_cache, v_cache = (empty_cache(4, H, page, D, torch.bfloat16, layout=layout, skew=1) for _ in range(2))
        bits, norm, summary = empty_index(4, H, page, D, 2, torch.bfloat16)
        rows = (fused[:, 1], fused[:, 2]) if layout == "NHD" else (fused[:, 1].clone(), fused[:, 2].clone())
        run("append_kv", (*rows, k_cache, v_cache, slots, None, None, bits, norm, centre, summary), backend)
        results.append((k_cache.contiguous(), v_cache.contiguous(), bits, norm, summary))
    for a, b in zip(*results):
        assert_same_bits(a, b)


# --- fuzz -----------------------------------------------------------------------------------------------------------


@native_backend
@settings(max_examples=50)
@given(
    seed=st.integers(0, 2**31),
    lens=st.lists(st.integers(0, 90), min_size=1, max_size=3),
    H=st.integers(1, 3),
    D=st.one_of(st.integers(1, 70), st.sampled_from([96, 128, 200])),
    page=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, F8]),
    planes=st.sampled_from([1, 2]),
    layout=st.sampled_from(["HND", "NHD"]),
    contiguous=st.booleans(),
)
def test_fuzz(seed, lens, H, D, page, dtype, planes, layout, contiguous, backend):
    gen = generator(seed)
    cache = paged_cache(gen, lens, H, D, page, dtype, layout=layout)
    place = (cache.k, None) if contiguous else (cache.k_cache, cache.block_table)
    scale = torch.tensor(0.6) if dtype == F8 else None
    inputs = (*place, cache.seq_lens, randn(gen, H, D), scale, planes, None)
    compare(run("key_sketch", inputs, backend), reference("key_sketch")(*inputs))


def test_case_inputs_are_reproducible():
    case = cases.grid("sketch")[5]
    for a, b in zip(case.inputs(), case.inputs()):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
