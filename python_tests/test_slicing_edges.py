"""Edges that a review or an attack once found wrong, each with the value that is right."""

from __future__ import annotations

import os
import signal

import pytest
import torch

import sic_kernels as sic
from sic_kernels import slicing as S

PAGE, H, G, D = 16, 2, 4, 32


def problem(length: int, seed: int = 0, T: int = 1):
    gen = torch.Generator().manual_seed(seed)
    pages = -(-length // PAGE)
    k, v = (torch.randn(pages, H, PAGE, D, generator=gen) for _ in range(2))
    table, lens = torch.randperm(pages, generator=gen).view(1, pages).int(), torch.tensor([length])
    q = torch.randn(1, T, H * G, D, generator=gen)
    index = S.key_sketch(k, table, lens, S.calibrate(k.transpose(1, 2).reshape(-1, H, D)))
    return q, k, v, index, table, lens


def omitted_truth(q, k, v, table, lens, lse, **extras):
    return 1 - torch.exp(lse - S.sliced_attention(q, k, v, table, lens, **extras)[1])


@pytest.mark.parametrize("backend", ["cpu", "ref"])
def test_a_row_of_nan_is_nan_not_zero(backend):
    q, k, v, _, table, lens = problem(100)
    q[0, 0, 3] = torch.nan
    out, lse = S.sliced_attention(q, k, v, table, lens, backend=backend)
    assert out[0, 0, 3].isnan().all()
    assert lse[0, 0, 3].isnan()
    assert not out[0, 0, :3].isnan().any()


def test_an_estimate_of_nan_falls_back():
    q, k, v, index, table, lens = problem(400)
    q[0, 0, 5] = torch.nan
    limited = S.attend(q, k, v, index, table, lens, policy=S.SlicePolicy(ratio=0.2, max_omitted_mass=1.0))
    assert S.STATUS[limited.status[0, 0, 5]] == "fallback_mass"


@pytest.mark.parametrize("unit", ["token", "page"])
def test_nothing_outside_the_window_is_missed(unit):
    q, k, v, index, table, lens = problem(400)
    if unit == "page":
        index = S.page_summary(k, table, lens)
    policy = S.SlicePolicy(unit=unit, ratio=0.2, sink=0, recent=32)
    result = S.attend(q, k, v, index, table, lens, policy=policy, window=32)
    assert (result.omitted_mass == 0).all()
    dense, _ = S.sliced_attention(q, k, v, table, lens, window=32)
    torch.testing.assert_close(result.out, dense)


def test_masked_tokens_are_not_missed():
    q, k, v, index, table, lens = problem(400)
    bias = torch.full((1, 400), -torch.inf)
    bias[:, 100:140] = 0
    result = S.attend(q, k, v, index, table, lens, policy=S.SlicePolicy(ratio=0.3), key_bias=bias)
    assert (result.omitted_mass < 1e-6).all()


def test_softcap_enters_the_estimate():
    q, k, v, index, table, lens = problem(2000)
    result = S.attend(3 * q, k, v, index, table, lens, policy=S.SlicePolicy(ratio=0.12), softcap=2.0)
    truth = omitted_truth(3 * q, k, v, table, lens, result.lse, softcap=2.0)
    assert (result.omitted_mass - truth).abs().max() < 0.1


def test_bias_of_invisible_positions_does_not_matter():
    q, k, v, _, table, lens = problem(200)
    lens = torch.tensor([150])
    summary = S.page_summary(k, table, lens)
    policy = S.SlicePolicy(unit="page", ratio=0.2, sink=0, recent=16)
    results = []
    for tail in (0.0, 100.0, torch.nan):
        bias = torch.zeros(1, 208)
        bias[:, 150:] = tail
        results.append(S.attend(q, k, v, summary, table, lens, policy=policy, key_bias=bias))
    for other in results[1:]:
        assert torch.equal(results[0].selection.indices, other.selection.indices)
        assert torch.equal(results[0].out, other.out)


def test_short_sequences_are_read_whole_even_with_top_p():
    q, k, v, index, table, lens = problem(300)
    result = S.attend(q, k, v, index, table, lens, policy=S.SlicePolicy(min_len=300, top_p=0.5))
    assert (result.selection.counts == 300).all()
    assert {S.STATUS[s] for s in result.status.flatten()} == {"dense_short"}


def test_at_least_one_token_is_read():
    q, k, v, index, table, lens = problem(5)
    result = S.attend(q, k, v, index, table, lens, policy=S.SlicePolicy(ratio=0.12, sink=0, recent=0))
    assert (result.selection.counts == 1).all()
    assert result.lse.isfinite().all()


def test_selections_must_ascend():
    _, k, v, _, table, lens = problem(100)
    for indices in ([5, 4], [5, 5]):
        chosen = S.Selection(torch.tensor(indices).int().expand(1, 1, H, 2), torch.full((1, 1, H), 2).int())
        with pytest.raises(sic.ArgumentError, match="ascending"):
            S.gather(k, v, table, lens, chosen)


def test_forced_counts_beyond_any_length_are_refused():
    q, k, v, index, table, lens = problem(100)
    scores = S.score_tokens(q, index, table, lens)
    with pytest.raises(sic.ArgumentError, match="sink"):
        S.select(scores, lens, sink=2**63 - 1)
    with pytest.raises(sic.ArgumentError, match="sink"):
        S.attend(q, k, v, index, table, lens, policy=S.SlicePolicy(sink=2**63 - 1))


def test_preallocated_outputs_serve_dense_calls_too():
    q, k, v, index, table, lens = problem(400)
    policy = S.SlicePolicy(ratio=0.2, dense_layers=(0,))
    r = S.attend(q, k, v, index, table, lens, policy=policy, layer=1)
    outs = (r.out, r.lse, r.selection.indices, r.selection.counts, r.omitted_mass, r.status)
    S.attend(q, k, v, index, table, lens, policy=policy, layer=0, out=outs)
    assert torch.equal(r.out, S.sliced_attention(q, k, v, table, lens)[0])
    assert (outs[2] == -1).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_computes_the_same():
    q, k, v, index, table, lens = problem(3000)
    want = S.attend(q, k, v, index, table, lens).out  # the threads exist now
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # a child that waits for threads that are gone would wait forever
        same = S.attend(q, k, v, index, table, lens).out.numpy().tobytes() == want.numpy().tobytes()
        os.write(write, b"same" if same else b"differs")
        os._exit(0)
    os.close(write)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert os.read(read, 16) == b"same"
    os.close(read)


# --- found by attack ------------------------------------------------------------------------------------------------------


def refused(message: str):
    return pytest.raises(sic.ArgumentError, match=message)


def test_tensors_without_memory_are_refused():
    q, k, v, _, table, lens = problem(100)
    freed = q.clone()
    freed.untyped_storage().resize_(0)
    with refused("without memory|data"):
        S.sliced_attention(freed, k, v, table, lens)
    with refused("q: got"):
        S.sliced_attention(q.to("meta"), k, v, table, lens, backend="cpu")
    with refused("k_cache: got"):
        S.sliced_attention(q, k.to_sparse(), v, table, lens)


def test_numpy_arrays_with_negative_strides():
    q, k, v, _, table, lens = problem(100)
    backwards = q.numpy()[:, :, ::-1]
    want, _ = S.sliced_attention(q.flip(2), k, v, table, lens)
    for backend in ("cpu", "ref"):
        args = (backwards, k.numpy(), v.numpy(), table.numpy(), lens.numpy())
        out, _ = S.sliced_attention(*args, backend=backend)
        torch.testing.assert_close(torch.from_numpy(out), want)


def test_malformed_cuda_array_interface():
    _, k, v, _, table, lens = problem(100)
    for typestr in ("<f0", "x", "<f16"):
        fake = type(
            "Fake", (), {"__cuda_array_interface__": {"typestr": typestr, "shape": (1, 1, 8, 32), "data": (0, False)}}
        )()
        with refused("q: got"):
            S.sliced_attention(fake, k, v, table, lens, backend="cpu")


def test_workspace_bytes_checks_its_arguments_and_runs_nothing():
    q, k, v, index, table, lens = problem(2100)
    for op, args in (("attend", (q, k, v, index, table, lens)), ("sliced_attention", (q, k, v, table, lens))):
        more = {"policy": S.SlicePolicy(ratio=1.0)} if op == "attend" else {}
        assert S.workspace_bytes(op, *args, **more) > 0
        with refused("q: got"):
            S.workspace_bytes(op, q[..., :3], *args[1:])
        with refused("max_seq_len"):
            S.workspace_bytes(op, *args, max_seq_len=-64)
    assert S.workspace_bytes("score_tokens", q, index, table, lens) == 0
    k_before = k.clone()
    slots = torch.zeros(1, dtype=torch.int64)
    assert S.workspace_bytes("append_kv", k[:1, :, 0] + 1, v[:1, :, 0] + 1, k, v, slots) == 0
    assert torch.equal(k, k_before)


@pytest.mark.parametrize("backend", ["cpu", "simt"])
def test_longer_lists_than_needed_need_more_workspace(backend):
    """Lists may have more slots than the policy fills; the partial results of all of them must fit, or it is an error."""
    q, k, v, index, table, lens = problem(5000)
    least = S.attend(q, k, v, index, table, lens, backend=backend)
    longer = torch.empty(*least.selection.indices.shape[:-1], 5000, dtype=torch.int32)
    out = (least.out.clone(), least.lse.clone(), longer, least.selection.counts.clone(), least.omitted_mass.clone(),
           least.status.clone())  # fmt: skip
    args = (q, k, v, index, table, lens)
    size = S.workspace_bytes("attend", *args, out=out, backend=backend)
    assert size > S.workspace_bytes("attend", *args, backend=backend)
    room = torch.full((size + 1024,), 0xA5, dtype=torch.uint8)
    begin = -room.data_ptr() % 256
    with refused("workspace: got"):
        S.attend(*args, out=out, workspace=room[begin : begin + size - 1], backend=backend)
    assert bool((room == 0xA5).all())
    result = S.attend(*args, out=out, workspace=room[begin : begin + size], backend=backend)
    assert torch.equal(result.out, least.out)
    assert bool((room[begin + size :] == 0xA5).all())


def test_outputs_in_the_memory_of_inputs_are_refused():
    q, k, v, _, table, lens = problem(100)
    lse = torch.empty(q.shape[:-1])
    with refused("out: got"):
        S.sliced_attention(q, k, v, table, lens, out=(q, lse))
    with refused("out: got"):
        S.sliced_attention(q, k, v, table, lens, out=(k.flatten()[: q.numel()].view_as(q), lse))
    states = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4)
    with refused("out: got"):
        S.merge_many(*states, out=(states[0][0], torch.empty(3, 4)))
    a, b = (torch.randn(3, 4, 8), torch.randn(3, 4)), (torch.randn(3, 4, 8), torch.randn(3, 4))
    want = S.merge_states(*a, *b)
    got = S.merge_states(*a, *b, out=a)  # in place is allowed where an element is read before it is written
    assert torch.equal(got[0], want[0])
    assert got[0].data_ptr() == a[0].data_ptr()


