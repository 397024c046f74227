"""The native modules: this file alone imports them.

`sic_kernels._C` has the CPU kernels, and the CUDA ones where nvcc built them. `sic_kernels._simt`, built for tests, has the
CUDA kernels compiled for the emulator: same entries, and CPU tensors play the device's.

torch is imported first, so that the module finds torch's OpenMP threads and shares them instead of starting its own.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import config
from .errors import BackendError

CHECK, CPU, CUDA = 0, 1, 2  # last argument of every op: check and allocate only, or run
PACKAGE = Path(__file__).resolve().parents[1]
SIZE = 4  # with a device: only the bytes of workspace, raised as WorkspaceSize


@functools.cache
def module() -> Any:
    """`sic_kernels._C` with the settings applied; `BackendError` with the remedy if it is not there."""
    native = _load("_C", native_remedy)
    settings = config.current()
    native.force_isa(settings.cpu_isa)
    native.set_num_threads(settings.num_threads)
    native.set_device_checks(settings.check)
    return native


@functools.cache
def simt_module() -> Any:
    """`sic_kernels._simt`; `BackendError` with the remedy if it is not there."""
    return _load("_simt", lambda: "tools/build_simt.sh (make test runs it), in the source tree")


def _load(name: str, remedy: Callable[[], str]) -> Any:
    import torch  # noqa: F401

    try:
        native = importlib.import_module(f"sic_kernels.{name}")
        if not hasattr(native, "set_device_checks"):
            raise ImportError(f"{native.__file__} is of another version")
        return native
    except Exception as error:  # a damaged module may raise anything
        raise BackendError(f"sic_kernels.{name} cannot be imported ({error}); build it with: {remedy()}") from error


def native_remedy() -> str:
    """How to get what is built. In a source tree Python takes the sources, though an installation may have it all."""
    for entry in sys.path:
        installed = Path(entry, "sic_kernels").resolve()
        if installed != PACKAGE and (installed / "_native").is_dir():
            return (
                f"{PACKAGE} is a source tree that was not built, and hides the installation {installed}: "
                "run outside of the tree, or build in it (pip install -e . or make build)"
            )
    return "pip install . (or make build) in the source tree"
