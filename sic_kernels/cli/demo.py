"""`python -m sic_kernels demo`: a real model over a real text, decoded dense, with sliced attention, and on a coded cache;
then what its logits say while it writes, and how it goes on after kill -9.
"""

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
        "--codec",
        default="k4v4",
        help="of the coded cache: k4v4, k3v3, k2v2, q8, or none to leave it out (default: k4v4)",
    )
    parser.add_argument("--templates", help="file that fit-templates wrote (default: the package's, if it has some)")
    parser.add_argument(
        "--shadow", action="store_true", help="run dense beside sliced in every layer and report agreement"
    )
    parser.add_argument(
        "--no-replay",
        action="store_true",
        help="leave out follow-up questions, the kill, self-speculation and drawing again",
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
    """Prefill once; decode the text's own continuation dense (torch, DynamicCache), sliced, and on codes; compare."""
    import torch

    from .. import models
    from ..integrations.transformers import SlicedCache, enable
    from ..slicing import SlicePolicy
    from . import _demo_head, _demo_replay, _followups, _run

    if args.threads:
        torch.set_num_threads(args.threads)
    with _run.progress() as bar:
        loading = bar.add_task("load the model", total=1)
        lm = models.load(args.model)
        ids = lm.tokens(models.text(args.text), args.context + args.steps + 1)
        templates, why_not = _templates(lm.model, args)
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

        def decode(what: str, implementation: str, with_cache: Any) -> dict[str, Any]:
            task = bar.add_task(f"decode {args.steps} tokens {what}", total=args.steps)
            return _decode(lm.model, implementation, with_cache, continuation, lambda n: bar.advance(task, n))

        sides = {"dense": decode("dense", "sdpa", _dense_copy(cache, lm.model.config))}
        sides["dense"]["cache_bytes"] = (args.context + args.steps) * _token_bytes(cache.pages)
        if templates is not None:
            for name, selecting in (("coded", None), ("coded_sliced", _token_policy(args))):
                coded = _coded_copy(cache, lm.model.config, templates, selecting, args)
                sides[name] = decode(name.replace("_", ", "), "sic_sliced", coded)
                sides[name].update(_coded_sizes(coded, args.steps))
                del coded
        cache.clear_stats()
        sides["sliced"] = decode("sliced", "sic_sliced", cache)
        lm.model.set_attn_implementation("sdpa")
        written = _demo_head.write(lm, continuation, bar)
        replayed = asked = None
        if not args.no_replay:
            asked = _followups.evaluate(lm, args.text, **_followups.SHORT, bar=bar)
            replayed = _demo_replay.measure(lm, args, continuation, bar)
    result = _result(args, lm, policy, cache, prefill_seconds, sides)
    codec = None if templates is None else args.codec
    return {
        **result,
        "written": written,
        "followups": asked,
        "replay": replayed,
        "codec": codec,
        "codec_absent": why_not,
    }


def _templates(model: Any, args: argparse.Namespace) -> tuple[Any, str | None]:
    """Templates for the coded cache, or None and why."""
    from .. import delta
    from ..runtime.errors import ArgumentError

    if args.codec == "none":
        return None, None
    if args.codec not in delta.PRESETS:
        raise ArgumentError.of("demo", "--codec", repr(args.codec), "|".join([*delta.PRESETS, "none"]))
    if args.templates:
        return delta.ModelTemplates.of(model, args.templates), None
    try:
        return delta.ModelTemplates.of(model), None
    except ArgumentError:
        return None, "no templates come with the package for this model: make some with fit-templates, give --templates"


def _token_policy(args: argparse.Namespace) -> Any:
    """What the coded, sliced cache reads; it selects by tokens and recomputes nothing."""
    from ..slicing import SlicePolicy

    return SlicePolicy() if args.ratio is None else SlicePolicy(ratio=args.ratio)


def _coded_copy(cache: Any, config: Any, templates: Any, policy: Any, args: argparse.Namespace) -> Any:
    """A coded cache of the same tokens, so that the prompt is computed once."""
    from ..integrations.delta import DeltaCache
    from . import _run

    capacity = args.context + args.steps + 16
    coded = DeltaCache(config, templates.codecs(args.codec), policy, params=templates.params, capacity=capacity)
    _run.fill(coded, (cache.pages.row(layer, 0) for layer in range(cache.pages.layers)))
    return coded


def _token_bytes(pages: Any) -> int:
    """Of one token in all layers, in the type that the pages have."""
    return pages.layers * pages.kv_heads * pages.plain_row_bytes


def _coded_sizes(coded: Any, steps: int) -> dict[str, Any]:
    """Bytes held, the sketch apart, and read by a step."""
    stats, parts = coded.stats(), coded.pages.nbytes_by_part()
    sketch = parts.pop("index")
    held = sum(parts.values())
    read = stats.bytes_read / steps if stats.bytes_dense else held
    return {"cache_bytes": held, "sketch_bytes": sketch, "kv_bytes": read}


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
    args: Any, lm: Any, policy: Any, cache: Any, prefill_seconds: float, sides: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    import torch

    from .._version import __version__

    stats, dense = cache.stats(), sides["dense"]
    greedy = dense["greedy"]
    for side in sides.values():
        agree = [a == b for a, b in zip(greedy, side.pop("greedy"))]
        side.pop("nll")
        side["greedy_agreement"] = sum(agree) / len(agree)
    parts = cache.pages.nbytes_by_part()
    # every step of every layer counts: layers that the policy keeps dense read all
    dense["kv_bytes"] = stats.bytes_dense / args.steps
    sides["sliced"].update(
        kv_bytes=stats.bytes_read / args.steps, sketch_bytes=parts["index"], cache_bytes=sum(parts.values()) - parts["index"]
    )  # fmt: skip
    if args.shadow:  # the answers of a shadow run are dense: only the comparison is of interest
        sides["sliced"]["attention_error"] = stats.shadow_error
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
        **sides,
        "greedy_agreement": sides["sliced"]["greedy_agreement"],
        "omitted_mass_max": stats.omitted_max,
        "omitted_mass_mean": stats.omitted_mean,
        "hit_ratio": stats.hit_ratio,
        "head_steps": stats.totals,
        "fallbacks": {str(layer): heads for layer, heads in enumerate(stats.fallback_heads) if heads},
        "cache_bytes": parts,
        "half_bytes": _half_bytes(cache.pages, args.context + args.steps),
    }


