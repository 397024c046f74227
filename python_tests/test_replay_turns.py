"""Calls of one plan from several threads, from within a segment, after a fork, interrupted: one at a time, none for ever."""

import dataclasses
import os
import threading
import time

import pytest
from replay_helpers import CHUNK, LAYERS, RUN, assert_state, inputs, plan, segments, state

from sic_kernels.replay import faults
from sic_kernels.replay.engine import CpuEngine
from sic_kernels.runtime import metrics
from sic_kernels.runtime.errors import SicError


def test_eight_threads():
    """Each with a plan of its own, and all with one plan, 200 calls each: calls of one plan wait for each other."""
    shared, problems, one = plan(), [], {"end": CHUNK}
    shared.run(inputs(), **one)
    want = state(shared)

    def work(own, n):
        try:
            for i in range(67):
                with faults.stop_at(own, (n + i) % (LAYERS + 2)):
                    stopped = own.run(inputs(), **one)
                assert own.resume(stopped.cursor).done
                assert_state(own, want)
                assert shared.run(inputs(), **one).done
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(plan(), n)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert problems == []
    assert_state(shared, want)


def test_not_from_within():
    holder = []
    parts = segments()
    parts[0] = dataclasses.replace(parts[0], fn=lambda step: holder[0].run(inputs(), **RUN))
    holder.append(plan(segments=parts))
    stopped = holder[0].run(inputs(), **RUN)
    assert "from within a segment" in str(stopped.error)


def joined(call, options):
    """A plan whose second segment waits for a thread that makes a call of the same plan; what the thread raised."""
    holder, raised = [], []
    parts = segments()

    def work():
        try:
            call(holder[0])
        except SicError as error:
            raised.append(error)

    def waits(step):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        parts[1].fn(step)

    holder.append(plan(segments=[parts[0], dataclasses.replace(parts[1], fn=waits), *parts[2:]], **options))
    return holder[0], raised


@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("run", lambda p: p.run(inputs(), **RUN)),
        ("resume", lambda p: p.resume(p.cursor())),
        ("verify", lambda p: p.verify(inputs())),
    ],
)
def test_a_thread_that_a_segment_waits_for_gives_up(op, call, caplog):
    """Else it would hang for ever. The run goes on as if nobody had called."""
    metrics.reset()
    p, raised = joined(call, {"timeout_ms": 40})
    assert p.run(inputs(), end=CHUNK).done
    expected = f"ReplayPlan.{op}: another call of the plan has finished no segment for 40 ms"
    assert [str(error).startswith(expected) for error in raised] == [True]
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    assert metrics.get("sic_plan_wait_timeout_ratio").read()[""] == metrics.Value(1, 1)


def test_a_call_waits_for_one_that_gets_on(want):
    """However long that takes: 20 segments of 60 ms, and less than 1000 ms without a mark."""
    metrics.reset()
    parts = [dataclasses.replace(s, fn=lambda step, fn=s.fn: (time.sleep(0.06), fn(step))) for s in segments()]
    p, outcomes, running = plan(segments=parts, timeout_ms=1000), [], threading.Event()
    first = threading.Thread(target=lambda: p.run(inputs(), **RUN, stop=lambda: running.set() or False))
    first.start()
    running.wait()
    outcomes.append(p.run(inputs(), **RUN))
    first.join()
    assert outcomes[0].done
    assert_state(p, want)
    assert metrics.get("sic_plan_wait_timeout_ratio").read()[""] == metrics.Value(0, 1)


def test_verify_gets_on_too():
    """Each segment is called again and again, 1 second in all: a call that waits sees that."""
    metrics.reset()
    parts = [dataclasses.replace(s, fn=lambda step, fn=s.fn: (time.sleep(0.02), fn(step))) for s in segments()]
    p, looking = plan(segments=parts, timeout_ms=400), threading.Event()
    p.engine = CpuEngine(segments(), p.tensors, p.word)  # only verify is slow
    found = []
    first = threading.Thread(target=lambda: (looking.set(), found.append(p.verify(inputs(), end=CHUNK))))
    first.start()
    looking.wait()
    time.sleep(0.02)
    assert p.run(inputs(), **RUN).done
    first.join()
    assert found == [[]]
    assert metrics.get("sic_plan_wait_timeout_ratio").read()[""] == metrics.Value(0, 1)


class InterruptedLock:
    """A lock; KeyboardInterrupt comes right after it has been taken, or right after it could not be."""

    def __init__(self, lock):
        self.lock, self.release = lock, lock.release

    def acquire(self, **options):
        self.lock.acquire(**options)
        raise KeyboardInterrupt


@pytest.mark.parametrize("free", [True, False])
def test_an_interrupt_while_a_call_takes_its_turn(free):
    """Leaves the plan to others, and to whoever has it."""
    p = plan(timeout_ms=100)
    turns, lock = p._turns, p._turns._lock
    holds, leave = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: turns.take("other", lambda: (holds.set(), leave.wait(10))))
    if not free:
        other.start()
        holds.wait()
    turns._lock = InterruptedLock(lock)
    with pytest.raises(KeyboardInterrupt):
        p.run(inputs(), **RUN)
    turns._lock = lock
    if not free:
        with pytest.raises(SicError, match="no segment for 100 ms"):
            p.run(inputs(), **RUN)
        leave.set()
        other.join()
    outcomes = []
    later = threading.Thread(target=lambda: outcomes.append(p.run(inputs(), **RUN)))
    later.start()
    later.join()
    assert [outcome.done for outcome in outcomes] == [True]


def test_not_after_a_fork():
    p = plan()
    child = os.fork()
    if child == 0:
        try:
            p.run(inputs(), **RUN)
        except SicError as error:
            os._exit(7 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert p.run(inputs(), **RUN).done
