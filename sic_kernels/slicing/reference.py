"""The definition of every slicing op: torch only, plain, float64 where results are rounded, exact integers elsewhere.

Each function takes the inputs of the native op of its name, in the same order, and returns a tuple of new tensors
(`append_kv` writes in place).  They check nothing: the native layer has, before they are called.
"""

from __future__ import annotations

from .reference_attend import attend, select_slice
from .reference_attention import gather, merge_many, merge_states, sliced_attention
from .reference_pages import page_summary, score_pages
from .reference_select import select
from .reference_sketch import append_kv, key_sketch, refine_tokens, score_tokens

__all__ = [
    "append_kv",
    "attend",
    "gather",
    "key_sketch",
    "merge_many",
    "merge_states",
    "page_summary",
    "refine_tokens",
    "score_pages",
    "score_tokens",
    "select",
    "select_slice",
    "sliced_attention",
]
