"""Plans as CUDA graphs, on the emulator: the library's own ops in captured segments, stopped anywhere and resumed by both
strategies; what was launched, what a lost device and failed captures leave behind."""

import dataclasses
import functools
import gc
import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest
import torch
from replay_helpers import FINGERPRINT, state

from sic_kernels import ArgumentError, BackendError, SicError, replay, slicing
from sic_kernels.replay import Rows, Segment
from sic_kernels.replay.faults import MOMENTS, Clock, campaign, stop_at
from sic_kernels.replay.graph_engine import KEPT
from sic_kernels.runtime import metrics, native
from sic_kernels.testing import assert_same_bits

pytestmark = pytest.mark.backend("simt")

CHUNK, TOKENS, HEADS, D = 4, 16, 2, 32  # the caches have one page
RUN = {"end": TOKENS, "chunk": CHUNK, "seed": 5}
by_strategy = pytest.mark.parametrize("strategy", ["segments", "mask"])


@pytest.fixture(autouse=True)
def simt():
    """Checks of device values would wait for the device, which no capture allows."""
    module = native.simt_module()
    module.set_device_checks(False)
    yield module
    module.set_device_checks(True)
    module.set_schedule("forward")


# --- a small model of the library's own ops ---------------------------------------------------------------------------


def buffers():
    rows, cache = (CHUNK, HEADS, D), (1, HEADS, TOKENS, D)
    x = {"table": torch.zeros(1, 1, dtype=torch.int32), "bias": torch.zeros(1, TOKENS)}
    x |= {name: torch.zeros(rows) for name in ("u", "v", "o")} | {"lse": torch.zeros(CHUNK, HEADS)}
    return x | {name: torch.zeros(cache) for name in ("keys", "values", "out", "drawn")}


def draw(name):
    return Segment(f"draw {name}", lambda step: step.uniform(step[name][: step.count]), writes=[name], rng=True)


def append(step):
    u, v = (step[name][: step.count] for name in ("u", "v"))
    slicing.append_kv(u, v, step["keys"], step["values"], step.positions, backend="simt")


def attend(step):
    n = step.count
    out = step["o"][None, :n], step["lse"][None, :n]
    cache = step["keys"], step["values"], step["table"], step.length
    slicing.sliced_attention(step["u"][None, :n], *cache, key_bias=step["bias"], out=out, backend="simt")


def keep(step):
    o = step["o"][: step.count]
    slicing.append_kv(o, step["u"][: step.count], step["out"], step["drawn"], step.positions, backend="simt")


def segments():
    return [
        draw("u"),
        draw("v"),
        Segment("append", append, reads=["u", "v"], rows=[Rows("keys", 2), Rows("values", 2)]),
        Segment("attend", attend, reads=["u", "keys", "values", "table", "bias"], writes=["o", "lse"]),
        Segment("keep", keep, reads=["o", "u", "lse"], rows=[Rows("out", 2), Rows("drawn", 2)]),
    ]


LAYERS = len(segments())
TOTAL = LAYERS * TOKENS // CHUNK


def plan(backend="simt", **options):
    given = {"buffers": buffers(), "fingerprint": FINGERPRINT, "inputs": ["bias"], "backend": backend, **options}
    return replay.ReplayPlan.capture(given.pop("segments", None) or segments(), **given)


def results(p):
    return {name: x for name, x in state(p).items() if name not in p.inputs}


def assert_equal(got, want, what=""):
    for name in want:
        assert_same_bits(got[name], want[name], f"{what} {name}")


@functools.cache
def uninterrupted(**run):
    """The results of a run whose segments are only called, each once a chunk."""
    p = plan("cpu")
    assert p.run(**{**RUN, **run}).done
    return results(p)


def after(n):
    """A function that asks for a stop once n segments have begun."""
    left = iter(range(n))
    return lambda: next(left, None) is None


def launches(simt, function):
    """Kernels and graphs that a call of it launched."""
    before = simt.counters()
    function()
    now = simt.counters()
    return now["launches"] - before["launches"], now["graph_launches"] - before["graph_launches"]


def live(simt):
    """Bytes and graphs of the device that nobody has given back, without what only waits to be collected."""
    gc.collect()
    return [simt.counters()[key] for key in ("live_bytes", "live_graphs")]


