"""The part of the demo that is about replay: a prefill killed with SIGKILL that goes on in another process, self-speculative
decoding, and the last token drawn again.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import torch

from .. import models, replay
from ..integrations.early_exit import generate_early_exit
from ..integrations.slots import SlotRow, resample
from . import _demo_head, _kill, _llama_cpp
from ._replay_process import Job

TOKENS, CHUNK = 1024, 256  # of the prefill that is killed, at most
FORMATS = ("torch", "safetensors", _llama_cpp.BASE)
WRITTEN = 24  # tokens, ordinarily and by self-speculation
DRAFT, SURE = 4, 0.9  # tokens drafted in a round at most, while the early exit gives them this probability
DRAWS, TEMPERATURE = 5, 1.0


def measure(lm: Any, args: argparse.Namespace, passage: torch.Tensor, bar: Any) -> dict[str, Any]:
    """All three. passage: int64 [1,n], what the model is asked about."""
    task = bar.add_task("kill -9, resume, slots", total=3)
    found = {"kill": killed(lm, args)}
    bar.advance(task)
    exit_layer = max(1, lm.model.config.num_hidden_layers * 5 // 6)
    store = replay.SlotStore(replay.MemoryPool(1 << 22))
    ids = _demo_head.question(lm, passage)[0]
    row = SlotRow(lm.model, store, capacity=len(ids) + WRITTEN, keep=[exit_layer])
    found["early_exit"] = speculated(row, ids, exit_layer)
    bar.advance(task)
    found["resample"] = drawn_again(row, exit_layer)
    bar.advance(task)
    return found


def killed(lm: Any, args: argparse.Namespace) -> dict[str, Any]:
    """The prefill of the demo's own text: killed half-way, resumed; against states saved and loaded, and computing anew."""
    tokens = min(args.context, TOKENS)
    job = Job("", tokens, CHUNK, text=args.text, threads=args.threads or 0)
    whole = job.runner(lm.model, backed=False)
    stop = -(-tokens // CHUNK) * len(whole.plan.segments) // 2
    with tempfile.TemporaryDirectory() as folder:
        lm.save(folder)  # a GGUF file takes the new processes many times as long to load
        found = _kill.kill(Job(**{**vars(job), "model": folder, "stop": stop}), FORMATS, lm)
    whole.prefill(lm.tokens(models.text(args.text), tokens)[0])
    return {
        **found.as_dict(), "tokens": tokens, "killed_after": stop, "same_tokens": whole.generate(job.answer) == found.answer
    }  # fmt: skip


def speculated(row: SlotRow, ids: torch.Tensor, exit_layer: int) -> dict[str, Any]:
    """The ordinary loop in `row`, and the same text drafted by the first layers."""
    logits = row.prefill(ids)
    begin = time.perf_counter()
    plain = row.generate(logits, WRITTEN)
    middle = time.perf_counter()
    found = generate_early_exit(row.model.model, ids, WRITTEN, exit_layer=exit_layer, draft=DRAFT, min_confidence=SURE)
    end = time.perf_counter()
    return {
        "exit_layer": exit_layer, "layers": found.layers, "tokens": WRITTEN, "drafted": found.drafted,
        "accepted": found.accepted, "layers_per_token": found.layers_per_token, "heads_per_token": found.heads_per_token,
        "same_tokens": found.tokens == plain, "least_margin": found.least_margin,
        "plain_seconds": middle - begin, "seconds_with_prompt": end - middle,
    }  # fmt: skip


def drawn_again(row: SlotRow, layer: int) -> dict[str, Any]:
    """The token after the last of `row` with other seeds, beside the whole step."""
    token = resample(row, layer).token
    begin = time.perf_counter()
    whole = row.step(token)
    middle = time.perf_counter()
    again = resample(row, layer)
    end = time.perf_counter()
    drawn = [resample(row, layer, temperature=TEMPERATURE, seed=seed).token for seed in range(DRAWS)]
    return {
        "layer": layer, "layers_run": again.layers, "layers": row.model.layers, "temperature": TEMPERATURE, "tokens": drawn,
        "same_bits": torch.equal(again.logits, whole), "step_seconds": middle - begin, "seconds": end - middle,
    }  # fmt: skip


def lines(found: dict[str, Any]) -> list[str]:
    """What `measure` found, for people."""
    kill, early, again = found["kill"], found["early_exit"], found["resample"]
    loads = ", ".join(
        f"{1e3 * seconds:.0f} ms ({form}, {kill['nbytes'][form] / 1e6:.0f} MB)"
        for form, seconds in kill["loaded"].items()
    )
    return [
        f"kill -9 in the middle of a prefill of {kill['tokens']} tokens, another process goes on: first missing segment "
        f"{1e3 * kill['resumed']:.1f} ms after the model is there, {_same(kill['same_tokens'], 'tokens')}",
        f"  in its place: {1e3 * kill['recomputed']:.0f} ms to compute what was done; {loads} to load what somebody had to save",
        *(f"  not measured: loading the state by {form}: {why}" for form, why in kill["absent"].items()),
        f"self-speculation, exit at layer {early['exit_layer']} of {early['layers']} where it is {SURE:.0%} sure: "
        f"{early['layers_per_token']:.1f} layers per token in place of {early['layers']}, {early['accepted']} of "
        f"{early['drafted']} drafts accepted, {_same(early['same_tokens'], 'text')}",
        f"the last token drawn again from layer {again['layer']}: {again['layers_run']} of {again['layers']} layers, "
        f"{1e3 * again['seconds']:.1f} ms in place of {1e3 * again['step_seconds']:.1f}, {_same(again['same_bits'], 'bits')}",
    ]


def _same(is_same: bool, what: str) -> str:
    return f"the same {what}" if is_same else f"OTHER {what.upper()}"
