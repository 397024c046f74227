"""Method of `eval delta`; see `_quality` for how runs are scored.

The cache of the prefix is coded, then the scored tokens run in chunks whose own keys and values are read raw within the chunk
and coded when it is over: every method alike. Sizes are those at the end, everything counted but what all sequences share
(templates) and the key sketch, which stands beside.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from .. import delta, slicing
from ..integrations.transformers import SlicedCache
from . import _llama_cpp, _run
from ._coders import Delta, Kivi, NotHere, Quanto, RowCoder, fp8, q4_0, q8_0
from ._quality import EvalCache, Plan, compare, policy, quality_row, score

Tensor = torch.Tensor

SIZES = ("size", "sketch", "raw_rows")  # of half precision; of the coded rows
CHUNK = 32  # scored tokens per forward


@dataclasses.dataclass(frozen=True)
class CodedPlan(Plan):
    """A row of the table with its way of coding: `coder()` makes one for a new sequence; None: rows stay raw."""

    coder: Callable[[], Any] | None = None


def plans(config: Any, templates: delta.ModelTemplates, ratio: float, tokens: int) -> list[CodedPlan]:
    """Dense, the peers, the presets, and the sliced coded cache against the oracle on the raw one."""
    dense, sliced = slicing.SlicePolicy(max_sliced_T=0), policy(ratio=ratio)

    def coded(label: str, coder: Callable[[], Any], against: str | None = None) -> CodedPlan:
        return CodedPlan(label, "dense", dense, against, coder)

    def preset(name: str) -> Callable[[], Any]:
        return lambda: Delta(templates.codecs(name), templates.params, tokens)

    oracle = f"oracle {ratio:.0%}, raw"
    return [
        CodedPlan("dense", "dense", dense),
        coded("fp8 e4m3", lambda: RowCoder(fp8, lambda D: D)),
        coded("q8_0", lambda: RowCoder(q8_0, lambda D: D * 34 / 32)),
        coded("q4_0", lambda: RowCoder(q4_0, lambda D: D * 18 / 32)),
        coded("KIVI-4", lambda: Kivi(4, 0)),
        coded("KIVI-2", lambda: Kivi(2, 0)),
        coded("KIVI-2, 128 raw", lambda: Kivi(2, 128)),
        coded("QuantizedCache quanto 4", lambda: Quanto(config, 4)),
        coded("QuantizedCache quanto 2", lambda: Quanto(config, 2)),
        coded("delta q8", preset("q8"), "q8_0"),
        coded("delta k4v4", preset("k4v4"), "fp8 e4m3"),
        coded("delta k3v3", preset("k3v3"), "q4_0"),
        coded("delta k2v2", preset("k2v2"), "KIVI-2"),
        CodedPlan(oracle, "oracle", sliced),
        CodedPlan(f"delta k4v4, sliced {ratio:.0%}", "sliced", sliced, oracle, preset("k4v4")),
    ]


class CodedEvalCache(EvalCache):
    """Pages of numbers that a coder's rows replace as soon as the tokens that brought them are answered."""

    def __init__(self, config: Any, plan: CodedPlan, coder: Any, **options: Any) -> None:
        super().__init__(config, plan, **options)
        self.coder = coder
        self._coded = [0] * len(self.layers)  # tokens that the coder has been given

    def code_prefix(self, raw: list[tuple[Tensor, Tensor]]) -> None:
        """Start with the rows `[Hkv,n,D]` of each layer, coded."""
        for layer, (k, v) in enumerate(raw):
            self._replace(layer, (0, k, v) if self.coder is None else self.coder.code(layer, k, v))

    def _end(self, layer: int) -> None:
        if self.coder is not None:
            k, v = (x[:, self._coded[layer] :].clone() for x in self.pages.row(layer, 0))  # type: ignore[union-attr]
            self._replace(layer, self.coder.code(layer, k, v))
        super()._end(layer)

    def _replace(self, layer: int, rows: Any) -> None:
        start, *new = rows
        for x, y in zip(self.pages.row(layer, 0), new):  # type: ignore[union-attr]
            x[:, start:] = y
            self._coded[layer] = x.shape[1]


