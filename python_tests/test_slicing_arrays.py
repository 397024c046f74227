"""Arrays that are not plain memory, or not what they say: named in an ArgumentError, never read, never a crash."""

import ctypes

import numpy as np
import pytest
import torch
from slicing_helpers import every_backend, native_backend

import sic_kernels as sic
from sic_kernels import slicing as S
from sic_kernels.runtime import arrays, native
from sic_kernels.slicing import cases
from sic_kernels.testing import assert_same_bits

on_the_emulator = pytest.mark.backend("simt")


@pytest.fixture
def attention():
    """sliced_attention of one small problem, with any argument replaced."""
    names = ("q", "k_cache", "v_cache", "block_table", "seq_lens")
    good = dict(
        zip(names, cases.attention_case([30, 11], 1, 2, 2, 16, 8, torch.float32).inputs()[: len(names)], strict=True)
    )

    def call(backend, **changed):
        return S.sliced_attention(**(good | changed), backend=backend)

    call.good = good
    return call


# --- torch tensors whose memory is not their numbers ----------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("arg", ["q", "k_cache", "v_cache", "block_table", "seq_lens", "sinks", "k_scale"])
def test_the_negative_bit_is_refused(attention, arg, backend):
    """The memory of such a tensor holds the negated numbers."""
    tensor = attention.good.get(arg, torch.ones(4))
    with pytest.raises(sic.ArgumentError, match=rf"^sliced_attention: {arg}: got .*negative bit.*resolve_neg"):
        attention(backend, **{arg: torch._neg_view(tensor)})


@native_backend
def test_a_resolved_conjugate_is_taken(attention, backend):
    want = attention(backend)
    for g, w in zip(attention(backend, q=torch._neg_view(-attention.good["q"]).resolve_neg()), want):
        assert_same_bits(g, w)


@every_backend
@pytest.mark.parametrize("arg", ["q", "k_cache", "sinks", "key_bias"])
def test_no_argument_may_require_grad(attention, arg, backend):
    tensor = attention.good.get(arg, torch.zeros(4) if arg == "sinks" else torch.zeros(2, 40)).clone().requires_grad_()
    with pytest.raises(sic.ArgumentError, match="requires grad"):
        attention(backend, **{arg: tensor})
    with torch.no_grad():
        attention(backend, **{arg: tensor})


@every_backend
def test_outputs_may_not_require_grad(attention, backend):
    out = torch.zeros(2, 1, 4, 16, requires_grad=True), torch.zeros(2, 1, 4)
    with pytest.raises(sic.ArgumentError, match="requires grad"):
        attention(backend, out=out)


@native_backend
@pytest.mark.parametrize("kind", ["sparse", "meta", "quantised", "nested"])
def test_tensors_without_plain_memory(attention, kind, backend):
    q = attention.good["q"]
    make = {
        "sparse": lambda: q.to_sparse(),
        "meta": lambda: q.to("meta"),
        "quantised": lambda: torch.quantize_per_tensor(q, 0.1, 0, torch.qint8),
        "nested": lambda: torch.nested.nested_tensor([q[0], q[1]]),
    }
    with pytest.raises(sic.ArgumentError, match=r"^sliced_attention: q: got [^\n]+$"):
        attention(backend, q=make[kind]())


@native_backend
def test_memory_must_be_aligned(attention, backend):
    room = torch.zeros(4 * 128 + 1, dtype=torch.uint8)
    q = torch.frombuffer(memoryview(room.numpy())[1:], dtype=torch.float32).view(2, 1, 4, 16)
    with pytest.raises(sic.ArgumentError, match=r"q: got .* expected an address that is a multiple of 4"):
        attention(backend, q=q)


# --- outputs that torch cannot write to -----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu", "simt"])
def test_an_output_with_negative_strides_is_written_or_refused(attention, backend):
    """torch would write into a copy."""
    good = {name: x.numpy() for name, x in attention.good.items()}
    want = attention("cpu")[0].numpy()
    out = np.zeros((2, 1, 4, 16), np.float32)[::-1], np.zeros((2, 1, 4), np.float32)
    attention(backend, **good, out=out)
    np.testing.assert_allclose(out[0], want, atol=0 if backend == "cpu" else 1e-6)
    with pytest.raises(sic.ArgumentError, match="out: got an array with negative strides"):
        attention("ref", **good, out=out)


def test_merged_results_go_where_they_should():
    """Leading dimensions that NumPy could join only in a copy."""
    outs, lses = np.random.default_rng(0).random((2, 3, 2, 4, 16), np.float32), np.zeros((2, 3, 2, 4), np.float32)
    gaps = np.zeros((3, 3, 4, 16), np.float32)[:, :2], np.zeros((3, 2, 4), np.float32)
    with pytest.raises(sic.ArgumentError, match="leading dimensions with gaps"):
        S.merge_many(outs, lses, out=gaps)
    whole = np.zeros((3, 2, 4, 16), np.float32), np.zeros((3, 2, 4), np.float32)
    S.merge_many(outs, lses, out=whole)
    np.testing.assert_allclose(whole[0], outs.mean(0), rtol=1e-5)


