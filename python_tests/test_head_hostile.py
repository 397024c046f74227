"""The head family against what no caller should give it: arrays of every wrong kind, numbers at the ends of their range, parts
that no op made, memory that ends at a page, and others who change a matcher meanwhile.
"""

import dataclasses
import fractions
import math
import threading

import numpy as np
import pytest
import torch
from head_helpers import every_backend, native_backend
from test_delta_hostile import before_a_guard

import sic_kernels as sic
from sic_kernels import ArgumentError, head
from sic_kernels.head import ConfidenceRing, StopMatcher, TerminationRule, TerminationState
from sic_kernels.runtime import native
from sic_kernels.testing import assert_close, assert_same_bits, generator, randn

NAN, INF = math.nan, math.inf
HUGE = 10**400  # beyond every float
FORMAT = r"^[\w.]+: [\w.]+: got .+, expected .+"


class Raises:
    """Every attribute raises what no attribute should."""

    def __getattr__(self, name):
        raise RuntimeError(name)


NO_ARRAYS = {
    "strings": np.array(["a"]), "other endian": np.zeros(3, ">f4"), "class": torch.Tensor, "raises": Raises(), "number": 3,
    "list": [0.5], "sparse": torch.zeros(3).to_sparse(), "meta": torch.zeros(3, device="meta"), "complex": torch.zeros(3) * 1j,
    "grad": torch.zeros(3, requires_grad=True), "none": None,
}  # fmt: skip


def part(**changed):
    """Two rows over three ids."""
    x = torch.tensor([[1.0, 2.0, 3.0]] * 2)
    return head.partial_stats(x, k=2, watch_ids=torch.tensor([1]), target_ids=torch.tensor([0, 1]))._replace(**changed)


# --- wrong kinds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NO_ARRAYS)
def test_no_arrays(kind):
    x, ring, state = NO_ARRAYS[kind], ConfidenceRing(3), TerminationState.allocate(3)
    calls = [
        lambda: ring.push(x),
        lambda: ring.as_key_bias(x, 4),
        lambda: head.verify_budget(x),
        lambda: head.record_stops(x),
        lambda: TerminationState.allocate(3, x if kind != "number" else -3),
        lambda: ring.reorder(x),
        lambda: state.reorder(x),
        lambda: head.probe(torch.zeros(2, 4), torch.zeros(3, 4), x),
        lambda: head.merge_stats([part(m=x), part()]),
        lambda: head.merge_stats([part(), part(m=x)]),
    ]
    if kind != "meta":  # there is no backend for that device
        calls.append(lambda: head.logits_stats(x))
    if kind != "none":
        calls += [
            lambda: head.verify_budget(torch.rand(3, 2), out=x),
            lambda: ring.as_key_bias(torch.ones(3).long(), 4, out=x),
        ]
    for call in calls:
        with pytest.raises(ArgumentError, match=FORMAT):
            call()
    assert ring.count.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: head.logits_stats(x, softcap=HUGE),
        lambda x: head.logits_stats(x, k=np.float32(2.5)),
        lambda x: head.logits_stats(x, k=fractions.Fraction(5, 2)),
        lambda x: head.logits_stats(x, valid_vocab=torch.tensor(2.5)),
        lambda x: head.logits_stats(x, backend=np.zeros(2)),
        lambda x: head.logits_stats(x, backend=""),
        lambda x: head.probe(x, x, x[0], HUGE),
        lambda x: head.probe(x, x, x[0], 1e39),
        lambda x: head.probe(x, x, x[0, :2], out=3),
        lambda x: head.Probe(None, x, x),
        lambda x: TerminationRule(threshold=HUGE),
        lambda x: TerminationRule(eos_ids=np.zeros(2)),
        lambda x: TerminationRule(eos_ids=torch.zeros(2, device="meta")),
        lambda x: TerminationRule(patience=True),
        lambda x: TerminationRule().threshold_at("5"),
        lambda x: TerminationState.allocate(2, device="nowhere"),
        lambda x: TerminationState.allocate(2, 2**31),
        lambda x: TerminationState.allocate(2, [1, -1]),
        lambda x: TerminationState.allocate(2, torch.tensor([1, 2**40])),
        lambda x: ConfidenceRing(2, device=2**70),
        lambda x: ConfidenceRing(1).as_key_bias(torch.tensor([1]), 4, strength=1e39),
        lambda x: ConfidenceRing(1).as_key_bias(torch.tensor([1]), 4, floor=1e-300),
        lambda x: head.verify_budget(x, HUGE),
        lambda x: StopMatcher(["a"], include=x),
        lambda x: head.stop_rule(3, lambda text: [1]),
        lambda x: head.stop_rule(["a"], lambda text: None),
        lambda x: head.stop_rule(["a"], lambda text: ["a"]),
    ],
)
def test_wrong_numbers_and_names(call):
    with pytest.raises(ArgumentError, match=FORMAT):
        call(torch.ones(2, 2))


