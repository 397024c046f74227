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
    PoolExhausted,
    StaleCursor,
)

__all__ = [
    "ContextPoisoned",
    "CursorError",
    "CursorExpired",
    "Fingerprint",
    "FingerprintMismatch",
    "PlanError",
    "PoolExhausted",
    "StaleCursor",
    "context_bucket",
]
