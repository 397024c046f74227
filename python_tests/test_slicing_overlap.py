"""Outputs and workspace in the memory of inputs or of each other: an ArgumentError, and nothing is written."""

import pytest
import torch
from slicing_helpers import native_backend
from test_slicing_determinism import attend_inputs, long_attention
from test_slicing_errors import GOOD, append_call

from sic_kernels import ArgumentError
from sic_kernels.runtime import backends
from sic_kernels.testing import RESULTS, assert_unchanged, copies, run

CALLS = {op: build for op, build in GOOD.items() if RESULTS[op]} | {
    "attend": lambda: attend_inputs([60, 33], 1, 2, 2, 16, 8, torch.float32),
    "sliced_attention": lambda: long_attention(0.4, 0),
}
# Every element is read before it is written, so these may be the same array.
IN_PLACE = {("merge_states", 0, 0), ("merge_states", 0, 2), ("merge_states", 1, 1), ("merge_states", 1, 3)}


def inside(memory, like, at_end):
    """A tensor as `like` in the first or last bytes of another one's memory; None if it does not fit."""
    size, item = like.numel() * like.element_size(), like.element_size()
    storage = memory.untyped_storage()
    first = (storage.nbytes() - size) // 16 * 16 if at_end else memory.storage_offset() * memory.element_size()
    if size == 0 or first < 0 or first % item or storage.nbytes() - first < size or (at_end and first == 0):
        return None
    return torch.empty(0, dtype=like.dtype).set_(storage, first // item, like.shape, torch.empty_like(like).stride())


def empty_results(op, inputs, backend):
    fresh = torch.zeros_like if op in ("key_sketch", "page_summary") else torch.empty_like
    return [fresh(w) for w in run(op, inputs, backend)]


@native_backend
@pytest.mark.parametrize("op", CALLS)
def test_outputs_in_inputs(op, backend):
    inputs = tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in CALLS[op]())
    like, before = empty_results(op, inputs, backend), copies(inputs)
    for n, output in enumerate(like):
        for i, x in enumerate(inputs):
            for at_end in (False, True):
                wrong = inside(x, output, at_end) if isinstance(x, torch.Tensor) else None
                if wrong is None or ((op, n, i) in IN_PLACE and not at_end):
                    continue
                outs = [wrong if m == n else other for m, other in enumerate(like)]
                with pytest.raises(ArgumentError, match=rf"^{op}: [\w.]+: got .* in the memory of an input, expected "):
                    run(op, inputs, backend, outs=outs)
    assert_unchanged(inputs, before)


@native_backend
@pytest.mark.parametrize("op", [op for op in CALLS if RESULTS[op] > 1])
def test_outputs_in_outputs(op, backend):
    inputs = CALLS[op]()
    like = empty_results(op, inputs, backend)
    for n, output in enumerate(like):
        for m, other in enumerate(like):
            wrong = inside(other, output, False) if m != n else None
            if wrong is not None:
                with pytest.raises(ArgumentError, match=rf"^{op}: [\w.]+: got .* in the memory of "):
                    run(op, inputs, backend, outs=[wrong if i == n else x for i, x in enumerate(like)])


@native_backend
@pytest.mark.parametrize("op", CALLS)
def test_a_workspace_in_an_output(op, backend):
    inputs = CALLS[op]()
    like = empty_results(op, inputs, backend)
    size = backends.workspace_bytes(backends.call, "slicing", op, tuple(inputs), tuple(like), None, backend)
    if not size:
        return
    for n, output in enumerate(like):
        room = torch.zeros(size + 512 + output.numel() * output.element_size(), dtype=torch.uint8)
        first = -room.data_ptr() % 256
        workspace = room[first : first + size]
        outs = [inside(workspace, output, False) if i == n else x for i, x in enumerate(like)]
        with pytest.raises(ArgumentError, match=rf"^{op}: workspace: got .* in the memory of "):
            run(op, inputs, backend, outs=outs, workspace=workspace)
        assert not room.any()


@native_backend
def test_shifted_states_are_not_in_place(backend):
    memory = torch.randn(5, 2, 16)
    inputs = memory[:4], torch.zeros(4, 2), torch.randn(4, 2, 16), torch.zeros(4, 2)
    with pytest.raises(ArgumentError, match=r"^merge_states: out: got .* in the memory of an input"):
        run("merge_states", inputs, backend, outs=(memory[1:], torch.zeros(4, 2)))


@native_backend
def test_rows_from_the_cache_they_go_to(backend):
    inputs = list(append_call())
    inputs[0] = inputs[2].view(-1)[: inputs[0].numel()].view(inputs[0].shape)
    before = copies(inputs)
    with pytest.raises(ArgumentError, match=r"^append_kv: k_cache: got .* in the memory of an input"):
        run("append_kv", inputs, backend)
    assert_unchanged(inputs, before)


@native_backend
def test_interleaved_outputs_are_meant(backend):
    """Two results in the columns of one array."""
    inputs = CALLS["merge_states"]()
    want = run("merge_states", inputs, backend)
    both = torch.zeros(*want[0].shape[:-1], 2 * want[0].shape[-1])
    width = want[0].shape[-1]
    run("merge_states", inputs, backend, outs=(both[..., :width], want[1].clone()))
    run("merge_states", inputs, backend, outs=(both[..., width:], want[1].clone()))
    assert torch.equal(both[..., :width], both[..., width:])
