"""pack and unpack: values by hand, every type, row and layout on every backend, guards, wrong arguments, any batch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slicing_helpers import by_case, every_backend, native_backend

from sic_kernels import ArgumentError, ragged
from sic_kernels.ragged import benches, cases
from sic_kernels.runtime import native
from sic_kernels.testing import (
    assert_same_bits,
    assert_unchanged,
    bits_of,
    copies,
    generator,
    guarded,
    reference,
    run,
    run_guarded,
)

PAST_CACHES = 8 << 20  # bytes of an output from which the CPU kernels store past the caches


# --- values by hand -------------------------------------------------------------------------------------------------


@every_backend
def test_golden_pack(backend):
    padded = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    assert ragged.pack(padded, [2, 0, 3], backend=backend).tolist() == [1, 2, 7, 8, 9]
    rows = padded[:, :, None] * torch.tensor([1, 10])
    assert ragged.pack(rows, [1, 2, 0], backend=backend).tolist() == [[1, 10], [4, 40], [5, 50]]


@every_backend
def test_golden_unpack(backend):
    packed = torch.tensor([1, 2, 7, 8, 9])
    assert ragged.unpack(packed, [0, 2, 2, 5], 3, backend=backend).tolist() == [[1, 2, 0], [0, 0, 0], [7, 8, 9]]
    rows = ragged.unpack(torch.tensor([[1.0, 2.0]]), [0, 1], 2, fill=-1.5, backend=backend)
    assert rows.tolist() == [[[1, 2], [-1.5, -1.5]]]


@every_backend
@pytest.mark.parametrize(
    ("dtype", "fill"),
    [(torch.float16, -0.1), (torch.bfloat16, float("-inf")), (torch.float8_e4m3fn, 448), (torch.uint8, 255),
     (torch.int16, -2), (torch.int32, -(2**31)), (torch.int64, 2**62 + 1), (torch.float64, 0.1), (torch.float32, 1)],
)  # fmt: skip
def test_fill_is_a_number_of_the_type(dtype, fill, backend):
    packed = torch.zeros(0, 3, dtype=dtype)
    got = ragged.unpack(packed, [0, 0], 2, fill=fill, backend=backend)
    assert_same_bits(got, torch.full((1, 2, 3), fill, dtype=dtype))


# --- the cases ------------------------------------------------------------------------------------------------------


@native_backend
@by_case([*cases.grid("pack"), *cases.grid("unpack")])
def test_grid(case, backend):
    """Bit for bit, between guard bytes; NaNs keep their payloads."""
    inputs = case.inputs()
    want = case.expected(inputs)
    skew = int(case.shape["lay"] == "skew")
    outs = run_guarded(case.op, inputs, backend, want, skew=skew, family="ragged")
    assert_same_bits(outs[0].tensor, want[0], str(case))
    assert_same_bits(run(case.op, inputs, backend, family="ragged")[0], want[0], f"{case}, an output of its own")


@every_backend
def test_rows_behind_the_last_token_are_left(backend):
    """An output of a capacity: what pack does not write keeps its value."""
    padded = cases.random_bits(generator(1), 2, 5, 3, dtype=torch.float32)
    out = guarded((10, 3), torch.float32)
    ragged.pack(padded, torch.tensor([0, 4, 6]), out=out.tensor, backend=backend)
    out.assert_guards()
    assert_same_bits(out.tensor[:6], torch.cat((padded[0, :4], padded[1, :2])))
    assert out.untouched()[6:].all()
    back = ragged.unpack(out.tensor, torch.tensor([0, 4, 6]), 5, backend=backend)
    assert_same_bits(back[1, :2], padded[1, :2])


@native_backend
def test_strided_outputs(backend):
    """Between the rows and the sequences of an output nothing changes."""
    packed, bounds = cases.random_bits(generator(2), 7, 6, dtype=torch.int16), torch.tensor([0, 3, 7])
    out = torch.full((2, 5, 3, 6), 77, dtype=torch.int16)
    ragged.unpack(packed, bounds, 5, out=out[:, :, 1], backend=backend)
    assert_same_bits(out[:, :, 1], reference("unpack", "ragged")(packed, bounds, 5, 0)[0])
    assert bool((out[:, :, [0, 2]] == 77).all())
    wide = torch.full((9, 2, 6), 77, dtype=torch.int16)
    ragged.pack(out[:, :, 1], bounds, out=wide[:, 1], backend=backend)
    assert_same_bits(wide[:7, 1], packed)
    assert bool((wide[:, 0] == 77).all() and (wide[7:] == 77).all())


@native_backend
def test_broadcast_sequences(backend):
    """One sequence, several lengths of it."""
    one = cases.random_bits(generator(3), 1, 6, 4, dtype=torch.float16).expand(3, 6, 4)
    assert_same_bits(ragged.pack(one, [2, 6, 0], backend=backend), torch.cat((one[0, :2], one[0])))


@pytest.mark.parametrize("width", [3, 500])
def test_outputs_that_no_cache_keeps(width):
    """Large enough for stores past the caches: whole rows and odd ones, odd starts."""
    gen, item = generator(width), 2
    S = PAST_CACHES // (3 * width * item) + 9
    padded = cases.random_bits(gen, 3 * S * width + 1, dtype=torch.int16)[1:].view(3, S, width)
    lengths = [S, S - 1, S]
    bounds = ragged.cu_seqlens(lengths)
    packed = ragged.pack(padded, lengths, backend="cpu")
    assert packed.nbytes >= PAST_CACHES
    assert_same_bits(packed, reference("pack", "ragged")(padded, bounds, None)[0])
    skewed = torch.empty(3 * S * width + 1, dtype=torch.int16)[1:].view(3, S, width)
    ragged.unpack(packed, bounds, S, fill=-3, out=skewed, backend="cpu")
    assert_same_bits(skewed, reference("unpack", "ragged")(packed, bounds, S, -3)[0])
    gaps = torch.empty(3, S, 2, width, dtype=torch.int16)[:, :, 1]
    ragged.unpack(packed, bounds, S, out=gaps, backend="cpu")
    assert_same_bits(ragged.pack(gaps, lengths, backend="cpu"), packed)


@pytest.mark.parametrize("isa", native.module().supported_isas())
def test_every_instruction_set(isa):
    padded = cases.random_bits(generator(4), 3, 5000, 411, dtype=torch.bfloat16)
    lengths = [5000, 17, 4999]
    try:
        native.module().force_isa(isa)
        packed = ragged.pack(padded, lengths, backend="cpu")
        back = ragged.unpack(packed, ragged.cu_seqlens(lengths), 5000, fill=1, backend="cpu")
    finally:
        native.module().force_isa("auto")
    assert_same_bits(packed, torch.cat([row[:n] for row, n in zip(padded, lengths)]))
    padded[1, 17:], padded[2, 4999:] = 1, 1
    assert_same_bits(back, padded)


# --- lengths in any form --------------------------------------------------------------------------------------------


@native_backend
def test_lengths_and_bounds_in_any_array(backend):
    padded = torch.arange(12.0).view(3, 4)
    want = ragged.pack(padded, [1, 0, 4], backend=backend)
    for lengths in ((1, 0, 4), [0, 1, 1, 5], torch.tensor([1, 0, 4]), np.array([1, 0, 4], dtype=np.uint8),
                    torch.tensor([0, 1, 1, 5], dtype=torch.int32), np.array([0, 1, 1, 5])):  # fmt: skip
        assert_same_bits(ragged.pack(padded, lengths, backend=backend), want)
    for bounds in ((0, 1, 1, 5), torch.tensor([0, 1, 1, 5], dtype=torch.int32), np.array([0, 1, 1, 5])):
        back = ragged.unpack(want, bounds, 4, backend=backend)
        assert back.tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [8, 9, 10, 11]]


def test_results_have_the_kind_of_the_rows():
    padded = np.arange(8, dtype=np.float32).reshape(2, 4)
    packed = ragged.pack(padded, [1, 3])
    assert isinstance(packed, np.ndarray)
    assert packed.tolist() == [0, 4, 5, 6]
    back = ragged.unpack(packed, [0, 1, 4], 3, fill=9)
    assert isinstance(back, np.ndarray)
    assert back.tolist() == [[0, 9, 9], [4, 5, 6]]
    assert ragged.pack(padded[::-1], [1, 0]).tolist() == [4]  # rows from the last one back


# --- any batch ------------------------------------------------------------------------------------------------------


@native_backend
@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    lens=st.lists(st.integers(0, 30), max_size=6),
    extra=st.integers(0, 3),
    row=st.lists(st.integers(1, 20), max_size=3),
    dtype=st.sampled_from(cases.DTYPES),
    layout=st.sampled_from(cases.LAYOUTS),
    index=st.sampled_from([torch.int32, torch.int64]),
)
def test_there_and_back(seed, lens, extra, row, dtype, layout, index, backend):
    gen, S = generator(seed), max(lens, default=0) + extra
    padded = cases.laid_out(gen, layout, len(lens), S, *row, lead=2, dtype=dtype)
    bounds = ragged.cu_seqlens(lens, dtype=index)
    packed = ragged.pack(padded, bounds, backend=backend)
    assert_same_bits(packed, torch.cat([padded[b, :n] for b, n in enumerate(lens)] or [padded.new_empty(0, *row)]))
    back = ragged.unpack(packed, bounds, S, fill=1, backend=backend)
    want = torch.ones(len(lens), S, *row, dtype=torch.float32).to(dtype)
    for b, n in enumerate(lens):
        bits_of(want)[b, :n] = bits_of(padded)[b, :n]
    assert_same_bits(back, want)
    assert_same_bits(ragged.pack(back, lens, backend=backend), packed)


@native_backend
def test_a_sequence_does_not_depend_on_its_batch(backend):
    padded = cases.random_bits(generator(5), 9, 40, 33, dtype=torch.float32)
    lengths = [40, 1, 0, 17, 39, 40, 2, 5, 8]
    together = ragged.pack(padded, lengths, backend=backend)
    bounds = ragged.cu_seqlens(lengths).tolist()
    for b, n in enumerate(lengths):
        alone = ragged.pack(padded[b : b + 1], [n], backend=backend)
        assert_same_bits(alone, together[bounds[b] : bounds[b + 1]].contiguous())


def test_any_number_of_threads():
    padded, lengths = cases.random_bits(generator(6), 8, 700, 500, dtype=torch.int32), [700, 3, 699, 0, 350, 700, 1, 5]
    bounds, before = ragged.cu_seqlens(lengths), native.module().num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            native.module().set_num_threads(threads)
            packed = ragged.pack(padded, lengths, backend="cpu")
            results.append((packed, ragged.unpack(packed, bounds, 700, backend="cpu")))
    finally:
        native.module().set_num_threads(before)
    for packed, back in results[1:]:
        assert_same_bits(packed, results[0][0])
        assert_same_bits(back, results[0][1])


# --- wrong arguments ------------------------------------------------------------------------------------------------

PADDED, PACKED = torch.arange(24.0).view(2, 4, 3), torch.arange(15.0).view(5, 3)
BOUNDS = torch.tensor([0, 2, 5])
ANY = "float32|float16|bfloat16|float8_e4m3fn|uint8|int16|int32|int64|float64"

WRONG_PACK = {
    f"padded: got float32[4], expected {ANY} of rank 2 or more": lambda: (PADDED[0, :, 0], BOUNDS),
    "padded: got an unknown type[2,4], expected": lambda: (torch.zeros(2, 4, dtype=torch.complex64), BOUNDS),
    "padded: got float32[2,4,3] with gaps in its rows, expected rows [3]": lambda: (
        torch.zeros(2, 4, 6)[..., ::2], BOUNDS),
    "padded: got list": lambda: ([[1.0]], BOUNDS),
    "lengths: got 4 values, expected 2 lengths, or 3 cumulative ones": lambda: (PADDED, [1, 2, 3, 4]),
    "lengths: got int64[2,1], expected 2 lengths": lambda: (PADDED, torch.ones(2, 1, dtype=torch.int64)),
    "lengths: got -1 at [1], expected integers, 0 or more": lambda: (PADDED, [1, -1]),
    "lengths: got 5 at [0], expected 0 to 4": lambda: (PADDED, torch.tensor([5, 0])),
    "cu_seqlens: got float32[3], expected int32|int64 of rank 1": lambda: (PADDED, BOUNDS.float()),
    "cu_seqlens: got 1 at [0], expected 0 first": lambda: (PADDED, [1, 2, 5]),
    "cu_seqlens: got 7 at [2] after 2 at [1], expected steps of 0 to 4": lambda: (PADDED, torch.tensor([0, 2, 7])),
    "cu_seqlens: got 1 at [2] after 2 at [1], expected steps of 0 to 4": lambda: (PADDED, torch.tensor([0, 2, 1])),
    "inputs: got a tensor that requires grad": lambda: (PADDED.clone().requires_grad_(), BOUNDS),
}  # fmt: skip
WRONG_UNPACK = {
    f"packed: got None, expected {ANY} of rank 1 or more": lambda: (None, BOUNDS, 3),
    "packed: got float32[5,3] with gaps in its rows": lambda: (torch.zeros(5, 6)[:, ::2], BOUNDS, 3),
    "packed: got float32[4,3], expected 5 rows or more": lambda: (PACKED[:4], BOUNDS, 3),
    "cu_seqlens: got int64[0], expected one more than there are sequences": lambda: (PACKED, BOUNDS[:0], 3),
    "cu_seqlens: got 5 at [2] after 2 at [1], expected steps of 0 to 2": lambda: (PACKED, BOUNDS, 2),
    "cu_seqlens: got 2.5 at [1], expected integers, 0 or more": lambda: (PACKED, [0, 2.5, 5], 3),
    "max_len: got -1, expected an integer, 0 or more": lambda: (PACKED, BOUNDS, -1),
    "max_len: got 2.0, expected an integer, 0 or more": lambda: (PACKED, BOUNDS, 2.0),
}
WRONG_OUT = {
    "out: got float32[4,3], expected 5 rows or more": lambda: torch.zeros(4, 3),
    "out: got float32[5,4], expected float32 with rows [3]": lambda: torch.zeros(5, 4),
    "out: got float64[5,3], expected float32 with rows [3]": lambda: torch.zeros(5, 3, dtype=torch.float64),
    "out: got float32[5,3] with stride 0": lambda: torch.zeros(1, 3).expand(5, 3),
    "out: got float32[5,3] with gaps in its rows": lambda: torch.zeros(5, 6)[:, ::2],
}
WRONG_FILL = {torch.uint8: 256, torch.int16: 1.5, torch.float16: 1e5, torch.float8_e4m3fn: 1000, torch.float32: "0"}


def fails(op, message, call, touched=()):
    """It raises just that, and nothing has changed."""
    before = copies(touched)
    with pytest.raises(ArgumentError) as error:
        call()
    assert str(error.value).startswith(f"{op}: {message}"), error.value
    assert_unchanged(touched, before)


@every_backend
def test_wrong_inputs(backend):
    out = torch.zeros(8, 3)
    for message, inputs in WRONG_PACK.items():
        fails("pack", message, lambda inputs=inputs: ragged.pack(*inputs(), out=out, backend=backend), [out, PADDED])
    out = torch.zeros(2, 3, 3)
    for message, inputs in WRONG_UNPACK.items():
        fails(
            "unpack", message, lambda inputs=inputs: ragged.unpack(*inputs(), out=out, backend=backend), [out, PACKED]
        )


@every_backend
def test_wrong_outputs(backend):
    for message, make in WRONG_OUT.items():
        out = make()
        fails("pack", message, lambda out=out: ragged.pack(PADDED, BOUNDS, out=out, backend=backend), [out, PADDED])
    for out, message in (
        (torch.zeros(2, 4, 3), "out: got float32[2,4,3], expected 3 in dimension 1"),
        (torch.zeros(3, 3, 3), "out: got float32[3,3,3], expected 2 in dimension 0"),
        (torch.zeros(2, 3, 4), "out: got float32[2,3,4], expected float32 with rows [3]"),
    ):
        fails("unpack", message, lambda out=out: ragged.unpack(PACKED, BOUNDS, 3, out=out, backend=backend), [out])


@every_backend
def test_wrong_fills(backend):
    for dtype, fill in WRONG_FILL.items():
        packed = torch.zeros(5, 3, dtype=dtype)
        name = str(dtype).removeprefix("torch.")
        message = f"fill: got {fill!r}, expected a number that {name} has"
        fails(
            "unpack", message, lambda p=packed, f=fill: ragged.unpack(p, BOUNDS, 3, fill=f, backend=backend), [packed]
        )


@native_backend
def test_outputs_in_inputs(backend):
    memory = torch.arange(64.0)
    padded, packed = memory[:24].view(2, 4, 3), memory[8:23].view(5, 3)
    message = "out: got float32[5,3] in the memory of an input, expected memory of its own"
    fails("pack", message, lambda: ragged.pack(padded, BOUNDS, out=packed, backend=backend), [memory])
    message = "out: got float32[2,4,3] in the memory of an input, expected memory of its own"
    fails("unpack", message, lambda: ragged.unpack(packed, BOUNDS, 4, out=padded, backend=backend), [memory])
    bounds = torch.tensor([0, 2, 5, 0, 0, 0, 0, 0], dtype=torch.int32)
    numbers = torch.zeros(2, 4, dtype=torch.int32)
    message = "out: got int32[3] in the memory of an input"
    fails(
        "pack",
        message,
        lambda: ragged.pack(numbers, torch.zeros_like(bounds[:3]), out=numbers.view(-1)[:3], backend=backend),
    )
    numbers, inside = torch.zeros(5, dtype=torch.int32), bounds[2:].view(2, 3)
    message = "out: got int32[2,3] in the memory of an input"
    fails("unpack", message, lambda: ragged.unpack(numbers, bounds[:3], 3, out=inside, backend=backend))


# --- graphs, launches -----------------------------------------------------------------------------------------------


@pytest.mark.backend("simt")
def test_a_graph_follows_the_lengths():
    """One launch each, no wait, no memory; a replay reads the lengths of the moment, which may be wrong."""
    simt = native.simt_module()
    padded = cases.random_bits(generator(7), 3, 50, 24, dtype=torch.bfloat16)
    bounds, packed = ragged.cu_seqlens([50, 3, 20]), torch.zeros(150, 24, dtype=torch.bfloat16)
    back = torch.zeros_like(padded)

    def step():
        ragged.pack(padded, bounds, out=packed, backend="simt")
        ragged.unpack(packed, bounds, 50, fill=2, out=back, backend="simt")

    simt.set_device_checks(False)
    try:
        graph = simt.Graph(step)
        before = simt.counters()
        for lengths in ([50, 3, 20], [0, 50, 50], [7, 8, 9]):
            bounds.copy_(ragged.cu_seqlens(lengths))
            graph.replay()
            want = torch.full_like(padded, 2)
            for b, n in enumerate(lengths):
                want[b, :n] = padded[b, :n]
            assert_same_bits(back, want)
        after = simt.counters()
        assert after["launches"] - before["launches"] == 6
        assert all(after[name] == before[name] for name in ("synchronisations", "allocations", "copies", "fills"))
        for wrong in ([0, 60, 60, 900], [0, -5, 3, 2], [2**31 - 9, 2**31 - 5, 2**31 - 2, 2**31 - 1]):
            bounds.copy_(torch.tensor(wrong))
            graph.replay()  # the emulator faults on an access outside the tensors
    finally:
        simt.set_device_checks(True)


def test_the_model_has_the_bytes_of_the_benchmark():
    shape = cases.RaggedShape(3, 40, 24)
    inputs = benches.Inputs(shape, sets=1)
    for name in benches.NAMES:
        bench, work = benches.build(name, inputs), benches.work_of(name, shape)
        bench.verify()
        assert work.nbytes == bench.nbytes
        assert work.kernels == 1
