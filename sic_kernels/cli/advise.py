"""`python -m sic_kernels advise snapshot.json`: what the metrics say should be changed, and why."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap

from ..runtime import advice
from ..runtime.errors import ArgumentError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Holds a snapshot of the metrics against their targets, and says what to change and why."
    parser.add_argument("file", help="JSON of metrics.snapshot(), or Prometheus text; - is standard input")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--strict", action="store_true", help="exit with 1 if a target is missed or a figure is not usable"
    )


def run(args: argparse.Namespace) -> int:
    rows = advice.advise(advice.read(_text(args.file)))
    if args.json:
        print(json.dumps([row.as_dict() for row in rows], indent=1))
    else:
        _show(rows)
    return 1 if args.strict and any(row.verdict in (advice.MISSED, advice.UNUSABLE) for row in rows) else 0


def _text(name: str) -> str:
    try:
        if name == "-":
            return sys.stdin.read()
        with open(name, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError.of("advise", "file", f"{name} ({error})", "a readable snapshot") from None


def _show(rows: list[advice.Advice]) -> None:
    width = max(len(row.metric) for row in rows)
    for row in rows:
        value = "" if row.value is None else f"{row.value:.4g}"
        print(f"{row.metric:<{width}}  {value:>8}  {row.target:<17}  {row.verdict}")
        for line in textwrap.wrap(row.change or row.note, 96):
            print(f"    {line}")
