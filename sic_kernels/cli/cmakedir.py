"""Print where the installed CMake package is: `cmake -Dsic_kernels_DIR=$(python -m sic_kernels cmakedir)`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..runtime.errors import BackendError
from ..runtime.native import PACKAGE, native_remedy

NATIVE = PACKAGE / "_native"


def cmake_dir() -> Path:
    """The folder of sic_kernelsConfig.cmake; raises BackendError if this installation has none."""
    found = NATIVE / "lib" / "cmake" / "sic_kernels"
    if not (found / "sic_kernelsConfig.cmake").is_file():
        raise BackendError(f"the CMake package is not installed; {native_remedy()}")
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__


def run(args: argparse.Namespace) -> int:
    print(cmake_dir())
    return 0
