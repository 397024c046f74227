"""Options that commands share."""

from __future__ import annotations

import argparse


def add_model_arguments(parser: argparse.ArgumentParser, context: str) -> None:
    """Options of every command that runs a model. context: what `--context` counts."""
    parser.add_argument(
        "--model", help="folder or .gguf file of a causal language model (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument("--context", type=int, default=6144, help=f"{context} (default: 6144)")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads (default: torch's)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
