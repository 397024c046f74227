"""How much workspace an op needs."""

from __future__ import annotations

from typing import Any

from ..runtime import backends
from .stats import lm_head_stats, logits_stats, merge_stats, partial_stats, probe

_OPS = {function.__name__: function for function in (lm_head_stats, logits_stats, merge_stats, partial_stats, probe)}


def workspace_bytes(op: str, *args: Any, **kwargs: Any) -> int:
    """Bytes of `workspace` that the op of that name needs for these arguments (its own, in the same order).

    The arguments are checked and nothing runs. The answer depends on shapes, never on values: one workspace serves every step
    of a captured graph.
    """
    return backends.workspace_bytes(backends.named_op("workspace_bytes", op, _OPS), *args, **kwargs)