@pytest.fixture
def kernels(simt):
    """How many kernels each segment launches; what is drawn is one."""
    step = replay.Step(plan("cpu").tensors, 0, 1)
    step.count = CHUNK
    called = [launches(simt, lambda fn=fn: fn(step))[0] for fn in (append, attend, keep)]
    return [1, 1, *called]


def warm(p):
    """A run that calls and captures everything."""
    assert p.run(**RUN).done
    return p


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
def test_random_interruptions(strategy):
    """Before a segment, in the middle of its writing, before and after its mark; up to three in a run."""
    report = campaign(warm(plan(strategy=strategy)), {}, count=100, seed=3, end=TOKENS, chunk=CHUNK)
    assert report.failures == []
    assert report.runs == 100 < report.interruptions


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("k", range(LAYERS, 2 * LAYERS))
def test_one_graph_resumes_where_it_was_cut_off(k, moment, simt):
    """Between two of its segments, or in one: the chunk before and what is resumed are one launch each."""
    p, first = warm(plan(strategy="mask")), k + (moment == "after")
    with stop_at(p, k, moment):
        assert launches(simt, lambda: p.run(**RUN))[1] == 1
    assert (p.cursor().layer, p.cursor().position) == (first % LAYERS, first // LAYERS * CHUNK)
    assert launches(simt, lambda: p.resume(p.cursor()))[1] == TOKENS // CHUNK - first // LAYERS
    assert_equal(results(p), uninterrupted())


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


def test_a_segment_that_raises_is_retried_or_stops_the_run():
    failures = []

    def sometimes(step):
        if failures:
            raise failures.pop()
        keep(step)

    p = plan(segments=[*segments()[:-1], dataclasses.replace(segments()[-1], fn=sometimes)])
    failures[:] = [OSError("a"), OSError("b")]
    stopped = p.run(**RUN, retries=1)
    assert (stopped.reason, str(stopped.error), stopped.cursor.layer) == ("exception", "a", LAYERS - 1)
    assert p.resume(stopped.cursor).done
    assert_equal(results(p), uninterrupted())


def test_a_torn_word_is_refused():
    p, calls = warm(plan()), iter(range(3))

    def tear():
        if next(calls, None) is None:
            p.word.set_raw(bytes(4) + p.word.raw()[4:])
            return True
        return False

    with pytest.raises(replay.StaleCursor, match="progress word"):
        p.run(**RUN, stop=tear)
    with pytest.raises(replay.StaleCursor):
        p.cursor()


def test_a_word_ahead_of_the_run_is_refused():
    p, calls = warm(plan()), iter(range(3))

    def forge():
        if next(calls, None) is None:
            p.word.mark(p.word.read()[0].epoch, 2, 2 * CHUNK)
            return True
        return False

    with pytest.raises(replay.StaleCursor, match="12 segments done, but 3 of the run were launched"):
        p.run(**RUN, stop=forge)


# --- the death of a process -------------------------------------------------------------------------------------------


def filed(folder, **options):
    """A plan whose buffers and word are in files of the folder; of a new file they are zero."""
    pool = replay.MemoryPool(1 << 20, backing=folder / "pool")
    if pool.blocks():
        own = {name: pool.block(name) for name in buffers()}
    else:
        own = {name: pool.alloc(tuple(x.shape), x.dtype, name=name) for name, x in buffers().items()}
        for block in own.values():
            block.tensor.zero_()
    return plan(buffers=own, word=replay.CursorWord(folder / "word"), timeout_ms=600_000, **options)


def run_until_killed(folder, strategy, k):
    """Runs in a process of its own. The results of its first run are those of another seed."""
    native.simt_module().set_device_checks(False)
    p, stop = filed(pathlib.Path(folder), strategy=strategy), after(k)
    assert p.run(**{**RUN, "seed": 6}).done
    p.run(**RUN, stop=lambda: stop() and os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.parametrize("resumed_by", ["segments", "mask"])
@pytest.mark.parametrize("strategy, k, done", [("segments", 2, 2), ("segments", 13, 13), ("mask", 7, 10)])
def test_another_process_goes_on_where_one_was_killed(strategy, k, done, resumed_by, simt, kernels, tmp_path):
    """From the word and the buffers in their files; one graph of all segments had been launched with its whole chunk."""
    tests = os.path.dirname(__file__)
    code = f"import sys; sys.path.insert(0, {tests!r}); import test_replay_graphs as t"
    code += f"; t.run_until_killed({str(tmp_path)!r}, {strategy!r}, {k})"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    want, p, rest = uninterrupted(), filed(tmp_path, strategy=resumed_by), [i % LAYERS for i in range(done, TOTAL)]
    cursor = p.cursor()
    assert (cursor.layer, cursor.position) == (done % LAYERS, done // LAYERS * CHUNK)
    launched, _ = launches(simt, lambda: p.resume(cursor))
    assert launched == -(-len(rest) // LAYERS) + sum(kernels[i] + 1 for i in rest)
    assert p.cursor() is None
    assert_equal(results(p), want)


# --- a lost device ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["called", "segments", "mask"])
def test_an_illegal_access_poisons_the_context(strategy):
    """The message names the segment that was running, and everything is refused from then on."""
    p = plan(strategy="mask" if strategy == "mask" else "segments")
    if strategy != "called":
        warm(p)
    stopped = p.run(**RUN, stop=after(LAYERS if strategy == "mask" else 2))
    p.tensors["table"][0, 0] = 1 << 20  # a page that the cache does not have
    said = r"^segment 'attend': at token \d+: .*(out of bounds|illegal memory)"
    with pytest.raises(replay.ContextPoisoned, match=said):
        p.resume(stopped.cursor)
    place = p.word.read()[1]
    assert (place.layer, place.position) == (3, CHUNK if strategy == "mask" else 0)
    p.tensors["table"][0, 0] = 0
    for refused in (lambda: p.run(**RUN), lambda: p.resume(place)):
        with pytest.raises(replay.ContextPoisoned, match="'attend'"):
            refused()


def test_an_engine_refuses_after_a_loss():
    p = warm(plan())
    p.tensors["table"][0, 0] = 1 << 20
    with pytest.raises(replay.ContextPoisoned):
        p.run(**RUN)
    with pytest.raises(replay.ContextPoisoned, match="at token 0"):
        p.engine.begin(p.word.read()[0])


def test_an_error_that_others_left_is_logged(caplog):
    """And not blamed on a segment of the run."""
    p, other = warm(plan()), plan()
    other.tensors["table"][0, 0] = 1 << 20
    with pytest.raises(replay.ContextPoisoned):
        other.run(**RUN)
    for logged in (1, 0):
        caplog.clear()
        assert p.run(**RUN).done
        message = "a CUDA call before this run had failed, and nobody had asked: "
        assert sum(x.startswith(message) for x in caplog.messages) == logged


HOST_FUNCTION = """
import threading, time
from sic_kernels import replay
from sic_kernels.runtime import native

def host():  # gives the GIL up, and needs it again
    running.set()
    time.sleep(0.1)

simt, word, running = native.simt_module(), replay.CursorWord(), threading.Event()
graph = simt.Graph(lambda: simt.add_host_function(host))
held = [simt.DeviceProgress(word.address, 0, word)]
held[0].launched(0, 1)
for wait in (lambda: held[0].check_alive(0), lambda: held[0].wait(0), lambda: held[0].launched(0, 2), held.clear):
    running.clear()
    thread = threading.Thread(target=graph.replay)
    thread.start()
    running.wait()
    wait()
    thread.join()
"""


def test_host_functions_of_a_graph_can_have_the_gil():
    """While another thread waits for the device, also because it drops what is under way. A process that hangs is killed."""
    subprocess.run([sys.executable, "-c", HOST_FUNCTION], check=True, timeout=60)


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


@by_strategy
def test_failed_captures_leave_nothing(strategy, simt):
    """A hundred of them; the error is the segment's own, and the segment is not done."""
    calls = []

    def fails(step):
        """Where it is called to be captured: every second time, or every time but the first."""
        calls.append(1)
        if len(calls) > 1 and (strategy == "mask" or len(calls) % 2 == 0):
            raise KeyError("captured")
        append(step)

    p = plan(strategy=strategy, segments=[*segments()[:2], dataclasses.replace(segments()[2], fn=fails)])
    p.run(end=CHUNK)
    before = live(simt)
    for _ in range(100):
        stopped = p.run(end=CHUNK)
        assert (stopped.reason, stopped.error.args) == ("exception", ("captured",))
        assert stopped.cursor.layer == (0 if strategy == "mask" else 2)
    assert live(simt) == before


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
