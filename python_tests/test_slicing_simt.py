"""What only the emulator can show of the CUDA kernels: any order of threads gives the same bits, launchers neither wait nor
allocate, and the number of multiprocessors changes nothing."""

import functools
import sys
import threading
import types

import pytest
import torch
from test_slicing_determinism import attend_inputs, long_attention

import sic_kernels as sic
from sic_kernels.runtime import native
from sic_kernels.slicing import cases, cases_select
from sic_kernels.testing import assert_same_bits, generator, randn, run

pytestmark = pytest.mark.backend("simt")
BF16, F32 = torch.bfloat16, torch.float32


def append_inputs(summary):
    """Rows for the second half of a cache, some slots twice, with a sketch or a summary to keep up to date."""
    k_cache, table, lens, *rest = cases.sketch_case([200, 77], 2, 64, 16, F32, 2).inputs()
    gen = generator(3)
    slots = torch.cat([torch.arange(16, 48), torch.tensor([17, -1, 40])])
    k, v = (randn(gen, len(slots), 2, 64) for _ in range(2))
    if summary:
        index = (None, None, None, run("page_summary", (k_cache, table, lens, None, None), "ref")[0])
    else:
        index = (*run("key_sketch", (k_cache, table, lens, *rest), "ref"), rest[0], None)
    return (k, v, k_cache, k_cache.clone(), slots, None, None, *index)


CALLS = {
    "append_sketch": ("append_kv", lambda: append_inputs(False)),
    "append_summary": ("append_kv", lambda: append_inputs(True)),
    "key_sketch": ("key_sketch", lambda: cases.sketch_case([100, 37], 2, 96, 16, BF16, 2).inputs()),
    "score_max": ("score_tokens", lambda: cases.score_case([700, 80], 1, 2, 4, 128, 16, BF16, 2, 0).inputs()),
    "score_softmax": ("score_tokens", lambda: cases.score_case([300, 80], 2, 2, 3, 80, 7, BF16, 1, 1).inputs()),
    "refine": ("refine_tokens",
               lambda: cases.refine_case(cases.score_case([700, 80], 1, 2, 4, 128, 16, BF16, 2, 1)).inputs()),
    "page_summary": ("page_summary", lambda: cases.summary_case([300, 80], 16, 128, BF16).inputs()),
    "score_pages": ("score_pages", lambda: cases.page_score_case([1500, 80], 2, 2, 4, 64, 16, BF16, 0.5, 1).inputs()),
    "select_block": ("select", lambda: cases_select.topk_case(3, 3000, 512, F32, None).inputs()),
    "select_chunks": ("select", lambda: cases_select.topk_case(2, 20000, 512, BF16, None).inputs()),
    "gather": ("gather", lambda: cases.gather_case([300, 80], 1, 2, 128, 64, 16, BF16, 0).inputs()),
    "merge_states": ("merge_states", lambda: cases.merge_case((20, 8), 128, BF16).inputs()),
    "merge_many": ("merge_many", lambda: (randn(generator(0), 3, 20, 4, 64), randn(generator(1), 3, 20, 4))),
    "dense": ("sliced_attention", lambda: cases.attention_case([600, 33], 3, 2, 4, 64, 16, BF16).inputs()),
    "dense_f32": ("sliced_attention", lambda: cases.attention_case([600, 33], 1, 2, 3, 80, 7, F32).inputs()),
    "tokens": ("sliced_attention", lambda: cases.attention_case([1300], 1, 2, 4, 128, 16, BF16, density=0.6).inputs()),
    "pages": ("sliced_attention", lambda: cases.attention_case([700], 1, 2, 4, 64, 16, BF16, density=0.5, unit=1).inputs()),
    "splits": ("sliced_attention", lambda: long_attention(0.4, 0)),
    "attend": ("attend", lambda: attend_inputs([900, 33], 1, 2, 4, 128, 16, BF16)),
    "attend_clusters": ("attend", lambda: attend_inputs([8300, 33], 1, 1, 2, 32, 16, F32)),
    "attend_fallback": ("attend", lambda: attend_inputs([600, 90], 2, 2, 4, 64, 16, F32, max_omitted_mass=0.1)),
    "attend_keep": ("attend", lambda: attend_inputs([600, 90], 2, 2, 4, 64, 16, F32, keep=cases_select.kept("several"))),
}  # fmt: skip
# Rows of attend that are too long for the shared memory of a block are selected from step by step.
CALLS |= {f"{name}_steps": CALLS[name] for name in ("attend", "attend_fallback", "attend_keep")}
every_call = pytest.mark.parametrize("name", CALLS)


@functools.lru_cache(maxsize=1)
def problem(name):
    op, build = CALLS[name]
    return op, build()


def call(name, outs=None, workspace=None):
    """Every tensor that the op makes or changes."""
    op, inputs = problem(name)
    if op == "append_kv":
        inputs = tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in inputs)
        run(op, inputs, "simt", outs=outs, workspace=workspace)
        return inputs
    return run(op, inputs, "simt", outs=outs, workspace=workspace)


