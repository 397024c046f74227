"""Fallbacks are never silent: what was not done as asked is logged here, and under SIC_STRICT=1 it is an error.

Where the result carries a status and a metric counts, and what each fallback is, docs/configuration.md lists.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Iterator
from typing import Any

from . import config
from .errors import SicError


def report(log: logging.Logger, message: str, *args: Any, level: int = logging.INFO) -> None:
    """Log a fallback that happened; `SicError` in place of that under SIC_STRICT=1."""
    if config.current().strict:
        raise SicError("SIC_STRICT: " + message % args)
    log.log(level, message, *args)


_LATER: contextvars.ContextVar[bool] = contextvars.ContextVar("sic_fallbacks_later", default=False)


@contextlib.contextmanager
def looked_at_later() -> Iterator[None]:
    """Inside, ops do not look at their own statuses: the caller does, at a place where an error leaves nothing half done."""
    token = _LATER.set(True)
    try:
        yield
    finally:
        _LATER.reset(token)


def strict_on(tensor: Any) -> bool:
    """Whether an op has to look at a status on the tensor's device now: SIC_STRICT=1, and no graph is being captured.

    Looking waits for a GPU. What a captured graph does at its replays only its outputs say.
    """
    if not config.current().strict or _LATER.get():
        return False
    import torch

    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
