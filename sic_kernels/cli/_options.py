"""Options that commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


def count(least: int, most: int = (1 << 31) - 1) -> Callable[[str], int]:
    """The type of an option that counts something."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            limits = f"{least} or more" if most == (1 << 31) - 1 else f"{least} to {most}"
            raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer, {limits}")
        return number

    return parse


def share(text: str) -> float:
    """The type of an option that is a share of something."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number above 0, at most 1")
    return number


def output_file(text: str) -> Path:
    """The type of an option that names a file to write: found out before the work is done whether that is possible."""
    path = Path(text)
    try:
        new = not path.exists()
        path.open("ab").close()
        if new:
            path.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: {error.strerror}") from None
    return path


def add_model_arguments(parser: argparse.ArgumentParser, context: str) -> None:
    """Options of every command that runs a model. context: what `--context` counts."""
    parser.add_argument(
        "--model", help="folder or .gguf file of a causal language model (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument("--context", type=count(1), default=6144, help=f"{context} (default: 6144)")
    parser.add_argument("--threads", type=count(1), default=None, help="CPU threads (default: torch's)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
