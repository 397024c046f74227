"""The head ops in Triton: where there is a GPU but no CUDA compiler, and a second implementation in tests.

As in `slicing.triton_kernels`: each function takes the inputs of the native op of its name, in the same order, and `outs`;
launchers allocate scratch memory, launch and return, so that all can be captured.
"""

from __future__ import annotations

from .triton_lm_head import lm_head_part, lm_head_stats
from .triton_probe import probe
from .triton_stats import logits_part, logits_stats, merge_stats
from .triton_termination import termination_step

__all__ = ["lm_head_part", "lm_head_stats", "logits_part", "logits_stats", "merge_stats", "probe", "termination_step"]
