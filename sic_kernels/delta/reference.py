"""The definition of every delta op: torch only, plain, exact bits where they are stored, float64 where results are rounded.

Each function takes the inputs of the native op of its name, in the same order, and returns a tuple of new tensors
(`delta_encode` writes in place). They check nothing: the native layer has, before they are called. Pages and codec are tuples:

    pages = k_codes, v_codes, tags, raw, raw_owner, raw_state
    codec = k_bits, v_bits, k_rotation, k_templates, v_templates, rope, interleaved
    rope = lo, hi, undo (None without RoPE)
    templates = centres, search, half_norm, mean, step, bound
"""

from __future__ import annotations

from .reference_decode import delta_attention, delta_decode
from .reference_encode import delta_encode

__all__ = ["delta_attention", "delta_decode", "delta_encode"]
