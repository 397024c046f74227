"""Batches of different lengths without padding: plan them, pack them, and count what padding would have cost.

    segments = sic.ragged.plan(lengths)                   # groups of similar lengths; buckets=None: no padding at all
    packed = sic.ragged.pack(padded, lengths)             # [B,S,...] -> [N,...], the sequences behind each other
    padded = sic.ragged.unpack(packed, cu_seqlens, S)     # and back

Conventions (shapes: B sequences of at most S tokens, N tokens in all):

* Lengths are a list or an array of integers; `cu_seqlens` are cumulative lengths from 0 on, i32|i64 [B+1], as attention
  kernels for sequences of different lengths take them.
* Arrays are torch tensors or anything with DLPack or `__cuda_array_interface__`; results have the kind of the first one.
  Whatever a token has, its row, is one run of contiguous elements; rows and sequences may lie anywhere.
* Bits are moved, never converted: f32, f16, bf16, f8_e4m3, f64, u8, i16, i32, i64; results are the same on every backend.
* With `out=` and `cu_seqlens` on the device of the rows an op neither allocates nor synchronises and can be captured in a CUDA
  graph; it needs no workspace. Lengths on a CUDA device are taken as right (nothing outside the arrays is touched for it); with
  `SIC_CHECK=1` they are read back and checked.
* The planner runs on the host, without tensors: the same lengths give the same plan.
* `ArgumentError` (one format) before anything is read or written.
"""

from .batching import batch_by_tokens
from .lengths import cu_seqlens
from .packing import pack, unpack
from .planning import Segment, Segments, padding_efficiency, plan

__all__ = [
    "Segment",
    "Segments",
    "batch_by_tokens",
    "cu_seqlens",
    "pack",
    "padding_efficiency",
    "plan",
    "unpack",
]
