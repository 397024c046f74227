"""Plans as CUDA graphs, on the emulator, under faults: cut off anywhere, damaged words, the death of a process, a lost device,
failed captures."""

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys

import pytest
from graph_helpers import (
    CHUNK,
    LAYERS,
    RUN,
    TOKENS,
    TOTAL,
    after,
    append,
    assert_equal,
    buffers,
    by_strategy,
    keep,
    launches,
    live,
    plan,
    results,
    segments,
    uninterrupted,
    warm,
)

from sic_kernels import replay
from sic_kernels.replay.faults import MOMENTS, campaign, stop_at
from sic_kernels.runtime import metrics, native

pytestmark = [pytest.mark.backend("simt"), pytest.mark.usefixtures("simt")]


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
def test_faults_are_no_launches_without_a_graph(strategy):
    """Neither segments that raise nor those that are run by themselves to be cut off pull the ratio down."""
    p = warm(plan(strategy=strategy))
    metrics.reset()
    assert campaign(p, {}, count=10, seed=3, end=TOKENS, chunk=CHUNK).failures == []
    replays = metrics.get("sic_graph_replay_ratio").read()[""]
    assert replays.numerator == replays.denominator > 0
    metrics.reset()
    raising = [dataclasses.replace(segments()[0], fn=lambda step: 1 // 0), *segments()[1:]]
    assert plan(strategy=strategy, segments=raising).run(**RUN, retries=3).reason == "exception"
    assert metrics.get("sic_graph_replay_ratio").read()[""].denominator == 0


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
    code = f"import sys; sys.path.insert(0, {tests!r}); import test_replay_graph_faults as t"
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
