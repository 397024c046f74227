"""What the model is sure of, and when it is done: statistics of its logits in one pass, probes, rules, stop strings.

    stats = sic.head.lm_head_stats(hidden, weight, k=8, watch_ids=eos_ids)
    stats.entropy, stats.topk_ids, stats.watch_logprobs

Conventions of every op (shapes: B rows, V ids, D hidden size, k listed ids, W watched ids):

* Arrays are torch tensors or anything with DLPack or `__cuda_array_interface__`; results have the kind of the first one.
* With `out=` and `workspace=` (`workspace_bytes` of u8, 256-byte aligned on CUDA) an op neither allocates nor synchronises and
  can be captured in a CUDA graph.
* Results are bitwise equal from run to run, for any thread count and any batch a row is in.
* `ArgumentError` (one format) before anything is read or written.
"""

from .confidence import ConfidenceRing, verify_budget
from .guarantee import Certificate, Stops, binomial_p_value, certify, stops_at
from .probe_metrics import auroc, bootstrap_difference, evaluate_probe, number_scores
from .probes import Split, load_probes, probe_scores, save_probes, split_by_prompt, train_probe
from .stats import lm_head_stats, logits_stats, merge_stats, partial_stats, probe
from .stops import StopMatcher, StopStep
from .termination import Reason, TerminationRule, TerminationState, record_stops, stop_rule, termination_step
from .types import Probe, StatsPart, Status, TokenStats

__all__ = [
    "Certificate",
    "ConfidenceRing",
    "Probe",
    "Reason",
    "Split",
    "StatsPart",
    "Status",
    "StopMatcher",
    "StopStep",
    "Stops",
    "TerminationRule",
    "TerminationState",
    "TokenStats",
    "auroc",
    "binomial_p_value",
    "bootstrap_difference",
    "certify",
    "evaluate_probe",
    "lm_head_stats",
    "load_probes",
    "logits_stats",
    "merge_stats",
    "number_scores",
    "partial_stats",
    "probe",
    "probe_scores",
    "record_stops",
    "save_probes",
    "split_by_prompt",
    "stop_rule",
    "stops_at",
    "termination_step",
    "train_probe",
    "verify_budget",
    "workspace_bytes",
]

from .workspace import workspace_bytes
