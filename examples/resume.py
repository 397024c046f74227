"""A prefill that stops and goes on with the same bits: at a deadline, and in another process after `kill -9`.

    python examples/resume.py

The model is SmolLM2-135M-Instruct (`make demo` sets it up). All that a later segment reads lies in a pool, here a mapped
file; a word of 64 bits in a second file says which layer of which chunk is done. Nothing is saved on the way.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import sic_kernels as sic
from sic_kernels.integrations.replay import ReplayRunner
from sic_kernels.models import load, text

CHUNK = 128  # tokens
TIMEOUT_MS = 600_000  # loading the model in a new process may take longer than the 8.5 s that a cursor is good for


def runner(lm, folder, tokens):
    """Over the two files in `folder`; what another process left there is taken over."""
    pool = sic.replay.MemoryPool(256 << 20, backing=folder / "state.pool")
    word = sic.replay.CursorWord(folder / "state.word")
    return ReplayRunner(lm.model, pool, capacity=tokens + 64, chunk=CHUNK, word=word, timeout_ms=TIMEOUT_MS)


def prefill_and_die(folder, tokens, segments, model):
    """What the first process does: SIGKILL comes after so many segments, from outside all Python."""
    lm, done = load(model or None), 0

    def stop():
        nonlocal done
        done += 1
        if done > segments:
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    runner(lm, folder, tokens).prefill(lm.tokens(text("hamlet"), tokens)[0], stop=stop)


@torch.no_grad()
def main(tokens=512, segments=75, steps=24, model=""):
    lm = load(model or None)
    ids = lm.tokens(text("hamlet"), tokens)[0]
    with tempfile.TemporaryDirectory() as folder:
        first = subprocess.run([sys.executable, __file__, folder, str(tokens), str(segments), model])
        run = runner(lm, Path(folder), tokens)
        print(f"the first process ended by signal {-first.returncode}; {run.plan.explain(run.cursor())}")
        outcome = run.resume(run.cursor(), deadline_ms=200)
        while not outcome.done:
            print(f"stopped at the deadline; {run.plan.explain(outcome.cursor)}")
            outcome = run.resume(outcome.cursor)
        resumed = run.generate(steps)
    plain = ReplayRunner(lm.model, sic.replay.MemoryPool(256 << 20), capacity=tokens + 64, chunk=CHUNK)
    plain.prefill(ids)
    assert resumed == plain.generate(steps)
    print(f"the same text as without a stop: {lm.tokenizer.decode(resumed)!r}")


if __name__ == "__main__":
    if sys.argv[1:]:
        prefill_and_die(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        main()