def _half_bytes(pages: Any, tokens: int) -> int:
    """Of so many tokens in half precision: what sizes are compared with."""
    return tokens * pages.layers * pages.kv_heads * (pages.head_dim + pages.v_head_dim) * 2


def _print_table(result: dict[str, Any]) -> None:
    from rich.table import Table

    from . import _demo_head, _demo_replay, _followups
    from ._run import wide_console

    dense = result["dense"]
    name, share = "shadow" if result["shadow"] else "sliced", f"{result['ratio']:.0%}"
    titles = {"dense": "dense (torch SDPA)", "sliced": f"{name} {share}", "coded": f"coded {result['codec']}",
              "coded_sliced": f"coded, sliced {share}"}  # fmt: skip
    shown = [side for side in titles if side in result]
    sides = [result[side] for side in shown]
    title = f"{result['model']}, {result['text']}, {result['context']} tokens of context, {result['threads']} threads"
    table = Table(title=title, caption=_caption(result), caption_justify="left")
    table.add_column("")
    for side in shown:
        table.add_column(titles[side], justify="right")

    def line(what: str, cell: Any) -> None:
        table.add_row(what, *(cell(side) for side in sides))

    def against_dense(key: str, form: str, word: str, scale: float = 1.0) -> Any:
        return lambda side: form.format(side[key] * scale) + _times(dense, side, key, word)

    line("decode, ms per token", against_dense("step_ms", "{:.1f}", "faster"))
    line("  P50 / P99 of it", lambda side: f"{side['step_p50_ms']:.1f} / {side['step_p99_ms']:.1f}")
    line("attention, ms per token", against_dense("attention_ms", "{:.2f}", "faster"))
    line("KV and index read, MB per token", against_dense("kv_bytes", "{:.2f}", "fewer", 1e-6))
    half = result["half_bytes"]
    line("cache, MB (share of half precision)",
         lambda side: f"{1e-6 * side['cache_bytes']:.1f} ({side['cache_bytes'] / half:.1%})")  # fmt: skip
    line("  its key sketch", lambda side: f"{1e-6 * side['sketch_bytes']:.1f}" if "sketch_bytes" in side else "")
    line("perplexity, teacher-forced", lambda side: f"{side['perplexity']:.3f}" + (
        "" if side is dense else f" ({side['perplexity'] / dense['perplexity'] - 1:+.2%})"))  # fmt: skip
    line("greedy tokens that agree", lambda side: "" if side is dense else f"{side['greedy_agreement']:.1%}")
    sliced = result["sliced"]
    if result["omitted_mass_max"] is not None:
        estimate = f"{result['omitted_mass_max']:.3f} / {result['omitted_mass_mean']:.4f}"
        line("omitted mass, largest / mean estimate", lambda side: estimate if side is sliced else "")
    if "attention_error" in sliced:
        worst = max(range(len(sliced["attention_error"])), key=sliced["attention_error"].__getitem__)
        largest = f"{sliced['attention_error'][worst]:.3f} (layer {worst})"
        line("largest error of attention output", lambda side: largest if side is sliced else "")
    console = wide_console()
    console.print(table)
    more = []
    if result["replay"]:
        more = [_followups.line(result["followups"]), *_demo_replay.lines(result["replay"])]
    for text in [*_demo_head.lines(result["written"]), *more]:
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def _caption(result: dict[str, Any]) -> str:
    steps = {name: n for name, n in result["head_steps"].items() if n}
    lines = ["head-steps: " + ", ".join(f"{name} {n}" for name, n in steps.items())]
    if result["fallbacks"]:
        shown = [f"layer {layer}: " + ", ".join(f"head {h} ({n}x)" for h, n in heads.items())
                 for layer, heads in list(result["fallbacks"].items())[:12]]  # fmt: skip
        lines += ["recomputed dense: " + "; ".join(shown) + (" ..." if len(result["fallbacks"]) > 12 else "")]
    else:
        lines += ["recomputed dense: none"]
    if result["codec_absent"]:
        lines += [f"no coded cache: {result['codec_absent']}"]
    return "\n".join(lines)


def _times(dense: dict[str, Any], side: dict[str, Any], key: str, word: str) -> str:
    if side is dense or not side[key]:
        return ""
    ratio = dense[key] / side[key]
    return f" ({ratio:.1f}x {word})" if ratio >= 1 else f" ({1 / ratio:.1f}x {_OPPOSITE[word]})"


_OPPOSITE = {"faster": "slower", "fewer": "more"}
