"""`python -m sic_kernels demo`: a real model over a real text, decoded dense and with sliced attention."""

from __future__ import annotations

import argparse
import json
import math
import time
from typing import Any

from ..models.language_model import require
from ._options import add_model_arguments, count, share


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, "tokens in the cache before decoding")
    parser.add_argument(
        "--text", default="hamlet", help="a play, python-topics, python:MODULE, or a file (default: hamlet)"
    )
    parser.add_argument("--steps", type=count(1), default=128, help="tokens to decode (default: 128)")
    parser.add_argument(
        "--ratio", type=share, default=None, help="share of the cache to read (default: SIC_SLICE_RATIO, 0.12)"
    )
    parser.add_argument(
        "--max-omitted-mass", type=float, default=None, help="recompute a head dense above this estimate"
    )
    parser.add_argument(
        "--shadow", action="store_true", help="run dense beside sliced in every layer and report agreement"
    )


def run(args: argparse.Namespace) -> int:
    for package in ("transformers", "rich"):
        require(package, "the demo")
    result = measure(args)
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        _print_table(result)
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Prefill once; decode the text's own continuation dense (torch, DynamicCache) and sliced; compare."""
    import torch

    from .. import models
    from ..integrations.transformers import SlicedCache, enable
    from ..slicing import SlicePolicy
    from . import _run

    if args.threads:
        torch.set_num_threads(args.threads)
    with _run.progress() as bar:
        loading = bar.add_task("load the model", total=1)
        lm = models.load(args.model)
        ids = lm.tokens(models.text(args.text), args.context + args.steps + 1)
        bar.advance(loading)
        options = {name: value for name, value in (("ratio", args.ratio), ("max_omitted_mass", args.max_omitted_mass))
                   if value is not None}  # fmt: skip
        policy = SlicePolicy(**options)
        cache = SlicedCache(lm.model.config, policy, capacity=args.context + args.steps + 64, shadow=args.shadow)
        enable(lm.model)
        context, continuation = ids[:, : args.context], ids[:, args.context :]
        task = bar.add_task(f"prefill {args.context} tokens", total=args.context)
        start = time.perf_counter()
        _run.prefill(lm.model, context, cache, lambda n: bar.advance(task, n))
        prefill_seconds = time.perf_counter() - start
        dense_cache = _dense_copy(cache, lm.model.config)
        task = bar.add_task(f"decode {args.steps} tokens dense", total=args.steps)
        dense = _decode(lm.model, "sdpa", dense_cache, continuation, lambda n: bar.advance(task, n))
        del dense_cache
        cache.clear_stats()
        task = bar.add_task(f"decode {args.steps} tokens sliced", total=args.steps)
        sliced = _decode(lm.model, "sic_sliced", cache, continuation, lambda n: bar.advance(task, n))
    return _result(args, lm, policy, cache, prefill_seconds, dense, sliced)


def _dense_copy(cache: Any, config: Any) -> Any:
    """A transformers DynamicCache with the same keys and values, so that the prompt is computed once."""
    from transformers.cache_utils import DynamicCache

    copy = DynamicCache(config=config)
    for layer in range(cache.pages.layers):
        k, v = cache.pages.row(layer, 0)
        copy.update(k[None].clone(), v[None].clone(), layer)
    return copy


