"""What the head ops mean, in float64.  Inputs in the order of the native ops."""

from .reference_probe import probe
from .reference_stats import lm_head_part, lm_head_stats, logits_part, logits_stats, merge_stats
from .reference_termination import termination_step

__all__ = ["lm_head_part", "lm_head_stats", "logits_part", "logits_stats", "merge_stats", "probe", "termination_step"]
