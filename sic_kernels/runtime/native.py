"""The native module: this file alone imports `sic_kernels._C`.

torch is imported first, so that the module finds torch's OpenMP threads and shares them instead of starting its own.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from . import config
from .errors import BackendError

CHECK, CPU, CUDA = 0, 1, 2  # last argument of every op: check and allocate only, or run


@functools.cache
def module() -> Any:
    """`sic_kernels._C` with SIC_CPU_ISA and SIC_NUM_THREADS applied; `BackendError` with the remedy if it is not there."""
    import torch  # noqa: F401

    try:
        native = importlib.import_module("sic_kernels._C")
    except ImportError as error:
        raise BackendError(f"sic_kernels._C cannot be imported ({error}); build it with: pip install .") from error
    settings = config.current()
    native.force_isa(settings.cpu_isa)
    native.set_num_threads(settings.num_threads)
    return native
