"""Kept hidden states: self-speculation by exit layer, the last token drawn again, keys and values restored."""

from __future__ import annotations

import functools
import statistics
import time

import pytest
import torch
from smollm2 import model, prompt

from sic_kernels import replay
from sic_kernels.cli._answers import prompt_ids
from sic_kernels.integrations.early_exit import generate_early_exit
from sic_kernels.integrations.slots import SlotRow, evict_kv, resample, restore_kv

EXITS = [(10, 1, 0.0), (15, 1, 0.0), (20, 1, 0.0), (25, 1, 0.0), (25, 4, 0.0), (25, 4, 0.9), (28, 4, 0.9)]
QUESTIONS, ANSWER = 4, 48  # instructions that are answered, and tokens of each answer
CONTEXT = 1024


def row(capacity, keep):
    return SlotRow(model().model, replay.SlotStore(replay.MemoryPool(1 << 29)), capacity=capacity, keep=keep)


def seconds_of(call):
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


@functools.cache
def plain_answers():
    """Of each question: its ids, the ordinary loop's tokens, seconds of the loop without the prompt."""
    from sic_kernels import models

    answers = []
    for text in models.instructions(QUESTIONS):
        ids = torch.tensor(prompt_ids(model().tokenizer, text))
        r = row(len(ids) + ANSWER, [])
        logits = r.prefill(ids)
        seconds, tokens = seconds_of(functools.partial(r.generate, logits, ANSWER))
        answers.append((ids, tokens, seconds))
    return answers


@pytest.mark.parametrize(("exit_layer", "draft", "least"), EXITS, ids=lambda x: f"{x:g}")
def bench_early_exit(benchmark, fact, exit_layer, draft, least):
    """Layers, heads and time for a token that is written, against the ordinary loop: 30 layers, a head, the same tokens."""
    found, spent, before = [], 0.0, 0.0
    for ids, tokens, seconds in plain_answers():
        generate = functools.partial(
            generate_early_exit, model().model, ids, exit_layer=exit_layer, draft=draft, min_confidence=least
        )
        only_prompt, _ = seconds_of(functools.partial(generate, 1))
        whole, result = seconds_of(functools.partial(generate, ANSWER))
        assert result.tokens == tokens
        found.append(result)
        spent, before = spent + whole - only_prompt, before + seconds
    benchmark.pedantic(lambda: None, rounds=1)
    count, drafted = QUESTIONS * (ANSWER - 1), sum(f.drafted for f in found)
    layers, heads = sum(f.layer_calls for f in found) / count, sum(f.head_calls for f in found) / count
    acceptance, margin = sum(f.accepted for f in found) / drafted, min(f.least_margin for f in found)
    sure = f", where it is {least:.0%} sure" if least else ""
    fact(
        f"exit at layer {exit_layer} of {found[0].layers}, {draft} drafted{sure}: the ordinary {count} tokens",
        f"{layers:.1f} layers, {heads:.2f} heads, {1e3 * spent / count:.0f} ms a token ({before / spent:.2f}x as fast), "
        f"{acceptance:.0%} of {drafted} drafts accepted, least margin {margin:.3f}",
        layers=layers, heads=heads, acceptance=acceptance, seconds=spent / count, plain_seconds=before / count,
    )  # fmt: skip


def bench_resample(benchmark, fact):
    """The last token of a long row drawn again from late boundaries, beside the whole step."""
    boundaries = (0, 15, 25, 30)
    r = row(CONTEXT + 16, boundaries)
    logits = r.prefill(prompt(CONTEXT))
    steps = []
    for _ in range(7):
        token = int(logits.argmax())
        seconds, logits = seconds_of(functools.partial(r.step, token))
        steps.append(seconds)
    whole = statistics.median(steps)
    kept = logits.clone()
    for boundary in boundaries:
        again = [seconds_of(functools.partial(resample, r, boundary)) for _ in range(7)]
        assert all(torch.equal(result.logits, kept) for _, result in again)
        seconds, layers = statistics.median(s for s, _ in again), again[0][1].layers
        fact(
            f"the last of {CONTEXT} tokens drawn again from boundary {boundary}, the same bits",
            f"{layers} layers and the head, {1e3 * seconds:.1f} ms (a step: {1e3 * whole:.1f} ms)",
            layers=layers, seconds=seconds, step_seconds=whole,
        )  # fmt: skip
    benchmark.pedantic(lambda: resample(r, 30), rounds=7, warmup_rounds=1)


def bench_restore_kv(benchmark, fact):
    """Keys and values of every layer from its states, beside the prefill that made them."""
    layers = model().model.config.num_hidden_layers
    r = row(CONTEXT, range(layers))
    prefill, _ = seconds_of(lambda: r.prefill(prompt(CONTEXT)))
    before = [r.kv[i][:, :, :CONTEXT].clone() for i in range(layers)]
    spent = 0.0
    for i in range(layers):
        evict_kv(r, i)
        spent += seconds_of(functools.partial(restore_kv, r, i))[0]
        assert torch.equal(r.kv[i][:, :, :CONTEXT], before[i])
    benchmark.pedantic(lambda: (evict_kv(r, 0), restore_kv(r, 0)), rounds=5)
    fact(
        f"keys and values of {layers} layers, {CONTEXT} tokens, from states, the same bits",
        f"{1e3 * spent:.0f} ms ({prefill / spent:.1f}x as fast as the prefill)", seconds=spent, prefill_seconds=prefill,
    )  # fmt: skip
    state, kv = r.model.state_bytes, r.model.kv_bytes
    fact("bytes of a token and layer", f"{state} a state, {kv} keys and values ({state / kv:.2f}x)", state=state, kv=kv)