def assert_equal(got, want, what):
    for g, w in zip(got, want, strict=True):
        if isinstance(g, torch.Tensor):
            assert_same_bits(g, w, what)


@pytest.fixture
def simt(request):
    module = native.simt_module()
    if "steps" in request.node.name:
        module.set_shared_memory(36 * 1024)
    yield module
    module.set_schedule("forward")
    module.set_multiprocessors(4)
    module.set_shared_memory(227 * 1024)


@every_call
def test_schedules_give_the_same_bits(name, simt):
    """Threads and blocks in order, in reverse order, and in three random ones."""
    first = call(name)
    for schedule in (("reverse", 1), ("random", 1), ("random", 2), ("random", 3)):
        simt.set_schedule(*schedule)
        assert_equal(call(name), first, f"{name}, {schedule}")


@every_call
def test_multiprocessors_change_nothing(name, simt):
    simt.set_multiprocessors(1)
    first = call(name)
    simt.set_multiprocessors(132)
    assert_equal(call(name), first, name)


@every_call
def test_given_memory_is_all_that_a_launcher_needs(name, simt):
    """With outputs and a dirty workspace of just the size that is asked for: launches, no allocation, no synchronisation."""
    op, inputs = problem(name)
    first = call(name)
    # Index builders leave what is not live as it is.
    fill = 0 if op in ("key_sketch", "page_summary") else 77
    outs = tuple(torch.full_like(t, fill) for t in first) if op != "append_kv" else ()
    workspace = dirty_workspace(op, inputs, outs)
    simt.set_device_checks(False)  # checks of values wait for the device
    try:
        before = simt.counters()
        again = call(name, outs, workspace)
        after = simt.counters()
    finally:
        simt.set_device_checks(True)
    assert_equal(again, first, name)
    made = {key: after[key] - before[key] for key in after}
    assert made["launches"] > 0
    assert {key: made[key] for key in ("allocations", "frees", "synchronisations", "copies")} == dict.fromkeys(
        ("allocations", "frees", "synchronisations", "copies"), 0
    )


def dirty_workspace(op, inputs, outs):
    """As many bytes as the op asks for, at an address that is a multiple of 256 and no more."""
    from sic_kernels.runtime import backends

    size = backends.workspace_bytes(backends.call, "slicing", op, tuple(inputs), outs, None, "simt")
    room = torch.full((size + 1024,), 0xA5, dtype=torch.uint8)
    skew = -room.data_ptr() % 512 + 256
    return room[skew : skew + size] if size else None


