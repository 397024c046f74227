"""Bad arguments of the head ops: one ArgumentError in the one format, before anything is touched; no memory shared."""

import re

import numpy as np
import pytest
import torch
from head_helpers import native_backend, run
from test_slicing_errors import FORMAT
from test_slicing_overlap import inside

import sic_kernels as sic
from sic_kernels import ArgumentError, head
from sic_kernels.head import cases
from sic_kernels.testing import (
    RESULTS,
    assert_same_bits,
    assert_unchanged,
    copies,
    generator,
    guarded_like,
    map_tensors,
    randn,
)


def good_logits():
    gen = generator(1)
    return cases.logits_inputs(randn(gen, 3, 50), **cases.all_extras(gen, 3, 50))


def good_head():
    gen = generator(2)
    of_probe = (randn(gen, 16, 12), randn(gen, 2, 16), randn(gen, 2), 0, 0)
    return cases.lm_head_inputs(randn(gen, 3, 12), randn(gen, 50, 12), of_probe, **cases.all_extras(gen, 3, 50))


def good_merge():
    parts = [run("logits_part", p, "ref") for p in cases.split(good_logits(), [32])]
    return (*(torch.stack(x) for x in zip(*parts)), good_logits()[1])


GOOD = {
    "logits_stats": good_logits,
    "logits_part": good_logits,
    "lm_head_stats": good_head,
    "lm_head_part": lambda: good_head()[:-1],
    "merge_stats": good_merge,
    "probe": lambda: (good_head()[0], *good_head()[-1]),
}
LOGITS = ("logits_stats", "logits_part")
HEADS = ("lm_head_stats", "lm_head_part")


def changed(op, position, value):
    inputs = list(GOOD[op]())
    inputs[position] = value(inputs[position]) if callable(value) else value
    return tuple(inputs)


def common(first, name):
    """The position of what follows the logits, or hidden and weight."""
    names = (
        "temperature",
        "bias",
        "softcap",
        "valid_vocab",
        "mask_bits",
        "k",
        "watch_ids",
        "target_ids",
        "vocab_start",
    )
    return first + names.index(name)


WRONG = [
    ("temperature", torch.ones(2)),
    ("temperature", torch.ones(3, dtype=torch.float64)),
    ("temperature", torch.tensor([1.0, -0.5, 1.0])),
    ("temperature", torch.tensor([1.0, float("nan"), 1.0])),
    ("temperature", -1.0),
    ("temperature", True),
    ("bias", torch.ones(49)),
    ("bias", torch.ones(50).half()),
    ("softcap", -1.0),
    ("softcap", float("inf")),
    ("valid_vocab", -1),
    ("mask_bits", torch.zeros(3, 3, dtype=torch.int32)),
    ("mask_bits", torch.zeros(3, 2, dtype=torch.int64)),
    ("mask_bits", torch.zeros(2, 2, dtype=torch.int32)),
    ("k", 65),
    ("k", -1),
    ("watch_ids", torch.tensor([0, -1])),
    ("watch_ids", torch.zeros(65, dtype=torch.int32)),
    ("watch_ids", torch.zeros(2, 4, dtype=torch.int32)),
    ("watch_ids", torch.zeros(4)),
    ("target_ids", torch.zeros(2, dtype=torch.int64)),
    ("target_ids", torch.tensor([0, -2, 0])),
    ("vocab_start", -1),
    ("vocab_start", 2**31 - 10),
]


@native_backend
@pytest.mark.parametrize("op", [*LOGITS, *HEADS])
def test_wrong_options(op, backend):
    first = 1 if op in LOGITS else 2
    public = "partial_stats" if op.endswith("_part") else op
    for name, value in WRONG:
        inputs = changed(op, common(first, name), value)
        outs = guarded_like(run(op, GOOD[op](), "ref"))
        before = copies(inputs)
        with pytest.raises(ArgumentError) as caught:
            run(op, inputs, backend, outs=[g.tensor for g in outs])
        found = FORMAT.match(str(caught.value))
        assert found, str(caught.value)
        assert (found["op"], found["arg"]) == (public, name), f"{value}: {caught.value}"
        assert_unchanged(inputs, before)
        assert all(g.untouched().all() for g in outs), name


