"""`python -m sic_kernels train-probe`: probes on a model's hidden states, held against what is known without them."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from ..models.language_model import require
from ._options import count, output_file

QUICK = {"prompts": 36, "cap": 24}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", help="folder or .gguf file of a causal language model (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument("--prompts", type=count(12), default=280, help="instructions to answer (default: 280)")
    parser.add_argument("--cap", type=count(4), default=96, help="tokens of an answer, at most (default: 96)")
    parser.add_argument("--batch", type=count(1), default=40, help="answers generated together (default: 40)")
    parser.add_argument("--seed", type=count(0), default=0, help="of prompts, split and training (default: 0)")
    parser.add_argument("--out", type=output_file, help="safetensors file for the probes and all that was measured")
    parser.add_argument(
        "--quick", action="store_true", help="36 prompts, 24 tokens each: a smoke test, not a measurement"
    )
    parser.add_argument("--threads", type=count(1), default=None, help="CPU threads (default: torch's)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    for package in ("transformers", "rich", *(["safetensors"] if args.out else [])):
        require(package, "training probes")
    if args.quick:
        args.prompts, args.cap = (
            min(given, QUICK[name]) for name, given in (("prompts", args.prompts), ("cap", args.cap))
        )
    result = measure(args)
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        print_tables(result)
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Answers, probes, evaluation; writes the file; returns what is printed."""
    import torch

    from .. import head, models
    from ..delta.model_shape import weights_digest
    from . import _answers, _probe_eval, _run, _speculation

    if args.threads:
        torch.set_num_threads(args.threads)
    start = time.perf_counter()
    with _run.progress() as bar:
        lm = models.load(args.model)
        task = bar.add_task(f"answer {args.prompts} instructions", total=args.prompts)
        prompts = models.instructions(args.prompts, args.seed)
        answers = _answers.answer(lm, prompts, args.cap, args.batch, lambda n: bar.advance(task, n))
        task = bar.add_task("train the probes", total=len(_probe_eval.TASKS))
        probes, found = _probe_eval.measure(answers, lm.tokenizer, args.seed, lambda n: bar.advance(task, n))
    result = {
        "model": lm.name, "weights": weights_digest(lm.model), "cap": args.cap, "seed": args.seed,
        "finished": int(answers.finished.sum()), **found,
        "speculation": _speculation.replayed(answers), "seconds": time.perf_counter() - start,
    }  # fmt: skip
    if args.out:
        head.save_probes(args.out, probes, result)
    return result


SHOWN = {"positions": "positions", "auroc": "AUROC", "brier": "Brier", "ece": "ECE", "precision": "precision",
         "recall": "recall", "mae": "MAE", "rmse": "RMSE", "r2": "R^2"}  # fmt: skip


def print_tables(result: dict[str, Any]) -> None:
    """What `measure` returned, for people."""
    from . import _speculation
    from ._run import wide_console

    console, n = wide_console(), result["prompts"]
    console.print(
        f"{result['model']}: {sum(n.values())} prompts ({n['train']} to train, {n['calibration']} to calibrate, {n['test']} to "
        f"test), {result['positions']} positions; all figures are of the test prompts"
    )
    for key in ("auroc", "r2"):
        console.print(_score_table([row for row in result["rows"] if key in row]))
    for name, verdict in result["against_best_baseline"].items():
        word = "better than" if verdict["beats"] else "not shown to be better than"
        difference, *interval = (_number(verdict[key], "+.3f") for key in ("difference", "low", "high"))
        console.print(f"{name}: the probe is {word} {verdict['baseline']}: {SHOWN[verdict['metric']]} {difference} "
                      f"[{', '.join(interval)}]")  # fmt: skip
    for risk in dict.fromkeys(row["risk"] for row in result["stopping"]):
        console.print(_stop_table([row for row in result["stopping"] if row["risk"] == risk]))
    word = "more" if result["saves_more_than_p_eos"] else "no more"
    console.print(f"complete: with the same guarantees the probe saves {word} tokens than P(EOS)")
    console.print(_speculation.table(result["speculation"]))


def _number(value: float | None, form: str = ".3f") -> str:
    return "" if value is None else f"{value:{form}}"


def _score_table(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table()
    table.add_column("predicted")
    table.add_column("by")
    names = [name for name in SHOWN if name in rows[0]]
    for name in names:
        table.add_column(SHOWN[name], justify="right")
    for row in rows:
        table.add_row(row["task"], row["name"], str(row["positions"]), *(_number(row[name]) for name in names[1:]))
    return table


def _stop_table(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    risk, confidence = rows[0]["risk"], rows[0]["confidence"]
    table = Table(title=f"stopping early, at most {risk:.0%} of the answers changed at {confidence:.0%} confidence")
    table.add_column("score")
    for name in ("threshold", "p", "stopped early", "premature", "precision", "tokens saved"):
        table.add_column(name, justify="right")
    for row in rows:
        if row["threshold"] is None:
            table.add_row(row["name"], "none", "", "", "", "", "")
            continue
        stopped, premature, saved = row["stopped"], row["premature"], row["saved"]
        table.add_row(
            row["name"], f"{row['threshold']:.4f}", _number(row["p_value"]), f"{stopped} of {row['answers']}", str(premature),
            f"{1 - premature / stopped:.2f}" if stopped else "", f"{saved} of {row['tokens']} ({saved / row['tokens']:.1%})",
        )  # fmt: skip
    return table
