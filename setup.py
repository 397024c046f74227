"""Builds the C++ core and the bindings with CMake; all metadata is in pyproject.toml.

The CMake build lives in build/cmake-<python tag>, which outlives the process: a second build recompiles
only what changed. Environment:
    SIC_BUILD_DIR    another build folder
    SIC_CMAKE_ARGS   extra arguments, for example "-DSIC_SANITIZE=address"
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def tool(name: str) -> str:
    """The tool beside the interpreter, else the one on PATH (a build environment puts its own first).

    Another version of Ninja starts the build folder over, so the system's comes last.
    """
    beside = str(Path(sys.executable).parent)
    found = shutil.which(name, path=beside) or shutil.which(name)
    if found is None:
        raise SystemExit(f"sic_kernels: {name} was not found; install it (Debian: cmake ninja-build g++)")
    return found


def pybind11_dir(build: Path) -> Path:
    """A copy of pybind11 at a path that does not change.

    pip builds in an environment with a new random path each time; headers from there would
    recompile every binding.
    """
    kept = build / f"pybind11-{pybind11.__version__}"
    if not kept.exists():
        source = Path(pybind11.__file__).parent
        partial = kept.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        for part in ("include", "share"):
            shutil.copytree(source / part, partial / part)
        partial.rename(kept)
    return kept / "share" / "cmake" / "pybind11"


class BuildPython(build_py):
    """build/lib outlives the process too: without this a wheel would carry files that were deleted since."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


def jobs() -> int:
    cores = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
    return int(os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", len(cores)))


class BuildNative(build_ext):
    """Runs CMake once for sic_kernels._C, the static library, the headers and the CMake package."""

    def build_extension(self, ext: Extension) -> None:
        tag = f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
        build = Path(os.environ.get("SIC_BUILD_DIR", ROOT / "build" / f"cmake-{tag}")).resolve()
        build.mkdir(parents=True, exist_ok=True)
        module = Path(self.get_ext_fullpath(ext.name)).resolve()
        cmake = tool("cmake")
        configure = [
            cmake, "-S", str(ROOT), "-B", str(build), "-G", "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            f"-DCMAKE_BUILD_TYPE={os.environ.get('CMAKE_BUILD_TYPE', 'Release')}",
            "-DSIC_PYTHON=ON",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11_dir(build)}",
            *shlex.split(os.environ.get("SIC_CMAKE_ARGS", "")),
        ]  # fmt: skip
        subprocess.check_call(configure)
        subprocess.check_call([cmake, "--build", str(build), "--parallel", str(jobs())])
        # The module beside the Python files; the rest (headers, library, CMake package, sources) under _native.
        shutil.rmtree(module.parent / "_native", ignore_errors=True)
        for component, prefix in (("python", module.parent), ("dev", module.parent / "_native")):
            subprocess.check_call([cmake, "--install", str(build), "--component", component, "--prefix", str(prefix)])
        if not module.exists():
            raise SystemExit(f"sic_kernels: the build made no {module.name}")

    def copy_extensions_to_source(self) -> None:
        """Editable installs: setuptools copies the module beside the Python files; _native and _simt go with it."""
        super().copy_extensions_to_source()
        built, here = Path(self.build_lib) / "sic_kernels", ROOT / "sic_kernels"
        shutil.rmtree(here / "_native", ignore_errors=True)
        shutil.copytree(built / "_native", here / "_native")
        for module in built.glob("_simt.*"):  # with SIC_CMAKE_ARGS=-DSIC_SIMT=ON
            shutil.copy2(module, here / f".{module.name}")
            (here / f".{module.name}").replace(here / module.name)  # a process that has the old one open keeps it


setup(
    ext_modules=[Extension("sic_kernels._C", sources=[])], cmdclass={"build_py": BuildPython, "build_ext": BuildNative}
)
