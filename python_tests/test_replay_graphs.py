"""Plans as CUDA graphs, on the emulator: the library's own ops in captured segments, stopped anywhere and resumed by both
strategies; what was launched, what cannot be captured."""

import dataclasses
import gc
import threading

import pytest
import torch
from graph_helpers import (
    CHUNK,
    LAYERS,
    RUN,
    TOKENS,
    TOTAL,
    after,
    assert_equal,
    buffers,
    by_strategy,
    launches,
    live,
    plan,
    results,
    segments,
    uninterrupted,
    warm,
)

from sic_kernels import ArgumentError, BackendError, SicError, replay
from sic_kernels.replay import Segment
from sic_kernels.replay.faults import Clock
from sic_kernels.replay.graph_engine import KEPT
from sic_kernels.runtime import metrics, native

pytestmark = [pytest.mark.backend("simt"), pytest.mark.usefixtures("simt")]


# --- the same bits ----------------------------------------------------------------------------------------------------


@by_strategy
def test_captured_segments_give_the_bits_of_called_ones(strategy, simt):
    """At other positions, seeds and ends than those of the capture, in any order of threads."""
    p = plan(strategy=strategy)
    for schedule, run in (
        ("forward", {}), ("forward", {}), ("reverse", {"seed": 2**64 - 1}), ("random", {"seed": 7}),
        ("forward", {"begin": 4, "end": 12, "rows_given": True}),
        ("forward", {"end": 10}), ("random", {"end": 10}), ("forward", {"chunk": 2}),
    ):  # fmt: skip
        simt.set_schedule(schedule)
        for x in p.tensors.values():
            if x.dtype == torch.float32:
                x.zero_()
        got = p.run(**{**RUN, **run})
        assert got.done
        assert len(got.executed) == LAYERS * -(
            -({**RUN, **run}["end"] - run.get("begin", 0)) // run.get("chunk", CHUNK)
        )
        assert_equal(results(p), uninterrupted(**run), f"{strategy}, {run}")


@by_strategy
def test_a_chunk_costs_few_calls(strategy, simt, kernels):
    """One launch for what is new on the device, then a graph for each segment, or for all. Nothing is allocated or copied."""
    p = warm(plan(strategy=strategy))
    before = simt.counters()
    assert p.run(**RUN).done
    made = {key: value - before[key] for key, value in simt.counters().items()}
    chunks = TOKENS // CHUNK
    assert made["graph_launches"] == chunks * (LAYERS if strategy == "segments" else 1)
    assert made["launches"] == chunks * (1 + sum(kernels) + LAYERS)  # the step, the segments, their marks
    # Each launch waits until at most two are under way, and the end for the rest.
    assert made["synchronisations"] == made["graph_launches"]
    assert not any(made[key] for key in ("allocations", "frees", "copies", "fills", "live_bytes", "live_graphs"))


