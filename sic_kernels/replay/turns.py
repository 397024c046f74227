"""`Turns`: calls of a plan run one after another, and none waits for one that waits for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from ..runtime import metrics
from ..runtime.errors import SicError
from ..runtime.log import get_logger
from .cursor_word import CursorWord

T = TypeVar("T")

_log = get_logger("replay")


class Turns:
    """Who may call a plan now: one call at a time, by the process that made the plan, and never out of a segment.

    A call that gets on is waited for, however long it takes: it marks the word, or says `passed`.
    """

    def __init__(self, word: CursorWord, timeout_ms: int) -> None:
        self._word, self._timeout_ms = word, timeout_ms
        self._lock = threading.RLock()  # not to enter twice: it knows whose it is
        self._process, self._running = os.getpid(), threading.local()
        self._passed = 0

    def passed(self) -> None:
        """The call that has the turn got on."""
        self._passed += 1

    def take(self, op: str, call: Callable[[], T]) -> T:
        """What `call` returns, once no other call has the turn. Raises `SicError` where it can never have it."""
        if os.getpid() != self._process:
            raise SicError(f"{op}: the plan was made before this process was forked: capture it again")
        if getattr(self._running, "here", False):
            raise SicError(f"{op}: called from within a segment of the same plan")
        # KeyboardInterrupt may come between any two calls: so the lock is taken within the `try`, and no call is made before it
        # is given back. A context manager of Python code could be interrupted on its way in and on its way out.
        try:
            self._wait(op)
            self.passed()
            self._running.here = True
            with torch.no_grad():  # buffers would remember every run that wrote them
                return call()
        finally:
            self._running.here = False
            try:  # noqa: SIM105
                self._lock.release()
            except RuntimeError:  # it was not ours yet
                pass

    def _wait(self, op: str) -> None:
        """Takes the lock, as long as the call that has it gets on; one whose segment waits for this call never does."""
        if self._lock.acquire(blocking=False):
            return
        waited, seen = metrics.get("sic_plan_wait_timeout_ratio"), None
        while (now := (self._passed, self._word.raw())) != seen:
            seen = now
            if self._lock.acquire(timeout=self._timeout_ms / 1000):
                waited.add(0, 1)
                return
        waited.add(1, 1)
        why = f"another call of the plan has finished no segment for {self._timeout_ms} ms: does its segment wait for this call?"
        _log.error("%s: gave up: %s", op, why)
        raise SicError(f"{op}: {why}")
