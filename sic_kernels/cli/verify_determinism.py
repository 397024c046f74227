"""Run every operation again and again and compare: bits from run to run, between thread counts, and for one sequence
alone and inside batches; peak memory from run to run; and how far the times spread.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ..runtime.errors import SicError
from ._options import count

HEADS, GROUP, DIM, PAGE, TOKENS = 2, 4, 64, 16, 2000
BATCHES = (1, 2, 8)


class DeterminismError(SicError):
    """A process could not run the operations."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("--runs", type=count(2), default=20, help="runs of each operation in each process")
    parser.add_argument(
        "--threads", type=count(1, 256), nargs="+", default=[1, 2], help="thread counts, one process each"
    )
    parser.add_argument("--backend", default="auto", help="backend to check")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--no-measure", dest="measure", action="store_false", help="bits only, not memory and time")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """0 when every bit and every peak of memory agrees, else 1. Times are reported, not judged."""
    if args.worker:
        print(json.dumps(examine(args.runs, args.backend, args.measure)))
        return 0
    by_threads = {n: _in_process(args, n) for n in args.threads}
    report = {"runs": args.runs, "measured": args.measure, "operations": _join(by_threads)}
    report["equal"] = all(row["equal"] for row in report["operations"].values())
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        _show(report)
    return 0 if report["equal"] else 1


def _in_process(args: argparse.Namespace, threads: int) -> dict[str, Any]:
    """Results of one thread count; settings are frozen at first use, so each count needs its own process."""
    command = [sys.executable, "-m", "sic_kernels", "verify-determinism", "--worker"]
    command += ["--runs", str(args.runs), "--backend", args.backend, *([] if args.measure else ["--no-measure"])]
    done = subprocess.run(
        command, env={**os.environ, "SIC_NUM_THREADS": str(threads)}, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:  # its own message is on stderr
        raise DeterminismError(f"the process with {threads} threads ended with status {done.returncode}")
    return json.loads(done.stdout)


def _join(by_threads: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """operation -> {"equal", "digest", "why", "costs": {threads: what the runs cost}} over all thread counts."""
    first = next(iter(by_threads.values()))
    joined = {}
    for name, row in first.items():
        why = [f"{n} threads: {rows[name]['why']}" for n, rows in by_threads.items() if rows[name]["why"]]
        digests = {n: rows[name]["digest"] for n, rows in by_threads.items()}
        if len(set(digests.values())) > 1:
            why.append(f"differs between thread counts: {digests}")
        costs = {n: rows[name]["costs"] for n, rows in by_threads.items()}
        joined[name] = {"equal": not why, "digest": row["digest"], "why": "; ".join(why), "costs": costs}
    return joined


def _show(report: dict[str, Any]) -> None:
    width = max(map(len, report["operations"]))
    head = f"{'':<{width}}  bits     digest            peak memory       P50       P99/P50"
    print(head if any(row["costs"] for row in report["operations"].values()) else "")
    for name, row in report["operations"].items():
        state = "equal" if row["equal"] else "DIFFERS"
        print(f"{name:<{width}}  {state:<7}  {row['digest']}  {_costs(row['costs'])}  {row['why']}".rstrip())
    what = "every bit and every peak of memory" if report["measured"] else "every bit"
    print(f"{what} agrees" if report["equal"] else "some runs differ")


def _costs(by_threads: dict[str, Any]) -> str:
    """Of all thread counts: the largest peak and the widest spread."""
    measured = [costs for costs in by_threads.values() if costs]
    if not measured:
        return ""
    peak, middle = (max(costs[name] for costs in measured) for name in ("peak_bytes", "p50"))
    return f"{peak[1]:>9,} B  {1e6 * middle:>9,.0f} us  {max(costs['spread'] for costs in measured):>6.2f}"


# --- what runs in each process ---------------------------------------------------------------------------------------


def examine(runs: int, backend: str, measure: bool = True) -> dict[str, Any]:
    """operation -> {"digest", "why", "costs"}: repeated runs, and the first sequence alone against the same one in batches."""
    from ..runtime.determinism import verify_determinism

    rows: dict[str, dict[str, Any]] = {}
    largest = _operations(max(BATCHES), backend)
    for name, op in largest.items():
        report = verify_determinism(op, runs=runs, measure=measure)
        costs = report.costs
        why = [report.difference] if report.difference else []
        if costs is not None and not costs.memory_equal:
            why.append("peak memory from {:,} to {:,} bytes".format(*costs.peak_bytes))
        rows[name] = {"digest": report.digest, "why": "; ".join(why), "costs": costs and costs.as_dict()}
    for batch in BATCHES[:-1]:
        for name, op in _operations(batch, backend).items():
            if not _same_rows(op(), largest[name](), batch):
                rows[name]["why"] += f" batch of {batch} differs from the same rows in a batch of {max(BATCHES)}"
    return rows


def _same_rows(small: Any, large: Any, batch: int) -> bool:
    """Whether the first rows of every tensor (first axis: sequences) have the same bits."""
    from ..testing import same_bits

    return all(same_bits(a, b[:batch]) for a, b in zip(small, large))


def _problem(batch: int) -> SimpleNamespace:
    """Inputs of the operations. Sequence i is the same whatever the batch."""
    import torch

    from .. import slicing

    wide = max(BATCHES)
    gen = torch.Generator().manual_seed(0)
    pages_each = -(-TOKENS // PAGE)
    shape = (wide * pages_each, HEADS, PAGE, DIM)
    k = torch.randn(shape, generator=gen).to(torch.bfloat16)
    v = torch.randn(shape, generator=gen).to(torch.bfloat16)
    q = torch.randn(wide, 1, HEADS * GROUP, DIM, generator=gen).to(torch.bfloat16)[:batch]
    table = torch.randperm(wide * pages_each, generator=gen).view(wide, pages_each).to(torch.int32)[:batch]
    lens = torch.tensor([TOKENS - 97 * i for i in range(wide)], dtype=torch.int32)[:batch]

    params = slicing.calibrate(k.transpose(1, 2).reshape(-1, HEADS, DIM))
    sketch = slicing.key_sketch(k, table, lens, params)
    scores = slicing.score_tokens(q, sketch, table, lens)
    chosen = slicing.select(scores, lens, unit="token", page_size=PAGE)
    states = [slicing.sliced_attention(q, k, v, table, lens, selection) for selection in (chosen, None)]
    return SimpleNamespace(
        q=q, k=k, v=v, table=table, lens=lens, sketch=sketch, scores=scores, chosen=chosen,
        rows=k.view(wide, pages_each, HEADS, PAGE, DIM).transpose(1, 2).reshape(wide, HEADS, -1, DIM)[:batch],
        summary=slicing.page_summary(k, table, lens), keep=torch.tensor([[[7 * i, 300], [500, 501]] for i in range(batch)]),
        outs=torch.stack([out for out, _ in states]), lses=torch.stack([lse for _, lse in states]),
    )  # fmt: skip


def _operations(batch: int, backend: str) -> dict[str, Callable[[], tuple]]:
    """operation -> call that returns its tensors."""
    import torch

    from .. import slicing

    p = _problem(batch)
    paged = (p.table, p.lens)
    forced: dict[str, Any] = {"backend": None if backend == "auto" else backend}

    def key_sketch() -> tuple:
        got = slicing.key_sketch(p.rows, None, p.lens, p.sketch.params, **forced)
        return got.bits, got.norm

    def append_kv() -> tuple:
        keys, values, bits, norm = (torch.zeros_like(x) for x in (p.k, p.v, p.sketch.bits, p.sketch.norm))
        index = dataclasses.replace(p.sketch, bits=bits, norm=norm)
        slots = torch.arange(batch) * PAGE  # sequence i into page i
        slicing.append_kv(p.k[:batch, :, 0], p.v[:batch, :, 0], keys, values, slots, index=index, **forced)
        return keys[:batch], values[:batch], bits[:batch], norm[:batch]

    def refine_tokens() -> tuple:
        return (slicing.refine_tokens(p.q, p.sketch, p.chosen, *paged, **forced),)

    def select() -> tuple:
        got = slicing.select(p.scores, p.lens, unit="token", page_size=PAGE, **forced)
        return got.indices, got.counts

    def gather() -> tuple:
        keys, values, starts = slicing.gather(p.k, p.v, *paged, p.chosen, **forced)
        return keys[None, : starts[HEADS]], values[None, : starts[HEADS]]  # rows are packed: those of sequence 0

    def attend(keep: Any = None) -> tuple:
        got = slicing.attend(p.q, p.k, p.v, p.sketch, *paged, keep=keep, **forced)
        assert got.selection is not None  # only a dense layer has none
        return got.out, got.lse, got.selection.indices, got.selection.counts, got.omitted_mass, got.status

    return {
        "key_sketch": key_sketch,
        "page_summary": lambda: (slicing.page_summary(p.rows, None, p.lens, **forced),),
        "append_kv": append_kv,
        "score_tokens": lambda: (slicing.score_tokens(p.q, p.sketch, *paged, **forced),),
        "score_pages": lambda: (slicing.score_pages(p.q, p.summary, *paged, page_size=PAGE, **forced),),
        "refine_tokens": refine_tokens,
        "select": select,
        "gather": gather,
        "sliced_attention": lambda: tuple(slicing.sliced_attention(p.q, p.k, p.v, *paged, p.chosen, **forced)),
        "dense_attention": lambda: tuple(slicing.sliced_attention(p.q, p.k, p.v, *paged, **forced)),
        "merge_states": lambda: tuple(slicing.merge_states(p.outs[0], p.lses[0], p.outs[1], p.lses[1], **forced)),
        "merge_many": lambda: tuple(slicing.merge_many(p.outs, p.lses, **forced)),
        "attend": attend,
        "attend, spans kept": lambda: attend(p.keep),
        **_coded_operations(p, batch, forced),
        **_head_operations(batch, forced),
        **_ragged_operations(batch, forced),
        "uniform": lambda: (_uniform_rows(batch, forced),),
    }


def _coded_operations(p: SimpleNamespace, batch: int, forced: dict[str, Any]) -> dict[str, Callable[[], tuple]]:
    """The same rows, coded."""
    import torch

    from .. import delta, slicing

    gen = torch.Generator().manual_seed(1)
    k_templates, v_templates = (
        delta.fit_templates(torch.randn(256, HEADS, DIM, generator=gen), count=16) for _ in "kv"
    )
    codec = delta.Codec(4, 4, k_templates, v_templates, delta.Rope(1e4, DIM, max_position=TOKENS))
    wide = max(BATCHES)
    longest = p.rows.shape[2]
    table = torch.arange(wide * longest // PAGE, dtype=torch.int32).view(wide, -1)[:batch]
    k = p.rows.transpose(1, 2)  # [B,S,Hkv,D]
    at = torch.arange(longest).repeat(batch)
    slots = (torch.arange(batch)[:, None] * longest + torch.arange(longest)).flatten()
    coded = (codec, pages := _coded_pages(codec, p), table, p.lens)

    def encode(into: Any = None) -> tuple:
        pages = into or _coded_pages(codec, p)
        delta.encode(codec, k.flatten(0, 1), k.flatten(0, 1), at, slots, pages, **({} if into else forced))
        return tuple(x.unflatten(0, (wide, -1))[:batch] for x in (pages.k_codes, pages.v_codes, pages.tags))

    def select_slice() -> tuple:
        selection, unread = slicing.select_slice(p.q, p.sketch, p.table, p.lens, **forced)
        return selection.indices, selection.counts, unread

    encode(pages)
    return {
        "select_slice": select_slice,
        "encode": encode,
        "decode": lambda: tuple(delta.decode(*coded, **forced)),
        "delta_attention": lambda: tuple(delta.delta_attention(p.q, *coded, **forced)),
        "delta_attention, sliced": lambda: tuple(delta.delta_attention(p.q, *coded, p.chosen, **forced)),
    }


def _head_operations(batch: int, forced: dict[str, Any]) -> dict[str, Callable[[], tuple]]:
    """Statistics of logits, a vocabulary as long as several segments; with equal logits, where lists could differ."""
    import torch

    from .. import head

    gen = torch.Generator().manual_seed(2)
    hidden = torch.randn(max(BATCHES), 192, generator=gen).to(torch.bfloat16)[:batch]
    weight = torch.randn(5000, 192, generator=gen).to(torch.bfloat16)
    logits = (12 * torch.randn(max(BATCHES), 70_000, generator=gen)).round()[:batch] / 4
    of_probe = torch.randn(16, 192, generator=gen).to(torch.bfloat16), torch.randn(16, generator=gen)
    wanted: dict[str, Any] = {"k": 8, "watch_ids": torch.tensor([3, 4999]), "target_ids": torch.arange(batch)}
    parts = [
        head.partial_stats(logits[:, at : at + 14_000], vocab_start=at, **wanted) for at in range(0, 70_000, 14_000)
    ]
    rule = head.TerminationRule(threshold=0.5, patience=2, plateau_window=4, plateau_width=0.1)
    scores = torch.rand(4, max(BATCHES), generator=gen)[:, :batch]
    stats = head.logits_stats(logits)

    def termination_step() -> tuple:
        state, tokens = head.TerminationState.allocate(batch), torch.arange(batch)
        steps = [head.termination_step(rule, state, score, stats, tokens, **forced) for score in scores.contiguous()]
        return tuple(x for step in steps for x in step)

    return {
        "logits_stats": lambda: tuple(head.logits_stats(logits, **wanted, **forced)[:9]),
        "lm_head_stats": lambda: tuple(head.lm_head_stats(hidden, weight, **wanted, **forced)[:9]),
        "partial_stats": lambda: (
            *head.partial_stats(logits, **wanted, **forced)[:9],
            *head.partial_stats(hidden=hidden, weight=weight, **wanted, **forced)[:9],
        ),
        "merge_stats": lambda: tuple(head.merge_stats(parts, **forced)[:9]),
        "probe": lambda: (head.probe(hidden, *of_probe, **forced),),
        "termination_step": termination_step,
    }


def _uniform_rows(batch: int, forced: dict[str, Any]) -> Any:
    """A row for each sequence, of its own position."""
    import torch

    from .. import replay

    rows = torch.empty(batch, 1000)
    for i, row in enumerate(rows):
        replay.uniform((7, 100 + i, 3), out=row, **forced)
    return rows


def _ragged_operations(batch: int, forced: dict[str, Any]) -> dict[str, Callable[[], tuple]]:
    """Rows of sequences of different lengths, empty ones among them."""
    import torch

    from .. import ragged

    gen = torch.Generator().manual_seed(3)
    lengths = [(700 - 97 * i) * (i % 3 > 0 or i == 0) for i in range(max(BATCHES))][:batch]
    padded = torch.randn(max(BATCHES), max(lengths), 96, generator=gen)[:batch]
    packed = torch.cat([row[:n] for row, n in zip(padded, lengths)])
    bounds = ragged.cu_seqlens(lengths)
    return {
        "pack": lambda: (ragged.pack(padded, bounds, **forced)[None, : lengths[0]],),  # rows of sequence 0
        "unpack": lambda: (ragged.unpack(packed, bounds, padded.shape[1], **forced),),
    }


def _coded_pages(codec: Any, p: SimpleNamespace) -> Any:
    """Empty pages for the largest batch, with room for every sequence's sinks."""
    from .. import delta

    return delta.DeltaPages.allocate(codec, len(p.k), PAGE, HEADS, DIM, DIM, raw_rows=max(BATCHES) * HEADS * 64)
