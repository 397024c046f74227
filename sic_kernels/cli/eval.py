"""`python -m sic_kernels eval slicing|delta|head|ragged|references`: what a method costs in quality, or what it is good for."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ..models.language_model import require
from ..runtime.errors import ArgumentError
from ._options import add_model_arguments, count, share

DEFAULT_TEXTS = ("hamlet", "python-topics", "python:_pydecimal")
METHODS = {"slicing": 2048, "delta": 2048, "head": 512}  # tokens scored; head runs them one by one
ANSWER_TOKENS = 96


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "method",
        choices=[*METHODS, "ragged", "references"],
        help="what to measure; ragged takes --model and --json only, references --json and --long only",
    )
    add_model_arguments(parser, "tokens in all, the scored ones last")
    parser.add_argument("--text", dest="texts", action="append",
                        help=f"may be given several times (default: {', '.join(DEFAULT_TEXTS)})")  # fmt: skip
    parser.add_argument(
        "--scored",
        type=count(1),
        default=None,
        help="tokens scored at the end of the context (default: 2048; head: 512)",
    )
    parser.add_argument(
        "--skip", type=count(0), default=1000, help="tokens skipped at the start of the text (default: 1000)"
    )
    parser.add_argument(
        "--ratio",
        dest="ratios",
        type=share,
        action="append",
        help="share of the cache to read; slicing: may be given several times (default: 0.12 and 0.06; delta: 0.06; head: 0.12)",
    )
    parser.add_argument(
        "--needles", type=count(0, 12), default=12, help="slicing: questions per text, 0 to 12 (default: 12)"
    )
    parser.add_argument("--templates", help="delta: file that fit-templates wrote (default: the package's)")
    parser.add_argument("--probes", type=Path, help="head: file that train-probe wrote, to show its tables as well")
    parser.add_argument(
        "--answers", type=count(0), default=12, help="head: instructions answered with prompt lookup (default: 12)"
    )
    parser.add_argument(
        "--long", action="store_true", help="references: the time of texts of up to ten million characters"
    )
    parser.add_argument(
        "--fast", action="store_true", help="512 scored tokens (head: 64), no needles: a smoke test, not a measurement"
    )


def run(args: argparse.Namespace) -> int:
    for package in ("transformers", "rich"):
        require(package, "the evaluation")
    if args.method == "references":
        return _run_references(args)
    if args.method == "ragged":
        return _run_ragged(args)
    args.scored = args.scored or METHODS[args.method]
    if args.fast:
        args.scored, args.needles = min(args.scored, METHODS[args.method] // 8 if args.method == "head" else 512), 0
    if args.scored >= args.context:
        raise ArgumentError(f"--scored: got {args.scored}, expected fewer than the {args.context} tokens of --context")
    work, show = {
        "slicing": (measure, _print_tables), "delta": (measure_delta, _print_delta), "head": (measure_head, _print_head)
    }[args.method]  # fmt: skip
    result = work(args)
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)
    return 0


def _refuse_other_options(args: argparse.Namespace, *used: str) -> None:
    """For a method that runs no model."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    unset = vars(parser.parse_args([args.method]))
    given = sorted(name for name, default in unset.items() if name not in used and getattr(args, name) != default)
    if given:
        taken = " and ".join(f"--{name}" for name in used if name != "method")
        raise ArgumentError.of(f"eval {args.method}", "options", ", ".join(given), f"{taken} only")


def _run_references(args: argparse.Namespace) -> int:
    """References in sentences by hand; see `_references_eval` for the method."""
    from . import _references_eval

    _refuse_other_options(args, "method", "json", "long")
    result = _references_eval.measure(args.long)
    if args.json:
        print(json.dumps(result, indent=1, ensure_ascii=False))
    else:
        from ._run import wide_console

        for table in _references_eval.tables(result):
            wide_console().print(table)
    return 0


