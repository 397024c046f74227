"""The processes of a kill: one is killed in the middle of a prefill, one goes on from its pool, one loads a saved state.

    python -m sic_kernels.cli._replay_process prefill '{"folder": ..., "stop": 144, ...}'   waits there for its death
    python -m sic_kernels.cli._replay_process save    '{...}'   the state of the dead one, as files
    python -m sic_kernels.cli._replay_process resume  '{...}'   from pool and progress word
    python -m sic_kernels.cli._replay_process load    '{"format": "torch", ...}'   from a file with the same state

Answers are lines of JSON. Times begin when the model is loaded and end when the first missing segment begins.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from .. import models, replay
from ..integrations.replay import ReplayRunner
from ..replay.cursor_word import RunRecord
from ..replay.engine import Engine

FILES = {"torch": "state.pt", "torch, mmap": "state.pt", "safetensors": "state.safetensors"}
ROOM = 1.6  # of the pool, over keys and values: the other parts, and a margin


@dataclasses.dataclass(frozen=True)
class Job:
    """What the processes of a kill have in common. stop: the segment, over the whole run; answer: tokens written afterwards."""

    folder: str
    tokens: int
    chunk: int
    stop: int = 0
    answer: int = 8
    model: str | None = None
    text: str = "hamlet"
    threads: int = 0
    format: str = ""

    def runner(self, model: Any, backed: bool) -> ReplayRunner:
        config = model.config
        row = (
            2
            * config.num_hidden_layers
            * config.num_key_value_heads
            * (config.hidden_size // config.num_attention_heads)
            * 4
        )
        size = int(ROOM * row * (self.tokens + self.answer)) + (16 << 20)
        place = Path(self.folder)
        pool = replay.MemoryPool(size, backing=place / "pool" if backed else None)
        word = replay.CursorWord(place / "word" if backed else None)
        capacity = self.tokens + self.answer
        return ReplayRunner(
            model, pool, capacity=capacity, chunk=self.chunk, word=word, timeout_ms=10**9, check_model=False
        )

    def file(self, form: str) -> Path:
        return Path(self.folder) / FILES[form]


class Watched:
    """An engine that notes when its first segment begins, and waits for its death before segment `stop`."""

    def __init__(self, engine: Engine, stop: int | None = None) -> None:
        self.engine, self.stop, self.count, self.first = engine, stop, 0, 0.0

    def begin(self, record: RunRecord) -> None:
        self.engine.begin(record)

    def settle(self, at: int) -> int:
        return self.engine.settle(at)

    def run(self, layer: int, position: int, alone: bool = False) -> None:
        if self.count == 0:
            self.first = time.perf_counter()
        if self.count == self.stop:
            say(work=time.perf_counter() - self.first)
            time.sleep(3600)
        self.count += 1
        self.engine.run(layer, position, alone)


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def prefill(job: Job, lm: Any) -> None:
    r = job.runner(lm.model, backed=True)
    say(segments=len(r.plan.segments))
    r.plan.engine = Watched(r.plan.engine, job.stop)
    r.prefill(lm.tokens(models.text(job.text), job.tokens)[0])


def save(job: Job) -> dict[str, Any]:
    """What a process that foresaw its death would have saved."""
    from safetensors.torch import save_file

    seconds, sizes = {}, {}
    with replay.MemoryPool.attach(Path(job.folder) / "pool") as pool:
        # copies: torch.save writes all of the memory that a tensor is a view of
        state = {str(block.name).removeprefix("run."): block.tensor.clone() for block in pool.blocks()}
        for form, write in (("torch", torch.save), ("safetensors", save_file)):
            begin = time.perf_counter()
            write(state, str(job.file(form)))
            seconds[form] = time.perf_counter() - begin
            sizes[form] = job.file(form).stat().st_size
    return {"saving": seconds, "nbytes": sizes}


def resume(job: Job, lm: Any) -> dict[str, Any]:
    begin = time.perf_counter()
    r = job.runner(lm.model, backed=True)
    watched = r.plan.engine = Watched(r.plan.engine)
    outcome = r.resume(r.cursor())
    return {"first": watched.first - begin, "executed": len(outcome.executed), "answer": r.generate(job.answer)}


def load(job: Job, lm: Any) -> dict[str, Any]:
    """Into the cache of a runner that is there."""
    begin = time.perf_counter()
    r = job.runner(lm.model, backed=False)
    if job.format == "safetensors":
        from safetensors.torch import load_file

        state = load_file(str(job.file(job.format)))
    else:
        state = torch.load(job.file(job.format), mmap="mmap" in job.format, weights_only=True)
    for name, x in state.items():
        r.plan.tensors[name].copy_(x)
    return {"first": time.perf_counter() - begin}


def main(what: str, options: str) -> None:
    job = Job(**json.loads(options))
    if job.threads:
        torch.set_num_threads(job.threads)
    if what == "save":
        return say(**save(job))
    begin = time.perf_counter()
    lm = models.load(job.model)
    say(loading=time.perf_counter() - begin)
    if what == "prefill":
        return prefill(job, lm)
    say(**{"resume": resume, "load": load}[what](job, lm))


if __name__ == "__main__":
    main(*sys.argv[1:])