@native_backend
@pytest.mark.parametrize(
    "op, position, value, name",
    [
        ("logits_stats", 0, torch.zeros(50), "logits"),
        ("logits_stats", 0, torch.zeros(3, 50, dtype=torch.float64), "logits"),
        ("logits_stats", 0, torch.zeros(50, 3).T, "logits"),
        ("logits_stats", 0, None, "logits"),
        ("logits_stats", 7, torch.tensor([50]), "watch_ids"),
        ("logits_stats", 8, torch.tensor([0, 50, 0]), "target_ids"),
        ("logits_part", 6, 0, "k"),
        ("lm_head_stats", 0, torch.zeros(3, 11), "weight"),
        ("lm_head_stats", 1, torch.zeros(50, 12, dtype=torch.int32), "weight"),
        ("lm_head_stats", 1, torch.zeros(12, 50).T, "weight"),
        ("merge_stats", 0, lambda m: m[0], "parts.m"),
        ("merge_stats", 0, lambda m: m[:0], "parts"),
        ("merge_stats", 1, lambda s: s.float(), "parts.s"),
        ("merge_stats", 4, lambda ids: ids[..., :0], "parts.top_ids"),
        ("merge_stats", 5, lambda top: top[..., 1:], "parts.top"),
        ("merge_stats", 7, lambda target: target[:, :2], "parts.target"),
        ("merge_stats", 9, torch.ones(2), "temperature"),
        ("probe", 0, torch.zeros(12), "hidden"),
        ("probe", 1, torch.zeros(16, 11), "projection"),
        ("probe", 1, torch.zeros(65, 12), "projection"),
        ("probe", 2, torch.zeros(2, 15), "vector"),
        ("probe", 2, torch.zeros(17, 16), "vector"),
        ("probe", 3, torch.zeros(3), "bias"),
    ],
)
def test_wrong_arrays(op, position, value, name, backend):
    with pytest.raises(ArgumentError, match=rf"^{op.replace('logits_part', 'partial_stats')}: {re.escape(name)}: got "):
        run(op, changed(op, position, value), backend)


@native_backend
@pytest.mark.parametrize("op", GOOD)
def test_wrong_outputs(op, backend):
    """Each of another shape, another type, or in the memory of an input or of another output."""
    inputs = map_tensors(torch.clone, GOOD[op]())
    like = run(op, inputs, backend)
    before = copies(inputs)
    tensors = [x for x in (*inputs, *(inputs[-1] if op == "lm_head_stats" else ())) if isinstance(x, torch.Tensor)]
    for n in range(RESULTS[op]):
        wrongs = [torch.empty(*like[n].shape, 1), torch.empty(like[n].shape, dtype=torch.int16)]
        wrongs += [inside(x, like[n], False) for x in tensors]
        wrongs += [inside(x, like[n], False) for m, x in enumerate(like) if m != n]
        for wrong in wrongs:
            if wrong is None:
                continue
            outs = [wrong if m == n else torch.empty_like(x) for m, x in enumerate(like)]
            if any(
                wrong.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
                for m, x in enumerate(like)
                if m != n
            ):
                outs = [wrong if m == n else x for m, x in enumerate(like)]
            with pytest.raises(ArgumentError, match=r"^\w+: [\w.]+: got "):
                run(op, inputs, backend, outs=outs)
    assert_unchanged(inputs, before)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: head.logits_stats(x, softcap=0.0),
        lambda x: head.logits_stats(x, softcap="2"),
        lambda x: head.logits_stats(x, k=2.5),
        lambda x: head.logits_stats(x, out=(x,)),
        lambda x: head.logits_stats("x"),
        lambda x: head.logits_stats(x.requires_grad_()),
        lambda x: head.lm_head_stats(x, x, probe=3),
        lambda x: head.partial_stats(),
        lambda x: head.partial_stats(x, hidden=x, weight=x),
        lambda x: head.partial_stats(hidden=x),
        lambda x: head.merge_stats([]),
        lambda x: head.merge_stats([x]),
        lambda x: head.merge_stats([head.partial_stats(x), head.partial_stats(x, k=2)]),
        lambda x: head.merge_stats([head.partial_stats(x), head.partial_stats(x, temperature=2.0)]),
        lambda x: head.merge_stats([head.partial_stats(x), head.partial_stats(x[:1])]),
        lambda x: head.Probe(x, x, x, activation="tanh"),
        lambda x: head.probe(x, x, x, "bias"),
        lambda x: head.workspace_bytes("softmax", x),
    ],
)
def test_wrong_calls(call):
    with pytest.raises(ArgumentError, match=r"^\w+: [\w.]+: got .+, expected "):
        call(torch.ones(2, 4))


def test_public_names_and_other_arrays():
    """NumPy in, NumPy out."""
    got = sic.head.logits_stats(np.zeros((2, 8), np.float32), k=2)
    assert isinstance(got.entropy, np.ndarray)
    assert got.topk_ids.tolist() == [[0, 1]] * 2
    assert got.entropy == pytest.approx([np.log(8)] * 2)
    assert sic.head.workspace_bytes("logits_stats", torch.zeros(2, 8), k=2) == 0


def test_outputs_that_are_given_are_used():
    x = randn(generator(3), 2, 3000)
    want = head.logits_stats(x, k=4)
    outs = guarded_like(want[:9], skew=1)
    got = head.logits_stats(x, k=4, out=tuple(g.tensor for g in outs))
    for g, w, x in zip(outs, want, got):
        assert x.data_ptr() == g.tensor.data_ptr()
        g.assert_guards()
        assert_same_bits(g.tensor, w)


def test_results_may_be_given_again_as_outputs():
    """Of every kind of array, though some have no elements; parts and statistics with all their fields."""
    for x in (randn(generator(4), 2, 300), randn(generator(4), 2, 300).numpy()):
        first = head.logits_stats(x, k=2)
        again = head.logits_stats(x, k=2, out=first)
        assert again.entropy.tolist() == first.entropy.tolist()
        part = head.partial_stats(x, k=2)
        merged = head.merge_stats([head.partial_stats(x, k=2, out=part)])
        assert type(merged.entropy) is type(x)
        assert merged.topk_ids.tolist() == first.topk_ids.tolist()
