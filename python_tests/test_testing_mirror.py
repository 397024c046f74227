"""Tests on a GPU are the CPU's tests: tensors go there as they lie here, and everything that was written comes back."""

import pytest
import torch

from sic_kernels import testing
from sic_kernels.slicing import cases
from sic_kernels.testing import Mirror, same_bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_views_lie_as_they_do_here(dtype):
    base = torch.arange(120).to(dtype)
    views = [base[7:67].view(3, 4, 5).transpose(0, 2), base[3:4].expand(6), base[:0], base.view(2, 60)[:, 8:20]]
    mirror = Mirror("cpu")
    for here in views:
        there = mirror(here)
        assert (there.shape, there.stride(), there.storage_offset()) == (
            here.shape,
            here.stride(),
            here.storage_offset(),
        )
        assert torch.equal(there.to(torch.float32), here.to(torch.float32))
        assert there.untyped_storage().data_ptr() != here.untyped_storage().data_ptr()
    assert len({mirror(v).untyped_storage().data_ptr() for v in views}) == 1  # one memory, as here
    assert mirror(None) is None
    assert mirror(3) == 3


def test_what_is_written_there_comes_back():
    base = torch.zeros(10)
    mirror = Mirror("cpu")
    mirror(base[2:4]).fill_(1)
    assert base.sum() == 0
    mirror.bring_back()
    assert base.tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 0, 0]


@pytest.fixture
def elsewhere(monkeypatch):
    """The CPU backend as if its memory were another device's."""
    made = []

    class Seen(Mirror):
        def __init__(self, device):
            super().__init__("cpu")
            made.append(device)

    monkeypatch.setattr(testing, "device_of", lambda backend: "elsewhere")
    monkeypatch.setattr(testing, "Mirror", Seen)
    return made


@pytest.mark.parametrize("grid", ["gather", "merge", "head_size"])
def test_ops_run_there(grid, elsewhere):
    case = cases.grid(grid)[-1]
    inputs = case.inputs()
    want = case.expected(inputs)
    for got in (
        testing.run(case.op, inputs, "cpu"),
        [g.tensor for g in testing.run_guarded(case.op, inputs, "cpu", want, skew=1)],
    ):
        assert len(got) == len(want)
        assert all(g.shape == w.shape and not g.isnan().any() for g, w in zip(got, want))
    assert elsewhere == ["elsewhere"] * 2


def test_a_write_out_of_bounds_is_seen_here(elsewhere, monkeypatch):
    case = cases.grid("merge")[0]
    inputs = case.inputs()

    def broken(*args, **kwargs):
        """The op, and a byte behind its first output."""
        outs = args[3]
        outs[0].untyped_storage()[outs[0].nbytes + outs[0].storage_offset() * 4] = 0
        return outs

    monkeypatch.setattr("sic_kernels.runtime.backends.call", broken)
    with pytest.raises(AssertionError, match="1 guard bytes overwritten"):
        testing.run_guarded(case.op, inputs, "cpu", case.expected(inputs))


def test_where_tensors_of_a_backend_are(monkeypatch):
    for available, cuda in ((True, "cuda"), (False, "cpu")):  # False: Triton's interpreter
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert [testing.device_of(b) for b in ("cpu", "simt", "ref", "cuda", "triton")] == ["cpu"] * 3 + [cuda] * 2


def test_results_are_the_same_bits(elsewhere):
    case = cases.grid("score")[0]
    inputs = case.inputs()
    (there,) = testing.run("score_tokens", inputs, "cpu")
    assert same_bits(there, case.expected(inputs)[0])
