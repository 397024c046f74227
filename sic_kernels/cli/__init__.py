"""The command line: each command is one module with `add_arguments(parser)` and `run(args) -> exit status`.

A module is imported only when its command is called, so that `doctor` and `cmakedir` work with nothing but the
standard library, whatever the others need.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from .._version import __version__
from ..runtime.errors import SicError

# command -> (module, one line of help)
COMMANDS = {
    "demo": ("demo", "run a language model dense, sliced and on a coded cache, and compare"),
    "doctor": ("doctor", "what is built, what is missing, and how to get it"),
    "bench": ("bench", "run the benchmarks"),
    "eval": ("eval", "measure the quality of a method on a model"),
    "inspect": ("inspect", "show what a blob or a file of templates holds"),
    "fit-templates": ("fit_templates", "fit the templates of a model's coded cache"),
    "train-probe": ("train_probe", "train probes on a model's hidden states and hold them against P(EOS)"),
    "advise": ("advise", "what the metrics say should be changed, and why"),
    "trace-view": ("trace_view", "draw a trace of one step as a page"),
    "verify-determinism": ("verify_determinism", "run every operation again and again and compare the bits"),
    "cmakedir": ("cmakedir", "print the directory for find_package(sic_kernels)"),
}


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(["usage: python -m sic_kernels COMMAND [options]", "", "commands:", *lines, "",
                      "COMMAND --help explains a command."])  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status (2: wrong usage, 1: a SicError, printed on stderr)."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage(), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    if argv[0] == "--version":
        print(__version__)
        return 0
    if argv[0] not in COMMANDS:
        print(f"unknown command {argv[0]!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    module_name, about = COMMANDS[argv[0]]
    try:
        module = importlib.import_module(f".{module_name}", __name__)
    except ModuleNotFoundError as error:
        print(f"{argv[0]}: {_missing(error)}", file=sys.stderr)
        return 1
    parser = argparse.ArgumentParser(prog=f"python -m sic_kernels {argv[0]}", description=about)
    module.add_arguments(parser)
    try:
        status = int(module.run(parser.parse_args(argv[1:])))
        sys.stdout.flush()
        return status
    except SicError as error:
        text = str(error)  # that of an argument begins with the command's name, too
        print(text if text.startswith(f"{argv[0]}: ") else f"{argv[0]}: {text}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader has left, as in `doctor | head`: nothing more goes to stdout, at exit neither
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _missing(error: ModuleNotFoundError) -> str:
    """Which package is missing, and that doctor knows more."""
    return f"needs {error.name}, which is not installed; `python -m sic_kernels doctor` says how to get it"
