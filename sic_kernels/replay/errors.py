"""What can be wrong with a cursor, a plan or a pool. Bad arguments are `ArgumentError`s as everywhere."""

from __future__ import annotations

from typing import Any

from ..runtime.errors import SicError


class CursorError(SicError):
    """A cursor that cannot be resumed."""


class StaleCursor(CursorError):
    """It is damaged, of another version, run or pool, or names a place that the plan does not have."""


class CursorExpired(CursorError):
    """It is older than the time-out."""


class FingerprintMismatch(CursorError):
    """It was made by another model or other settings: `field` says which differs, with the `saved` and the `live` value."""

    def __init__(self, field: str, saved: Any, live: Any) -> None:
        super().__init__(f"fingerprint: {field}: saved {saved!r}, live {live!r}: recompute, or restore what was")
        self.field, self.saved, self.live = field, saved, live


class ContextPoisoned(SicError):
    """The device context is lost (an illegal access, an ECC error): nothing in it may be read again.

    segment: which one was running, where that is known.
    """

    segment: str | None = None


class PlanError(SicError):
    """A segment whose second run would not give the bits of the first: `hazard` names the kind."""

    def __init__(self, segment: str, hazard: str, detail: str) -> None:
        super().__init__(f"segment {segment!r}: {hazard}: {detail}")
        self.segment, self.hazard, self.detail = segment, hazard, detail


class PoolExhausted(SicError, MemoryError):
    """No block of that size is free in the part; the message has the part's quota, what is used and the largest free block."""


class PoolError(SicError):
    """A pool that cannot be used: its file is damaged or in use by another process, its memory was written to after it was
    freed, or it is closed. The message says which."""
