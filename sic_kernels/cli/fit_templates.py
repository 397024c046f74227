"""`python -m sic_kernels fit-templates MODEL`: the templates of a model's coded cache, from any text."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from ..models.language_model import require
from ._options import count, output_file

OWN = "own"
SKIPPED = 4  # tokens at the start of a window: sinks, which the cache keeps raw


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", help="folder or .gguf file of a causal language model (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument(
        "--text",
        dest="texts",
        action="append",
        help="own (passages that the model writes itself), a play, python-topics, python:MODULE or a file; may be given "
        "several times (default: own)",
    )
    parser.add_argument(
        "--tokens", type=count(8), default=8192, help="tokens in all, shared by the texts (default: 8192)"
    )
    parser.add_argument(
        "--window", type=count(8), default=4096, help="tokens that the model reads at once (default: 4096)"
    )
    parser.add_argument("--count", type=count(1, 256), default=256, help="templates a head, 1 to 256 (default: 256)")
    parser.add_argument("--iterations", type=count(0), default=25, help="of k-means (default: 25)")
    parser.add_argument("--seed", type=count(0), default=0, help="of the model's own text and of k-means (default: 0)")
    parser.add_argument("--interleaved", action="store_true", help="RoPE turns neighbouring channels (2d, 2d + 1)")
    parser.add_argument("--out", type=output_file, required=True, help="safetensors file to write")
    parser.add_argument("--threads", type=count(1), default=None, help="CPU threads (default: torch's)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    for package in ("transformers", "rich", "safetensors"):
        require(package, "fitting templates")
    result = measure(args)
    if args.json:
        print(json.dumps(result, indent=1))
        return 0
    k, v = result["residual_norm_keys"], result["residual_norm_values"]
    print(f"{result['model']}: {result['layers']} layers, {result['count']} templates a head from {result['tokens']} tokens "
          f"of {', '.join(result['texts'])}")  # fmt: skip
    print(f"norm left after the nearest template: keys {_mean(k):.3f} (layers {min(k):.3f} to {max(k):.3f}), "
          f"values {_mean(v):.3f} ({min(v):.3f} to {max(v):.3f})")  # fmt: skip
    print(f"{args.out}: {result['bytes']} bytes, {result['seconds']:.0f} s")
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Fit and write; returns what is printed."""
    import torch

    from .. import models
    from ..delta import fit_model_templates
    from . import _run

    start = time.perf_counter()
    if args.threads:
        torch.set_num_threads(args.threads)
    texts = args.texts or [OWN]
    with _run.progress() as bar:
        lm = models.load(args.model)
        windows = [w for name in texts for w in _windows(lm, name, args.tokens // len(texts), args, bar)]
        samples = _samples(lm.model, windows, bar)
        tokens = samples[0].keys.shape[0]
        task = bar.add_task(f"fit {args.count} templates a head", total=len(samples))
        templates, norms = fit_model_templates(
            lm.model, samples, count=args.count, seed=args.seed, iterations=args.iterations, name=lm.name,
            interleaved=args.interleaved, meta={"command": _command(args, texts), "tokens": tokens},
            advance=lambda n: bar.advance(task, n),
        )  # fmt: skip
    templates.save(args.out)
    return {
        "model": lm.name, "layers": templates.shape.layers, "count": args.count, "texts": texts, "tokens": tokens,
        "residual_norm_keys": norms.keys, "residual_norm_values": norms.values, "bytes": args.out.stat().st_size,
        "seconds": time.perf_counter() - start, "command": _command(args, texts),
    }  # fmt: skip


def _command(args: argparse.Namespace, texts: list[str]) -> str:
    """The command as it is recorded in the file, without what changes nothing: threads, places of model and output."""
    parts = ["python -m sic_kernels fit-templates", *(f"--text {Path(name).name}" for name in texts)]
    parts += [f"--{name} {getattr(args, name)}" for name in ("tokens", "window", "count", "iterations", "seed")]
    return " ".join([*parts, *["--interleaved"] * args.interleaved])


def _windows(lm: Any, name: str, tokens: int, args: argparse.Namespace, bar: Any) -> list[Any]:
    """`[1,n]` pieces of a text, at most `--window` tokens each."""
    from .. import models

    if name == OWN:
        task = bar.add_task("the model writes", total=tokens)
        ids = models.own_text(lm, tokens, args.seed, lambda n: bar.advance(task, n))
    else:
        ids = lm.tokens(models.text(name), tokens)
    return [part for part in ids.split(args.window, dim=1) if part.shape[1] > SKIPPED]


def _samples(model: Any, windows: list[Any], bar: Any) -> list[Any]:
    """Keys and values of every layer over all windows, the first tokens of each left out."""
    import torch
    from transformers.cache_utils import DynamicCache

    from ..delta import LayerSamples
    from . import _run

    task = bar.add_task("run the model", total=sum(w.shape[1] for w in windows))
    parts: list[list[LayerSamples]] = []
    for window in windows:
        cache = DynamicCache()
        _run.prefill(model, window, cache, lambda n: bar.advance(task, n))
        positions = torch.arange(SKIPPED, window.shape[1])
        rows = [[x[0, :, SKIPPED:].transpose(0, 1) for x in (layer.keys, layer.values)] for layer in cache.layers]
        parts.append([LayerSamples(k, v, positions) for k, v in rows])
    return [LayerSamples(*map(torch.cat, zip(*layer))) for layer in zip(*parts)]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