# --- numbers in place of tensors ------------------------------------------------------------------------------------


@native_backend
def test_scales_of_any_kind_of_number(attention, backend):
    f8 = {name: attention.good[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    want = attention(backend, **f8, k_scale=0.5)
    for scale in (np.float32(0.5), np.float64(0.5), torch.tensor(0.5)):
        for g, w in zip(attention(backend, **f8, k_scale=scale), want):
            assert_same_bits(g, w)
    for scale in (True, 10**400, 1e300, float("nan"), float("inf"), "1", [0.5]):
        with pytest.raises(sic.ArgumentError, match=r"^sliced_attention: k_scale: got "):
            attention(backend, **f8, k_scale=scale)


@native_backend
@pytest.mark.parametrize(
    "options", [{"softcap": 1e-50}, {"softcap": 1e-40}, {"softcap": float("inf")}, {"scale": 1e300}]
)
def test_numbers_that_f32_does_not_hold(attention, options, backend):
    """A soft cap of 1e-50 is not "none", which 0 means."""
    (name,) = options
    with pytest.raises(sic.ArgumentError, match=rf"^sliced_attention: {name}: got "):
        attention(backend, **options)


@every_backend
def test_pages_whose_number_of_positions_overflows(backend):
    q, summary, table = torch.zeros(1, 1, 1, 16), torch.zeros(4, 1, 2, 16), torch.zeros(1, 4, dtype=torch.int32)
    for page in (2**31, 2**61 + 1, 2**62):
        with pytest.raises(sic.ArgumentError, match=r"^score_pages: page_size: got "):
            S.score_pages(q, summary, table, torch.tensor([0]), page_size=page, backend=backend)


# --- __cuda_array_interface__ ---------------------------------------------------------------------------------------


class CudaArray:
    """A tensor behind `__cuda_array_interface__`, with entries replaced; `...` leaves one out."""

    def __init__(self, tensor, **entries):
        kinds = {torch.float32: "<f4", torch.int32: "<i4", torch.uint8: "|u1"}
        self.tensor, self.shape, self.ndim = tensor, tuple(tensor.shape), tensor.ndim
        info = {"version": 3, "typestr": kinds[tensor.dtype], "shape": self.shape, "data": (tensor.data_ptr(), False)}
        self.info = {name: value for name, value in (info | entries).items() if value is not ...}

    @property
    def __cuda_array_interface__(self):
        if isinstance(self.info.get("raises"), BaseException):
            raise self.info["raises"]
        return self.info.get("instead", self.info)


BAD_ENTRIES = [
    {"typestr": ">i4"}, {"typestr": None}, {"typestr": "i4"}, {"typestr": 4}, {"typestr": "<é4"}, {"typestr": ...},
    {"typestr": "<c8"}, {"shape": (-2,)}, {"shape": (2.0,)}, {"shape": None}, {"shape": 2}, {"shape": "ab"},
    {"shape": (2**62,)}, {"shape": (2**64,)}, {"shape": (1,) * 9}, {"strides": ()}, {"strides": (4, 4)}, {"strides": (6,)},
    {"strides": "ab"}, {"strides": (-4,)}, {"data": None}, {"data": (0, False)}, {"data": (-1, False)}, {"data": ()},
    {"data": ("x", False)}, {"data": 5}, {"mask": torch.ones(2)}, {"version": 99}, {"version": "3"}, {"stream": 0},
    {"stream": "x"}, {"stream": -5}, {"instead": None}, {"instead": 5}, {"raises": ValueError("boom")},
]  # fmt: skip


@on_the_emulator
@pytest.mark.parametrize("entries", BAD_ENTRIES, ids=str)
def test_a_broken_cuda_array_interface(attention, entries):
    backend = "simt"
    lens = attention.good["seq_lens"]
    with pytest.raises(sic.ArgumentError, match=r"^sliced_attention: seq_lens: got .+, expected .+"):
        attention(backend, seq_lens=CudaArray(lens, **entries))


@on_the_emulator
@pytest.mark.parametrize(
    "entries", [{}, {"stream": None}, {"stream": 1}, {"stream": 2}, {"shape": [2]}, {"version": ...}], ids=str
)
def test_a_good_cuda_array_interface(attention, entries):
    backend = "simt"
    for g, w in zip(attention(backend, seq_lens=CudaArray(attention.good["seq_lens"], **entries)), attention(backend)):
        assert_same_bits(g, w)


@on_the_emulator
def test_an_interrupt_stays_one(attention):
    for error in (KeyboardInterrupt(), MemoryError()):
        with pytest.raises(type(error)):
            attention("simt", seq_lens=CudaArray(attention.good["seq_lens"], raises=error))


@on_the_emulator
def test_an_array_is_waited_for_on_its_stream(attention):
    """The call's stream waits for the array's; a handle of no stream is found out. Not while a graph is captured."""
    simt = native.simt_module()
    lens = CudaArray(attention.good["seq_lens"], stream=simt.create_stream())
    for g, w in zip(attention("simt", seq_lens=lens), attention("simt")):
        assert_same_bits(g, w)
    lens.info["stream"] = 12345
    with pytest.raises(sic.BackendError, match="waiting for the stream of an array: invalid resource handle"):
        attention("simt", seq_lens=lens)
    simt.set_device_checks(False)
    try:
        out = torch.empty(2, 1, 4, 16), torch.empty(2, 1, 4)
        simt.Graph(lambda: attention("simt", seq_lens=lens, out=out)).replay()
    finally:
        simt.set_device_checks(True)
    assert_same_bits(out[0], attention("simt")[0])


@on_the_emulator
def test_read_only_arrays_are_read_only(attention):
    q, out = attention.good["q"], torch.zeros(2, 1, 4, 16)
    attention("simt", q=CudaArray(q, data=(q.data_ptr(), True)), out=(out, torch.zeros(2, 1, 4)))
    out.zero_()
    with pytest.raises(sic.ArgumentError, match=r"^sliced_attention: out: got .* read-only"):
        attention("simt", out=(CudaArray(out, data=(out.data_ptr(), True)), torch.zeros(2, 1, 4)))
    assert not out.any()


# --- __dlpack__ -----------------------------------------------------------------------------------------------------


class DLPackArray:
    """`__dlpack__` is the given function."""

    def __init__(self, function, device=(1, 0)):
        self.function, self.device, self.ndim, self.shape = function, device, 4, (2, 1, 4, 16)

    def __dlpack__(self, **options):
        return self.function(**options)

    def __dlpack_device__(self):
        return self.device


def patched(tensor, offset, value, kind=ctypes.c_int32):
    """The tensor's capsule with one field of the struct changed."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]

    def function(**_):
        capsule = tensor.__dlpack__()
        kind.from_address(pointer(capsule, b"dltensor") + offset).value = value
        return capsule

    return function


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("even its text fails")


def raising(error):
    def function(**_):
        raise error

    return function


def used(tensor):
    capsule = tensor.__dlpack__()
    torch.from_dlpack(capsule)
    return lambda **_: capsule


BROKEN = {
    "None": lambda q: lambda **_: None,
    "a tensor": lambda q: lambda **_: q,
    "used": used,
    "versioned": lambda q: lambda **_: q.__dlpack__(max_version=(1, 0)),
    "raises": lambda q: raising(ZeroDivisionError("boom")),
    "raises without a text": lambda q: raising(Unspeakable()),
    "no callable": lambda q: 5,
    "device": lambda q: patched(q, 8, 7),
    "negative rank": lambda q: patched(q, 16, -1),
    "rank 100": lambda q: patched(q, 16, 100),
    "no shape": lambda q: patched(q, 24, 0, ctypes.c_int64),
    "lanes": lambda q: patched(q, 22, 4, ctypes.c_uint16),
    "no data": lambda q: patched(q, 0, 0, ctypes.c_int64),
}


@native_backend
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_dlpack(attention, what, backend):
    array = DLPackArray(BROKEN[what](attention.good["q"]))
    with pytest.raises(sic.ArgumentError, match=r"^sliced_attention: q: got .+, expected .+"):
        attention(backend, q=array)


@native_backend
def test_a_capsule_may_be_read_twice(attention, backend):
    capsule = attention.good["q"].__dlpack__()
    array = DLPackArray(lambda **_: capsule)
    q_first, q_again = attention(backend, q=array)[0], attention(backend, q=array)[0]
    assert_same_bits(torch.as_tensor(q_first), torch.as_tensor(q_again))


@on_the_emulator
def test_cupy_need_not_wait_for_its_own_stream(attention, monkeypatch):
    """CuPy's arrays are asked with stream=-1, which a graph under capture allows; others with nothing."""
    import sys
    import types

    simt, asked = native.simt_module(), []
    stream = simt.create_stream()

    def dlpack(**options):
        asked.append(options)
        return patched(attention.good["k_cache"], 8, 2)()

    class CupyArray(DLPackArray):
        __module__ = "cupy._core"

    module = types.ModuleType("cupy")
    module.cuda = types.SimpleNamespace(get_current_stream=lambda: types.SimpleNamespace(ptr=stream))
    monkeypatch.setitem(sys.modules, "cupy", module)
    want = attention("simt")
    for kind, options in ((CupyArray, {"stream": -1}), (DLPackArray, {})):
        asked.clear()
        assert_same_bits(attention("simt", k_cache=kind(dlpack, (2, 0)))[0], want[0])
        assert asked == [options]


def test_the_device_of_an_array_is_asked():
    """An array of a GPU need not have `__cuda_array_interface__`."""
    assert arrays.device_type(DLPackArray(None, (2, 0))) == "cuda"
    assert arrays.device_type(DLPackArray(None, (1, 0))) == "cpu"
    assert arrays.device_type(DLPackArray(None, None)) == "cpu"
    assert arrays.device_type(CudaArray(torch.zeros(1))) == "cuda"
    assert arrays.device_type(np.zeros(1)) == "cpu"
    assert arrays.device_type(torch.zeros(1, device="meta")) == "meta"