@torch.inference_mode()
def evaluate_text(
    lm: Any,
    name: str,
    raw: str,
    context: int,
    scored: int,
    skip: int,
    templates: delta.ModelTemplates,
    ratio: float,
    bar: Any,
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Tensor]]]:
    """Lines of the table for one text, and the scores they come from."""
    config, ids = lm.model.config, lm.tokens(raw, context, skip)
    base = SlicedCache(config, slicing.SlicePolicy(max_sliced_T=0), capacity=context + 64, params=templates.params)
    task = bar.add_task(f"{name}: prefill", total=context - scored)
    _run.prefill(lm.model, ids[:, : context - scored], base, lambda n: bar.advance(task, n))
    pages: Any = base.pages
    prefix = [(k.clone(), v.clone()) for k, v in (pages.row(layer, 0) for layer in range(pages.layers))]
    plan_list = plans(config, templates, ratio, context)
    task = bar.add_task(f"{name}: {len(plan_list)} methods", total=scored * len(plan_list))
    rows: list[dict[str, Any]] = []
    dense: list[Tensor] = []
    scores: dict[str, dict[str, Tensor]] = {}
    for plan in plan_list:
        try:
            coder = None if plan.coder is None else plan.coder()
        except NotHere as why:
            rows.append({"text": name, "policy": plan.label, "absent": str(why)})
            bar.advance(task, scored)
            continue
        cache = CodedEvalCache(config, plan, coder, page_size=base.page_size, params=base.params)
        cache.take_pages_of(base)
        cache.code_prefix(prefix)
        scores[plan.label] = score(
            lm.model, ids[:, context - scored :], cache, dense, CHUNK, lambda n: bar.advance(task, n)
        )
        cache.crop(-scored)
        rows.append({**quality_row(name, plan.label, plan.against, scores), **_sizes(plan, coder, pages, context)})
    return rows + _llama_rows(lm, name, ids, scored, scores, bar), scores


def _llama_rows(
    lm: Any, text: str, ids: Tensor, scored: int, scores: dict[str, dict[str, Tensor]], bar: Any
) -> list[dict[str, Any]]:
    """The lines of llama.cpp, each against its own half-precision run; their scores join the others."""
    try:
        gguf = _llama_cpp.require(lm.gguf)
    except NotHere as why:
        return [{"text": text, "policy": label, "absent": str(why)} for label in _llama_cpp.TYPES]
    rows: list[dict[str, Any]] = []
    dense: list[Tensor] = []
    task = bar.add_task(f"{text}: llama.cpp", total=scored * len(_llama_cpp.TYPES))
    for label, (kind, _) in _llama_cpp.TYPES.items():
        with contextlib.closing(_llama_cpp.Run(gguf, ids[0], kind)) as run:
            parts = _llama_cpp.log_probabilities(run, scored, CHUNK, lambda n: bar.advance(task, n))
        scores[label] = compare(parts, ids[:, -scored:], dense)
        rows.append({**quality_row(text, label, None, scores, _llama_cpp.BASE), "size": _llama_cpp.size(label)})
    return rows


def over_all_texts(scores: list[dict[str, dict[str, Tensor]]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same lines over the tokens of all texts; sizes are the mean."""
    joined = {label: {name: torch.cat([text[label][name] for text in scores]) for name in first}
              for label, first in scores[0].items()}  # fmt: skip
    lines = []
    for label in joined:
        mine = [row for row in rows if row["policy"] == label]
        sizes = {name: sum(row[name] for row in mine) / len(mine) for name in SIZES if name in mine[0]}
        base = _llama_cpp.BASE if label in _llama_cpp.TYPES else "dense"
        lines.append({**quality_row("all", label, mine[0].get("against"), joined, base), **sizes})
    return lines


def _sizes(plan: CodedPlan, coder: Any, pages: Any, tokens: int) -> dict[str, float]:
    """Bytes over those of a half-precision cache."""
    if coder is None:
        return {}
    half = tokens * pages.layers * pages.kv_heads * (pages.head_dim + pages.v_head_dim) * 2
    sizes = {"size": coder.nbytes() / half}
    if isinstance(coder, Delta):
        sizes["sketch"] = coder.sketch_nbytes() / half
        sizes["raw_rows"] = coder.raw_share()
    return sizes
