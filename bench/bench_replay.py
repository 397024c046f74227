"""Replay: what marks cost, what resuming costs in the same process and after kill -9, against saving and loading the state."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time

import torch
from smollm2 import model, prompt

from sic_kernels import replay
from sic_kernels.cli import _kill, _llama_cpp
from sic_kernels.cli._replay_process import FILES, Job
from sic_kernels.integrations.replay import ReplayRunner
from sic_kernels.replay.cursor_word import RunRecord

TOKENS, CHUNK = 4096, 512
SEGMENTS = 32  # of SmolLM2: embedding, 30 layers, head
KILLED_AT = 4 * SEGMENTS + 16  # the middle of the prefill


def runner(capacity=TOKENS):
    pool = replay.MemoryPool(400 << 20)
    return ReplayRunner(model().model, pool, capacity=capacity, chunk=CHUNK)


def bench_marks(benchmark, fact):
    """A mark alone, and what a plan adds to a decode step: marks, checks, the loop."""
    word = replay.CursorWord()
    word.begin(RunRecord(1, 0, 4096, 512, 0, 0, replay.Fingerprint("m")))
    benchmark.pedantic(lambda: [word.mark(1, 7, 512) for _ in range(1000)], rounds=50, warmup_rounds=2)
    r = runner(1024)
    r.prefill(prompt(512))
    steps, work = [], []
    timed_segments(r, work)
    for _ in range(12):
        del work[:]
        begin = time.perf_counter()
        r.generate(1)
        steps.append((time.perf_counter() - begin, sum(end - start for start, end in work)))
    if benchmark.stats is None:
        return
    mark = benchmark.stats.stats.median / 1000
    step = statistics.median(s for s, _ in steps)
    added = statistics.median(s - w for s, w in steps)
    share = SEGMENTS * mark / step
    fact("a mark of the progress word", f"{1e9 * mark:.0f} ns", ns=1e9 * mark)
    fact(f"{SEGMENTS} marks beside a decode step of SmolLM2", f"{share:.4%} of {1e3 * step:.1f} ms",
         target="< 0.5 %", reached=share < 0.005, share=share)  # fmt: skip
    fact(
        "a whole plan (marks, checks, timing of this benchmark) beside it",
        f"{added / step:.3%} ({1e6 * added:.0f} us)",
        us=1e6 * added,
    )


def timed_segments(r, work):
    """The plan's engine with a clock around each segment's function; `work` gets when each began and ended."""

    def timed(fn):
        def run(step):
            begin = time.perf_counter()
            fn(step)
            work.append((begin, time.perf_counter()))

        return run

    r.plan.engine.segments = tuple(dataclasses.replace(s, fn=timed(s.fn)) for s in r.plan.engine.segments)


def bench_resume_in_process(benchmark, fact):
    """What resuming adds to the missing segments: from its call to the first, from the last to its return; and between them."""
    r, left, work = runner(), [KILLED_AT], []

    def stop():
        left[0] -= 1
        return left[0] < 0

    stopped = r.prefill(prompt(TOKENS), stop=stop)
    assert len(stopped.executed) == KILLED_AT
    timed_segments(r, work)
    overheads, between, cursor = [], [], stopped.cursor
    outcome = None
    while outcome is None or not outcome.done:  # in pieces of one chunk, each a resume
        left[0] = SEGMENTS
        del work[:]
        begin = time.perf_counter()
        outcome = r.resume(cursor, stop=stop)
        end = time.perf_counter()
        overheads.append(work[0][0] - begin + end - work[-1][1])
        between.append((end - begin - overheads[-1] - sum(last - first for first, last in work)) / len(work))
        cursor = getattr(outcome, "cursor", None)
    benchmark.pedantic(r.cursor, rounds=20)
    worst = 1e3 * max(overheads)
    fact(f"resume at mid-prefill of {TOKENS} tokens, same process: overhead beyond the missing work, worst of {len(overheads)}",
         f"{worst:.3f} ms", target="<= 1 ms", reached=worst <= 1, ms=worst)  # fmt: skip
    us = 1e6 * statistics.median(between)
    fact("  between two of its segments, as in any run (this benchmark's clock included)", f"{us:.0f} us", us=us)


def bench_kill_nine(benchmark, fact, absent):
    with tempfile.TemporaryDirectory() as folder:
        model().save(folder)  # a GGUF file takes the new processes many times as long to load
        job, formats = Job("", TOKENS, CHUNK, KILLED_AT, model=folder), (*FILES, *_llama_cpp.STATES)
        found = _kill.kill(job, formats, model(), _kill.LOADS)
    assert found.executed == TOKENS // CHUNK * SEGMENTS - KILLED_AT
    whole = runner(TOKENS + 8)
    whole.prefill(prompt(TOKENS))
    assert whole.generate(8) == found.answer
    benchmark.pedantic(lambda: None, rounds=1)
    fact(f"kill -9 at mid-prefill, a new process: model loaded to first missing segment (median of {_kill.LOADS}, as below)",
         f"{1e3 * found.resumed:.1f} ms",
         ms=1e3 * found.resumed)  # fmt: skip
    for form, seconds in found.loaded.items():
        ratio = seconds / found.resumed
        target = ">= 4.8x (the full state, through a file)" if form == "torch" else ""
        times = f"{1e3 * seconds:.0f} ms ({ratio:.1f}x)"
        if form in found.opening:
            times += f", {1e3 * found.opening[form]:.0f} ms of it to make its context"
        fact(f"the same, from a saved state: {form}", times, target=target, reached=ratio >= 4.8, ms=1e3 * seconds)
    for form, why in found.absent.items():
        absent("llama_cpp", f"the same, from a saved state: {form}", why)
    saved = [f"{form} {found.nbytes[form] >> 20} MiB, {1e3 * s:.0f} ms" for form, s in found.saving.items()]
    fact("what had to be saved before, for those", "; ".join(saved), bytes=found.nbytes)
    fact(
        "the same, everything computed again",
        f"{found.recomputed:.1f} s ({found.recomputed / found.resumed:.0f}x)",
        s=found.recomputed,
    )


def bench_uniform(benchmark, fact):
    """Counter-based random numbers beside torch's own."""
    out = torch.empty(1 << 20)
    replay.uniform((1, 2, 3), out=out)
    assert 0 <= float(out.min()) < 1e-4 < 0.9999 < float(out.max()) < 1
    begin = time.perf_counter()
    for _ in range(20):
        torch.rand(1 << 20, out=out)
    peer = (time.perf_counter() - begin) / 20
    benchmark.pedantic(lambda: replay.uniform((1, 2, 3), out=out), rounds=50, warmup_rounds=2)
    if benchmark.stats is not None:
        us = 1e6 * benchmark.stats.stats.median
        fact("uniform, a million numbers", f"{us:.0f} us ({1e6 * peer / us:.1f}x torch.rand)", us=us)
