"""Every error that sic_kernels raises on purpose derives from `SicError`."""

from __future__ import annotations


class SicError(Exception):
    """Base of all errors of the library."""


class ArgumentError(SicError, ValueError):
    """A bad argument, reported before anything is read, written or launched.

    One format: ``op: arg: got X, expected Y``, for example
    ``sliced_attention: k_cache: got float64[8,3,16,64], expected float32|float16|bfloat16 of rank 4``.
    """

    @classmethod
    def of(cls, op: str, arg: str, got: object, expected: object) -> ArgumentError:
        """The error in the one format."""
        return cls(f"{op}: {arg}: got {got}, expected {expected}")


class BackendError(SicError, RuntimeError):
    """No usable backend: the message names the reason and how to get one."""


class WorkspaceSize(SicError):
    """Not a failure: how the native layer answers a question for bytes of workspace. `backends.workspace_bytes` catches it."""


class ConfigError(SicError, ValueError):
    """A `SIC_*` environment variable is unknown, malformed, or was changed after it was read."""