@pytest.mark.parametrize(
    "rows", [[3], [-1], [0.5], "0", torch.tensor([0.5]), torch.tensor([7]), torch.tensor([[0]]), [2**70]]
)
def test_wrong_rows_change_nothing(rows):
    state, ring = TerminationState.allocate(3, [4, 5, 6]), ConfidenceRing(3, lag=1)
    state.generated.add_(1)
    ring.push(torch.rand(3))
    for call in (state.reset, state.reorder, ring.reset, ring.reorder, lambda rows: state.reset(rows, 7)):
        with pytest.raises(ArgumentError, match=FORMAT):
            call(rows)
    with pytest.raises(ArgumentError, match=FORMAT):
        state.reset([0, 1], [1, 2.5])
    assert (state.input_lens.tolist(), state.generated.tolist(), ring.count.tolist()) == ([4, 5, 6], [1] * 3, [1] * 3)


def test_outputs_that_torch_cannot_write_to():
    """Read-only, copied because of a negative stride, or with elements in one place."""
    sealed = np.zeros(3, np.int64)
    sealed.flags.writeable = False
    for out in (sealed, np.zeros(6, np.int64)[::-2], torch.zeros(1, dtype=torch.int64).expand(3), torch.zeros(3)):
        with pytest.raises(ArgumentError, match=r"^verify_budget: out: got .+, expected .+"):
            head.verify_budget(torch.full((3, 2), 0.9), out=out)
    assert not sealed.any()


def test_a_probe_that_requires_grad():
    probe = head.Probe(torch.zeros(2, 4, requires_grad=True), torch.zeros(1, 2), torch.zeros(1))
    with pytest.raises(ArgumentError, match="lm_head_stats: inputs: got a tensor that requires grad"):
        head.lm_head_stats(torch.zeros(3, 4), torch.zeros(5, 4), probe=probe)
    with torch.no_grad():
        assert head.lm_head_stats(torch.zeros(3, 4), torch.zeros(5, 4), probe=probe).score.tolist() == [[0.5]] * 3


# --- the ends of the range ------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("temperature", [1e-45, 1e-40, 1e-38, 3e38])
def test_temperatures_without_a_quotient(temperature, backend):
    """1 / temperature is beyond f32: all weight on the greatest; other rows are as ever."""
    x = torch.tensor([[1.0, 3.0, 2.0], [0.0, 0.0, 0.0]])
    got = head.logits_stats(x, temperature=temperature, k=1, backend=backend)
    assert got.status.tolist() == [0, 0]
    assert got.argmax.tolist() == [1, 0]
    want = [0.0 if temperature < 1 else math.log(3), math.log(3)]
    assert_close(got.entropy, torch.tensor(want), atol=1e-6)
    part = head.lm_head_stats(x, torch.eye(3), temperature=temperature, backend=backend)
    assert_close(part.entropy, torch.tensor(want), atol=1e-6)


@native_backend
@pytest.mark.parametrize("softcap", [1e-45, 0.1, 30.0, 1e4, 1e8, 3e38])
def test_soft_caps_far_above_the_logits(softcap, backend):
    """Where the cap is not felt the hyperbolic tangent is of small numbers, which must keep their digits."""
    x = randn(generator(1), 2, 700) * 5
    got, want = (head.logits_stats(x, softcap=softcap, k=3, backend=b) for b in (backend, "ref"))
    assert_close(got.lse, want.lse, atol=1e-5)
    assert_close(got.entropy, want.entropy, atol=1e-5)
    assert torch.equal(got.topk_ids, want.topk_ids)


# --- parts that no op made --------------------------------------------------------------------------------------------

