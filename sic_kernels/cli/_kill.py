"""A prefill that is killed with SIGKILL and goes on in another process; beside it, what a saved state and computing anew cost."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

from .. import models
from ..runtime.errors import SicError
from . import _llama_cpp
from ._coders import NotHere
from ._replay_process import FILES, Job, load, save

LOADS = 3  # times that a state is loaded; the median counts
TIMEOUT = 600  # seconds for each process


@dataclasses.dataclass(frozen=True)
class Saved:
    """States saved and loaded, by format. Seconds from the loaded model to the first missing segment: `loaded`.

    `opening`: the part of `loaded` in which llama.cpp makes its context. `saving`, `nbytes`, of each file: what loading needs
    beforehand. `absent`: why a format was not measured.
    """

    loaded: dict[str, float]
    opening: dict[str, float]
    saving: dict[str, float]
    nbytes: dict[str, int]
    absent: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Killed(Saved):
    """Also seconds to the first missing segment: `resumed`; `recomputed`, by doing again all that had been done.

    `executed`: segments that the second process ran; `answer`: its greedy tokens.
    """

    resumed: float
    recomputed: float
    executed: int
    answer: list[int]
    loading: float  # of the model, which all of them need

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def kill(
    job: Job, formats: tuple[str, ...] = tuple(FILES), lm: models.LanguageModel | None = None, times: int = 1
) -> Killed:
    """Starts, kills and starts again, in a folder made in `job.folder` ("": the usual place) that is then gone.

    formats: of `FILES`; and of `_llama_cpp.STATES`, which are llama.cpp's own files, if `lm` was loaded from a GGUF file.
    lm: the loaded model; saved states are then saved and loaded in this process, which is quicker. None: in new ones.
    times: that all this is done; the median of the resumes counts. States are saved once and loaded `LOADS` times.
    """
    resumes: list[dict[str, Any]] = []
    saved: Saved | None = None
    for _ in range(times):
        with tempfile.TemporaryDirectory(dir=job.folder or None) as folder:
            here = dataclasses.replace(job, folder=folder)
            died = _killed(here)
            saved = saved or _saved(here, formats, lm, died["segments"])
            resumes.append(_said("resume", here))
    assert saved is not None
    last = resumes[-1]
    return Killed(
        **vars(saved), resumed=statistics.median(r["first"] for r in resumes), recomputed=died["work"],
        executed=last["executed"], answer=last["answer"], loading=last["loading"],
    )  # fmt: skip


def _saved(job: Job, formats: tuple[str, ...], lm: models.LanguageModel | None, segments: int) -> Saved:
    """What the dead process would have had to save. segments: of its plan."""
    state = save(job) if lm is not None else _said("save", job)
    loaded = {form: _loaded(dataclasses.replace(job, format=form), lm) for form in formats if form in FILES}
    found = Saved(loaded, {}, state["saving"], state["nbytes"], {})
    for form in (form for form in formats if form in _llama_cpp.STATES):
        try:
            file = _by_llama_cpp(job, form, lm, segments)
        except NotHere as why:
            found.absent[form] = str(why)
            continue
        found.loaded[form], found.opening[form] = file.opening + file.loading, file.opening
        found.saving[form], found.nbytes[form] = file.saving, file.nbytes
    return found


def _by_llama_cpp(job: Job, form: str, lm: models.LanguageModel | None, segments: int) -> _llama_cpp.StateFile:
    """Its state after the chunks that the killed prefill had finished; it cannot stop within one."""
    gguf = _llama_cpp.require(None if lm is None else lm.gguf)
    assert lm is not None
    done = max(1, job.stop // segments * job.chunk)
    ids = lm.tokens(models.text(job.text), done + 1)[0].tolist()
    file = Path(job.folder) / "state.llama"
    return _llama_cpp.state_file(gguf, ids, job.tokens + job.answer, job.chunk, form, file, LOADS)


def _loaded(job: Job, lm: models.LanguageModel | None) -> float:
    """The median of some loads."""
    return statistics.median((load(job, lm) if lm is not None else _said("load", job))["first"] for _ in range(LOADS))


def _answers(what: str, job: Job) -> Generator[dict[str, Any], None, None]:
    """What a process says, as it says it; the process does not outlive the loop. `SicError` where it fails or takes too long."""
    command = [sys.executable, "-m", "sic_kernels.cli._replay_process", what, json.dumps(dataclasses.asdict(job))]
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryFile() as errors:  # a pipe that nobody reads would stop the process when it is full
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace", env=env)
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(TIMEOUT, end)
        timer.start()
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if (said := _answer(line)) is not None:
                    yield said
            if process.wait():
                errors.seek(0)
                why = (
                    f"took more than {TIMEOUT} s" if late.is_set() else f"ended by itself, status {process.returncode}"
                )
                raise SicError(f"{what}: the process {why}: {errors.read().decode(errors='replace')[-2000:]}")
        finally:
            timer.cancel()
            process.kill()
            process.wait()
            process.stdout.close()


def _answer(line: str) -> dict[str, Any] | None:
    """None: the line is not an answer, but what some library prints."""
    try:
        said = json.loads(line)
    except ValueError:
        return None
    return said if isinstance(said, dict) else None


def _killed(job: Job) -> dict[str, Any]:
    """Kills a prefill where it waits for it: the segments of its plan, and the seconds that it had worked."""
    found: dict[str, Any] = {}
    with contextlib.closing(_answers("prefill", job)) as answers:
        for said in answers:
            found |= said
            if "work" in said:
                return found
    raise SicError(f"prefill: the process ended by itself before segment {job.stop}, where it was to be killed")


def _said(what: str, job: Job) -> dict[str, Any]:
    """All that a process says, which ends by itself."""
    return {key: value for said in _answers(what, job) for key, value in said.items()}