def _decode(model: Any, implementation: str, cache: Any, ids: Any, advance: Any) -> dict[str, Any]:
    """Feed the continuation token by token; times, negative log-likelihoods and greedy choices."""
    from . import _run

    with _run.AttentionTimer(model, implementation) as timer:
        nll, greedy, steps = [], [], []
        start = time.perf_counter()
        for i, logp in enumerate(_run.teacher_forced(model, ids[:, :-1], cache, 1, advance)):
            steps.append(time.perf_counter() - start)
            nll.append(-logp[0, ids[0, i + 1]].item())
            greedy.append(int(logp[0].argmax()))
            start = time.perf_counter()
    steps.sort()
    return {
        "step_ms": 1e3 * sum(steps) / len(steps),
        "step_p50_ms": 1e3 * steps[len(steps) // 2],
        "step_p99_ms": 1e3 * steps[int(0.99 * (len(steps) - 1))],
        "attention_ms": 1e3 * timer.seconds / len(steps),
        "nll": nll,
        "greedy": greedy,
        "perplexity": math.exp(sum(nll) / len(nll)),
    }


def _result(
    args: Any, lm: Any, policy: Any, cache: Any, prefill_seconds: float, dense: dict[str, Any], sliced: dict[str, Any]
) -> dict[str, Any]:
    import torch

    from .._version import __version__

    stats = cache.stats()
    agree = [a == b for a, b in zip(dense.pop("greedy"), sliced.pop("greedy"))]
    dense.pop("nll"), sliced.pop("nll")
    # every step of every layer counts: layers that the policy keeps dense read all
    dense["kv_bytes"] = stats.bytes_dense / args.steps
    sliced["kv_bytes"] = stats.bytes_read / args.steps
    if args.shadow:  # the answers of a shadow run are dense: only the comparison is of interest
        sliced["attention_error"] = stats.shadow_error
    return {
        "version": __version__,
        "model": lm.name,
        "text": args.text,
        "context": args.context,
        "steps": args.steps,
        "ratio": policy.ratio,
        "threads": torch.get_num_threads(),
        "shadow": args.shadow,
        "prefill_seconds": prefill_seconds,
        "dense": dense,
        "sliced": sliced,
        "greedy_agreement": sum(agree) / len(agree),
        "omitted_mass_max": stats.omitted_max,
        "omitted_mass_mean": stats.omitted_mean,
        "hit_ratio": stats.hit_ratio,
        "head_steps": stats.totals,
        "fallbacks": {str(layer): heads for layer, heads in enumerate(stats.fallback_heads) if heads},
        "cache_bytes": cache.pages.nbytes_by_part(),
    }


def _print_table(result: dict[str, Any]) -> None:
    from rich.table import Table

    from ._run import wide_console

    dense, sliced = result["dense"], result["sliced"]
    title = f"{result['model']}, {result['text']}, {result['context']} tokens of context, {result['threads']} threads"
    table = Table(title=title, caption=_caption(result), caption_justify="left")
    table.add_column("")
    table.add_column("dense (torch SDPA)", justify="right")
    name = "shadow" if result["shadow"] else "sliced"
    table.add_column(f"{name} {result['ratio']:.0%}", justify="right")
    table.add_column("", justify="right")
    table.add_row(
        "decode, ms per token", *_pair(dense, sliced, "step_ms", "{:.1f}"), _times(dense, sliced, "step_ms", "faster")
    )
    p50_p99 = [f"{side['step_p50_ms']:.1f} / {side['step_p99_ms']:.1f}" for side in (dense, sliced)]
    table.add_row("  P50 / P99 of it", *p50_p99, "")
    attention = _times(dense, sliced, "attention_ms", "faster")
    table.add_row("attention, ms per token", *_pair(dense, sliced, "attention_ms", "{:.2f}"), attention)
    read = _times(dense, sliced, "kv_bytes", "fewer")
    table.add_row("KV and index read, MB per token", *_pair(dense, sliced, "kv_bytes", "{:.2f}", 1e-6), read)
    change = f"{sliced['perplexity'] / dense['perplexity'] - 1:+.2%}"
    table.add_row("perplexity, teacher-forced", *_pair(dense, sliced, "perplexity", "{:.3f}"), change)
    table.add_row("greedy tokens that agree", "", f"{result['greedy_agreement']:.1%}", "")
    if result["omitted_mass_max"] is not None:
        table.add_row("omitted mass, largest / mean estimate", "",
                      f"{result['omitted_mass_max']:.3f} / {result['omitted_mass_mean']:.4f}", "")  # fmt: skip
    if "attention_error" in sliced:
        worst = max(range(len(sliced["attention_error"])), key=sliced["attention_error"].__getitem__)
        table.add_row(
            "largest error of attention output", "", f"{sliced['attention_error'][worst]:.3f}", f"layer {worst}"
        )
    wide_console().print(table)


def _caption(result: dict[str, Any]) -> str:
    steps = {name: n for name, n in result["head_steps"].items() if n}
    lines = ["head-steps: " + ", ".join(f"{name} {n}" for name, n in steps.items())]
    if result["fallbacks"]:
        shown = [f"layer {layer}: " + ", ".join(f"head {h} ({n}x)" for h, n in heads.items())
                 for layer, heads in list(result["fallbacks"].items())[:12]]  # fmt: skip
        lines += ["recomputed dense: " + "; ".join(shown) + (" ..." if len(result["fallbacks"]) > 12 else "")]
    else:
        lines += ["recomputed dense: none"]
    return "\n".join(lines)


def _pair(dense: dict[str, Any], sliced: dict[str, Any], key: str, form: str, scale: float = 1.0) -> list[str]:
    return [form.format(side[key] * scale) for side in (dense, sliced)]


def _times(dense: dict[str, Any], sliced: dict[str, Any], key: str, word: str) -> str:
    if not sliced[key]:
        return ""
    ratio = dense[key] / sliced[key]
    return f"{ratio:.1f}x {word}" if ratio >= 1 else f"{1 / ratio:.1f}x {_OPPOSITE[word]}"


_OPPOSITE = {"faster": "slower", "fewer": "more"}
