"""Follow-up questions on a point of an earlier answer: attention dense, over a slice, and over a slice with the point kept.

The answer is a list of facts; text of another kind follows, then each question in turn ("In the third point above, what
is ...?"). `references` finds the point's tokens, `SlicedCache.keep` holds them in the slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import models, references
from ..integrations.transformers import SlicedCache, enable
from ..runtime.errors import SicError
from ..slicing import SlicePolicy
from . import _run

Tensor = torch.Tensor

ORDINALS = (
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
)
SHORT: dict[str, Any] = {"between": 600, "ratios": (0.04,), "count": 8}  # for the demo
QUESTION_TOKENS = 64  # at most; calls of so many are sliced too


def evaluate(lm: Any, text: str, between: int, ratios: Sequence[float], count: int, bar: Any) -> list[dict[str, Any]]:
    """A row for dense, and two for each ratio: right answers of `count` (by their first token), their mean probability, the
    share of the tokens that is kept. between: tokens of `text` between the answer and the questions."""
    cases = models.needle_cases(count)
    answer = (
        "Here are some points to remember:\n\n"
        + "".join(f"{i}. {c.fact.strip()}\n" for i, c in enumerate(cases, 1))
        + "\n"
    )
    encoded = lm.tokenizer(answer, return_tensors="pt", return_offsets_mapping=True)
    outline = references.outline(answer, offsets=[tuple(pair) for pair in encoded.offset_mapping[0].tolist()])
    ids = torch.cat([encoded.input_ids, lm.tokens(models.text(text), between)], dim=1)
    enable(lm.model)
    rows = []
    plans = [("dense", None, False), *((f"sliced {r:.0%}", r, keep) for r in ratios for keep in (False, True))]
    task = bar.add_task(f"{count} follow-up questions", total=count * len(plans))
    base: Any = None
    for name, ratio, keep in plans:
        cache = SlicedCache(lm.model.config, _policy(ratio), capacity=ids.shape[1] + QUESTION_TOKENS)
        if base is None:
            base = cache
            _run.prefill(lm.model, ids, base, lambda n: None)
        else:
            _run.fill(cache, (base.pages.row(layer, 0) for layer in range(base.pages.layers)))
        answers = []
        for i, case in enumerate(cases):
            question = _question(i, case.thing)
            span = _tokens_of(question, outline)
            if keep:
                cache.keep([[span]])
            answers.append(_ask(lm, cache, question, case.answer))
            bar.advance(task)
        right, probability = (sum(column) for column in zip(*answers))
        kept = (span[1] - span[0]) / ids.shape[1] if keep else 0.0
        label = name + (", point kept" if keep else "")
        rows.append({"policy": label, "ratio": ratio, "keep": keep, "questions": count, "right": right,
                     "probability": probability / count, "kept": kept, "context": ids.shape[1]})  # fmt: skip
    lm.model.set_attn_implementation("sdpa")
    return rows


def _policy(ratio: float | None) -> SlicePolicy:
    if ratio is None:
        return SlicePolicy(ratio=1.0, max_sliced_T=0)
    return SlicePolicy(ratio=ratio, max_sliced_T=QUESTION_TOKENS, min_len=0, dense_layers=())


def _question(i: int, thing: str) -> str:
    what = f"In the {ORDINALS[i]} point above, what is {thing}?"
    return f"\n\nQuestion: {what}\nAnswer: As point {i + 1} says, {thing} is"


def _tokens_of(question: str, outline: references.Outline) -> tuple[int, int]:
    """Of the point that the question is about."""
    found = references.resolve(references.parse(question, lang="en")[0], outline)
    if not isinstance(found, references.Resolved) or found.tokens is None:
        raise SicError(f"follow-ups: {question.strip()!r} was not resolved: {found}")
    return found.tokens


def _ask(lm: Any, cache: SlicedCache, question: str, answer: str) -> tuple[bool, float]:
    """Whether the next token begins the answer, and its probability; the cache is left as it was."""
    ids = lm.tokenizer(question, return_tensors="pt").input_ids
    expected = lm.tokenizer(f" {answer}").input_ids[0]
    with torch.inference_mode():
        logits = lm.model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1].float()
    cache.crop(-ids.shape[1])
    return int(logits.argmax()) == expected, float(logits.softmax(-1)[expected])


def line(rows: Sequence[dict[str, Any]]) -> str:
    """What `evaluate` found, for people."""
    parts = [f"{row['policy']} {row['right']} of {row['questions']} ({row['probability']:.2f})" for row in rows]
    return f"follow-ups on points of an answer {rows[0]['context']} tokens long ago, right (probability): {'; '.join(parts)}"
