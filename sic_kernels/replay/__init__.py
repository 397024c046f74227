"""Stop anywhere, resume exactly there: cursors in place of checkpoints.

pool = sic.replay.MemoryPool(1 << 30, backing="state.pool")       # what lives in it outlives the process
plan = sic.replay.ReplayPlan.capture(segments, buffers=buffers, fingerprint=fingerprint, inputs=["tokens"])
plan.verify(inputs)                                               # each segment again and again, on poisoned copies
outcome = plan.run(inputs, end=4096, chunk=512, deadline_ms=50)   # Result, or Interrupted with a cursor
outcome = plan.resume(outcome.cursor)                             # the missing suffix, the same bits
"""

from ..runtime.fingerprint import Fingerprint, context_bucket
from . import faults
from .cursor import Cursor
from .cursor_word import CursorWord
from .errors import (
    ContextPoisoned,
    CursorError,
    CursorExpired,
    FingerprintMismatch,
    PlanError,
    PoolError,
    PoolExhausted,
    StaleCursor,
)
from .outcomes import Explanation, Interrupted, Progress, Result
from .plan import ReplayPlan
from .pool import Block, MemoryPool, PartStats, PoolStats
from .random import uniform
from .segments import Rows, Segment, Step
from .slots import Slot, SlotStats, SlotStore, prefix_digest

__all__ = [
    "Block",
    "ContextPoisoned",
    "Cursor",
    "CursorError",
    "CursorExpired",
    "CursorWord",
    "Explanation",
    "Fingerprint",
    "FingerprintMismatch",
    "Interrupted",
    "MemoryPool",
    "PartStats",
    "PlanError",
    "PoolError",
    "PoolExhausted",
    "PoolStats",
    "Progress",
    "ReplayPlan",
    "Result",
    "Rows",
    "Segment",
    "Slot",
    "SlotStats",
    "SlotStore",
    "StaleCursor",
    "Step",
    "context_bucket",
    "faults",
    "prefix_digest",
    "uniform",
]
