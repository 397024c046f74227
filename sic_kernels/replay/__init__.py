"""Stop anywhere, resume exactly there: cursors in place of checkpoints.

pool = sic.replay.MemoryPool(1 << 30, backing="state.pool")       # what lives in it outlives the process
plan = sic.replay.ReplayPlan.capture(segments, backend="cpu", fingerprint=fingerprint)
plan.verify()                                                     # each segment twice, on poisoned buffers
outcome = plan.run(inputs, deadline_ms=50)                        # Result, or Interrupted with a cursor
outcome = plan.resume(outcome.cursor)                             # the missing suffix, the same bits
"""

from ..runtime.fingerprint import Fingerprint, context_bucket
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
from .pool import Block, MemoryPool, PartStats, PoolStats
from .slots import Slot, SlotStats, SlotStore, prefix_digest

__all__ = [
    "Block",
    "ContextPoisoned",
    "CursorError",
    "CursorExpired",
    "Fingerprint",
    "FingerprintMismatch",
    "MemoryPool",
    "PartStats",
    "PlanError",
    "PoolError",
    "PoolExhausted",
    "PoolStats",
    "Slot",
    "SlotStats",
    "SlotStore",
    "StaleCursor",
    "context_bucket",
    "prefix_digest",
]