# --- stops and resumes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", range(TOTAL))
@pytest.mark.parametrize("first_run", [True, False])
def test_stopped_after_every_segment_and_resumed(k, first_run, simt, kernels):
    """The suffix runs, and nothing else does: whether segments are called for the first time or replayed."""
    p = plan() if first_run else warm(plan())
    stopped = p.run(**RUN, stop=after(k))
    assert (stopped.done, stopped.reason, len(stopped.executed)) == (False, "stop", k)
    assert (stopped.cursor.layer, stopped.cursor.position) == (k % LAYERS, k // LAYERS * CHUNK)
    assert (p.cursor().layer, p.cursor().position) == (stopped.cursor.layer, stopped.cursor.position)
    launched, graphs = launches(simt, lambda: p.resume(stopped.cursor))
    rest = [i % LAYERS for i in range(k, TOTAL)]
    assert launched == -(-len(rest) // LAYERS) + sum(kernels[i] + 1 for i in rest)
    new = max(0, LAYERS - k) if first_run else 0  # segments that are called, as they never ran
    assert graphs == len(rest) - new
    assert_equal(results(p), uninterrupted(), f"stopped after {k}")


def test_stopped_by_a_deadline():
    """The clock is the plan's; the segment that is being launched when it passes is the last."""
    clock = Clock()
    slow = [dataclasses.replace(s, fn=lambda step, s=s: (clock.advance(1), s.fn(step))) for s in segments()]
    want = uninterrupted()
    p = plan(segments=slow, word=replay.CursorWord(clock=clock))
    stopped = p.run(**RUN, deadline_ms=5)  # each is called twice the first time
    assert (stopped.reason, len(stopped.executed)) == ("deadline", 3)
    clock.advance(8499)
    outcome = p.resume(stopped.cursor)
    assert outcome.done
    assert_equal(results(p), want)
    stopped = p.run(**RUN, deadline_ms=0)
    assert (stopped.reason, len(stopped.executed)) == ("deadline", 0)
    clock.advance(8500)
    with pytest.raises(replay.CursorExpired):
        p.resume(stopped.cursor)


@pytest.mark.parametrize("k", range(TOTAL))
def test_one_graph_resumes_what_graphs_of_segments_began(k, simt, kernels):
    """Nodes before the cursor are switched off for one launch, and are on again in the next chunk and the next run."""
    want, word, own = uninterrupted(), replay.CursorWord(), buffers()
    one, other = plan(word=word, buffers=own), warm(plan(word=word, buffers=own, strategy="mask"))
    for x in (own["keys"], own["values"], own["out"]):
        x.zero_()
    stopped = one.run(**RUN, stop=after(k))
    launched, graphs = launches(simt, lambda: other.resume(stopped.cursor))
    rest = [i % LAYERS for i in range(k, TOTAL)]
    assert graphs == -(-len(rest) // LAYERS)
    assert launched == graphs + sum(kernels[i] + 1 for i in rest)
    assert_equal(results(other), want, f"resumed after {k}")
    launched, graphs = launches(simt, lambda: other.run(**RUN))
    assert launched == TOKENS // CHUNK * (1 + sum(kernels) + LAYERS)
    assert_equal(results(other), want, "run again")


def test_one_graph_stops_between_chunks():
    """What was launched is done: the cursor says so."""
    want, p = uninterrupted(), warm(plan(strategy="mask"))
    stopped = p.run(**RUN, stop=after(LAYERS + 2))
    assert len(stopped.executed) == 2 * LAYERS
    assert (stopped.cursor.layer, stopped.cursor.position) == (0, 2 * CHUNK)
    assert p.resume(stopped.cursor).done
    assert_equal(results(p), want)
    last = p.run(**RUN, stop=after(TOTAL - 1))
    assert last.done  # the last chunk had been launched when the stop came


@by_strategy
def test_interrupted_again_and_again(strategy):
    want, p = uninterrupted(), plan(strategy=strategy)
    for k in (3, 1, 2, 7):
        outcome = p.run(**RUN, stop=after(k))
        while not outcome.done:
            outcome = p.resume(outcome.cursor, stop=after(k))
        assert_equal(results(p), want, f"every {k}")


@by_strategy
def test_launches_are_counted(strategy):
    """The first chunk calls each segment; then each is a launch, or all are one."""
    metrics.reset()
    warm(plan(strategy=strategy))
    replays = (TOKENS // CHUNK - 1) * (LAYERS if strategy == "segments" else 1)
    assert metrics.get("sic_graph_replay_ratio").read()[""] == metrics.Value(replays, replays + LAYERS)


def test_a_stop_from_another_thread():
    stop = threading.Event()
    p = warm(plan())
    stop.set()
    stopped = p.run(**RUN, stop=stop)
    assert (stopped.reason, len(stopped.executed)) == ("stop", 0)


def test_a_keyboard_interrupt_passes_through():
    want, p, calls = uninterrupted(), warm(plan()), iter([False] * 7)

    def stop():
        for value in calls:
            return value
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        p.run(**RUN, stop=stop)
    assert (p.cursor().layer, p.cursor().position) == (7 % LAYERS, CHUNK)
    assert p.resume(p.cursor()).done
    assert_equal(results(p), want)


# --- captures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["position", "end", "seed", "epoch"])
def test_what_the_host_knows_of_a_step_is_refused(what):
    """It would be the same in every replay."""

    def bad(step):
        getattr(step, what)

    p = plan(segments=[*segments(), Segment("bad", bad)])
    with pytest.raises(replay.PlanError, match=rf"segment 'bad': host_value: Step\.{what} would be the same") as error:
        p.run(**RUN)
    assert error.value.hazard == "host_value"
    assert p.cursor().layer == LAYERS
    with pytest.raises(replay.PlanError):
        p.resume(p.cursor())


@by_strategy
def test_what_a_step_offers_is_the_same_everywhere(strategy):
    """Positions, length and count, from the host and from the device."""
    seen = []

    def look(step):
        seen.append((step.layer, step.count, step.positions.tolist(), step.length.tolist()))

    for backend in ("cpu", "simt"):
        seen.append(backend)
        both = [Segment("look", look), Segment("again", look)]
        plan(backend, strategy=strategy, segments=both).run(begin=3, end=8, chunk=3)
    cut = seen.index("simt")
    on_host, on_device = seen[1:cut], seen[cut + 1 :]
    assert on_host[0] == (0, 3, [3, 4, 5], [6])
    assert on_host[-1] == (1, 2, [6, 7], [8])
    assert [x for i, x in enumerate(on_device) if x not in on_device[:i]] == on_host


def test_garbage_is_not_collected_during_a_capture():
    """Memory that a device has mapped is in it: to give that back would make the capture void."""
    plans, before = [plan() for _ in range(2)], gc.get_threshold()

    def litter(step):
        step.uniform(step["u"])
        if plans:
            knot = [plans.pop()]
            knot.append(knot)
            del knot
            assert [[] for _ in range(100)]  # enough for a collection

    p = plan(segments=[Segment("litter", litter, writes=["u"])], outputs=["u"])
    gc.set_threshold(1, 1, 1)
    try:
        assert p.run(end=CHUNK).done
    finally:
        gc.set_threshold(*before)
    assert plans == []
    assert gc.isenabled()


def test_a_segment_that_waits_cannot_be_captured(simt):
    simt.set_device_checks(True)  # reads slots back
    stopped = plan().run(**RUN)
    assert (stopped.reason, stopped.cursor.layer) == ("exception", 2)
    assert isinstance(stopped.error, BackendError)
    assert "while a graph is captured" in str(stopped.error)


def test_graphs_of_many_sizes(simt):
    """Those of the sizes used last are kept; a plan that is gone leaves nothing."""
    held, graphs = live(simt)
    only = Segment("draw", lambda step: step.uniform(step["u"][: step.count]), writes=["u"])
    p = plan(segments=[only], buffers={"u": torch.zeros(64)}, inputs=[], outputs=["u"])
    for chunk in range(1, KEPT + 4):
        for _ in range(2):
            assert p.run(chunk=chunk, end=2 * chunk).done
    assert live(simt) == [held + 4096, graphs + 2 * KEPT]  # the page of the word; a graph, and it as an executable
    del p
    assert live(simt) == [held, graphs]


@by_strategy
def test_the_hazards_are_found_of_segments_for_graphs(strategy):
    assert plan(strategy=strategy).verify(end=CHUNK) == []


# --- what cannot be used ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_plan_for_a_gpu_that_is_not_there():
    with pytest.raises(BackendError, match=r"^ReplayPlan.capture: backend 'cuda' cannot be used: "):
        plan("cuda")


def test_buffers_elsewhere():
    mixed = buffers() | {"extra": torch.zeros(1, device="meta")}
    with pytest.raises(ArgumentError, match="a dense tensor with memory for each element"):
        plan(buffers=mixed)


def test_without_cuda_kernels_there_are_no_graphs():
    module = native.module()
    if module.has_cuda():
        pytest.skip("this build has them")
    for call in (lambda: module.Graph(lambda: None), lambda: module.DeviceProgress(0, 0, None), module.forget_errors):
        with pytest.raises(SicError, match="this build has no CUDA kernels"):
            call()
