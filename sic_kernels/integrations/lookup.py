"""Prompt-lookup decoding: what follows the same words earlier in the text is proposed, and the model verifies it in one forward.

    result = generate(model, ids, max_new_tokens=200, cost=0.1)
    result.tokens, result.forwards, result.verified

Lossless: a proposed token is kept only where it is the model's own greedy choice, so the output is that of plain greedy
decoding. (One reservation, which holds for every speculative decoder: a forward of several tokens rounds its sums in another
order than a forward of one, so logits that are equal up to rounding may be ordered differently.)

How many proposed tokens are verified is decided per step from what is known before the forward: the length of the match, the
entropy at the last token, and how such proposals fared so far in this text. `sic.head.verify_budget` turns these confidences into
a length. Source: prompt lookup, Saxena 2023; the draft and verify scheme, Leviathan et al. 2023.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import numbers
from collections.abc import Collection, Sequence
from typing import Any

import torch

from .. import head
from ..runtime.arguments import integer, integers, real
from ..runtime.errors import ArgumentError

Tensor = torch.Tensor

ENTROPIES = (0.05, 0.5, 1.5)  # nats: edges of the classes that are counted apart


class Drafter:
    """Proposes continuations from the text itself, and learns how far they can be trusted.

    longest: tokens of the longest n-gram that is looked for; shorter ones are tried after it, and the latest occurrence
    wins. most: tokens proposed at most.  cost: of verifying one more token, in forwards of one token (see
    `sic.head.verify_budget`); None: all that is found is proposed.
    """

    def __init__(self, *, longest: int = 3, most: int = 10, cost: float | None = None) -> None:
        self.longest = integer("Drafter", "longest", longest, 1, "1 or more tokens")
        self.most = integer("Drafter", "most", most, 0, "0 or more tokens")
        expected = "forwards of one token, 0 or more, or None"
        self.cost = None if cost is None else real("Drafter", "cost", cost, lambda x: 0 <= x < math.inf, expected)
        self._text: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> where its latest continuation begins
        # of every kind of proposal: tokens accepted and tokens judged; with one of each before anything is known
        self._counts: dict[tuple[int, int, bool], tuple[int, int]] = {}
        self.matched, self._entropy = 0, 0  # of the last proposal: tokens of the match, class of the entropy

    def extend(self, tokens: Sequence[int]) -> None:
        """These tokens are part of the text."""
        for token in integers("Drafter.extend", "tokens", tokens, "ids of tokens"):
            n = len(self._text)
            for size in range(1, min(self.longest, n) + 1):
                self._after[tuple(self._text[n - size :])] = n
            self._text.append(token)

    def propose(self, entropy: float, limit: int) -> list[int]:
        """Up to `limit` tokens that may follow. entropy: of the distribution that the last token came from, nats."""
        if not isinstance(entropy, numbers.Real):  # NaN where the logits have some
            raise ArgumentError.of("Drafter.propose", "entropy", type(entropy).__name__, "a number of nats")
        limit = integer("Drafter.propose", "limit", limit, 0, "0 or more tokens")
        for size in range(min(self.longest, len(self._text)), 0, -1):
            start = self._after.get(tuple(self._text[-size:]))
            if start is not None:
                self.matched, self._entropy = size, bisect.bisect(ENTROPIES, entropy)
                found = self._text[start : start + min(self.most, limit)]
                return found if self.cost is None else found[: self._budget(len(found), self.cost)]
        return []

    def judged(self, accepted: int, proposed: int) -> None:
        """Of the last proposal, so many were right; nothing is known of what comes after the first wrong one."""
        accepted = integer("Drafter.judged", "accepted", accepted, 0, "0 or more tokens")
        proposed = integer("Drafter.judged", "proposed", proposed, 0, "0 or more tokens")
        for place in range(min(accepted + 1, proposed)):
            kind = (self.matched, self._entropy, place > 0)
            right, seen = self._counts.get(kind, (1, 2))
            self._counts[kind] = (right + (place < accepted), seen + 1)

    def _budget(self, count: int, cost: float) -> int:
        if count == 0:
            return 0
        (first, n), (later, m) = (
            self._counts.get((self.matched, self._entropy, then), (1, 2)) for then in (False, True)
        )
        confidence = torch.tensor([[first / n, *[later / m] * (count - 1)]])
        return int(head.verify_budget(confidence, cost)[0])


@dataclasses.dataclass(frozen=True)
class Generated:
    """tokens: what plain greedy decoding gives.  entropy: of the distribution each of them came from, nats.

    forwards: of the model, after the prompt's.  verified: proposed tokens that were computed; accepted: those that were right.
    """

    tokens: list[int]
    entropy: list[float]
    forwards: int
    verified: int
    accepted: int

    @property
    def verified_per_token(self) -> float:
        return self.verified / len(self.tokens)

    @property
    def forwards_per_token(self) -> float:
        return self.forwards / len(self.tokens)


def generate(
    model: Any,
    ids: Tensor,
    max_new_tokens: int,
    *,
    eos_ids: Collection[int] = (),
    longest: int = 3,
    most: int = 10,
    cost: float | None = None,
    cache: Any = None,
) -> Generated:
    """The greedy continuation of `ids` int64 [1,N] by a transformers model; longest, most, cost: see `Drafter`; most=0 is plain.

    An id of eos_ids ends it, and is the last token returned. cache: an empty transformers cache that can be cropped (default: a
    DynamicCache).
    """
    op = "lookup.generate"
    if not callable(model) or not hasattr(model, "config"):
        raise ArgumentError.of(op, "model", type(model).__name__, "a model of transformers")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] == 0:
        got = list(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise ArgumentError.of(op, "ids", got, "int64 [1,N] with a token at least")
    integer(op, "max_new_tokens", max_new_tokens, 1, "1 or more")
    ends = frozenset(integers(op, "eos_ids", eos_ids, "ids of tokens"))
    if cache is not None and not hasattr(cache, "crop"):
        raise ArgumentError.of(op, "cache", type(cache).__name__, "a cache of transformers that can be cropped")
    if cache is None:
        from transformers.cache_utils import DynamicCache

        cache = DynamicCache(config=model.config)
    drafter = Drafter(longest=longest, most=most, cost=cost)
    drafter.extend(ids[0].tolist())
    with torch.inference_mode():
        return _generate(model, ids, max_new_tokens, ends, drafter, cache)


def replay(
    ids: Sequence[int],
    tokens: Sequence[int],
    entropy: Sequence[float],
    *,
    longest: int = 3,
    most: int = 10,
    cost: float | None = None,
) -> Generated:
    """What `generate` would do for a greedy answer that is known already: the same counts, without the model.

    ids: of the prompt.  tokens: of the answer, each with the entropy of the distribution it came from.
    """
    op = "lookup.replay"
    ids, tokens = (integers(op, arg, x, "ids of tokens") for arg, x in (("ids", ids), ("tokens", tokens)))
    if not tokens:
        raise ArgumentError.of(op, "tokens", "none", "those of an answer, 1 or more")
    if not isinstance(entropy, Sequence) or not all(isinstance(x, numbers.Real) for x in entropy):
        raise ArgumentError.of(op, "entropy", type(entropy).__name__, "numbers of nats")
    if len(tokens) != len(entropy):
        raise ArgumentError.of(op, "entropy", f"{len(entropy)} numbers", f"one for each of {len(tokens)} tokens")
    drafter = Drafter(longest=longest, most=most, cost=cost)
    drafter.extend([*ids, tokens[0]])
    at, forwards, verified, accepted = 1, 0, 0, 0
    while at < len(tokens):
        draft = drafter.propose(entropy[at - 1], len(tokens) - at - 1)
        right = _agreeing(draft, tokens[at:])
        drafter.judged(right, len(draft))
        drafter.extend(tokens[at : at + right + 1])
        at += right + 1
        forwards, verified, accepted = forwards + 1, verified + len(draft), accepted + right
    return Generated(list(tokens), list(entropy), forwards, verified, accepted)


def _agreeing(draft: Sequence[int], choice: Sequence[int]) -> int:
    """How many of the proposed tokens are right, from the first on."""
    return next((i for i, (a, b) in enumerate(zip(draft, choice)) if a != b), len(draft))


def _generate(model: Any, ids: Tensor, wanted: int, eos_ids: frozenset[int], drafter: Drafter, cache: Any) -> Generated:
    tokens, entropy = [], []
    forwards = verified = accepted = 0
    draft: list[int] = []
    inputs = ids
    while True:
        logits = model(input_ids=inputs, cache=cache, use_cache=True, logits_to_keep=len(draft) + 1).logits[0]
        stats = head.logits_stats(logits)
        choice = stats.argmax.tolist()
        right = _agreeing(draft, choice)
        new = choice[: right + 1]
        ends = next((i + 1 for i, token in enumerate(new) if token in eos_ids), len(new))
        tokens += new[:ends]
        entropy += stats.entropy[:ends].tolist()
        verified, accepted = verified + len(draft), accepted + right
        if ends < len(new) or tokens[-1] in eos_ids or len(tokens) == wanted:
            return Generated(tokens, entropy, forwards, verified, accepted)
        drafter.judged(right, len(draft))
        if right < len(draft):
            cache.crop(right - len(draft))
        drafter.extend(new)
        draft = drafter.propose(entropy[-1], wanted - len(tokens) - 1)
        inputs = torch.tensor([[tokens[-1], *draft]], device=ids.device)
        forwards += 1
