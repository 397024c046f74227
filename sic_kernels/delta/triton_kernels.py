"""The delta ops in Triton: where there is a GPU but no CUDA compiler, and a second implementation in tests.

As in `slicing.triton_kernels`: each function takes the inputs of the native op of its name, in the same order, and `outs`;
launchers allocate scratch memory, launch and return, so that all can be captured. Codes, tags and the raw table are those of
every other backend bit for bit.
"""

from __future__ import annotations

from .triton_attention import delta_attention
from .triton_decode import delta_decode
from .triton_encode import delta_encode

__all__ = ["delta_attention", "delta_decode", "delta_encode"]