NONSENSE = {
    "m": [NAN, INF], "s": [NAN, INF, 0.0, -1.0], "t": [NAN, -INF], "u": [NAN, INF], "top": [NAN, INF],
    "top_ids": [-1, -7, 2**31 - 1, 2**40],
}  # fmt: skip


@every_backend
@pytest.mark.parametrize("name", NONSENSE)
def test_parts_that_no_op_made(name, backend):
    for value in NONSENSE[name]:
        wrong = getattr(part(), name).clone()
        wrong[1, ...] = value
        for parts in ([part(**{name: wrong})], [part(), part(**{name: wrong})]):
            with pytest.raises(
                ArgumentError, match=rf"^merge_stats: parts\.{name}: got .* of row 1 in part {len(parts) - 1}, "
            ):
                head.merge_stats(parts, backend=backend)
        status = torch.tensor([0, 1], dtype=torch.uint8)  # nothing of such a row is used
        got = head.merge_stats([part(), part(status=status, **{name: wrong})], backend=backend)
        assert got.status.tolist() == [0, 1]
        assert got.lse[1].isnan()


@every_backend
def test_a_streak_that_is_longer_than_the_patience(backend):
    """Left by another rule: it becomes the patience, as it would have."""
    state = dataclasses.replace(TerminationState.allocate(2), streak=torch.tensor([9, 1], dtype=torch.int32))
    head.termination_step(
        TerminationRule(patience=3), state, torch.ones(2), None, torch.zeros(2).long(), backend=backend
    )
    assert state.streak.tolist() == [3, 2]


# --- memory that ends -----------------------------------------------------------------------------------------------


def guarded(x):
    raw = x.contiguous().view(-1).view(torch.uint8)
    return before_a_guard(raw).view(x.dtype).view(x.shape)


@pytest.mark.parametrize("isa", native.module().supported_isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_nothing_behind_an_array_is_read(isa, dtype):
    gen = generator(2)
    try:
        native.module().force_isa(isa)
        for V, D in ((1, 3), (7, 17), (33, 31), (129, 65), (2051, 2)):
            options = {
                "bias": randn(gen, V), "mask_bits": torch.full((3, -(-V // 32)), -1, dtype=torch.int32),
                "temperature": torch.rand(3), "watch_ids": torch.tensor([V - 1]), "target_ids": torch.tensor([V - 1, -1, 0]),
            }  # fmt: skip
            tight = {name: guarded(x) for name, x in options.items()}
            x, h, w = (randn(gen, *shape, dtype=dtype) for shape in ((3, V), (3, D), (V, D)))
            for got, want in (
                (head.logits_stats(guarded(x), **tight), head.logits_stats(x, **options)),
                (head.lm_head_stats(guarded(h), guarded(w), **tight), head.lm_head_stats(h, w, **options)),
            ):
                for a, b in zip(got[:9], want[:9]):
                    assert_same_bits(a, b)
    finally:
        native.module().force_isa("auto")


# --- a matcher that others change ---------------------------------------------------------------------------------------


def test_chunks_that_change_the_matcher_while_they_are_read():
    matcher = StopMatcher(["ab"])

    class Growing(list):
        def __iter__(self):
            matcher.reorder([0] * 5000)
            return iter([b"ab"] * 5000)

    with pytest.raises(ArgumentError, match=FORMAT):
        matcher.feed(Growing([b"ab"]))
    assert matcher.batch == 5000
    assert not matcher.feed([b"b"] * 5000).matched.any()


def test_a_matcher_whose_batch_changes_under_other_threads():
    """Every call is whole: it works on all rows of the moment, or says that there are not so many."""
    matcher, faults = StopMatcher(["ab"], 8), []

    def work(calls):
        for i in range(1500):
            try:
                calls[i % len(calls)]()
            except ArgumentError:
                pass
            except Exception as error:
                faults.append(error)

    shapes = [lambda n=n: matcher.reorder([0] * n) for n in (1, 2000, 3)]
    others = [
        lambda: matcher.finish([matcher.batch - 1]),
        matcher.finish,
        matcher.reset,
        lambda: matcher.feed([b"a"] * matcher.batch),
    ]
    threads = [threading.Thread(target=work, args=(calls,)) for calls in (shapes, others, others[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert matcher.batch in (1, 2000, 3)
    with pytest.raises(sic.ArgumentError, match="rows from 0 to"):
        matcher.finish([2000])
