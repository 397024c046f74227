"""How much workspace an op needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..runtime import backends
from .attend import attend, select_slice
from .attention import append_kv, gather, merge_many, merge_states, sliced_attention
from .index import key_sketch, page_summary
from .scoring import refine_tokens, score_pages, score_tokens, select

_OPS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        append_kv, attend, gather, key_sketch, merge_many, merge_states, page_summary, refine_tokens, score_pages, score_tokens,
        select, select_slice, sliced_attention,
    )
}  # fmt: skip


def workspace_bytes(op: str, *args: Any, **kwargs: Any) -> int:
    """Bytes of `workspace` that the op of that name needs for these arguments (its own, in the same order).

    The arguments are checked and nothing runs. The answer depends on shapes, `max_seq_len` and the policy, never on values:
    one workspace serves every step of a captured graph. 0 where the backend keeps its own scratch (see the package docstring).
    """
    return backends.workspace_bytes(backends.named_op("workspace_bytes", op, _OPS), *args, **kwargs)