def test_half_a_selection_is_refused():
    q, k, v, index, table, lens = problem(100)
    with refused("selection.indices"):
        S.sliced_attention(q, k, v, table, lens, S.Selection(None, torch.full((1, 1, H), 3).int()))
    pages = S.select(S.score_tokens(q, index, table, lens), lens)._replace(unit="page")
    with refused("candidates.unit"):
        S.refine_tokens(q, index, pages, table, lens)


def test_gradients_are_refused_not_dropped():
    q, k, v, _, table, lens = problem(100)
    q.requires_grad_()
    with refused("requires grad"):
        S.sliced_attention(q, k, v, table, lens)
    with torch.no_grad():
        S.sliced_attention(q, k, v, table, lens)


def test_head_size_zero_is_refused():
    z = torch.zeros
    with refused("k_cache: got 0"):
        S.sliced_attention(z(1, 1, 4, 0), z(3, 2, 8, 0), z(3, 2, 8, 4), torch.tensor([[0, 1, 2]]), torch.tensor([20]))


def test_merged_states_have_one_shape():
    out, lse = torch.randn(2, 3, 3, 4), torch.randn(2, 3, 3)
    with refused("out_b"):
        S.merge_states(out, lse, out.reshape(3, 2, 3, 4), lse.reshape(3, 2, 3))