@every_call
def test_calls_are_captured_in_graphs(name, simt):
    """While a graph is captured nothing runs; every replay gives the same bits, also after the results were overwritten."""
    op, inputs = problem(name)
    first = call(name)
    if op == "append_kv":
        inputs = tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in inputs)
        outs, made, before = (), inputs, [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
    else:
        fill = 0 if op in ("key_sketch", "page_summary") else 77
        outs = made = tuple(torch.full_like(t, fill) for t in first)
        before = [t.clone() for t in outs]
    workspace = dirty_workspace(op, inputs, outs)
    simt.set_device_checks(False)
    try:
        graph = simt.Graph(lambda: run(op, inputs, "simt", outs=outs, workspace=workspace))
    finally:
        simt.set_device_checks(True)
    assert_equal(made, before, f"{name}: captured")
    for _ in range(2):
        graph.replay()
        assert_equal(made, first, f"{name}: replayed")
        for target, old in zip(made, before):
            if isinstance(target, torch.Tensor):
                target.copy_(old)


@pytest.mark.parametrize("name", ["attend_keep", "attend_keep_steps"])
def test_kept_spans_may_change_between_replays(name, simt):
    keep = torch.zeros_like(cases_select.kept("several"))
    inputs = attend_inputs([600, 90], 2, 2, 4, 64, 16, F32, keep=keep)
    outs = tuple(torch.full_like(t, 77) for t in call(name))
    workspace = dirty_workspace("attend", inputs, outs)
    simt.set_device_checks(False)
    try:
        graph = simt.Graph(lambda: run("attend", inputs, "simt", outs=outs, workspace=workspace))
    finally:
        simt.set_device_checks(True)
    seen = []
    for spans in (cases_select.kept("several"), torch.full_like(keep, -1), cases_select.kept("one").expand(2, 16, 2)):
        keep.copy_(spans)
        graph.replay()
        assert_equal(outs, run("attend", inputs, "simt"), name)
        seen.append(outs[0].clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


def test_a_capture_that_fails_leaves_nothing_behind(simt):
    """The error is the function's own; the next call and the next capture are like the first."""
    op, inputs = problem("dense")
    first = call("dense")
    outs = tuple(torch.empty_like(t) for t in first)

    def fails():
        run(op, inputs, "simt", outs=outs)
        raise KeyError("half way")

    with pytest.raises(sic.BackendError, match="while a graph is captured"):  # values cannot be read then
        simt.Graph(lambda: run(op, inputs, "simt", outs=outs))
    simt.set_device_checks(False)
    try:
        with pytest.raises(KeyError, match="half way"):
            simt.Graph(fails)
        with pytest.raises(sic.ArgumentError, match="got float64"):
            simt.Graph(lambda: run(op, (inputs[0].double(), *inputs[1:]), "simt", outs=outs))
        with pytest.raises(sic.ArgumentError, match="one capture at a time"):
            simt.Graph(lambda: simt.Graph(lambda: None))
        simt.Graph(lambda: run(op, inputs, "simt", outs=outs)).replay()
    finally:
        simt.set_device_checks(True)
    assert_equal(outs, first, "captured again")
    assert_equal(call("dense"), first, "called again")


def test_a_graph_holds_what_it_touches_and_no_other_threads_work(simt):
    """Outputs and workspace that its calls made stay; what another thread does meanwhile is done at once."""
    op, inputs = problem("splits")
    first = call("splits")
    theirs = []

    def work():
        run(op, inputs, "simt")  # its results and its workspace are dropped
        thread = threading.Thread(target=lambda: theirs.extend(run(op, inputs, "simt")))
        thread.start()
        thread.join()

    before = simt.counters()["launches"]
    simt.set_device_checks(False)
    try:
        graph = simt.Graph(work)
    finally:
        simt.set_device_checks(True)
    assert_equal(theirs, first, "the other thread")
    once = simt.counters()["launches"] - before
    others = [torch.full((1 << 14,), 7.0) for _ in range(100)]
    graph.replay()
    assert simt.counters()["launches"] - before == 2 * once
    assert all(bool((x == 7).all()) for x in others)


def test_numbers_of_the_device_are_checked(simt):
    for function in (simt.set_multiprocessors, simt.set_shared_memory):
        for wrong in (0, -1, 2**40):
            with pytest.raises(sic.ArgumentError, match=r"^set_\w+: number: got "):
                function(wrong)
    with pytest.raises(sic.ArgumentError, match=r"^set_schedule: schedule: got 'sideways'"):
        simt.set_schedule("sideways")


# --- arrays of other kinds ------------------------------------------------------------------------------------------


class DeviceArray:
    """Speaks CuPy's protocols: `__cuda_array_interface__`, a module named cupy with a current stream and `from_dlpack`."""

    def __init__(self, tensor):
        self.tensor, self.shape, self.ndim = tensor, tuple(tensor.shape), tensor.ndim

    @property
    def __cuda_array_interface__(self):
        kinds = {torch.float32: "<f4", torch.int32: "<i4", torch.int16: "<i2", torch.int64: "<i8", torch.uint8: "|u1"}
        item = self.tensor.element_size()
        return {"version": 3, "typestr": kinds[self.tensor.dtype], "shape": self.shape, "data": (self.tensor.data_ptr(), False),
                "strides": tuple(s * item for s in self.tensor.stride()), "stream": 1}  # fmt: skip


@pytest.fixture
def cupy(simt, monkeypatch):
    """A stand-in for CuPy whose current stream is one of the emulator's."""
    module = types.ModuleType("cupy")
    stream = simt.create_stream()
    module.asked = []

    def get_current_stream():
        module.asked.append(stream)
        return types.SimpleNamespace(ptr=stream)

    module.cuda = types.SimpleNamespace(get_current_stream=get_current_stream)
    module.from_dlpack = DeviceArray
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(DeviceArray, "__module__", "cupy._core")
    return module


def test_cupy_arrays_in_cupy_arrays_out_on_cupys_stream(cupy):
    op, inputs = problem("dense_f32")
    want = run(op, inputs, "simt")
    arrays = tuple(DeviceArray(x) if isinstance(x, torch.Tensor) else x for x in inputs)
    got = run(op, arrays, "simt")
    assert [type(x) for x in got] == [DeviceArray, DeviceArray]
    assert_equal([x.tensor for x in got], want, "cupy")
    assert len(cupy.asked) == 1


def test_a_stream_that_is_none_is_refused(cupy):
    cupy.cuda.get_current_stream = lambda: types.SimpleNamespace(ptr=12345)
    op, inputs = problem("dense_f32")
    with pytest.raises(sic.BackendError, match="resource handle"):
        run(op, (DeviceArray(inputs[0]), *inputs[1:]), "simt")


@pytest.mark.parametrize("seed", [-1, 1 << 32])
def test_a_seed_that_is_none_is_refused(seed, simt):
    with pytest.raises(sic.ArgumentError, match=r"^set_schedule: seed: got -?[\d.e+]+, expected 0 to 2\^32 - 1$"):
        simt.set_schedule("random", seed)
