"""`python -m sic_kernels trace-view step.json -o page.html`: a trace as a page to look at."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ..runtime import trace_file, trace_page
from ..runtime.errors import ArgumentError
from ._options import output_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Which pages each head read, with which scores, how it was answered, slots and cursors: one HTML file."
    )
    parser.add_argument("file", type=Path, help="what `Trace.save` wrote")
    parser.add_argument("-o", "--output", type=output_file, help="the page (default: the file's name with .html)")


def run(args: argparse.Namespace) -> int:
    try:
        text = args.file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError.of("trace-view", "file", f"{args.file} ({error})", "a readable trace") from None
    target = args.output or args.file.with_suffix(".html")
    if target.exists() and target.samefile(args.file):
        raise ArgumentError.of("trace-view", "output", f"{target}, the trace itself", "another file (-o page.html)")
    page = trace_page.page(trace_file.load(text)).encode()
    try:
        _write(target, page)
    except OSError as error:
        raise ArgumentError.of("trace-view", "output", f"{target} ({error})", "a file to write") from None
    print(target)
    return 0


def _write(target: Path, page: bytes) -> None:
    """All of it or nothing: a page that is there stays until the new one is whole."""
    if target.exists() and not target.is_file():  # a pipe or a terminal
        target.write_bytes(page)
        return
    target = target.resolve()  # a link goes on pointing to its page
    part = target.with_name(f".{os.getpid()}.part")
    try:
        part.write_bytes(page)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
