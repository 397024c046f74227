"""Print where the installed CMake package is: `cmake -Dsic_kernels_DIR=$(python -m sic_kernels cmakedir)`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..runtime.errors import BackendError

PACKAGE = Path(__file__).resolve().parents[1]
NATIVE = PACKAGE / "_native"


def cmake_dir() -> Path:
    """The folder of sic_kernelsConfig.cmake; raises BackendError if this installation has none."""
    found = NATIVE / "lib" / "cmake" / "sic_kernels"
    if not (found / "sic_kernelsConfig.cmake").is_file():
        raise BackendError(f"the CMake package is not installed; {native_remedy()}")
    return found


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__


def run(args: argparse.Namespace) -> int:
    print(cmake_dir())
    return 0