def test_scores_of_nan_fill_the_budget():
    scores, lens = torch.full((1, 1, 1, 8), torch.nan), torch.tensor([8])
    for backend in ("cpu", "ref"):
        chosen = S.select(scores, lens, budget=3, sink=0, recent=0, top_p=0.9, backend=backend)
        assert chosen.indices.flatten().tolist() == [0, 1, 2]


@pytest.mark.parametrize("name, none", [("softcap", 0), ("softcap", None), ("window", 0), ("window", None)])
def test_zero_means_none_on_every_backend(name, none):
    q, k, v, _, table, lens = problem(100)
    want, _ = S.sliced_attention(q, k, v, table, lens)
    for backend in ("cpu", "ref"):
        torch.testing.assert_close(S.sliced_attention(q, k, v, table, lens, backend=backend, **{name: none})[0], want)


def test_crop_and_reorder_take_whole_numbers_only():
    cache = S.SlicedKVCache(1, 2, 16, batch=2)
    cache.append(0, torch.randn(2, 2, 20, 16), torch.randn(2, 2, 20, 16))
    for wrong in ([3, 8.0], [3, float("nan")], [True, True]):
        with refused("whole numbers"):
            cache.crop(wrong)
        assert cache.lengths == (20, 20)
    with refused("whole numbers"):
        cache.reorder(torch.tensor([True, False]))
    lengths = torch.tensor([9, 9])
    cache.crop(lengths)
    lengths[0] = 2
    assert cache.lengths == (9, 9)


def test_damaged_sketch_params_are_refused(tmp_path):
    params = S.calibrate(torch.randn(9, 2, 16))
    path = tmp_path / "params.safetensors"
    params.save(path)
    whole = path.read_bytes()
    assert S.SketchParams.load(path) == params
    for damaged in (b"", whole[:7], whole[: len(whole) // 2], b"x" * 40, whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(damaged)
        with refused("SketchParams.load"):
            S.SketchParams.load(path)
    with refused("SketchParams.load"):
        S.SketchParams.load(tmp_path / "absent")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("backend", ["ref", "cpu", "simt"])
def test_values_that_are_not_read_do_not_count(backend, value):
    """Neither those of unlisted tokens nor those past the end."""
    q, k, v, _, table, lens = problem(100)
    chosen = S.select(torch.zeros(1, 1, k.shape[1], 100), lens, budget=3, sink=0, recent=0)
    want = S.sliced_attention(q, k, v, table, lens, chosen, backend=backend)
    dirty = v.clone()
    for token in range(3, table.shape[1] * v.shape[2]):
        dirty[table[0, token // v.shape[2]], :, token % v.shape[2]] = value
    got = S.sliced_attention(q, k, dirty, table, lens, chosen, backend=backend)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
