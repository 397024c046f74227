"""The slicing ops in Triton: where there is a GPU but no CUDA compiler, and a second implementation in tests.

Each function takes the inputs of the native op of its name, in the same order, and `outs`, the native op's outputs;
without them it allocates.  The native layer has checked everything before.  Launchers allocate scratch memory from
torch, launch, and return: grids follow from shapes and `max_seq_len`, nothing is read back, so all of it can be captured
in a graph (`gather` without outs must know how many rows there are, and waits).  Results that the contract defines bit
for bit are those of every other backend; attention is batch-invariant and the same from run to run.
"""

from __future__ import annotations

from .triton_append import append_kv, page_summary
from .triton_attend import attend, select_slice
from .triton_attention import merge_many, merge_states, sliced_attention
from .triton_gather import gather
from .triton_pages import score_pages
from .triton_scores import refine_tokens, score_tokens
from .triton_select import select
from .triton_sketch import key_sketch

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
