"""The head ops in Triton: where there is a GPU but no CUDA compiler, and a second implementation in tests."""

from __future__ import annotations

from .triton_termination import termination_step

__all__ = ["termination_step"]