def _run_ragged(args: argparse.Namespace) -> int:
    """Padding on real texts; see `_ragged_eval` for the method."""
    from .. import models
    from . import _ragged_eval

    _refuse_other_options(args, "method", "model", "json")
    tokenizer = models.load_tokenizer(args.model)
    name = args.model or "SmolLM2-135M"
    result = _ragged_eval.measure(
        lambda found: [len(ids) for ids in tokenizer(list(found)).input_ids], _ragged_eval.documents()
    )
    result = {"tokenizer": name, **result}
    if args.json:
        print(json.dumps(result, indent=1))
        return 0
    from rich.table import Table

    from ._run import wide_console

    table = Table(title=_ragged_eval.title(result))
    for column in _ragged_eval.HEADER:
        table.add_column(column, justify="right")
    for line in _ragged_eval.lines(result):
        table.add_row(*line)
    wide_console().print(table)
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every policy on every text; see `_slicing_eval` for the method."""
    from .. import models
    from . import _run, _slicing_eval

    plans = _slicing_eval.plans(args.ratios or [0.12, 0.06])
    rows: list[dict[str, Any]] = []
    needles: list[dict[str, Any]] = []
    with _run.progress() as bar:
        lm, texts = _start(args)
        for name in texts:
            raw = models.text(name)
            rows += _slicing_eval.evaluate_text(lm, name, raw, args.context, args.scored, args.skip, plans, bar)
            if args.needles:
                needles += _slicing_eval.evaluate_needles(
                    lm, name, raw, args.context, args.skip, args.needles, plans, bar
                )
    return {**_about(args, lm), "rows": rows, "needles": needles}


def measure_delta(args: argparse.Namespace) -> dict[str, Any]:
    """Every way of coding on every text, then over all texts; see `_delta_eval` for the method."""
    from .. import delta, models
    from . import _delta_eval, _run

    ratio = args.ratios[0] if args.ratios else 0.06
    rows: list[dict[str, Any]] = []
    scores = []
    with _run.progress() as bar:
        lm, texts = _start(args)
        templates = delta.ModelTemplates.of(lm.model, args.templates)
        for name in texts:
            lines, of_text = _delta_eval.evaluate_text(
                lm, name, models.text(name), args.context, args.scored, args.skip, templates, ratio, bar
            )
            rows += lines
            scores.append(of_text)
    if len(texts) > 1:
        rows += _delta_eval.over_all_texts(scores, rows)
    about = {"count": templates.count, "bytes": templates.nbytes(), **templates.meta}
    return {**_about(args, lm), "templates": about, "rows": rows}


def measure_head(args: argparse.Namespace) -> dict[str, Any]:
    """The ring on every text, prompt lookup on instructions, and what a file of probes says; see `_head_eval`, `_speculation`."""
    from .. import head, models
    from . import _head_eval, _run, _speculation

    probes = head.load_probes(args.probes)[1] if args.probes else None
    ratio = args.ratios[0] if args.ratios else 0.12
    with _run.progress() as bar:
        lm, texts = _start(args)
        rows = [
            row for name in texts
            for row in _head_eval.evaluate_ring(lm, name, models.text(name), args.context, args.scored, args.skip, ratio, bar)
        ]  # fmt: skip
        lm.model.set_attn_implementation("sdpa")
        prompts = models.instructions(args.answers)
        found = _speculation.measured(lm, prompts, ANSWER_TOKENS, bar) if prompts else []
    return {**_about(args, lm), "rows": rows, "speculation": found, "probes": probes}


def _start(args: argparse.Namespace) -> tuple[Any, list[str]]:
    """The model, ready for our caches, and the names of the texts."""
    import torch

    from .. import models
    from ..integrations.transformers import enable

    if args.threads:
        torch.set_num_threads(args.threads)
    lm = models.load(args.model)
    enable(lm.model)
    return lm, args.texts or list(DEFAULT_TEXTS)


def _about(args: argparse.Namespace, lm: Any) -> dict[str, Any]:
    import torch

    return {"model": lm.name, "context": args.context, "scored": args.scored, "threads": torch.get_num_threads()}


def _print_tables(result: dict[str, Any]) -> None:
    from rich.table import Table

    from ._run import wide_console

    console = wide_console()
    table = Table(title=_title(result))
    for name in ("text", "policy"):
        table.add_column(name)
    for name in (
        "read",
        "perplexity",
        "KL to dense",
        "KL / oracle",
        "agree",
        "omitted true",
        "estimate",
        "error",
        "in bound",
    ):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        table.add_row(row["text"], row["policy"], *_quality(row), *_omitted(row))
    console.print(table)
    if not result["needles"]:
        return
    table = Table(title="needle questions: answered as the dense model answers, and rightly")
    for name in ("text", "policy", "as dense", "right"):
        table.add_column(name)
    for row in result["needles"]:
        table.add_row(row["text"], row["policy"], f"{row['as_dense']} of {row['questions']}", f"{row['right']}")
    console.print(table)


def _print_head(result: dict[str, Any]) -> None:
    from rich.table import Table

    from . import _speculation, train_probe
    from ._run import wide_console

    console = wide_console()
    table = Table(title=f"{_title(result)}; confidence of earlier tokens as a bias on their keys")
    for name in ("text", "attention"):
        table.add_column(name)
    for name in ("perplexity", "KL to dense", "agree"):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        _, perplexity, kl, _, agree = _quality(row)
        table.add_row(row["text"], row["policy"], perplexity, kl, agree)
    console.print(table)
    if result["speculation"]:
        console.print(_speculation.table(result["speculation"]))
    if result["probes"]:
        train_probe.print_tables(result["probes"])


def _print_delta(result: dict[str, Any]) -> None:
    from rich.table import Table

    from ._run import wide_console

    table = Table(title=f"{_title(result)}; {result['templates']['count']} templates a head")
    for name in ("text", "cache"):
        table.add_column(name)
    for name in ("size", "sketch", "perplexity", "KL to dense", "KL / peer's", "agree"):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        if "absent" in row:
            table.add_row(row["text"], row["policy"], "", "", row["absent"], "", "", "")
            continue
        _, perplexity, kl, ratio, agree = _quality(row)
        kl = f"{row['kl']:.5f} [{row['kl_low']:.5f}, {row['kl_high']:.5f}]" if kl else ""
        sizes = [_share(row.get(name)) for name in ("size", "sketch")]
        table.add_row(row["text"], row["policy"], *sizes, perplexity, kl, ratio, agree)
    wide_console().print(table)


def _title(result: dict[str, Any]) -> str:
    return f"{result['model']}, {result['context']} tokens of context, {result['scored']} scored, 95 % paired bootstrap"


def _quality(row: dict[str, Any]) -> list[str]:
    if row["policy"] == "dense":
        return ["", f"{row['perplexity']:.3f}", "", "", ""]
    perplexity = f"{row['perplexity_change']:+.2%} [{row['perplexity_low']:+.2%}, {row['perplexity_high']:+.2%}]"
    ratio = ""
    if "kl_ratio" in row:
        ratio = f"{row['kl_ratio']:.2f} [{row['kl_ratio_low']:.2f}, {row['kl_ratio_high']:.2f}]"
    return [_share(row.get("read_ratio")), perplexity, f"{row['kl']:.4f}", ratio, f"{row['agreement']:.3f}"]


def _omitted(row: dict[str, Any]) -> list[str]:
    if "omitted_true" not in row:
        return ["", "", "", ""]
    means = [f"{row[name]:.4f}" for name in ("omitted_true", "omitted_estimate", "omitted_error")]
    return [*means, _share(row["omitted_coverage"])]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
