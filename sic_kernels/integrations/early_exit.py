"""Self-speculative decoding: the model's first layers draft, its last layers verify from the states that the draft left behind.

    result = generate_early_exit(model, ids, 200, exit_layer=25, draft=4)
    result.tokens, result.layers_per_token, result.acceptance

A round: the token to be run passes layers 0 .. L-1 (L is `exit_layer`); the model's own norm and head make a drafted token of
its state, which passes the same layers, and so on up to `draft` of them. Each state before layer L is kept in a slot. Then
layers L .. run once over all of them: keys and values of layers 0 .. L-1 are there already, nothing is computed twice. What
stays are the drafted tokens that are the model's own choice, up to the first that is not, and the model's own token after
them. Rows of rejected tokens are overwritten by position, their slots removed.

Source: LayerSkip, Elhoushi et al. 2024, which trains models for it; draft and verify: Leviathan et al. 2023.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any

import torch

from .. import head
from ..replay import MemoryPool, Slot, SlotStore
from ..replay.pool import UNIT
from ..runtime.arguments import integer, integers, real, tensor
from .layers import LayeredModel
from .slots import CHUNK, SlotRow, digest_after, numbered

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True)
class EarlyExit:
    """tokens: the greedy continuation.  rounds: of drafting and verifying.  drafted: tokens proposed; accepted: right ones.

    layer_calls, head_calls: run after the prompt's; a layer (or the head) over one or several tokens is one call, so it counts
    launches, not arithmetic.  layers: of the model, which is what an ordinary step calls, with one head.
    least_margin: the smallest difference between the two greatest logits at a token that was emitted (inf: all from the
    prompt).
    """

    tokens: list[int]
    rounds: int
    drafted: int
    accepted: int
    layer_calls: int
    head_calls: int
    layers: int
    least_margin: float

    @property
    def layers_per_token(self) -> float:
        """Layer calls for each token after the first, which the prompt gives; an ordinary loop has `layers`. NaN: one token."""
        return self.layer_calls / (len(self.tokens) - 1) if len(self.tokens) > 1 else math.nan

    @property
    def heads_per_token(self) -> float:
        """Calls of the head for each token after the first; an ordinary loop has 1."""
        return self.head_calls / (len(self.tokens) - 1) if len(self.tokens) > 1 else math.nan

    @property
    def acceptance(self) -> float:
        """Share of the drafted tokens that were right; NaN: none was drafted."""
        return self.accepted / self.drafted if self.drafted else math.nan


def generate_early_exit(
    model: Any,
    ids: Any,
    count: int,
    *,
    exit_layer: int,
    draft: int = 4,
    min_confidence: float = 0.0,
    eos_ids: Collection[int] = (),
    store: SlotStore | None = None,
    chunk: int = CHUNK,
) -> EarlyExit:
    """The greedy continuation of `ids` int64 [n] by a transformers model: `count` tokens, or fewer that end in one of `eos_ids`.

    exit_layer: layers that draft, 1 to all but one. draft: tokens proposed at most in a round; 0 is the ordinary loop.
    min_confidence: drafting ends before a token to which the early head gives less probability. store: where the states are
    kept (draft + 1 of them must fit; those of accepted tokens stay); None: one of that size.

    Promise: every token is the model's greatest logit, the lowest id of equals. These logits come from one call over several
    tokens, whose sums are rounded in another order than those of one token; so the tokens are those of the ordinary loop
    unless two logits there differ by rounding only (float32: about 1e-4; see `least_margin`). Equal calls give equal results.
    """
    op = "generate_early_exit"
    count = integer(op, "count", count, 1, "1 or more tokens")
    draft = integer(op, "draft", draft, 0, "0 or more tokens")
    least = real(op, "min_confidence", min_confidence, lambda x: 0 <= x <= 1, "0 to 1")
    ids = tensor(op, "ids", ids, (torch.int64,), (-1,))
    ends = frozenset(integers(op, "eos_ids", eos_ids, "ids of tokens"))
    layered = LayeredModel(model, check=False)  # SlotRow checks
    exit_layer = numbered(op, "exit_layer", exit_layer, 1, layered.layers - 1)
    store = _store_of(layered, draft) if store is None else store
    row = SlotRow(model, store, capacity=len(ids) + count, chunk=chunk)
    return _Speculation(row, exit_layer, draft, least, ends).run(row.prefill(ids), count)


def _store_of(model: LayeredModel, draft: int) -> SlotStore:
    """One that holds the states of a round."""
    room = -(-model.state_bytes // UNIT) * UNIT * (draft + 1)
    return SlotStore(MemoryPool(room, parts=("boundary",), weights=(1,), device=model.device))


class _Speculation:
    def __init__(self, row: SlotRow, exit_layer: int, draft: int, least: float, eos_ids: frozenset[int]) -> None:
        self.row, self.draft, self.least, self.eos_ids = row, draft, least, eos_ids
        self.early, self.late = range(exit_layer), range(exit_layer, row.model.layers)

    def run(self, logits: Tensor, count: int) -> EarlyExit:
        row, tokens, margin = self.row, [int(logits.argmax())], math.inf
        row.layer_calls = row.head_calls = 0
        rounds = drafted = accepted = 0
        while len(tokens) < count and tokens[-1] not in self.eos_ids:
            choice, margins, proposed = self._round(tokens[-1], min(self.draft, count - len(tokens) - 1))
            ends = next((i + 1 for i, token in enumerate(choice) if token in self.eos_ids), len(choice))
            tokens += choice[:ends]
            margin = min(margin, *margins[:ends])
            rounds, drafted, accepted = rounds + 1, drafted + proposed, accepted + len(choice) - 1
        return EarlyExit(tokens, rounds, drafted, accepted, row.layer_calls, row.head_calls, row.model.layers, margin)

    def _round(self, token: int, most: int) -> tuple[list[int], list[float], int]:
        """Runs `token` and what is drafted after it: tokens that follow, their margins, how many were drafted."""
        row, slots = self.row, list[Slot]()
        try:
            tokens = self._drafted(token, most, slots)
            states = torch.cat([slot.tensor for slot in slots])
            stats = head.logits_stats(row.head(row.run(states, self.late, len(row.tokens))), k=2)
        finally:
            for slot in slots:
                row.store.unpin(slot)
        choice = stats.argmax.tolist()
        right = next((i for i, (a, b) in enumerate(zip(tokens[1:], choice)) if a != b), len(tokens) - 1)
        for slot in slots[right + 1 :]:
            row.store.remove(slot)
        for i in range(right + 1):
            row.append([tokens[i]], slots[i].prefix)
        margins = (stats.topk_logprobs[:, 0] - stats.topk_logprobs[:, 1]).tolist()
        return choice[: right + 1], margins[: right + 1], len(tokens) - 1

    def _drafted(self, token: int, most: int, slots: list[Slot]) -> list[int]:
        """`token` and those drafted after it; `slots` gets the state before the exit layer of each, pinned."""
        row, tokens, digest = self.row, [token], self.row.digest
        while True:
            digest = digest_after(digest, tokens[-1:])
            h = row.run(row.embed(tokens[-1:]), self.early, len(row.tokens) + len(tokens) - 1)
            slots.append(row.store.put(row.fingerprint, digest, len(self.early), h, pin=True))
            if len(slots) > most:
                return tokens
            stats = head.logits_stats(row.head(h), k=1)
            if math.exp(float(stats.topk_logprobs[0, 0])) < self.least:
                return tokens
            tokens.append(int(stats.argmax[0]))
