"""A prefill that is killed with SIGKILL and goes on in another process; beside it, what a saved state and computing anew cost."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ..runtime.errors import SicError
from ._replay_process import FILES, Job, load, save

LOADS = 3  # times that a state is loaded; the quickest counts


@dataclasses.dataclass(frozen=True)
class Killed:
    """Seconds from the loaded model to the first missing segment: `resumed`, `loaded` by format, `recomputed`; `saving` by format
    and `nbytes` are what loading needs beforehand. `executed`: segments that the second process ran; `answer`: its greedy tokens.
    """

    resumed: float
    loaded: dict[str, float]
    recomputed: float
    saving: dict[str, float]
    nbytes: int
    executed: int
    answer: list[int]
    loading: float  # of the model, which all of them need

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def kill(job: Job, formats: tuple[str, ...] = tuple(FILES), lm: Any = None) -> Killed:
    """Starts, kills and starts again, in a folder made in `job.folder` ("": the usual place) that is then gone.

    lm: the loaded model; saved states are then saved and loaded in this process, which is quicker. None: in new ones.
    """
    with tempfile.TemporaryDirectory(dir=job.folder or None) as folder:
        job = dataclasses.replace(job, folder=folder)
        work = _killed(job)
        state = save(job) if lm is not None else _said("save", job)
        loads = {form: _loaded(dataclasses.replace(job, format=form), lm) for form in formats}
        last = _said("resume", job)
    return Killed(
        last["first"], loads, work, state["saving"], state["nbytes"], last["executed"], last["answer"], last["loading"]
    )


def _loaded(job: Job, lm: Any) -> float:
    """The quickest of some loads."""
    return min((load(job, lm) if lm is not None else _said("load", job))["first"] for _ in range(LOADS))


def _process(what: str, job: Job) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "sic_kernels.cli._replay_process", what, json.dumps(dataclasses.asdict(job))]
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def _killed(job: Job) -> float:
    """Kills a prefill where it waits for it; the seconds that it had worked."""
    process = _process("prefill", job)
    assert process.stdout is not None
    for line in process.stdout:
        if "work" in (said := json.loads(line)):
            process.kill()
            process.wait()
            return said["work"]
    raise SicError(f"the process that was to be killed ended by itself: {process.communicate()[1][-2000:]}")


def _said(what: str, job: Job) -> dict[str, Any]:
    """All that a process says, which ends by itself."""
    process = _process(what, job)
    text, errors = process.communicate()
    if process.returncode:
        raise SicError(f"{what}: ended with status {process.returncode}: {errors[-2000:]}")
    return {key: value for line in text.splitlines() for key, value in json.loads(line).items()}
