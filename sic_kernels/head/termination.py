"""When a row is done: rules over the score of a probe, the entropy, stop tokens, stop strings and lengths."""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import torch

from ..runtime import metrics
from ..runtime.arguments import INTS, described, instance, integer, is_dense, outputs, real, tensor, torch_device
from ..runtime.arrays import as_torch
from ..runtime.backends import call
from ..runtime.errors import ArgumentError
from .rows import chosen_rows, row_numbers
from .stops import StopMatcher
from .types import Array, TokenStats

MOST_TOKENS = (1 << 31) - 1
MOST_EOS_IDS = 32


class Reason(enum.IntFlag):
    """Why a row is done: every reason of the step in which it ended.  The last two end nothing."""

    EOS = 1  # a stop token
    STRING = 2  # a stop string
    SCORE = 4  # the score was above the threshold for long enough
    LENGTH = 8  # max_tokens
    PLATEAU = 16  # the entropy has not moved for long enough
    SCORE_NAN = 32  # the score was NaN in some step of the row
    STATS_STATUS = 64  # the statistics had a status in some step of the row


STOPS = Reason.EOS | Reason.STRING | Reason.SCORE | Reason.LENGTH | Reason.PLATEAU


@dataclasses.dataclass(frozen=True)
class TerminationRule:
    """When to stop.  Every condition is off unless it is given, but the score's, which needs a score.

    threshold, slope_per_1k, max_threshold: a score counts as above if it is greater than
    min(max_threshold, threshold + slope_per_1k / 1000 * input_len), continuous in the length of the prompt; the limit keeps it
    below 1 for prompts of any length.
    patience: steps in a row that must be above.  hysteresis: a streak, once begun, goes on while the score is at least the
    threshold minus this.  A step without a score (None) leaves the streak as it is; a NaN ends it.
    min_tokens: before so many tokens nothing but max_tokens stops a row.  A stop token is then an ordinary token (other serving
    stacks also forbid it to be sampled: mask it where it must not appear); a stop string stops once the number is reached,
    since a matcher stays matched; streaks and plateaus begin to count from the first token on.
    max_tokens: generated tokens, None: no limit.
    eos_ids: up to 32 token ids.
    plateau_window, plateau_width: stop when the entropies (nats) of the last `plateau_window` steps lie within plateau_width of
    each other; 0 is off. A step whose entropy is not known (NaN) is part of no plateau.
    """

    threshold: float = 0.92
    slope_per_1k: float = 0.01
    max_threshold: float = 0.99
    min_tokens: int = 0
    max_tokens: int | None = None
    patience: int = 1
    hysteresis: float = 0.0
    eos_ids: Sequence[int] = ()
    plateau_window: int = 0
    plateau_width: float = 0.0

    def __post_init__(self) -> None:
        most = _number("max_threshold", self.max_threshold, 1.0, "0 to 1")
        _number("threshold", self.threshold, most, f"0 to max_threshold ({most:g})")
        _number("slope_per_1k", self.slope_per_1k, math.inf, "a finite number, 0 or more")
        _number("hysteresis", self.hysteresis, 1.0, "0 to 1")
        _number("plateau_width", self.plateau_width, math.inf, "a finite number, 0 or more")
        _count("patience", self.patience, 1)
        _count("plateau_window", self.plateau_window, 0)
        least = _count("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and _count("max_tokens", self.max_tokens, 1) < least:
            raise ArgumentError.of("TerminationRule", "min_tokens", least, f"at most max_tokens ({self.max_tokens})")
        object.__setattr__(self, "eos_ids", _eos_ids(self.eos_ids))

    def threshold_at(self, input_len: int) -> float:
        """What the score must exceed after a prompt of so many tokens."""
        input_len = integer("TerminationRule", "input_len", input_len, 0, "a number of tokens")
        return min(self.max_threshold, self.threshold + self.slope_per_1k / 1000 * input_len)

    def inputs(self) -> tuple:
        """In the order of the native op."""
        return (
            float(self.threshold), float(self.slope_per_1k), float(self.max_threshold), float(self.hysteresis),
            int(self.patience), int(self.min_tokens), MOST_TOKENS if self.max_tokens is None else int(self.max_tokens),
            int(self.plateau_window), float(self.plateau_width), self.eos_ids,
        )  # fmt: skip


def _number(arg: str, value: Any, most: float, expected: str) -> float:
    return real("TerminationRule", arg, value, lambda x: 0 <= x <= most and x < math.inf, expected)


def _count(arg: str, value: Any, least: int) -> int:
    return integer("TerminationRule", arg, value, least, f"an integer from {least} to 2^31 - 1")


def _eos_ids(ids: Any) -> tuple[int, ...]:
    expected = f"up to {MOST_EOS_IDS} token ids"
    if isinstance(ids, numbers.Integral):
        ids = (ids,)
    array = as_torch(ids)
    if isinstance(array, torch.Tensor):
        ids = tensor("TerminationRule", "eos_ids", array, INTS, (-1,)).tolist()
    ids = () if ids is None else ids
    if not isinstance(ids, (Sequence, Set)) or isinstance(ids, (str, bytes)):
        raise ArgumentError.of("TerminationRule", "eos_ids", type(ids).__name__, expected)
    known = tuple(dict.fromkeys(integer("TerminationRule", "eos_ids", i, 0, expected) for i in ids))
    if len(known) > MOST_EOS_IDS:
        raise ArgumentError.of("TerminationRule", "eos_ids", f"{len(known)} ids", expected)
    return known


@dataclasses.dataclass(frozen=True, eq=False)
class TerminationState:
    """Where B rows are; `termination_step` updates it in place.  Plain tensors, all on one device.

    input_lens: i32[B], tokens of the prompts.  generated: i32[B], tokens so far.  streak: i32[B], steps in a row above the
    threshold, up to the rule's patience.  recent: f32[B,window], entropies, that of token n at n % window, NaN where there was
    none.  reason: u8[B], bits of `Reason`; a row is done when one of `STOPS` is among them.
    """

    input_lens: torch.Tensor
    generated: torch.Tensor
    streak: torch.Tensor
    recent: torch.Tensor
    reason: torch.Tensor

    @classmethod
    def allocate(
        cls, batch: int, input_lens: Any = 0, device: torch.device | str = "cpu", *, window: int = 64
    ) -> TerminationState:
        """Rows that have generated nothing.  input_lens: a number, or B of them.  window: the longest plateau_window to come."""
        B = integer("TerminationState", "batch", batch, 0, "the number of rows")
        W = integer("TerminationState", "window", window, 1, "1 or more steps")
        device = torch_device("TerminationState", device)
        lens = _lengths(input_lens, B)
        count = lambda: torch.zeros(B, dtype=torch.int32, device=device)
        state = cls(
            count(), count(), count(), torch.full((B, W), torch.nan, device=device), count().to(torch.uint8)
        )  # fmt: skip
        state.input_lens.copy_(lens)
        return state

    @property
    def done(self) -> torch.Tensor:
        """bool[B]"""
        return self.reason & int(STOPS) != 0

    def reset(self, rows: Any = None, input_lens: Any = None) -> None:
        """These rows (None: all; else indices or a bool mask) begin anew, with prompts of other lengths if they are given."""
        rows = chosen_rows("TerminationState.reset", rows, len(self.reason), self.reason.device)
        if input_lens is not None:
            count = len(self.input_lens[rows])
            self.input_lens[rows] = _lengths(input_lens, count).to(self.reason.device, torch.int32)
        self.generated[rows] = 0
        self.streak[rows] = 0
        self.recent[rows] = torch.nan
        self.reason[rows] = 0

    def reorder(self, rows: Any) -> TerminationState:
        """A new state whose row i is a copy of row rows[i]: beams, forks, batches that shrink or grow."""
        rows = row_numbers("TerminationState.reorder", rows, len(self.reason), self.reason.device)
        return TerminationState(*(getattr(self, f.name)[rows] for f in dataclasses.fields(self)))


def _lengths(input_lens: Any, batch: int) -> torch.Tensor:
    """i32|i64 [batch] or []. What is on a device is not looked at."""
    op, arg, expected = "TerminationState", "input_lens", f"a number of tokens, or {batch} of them"
    if isinstance(input_lens, numbers.Integral):
        return torch.tensor(integer(op, arg, input_lens, 0, expected))
    if isinstance(input_lens, (list, tuple)):
        input_lens = torch.tensor([integer(op, arg, n, 0, expected) for n in input_lens], dtype=torch.int64)
    lens = as_torch(input_lens)
    if not is_dense(lens) or lens.shape not in ((), (batch,)):
        raise ArgumentError.of(op, arg, described(lens), expected)
    tensor(op, arg, lens, INTS, tuple(lens.shape))
    if lens.device.type == "cpu" and bool(((lens < 0) | (lens > MOST_TOKENS)).any()):
        raise ArgumentError.of(op, arg, lens.tolist(), "numbers of tokens from 0 to 2^31 - 1")
    return lens


def termination_step(
    rule: TerminationRule,
    state: TerminationState,
    score: Array | None,
    stats: TokenStats | None,
    tokens: Array,
    *,
    matched: Array | None = None,
    out: tuple[Array, ...] | None = None,
    backend: str | None = None,
) -> tuple[Array, Array]:
    """Which rows are done after the tokens just sampled, and why: done bool[B], reason u8[B] (bits of `Reason`).

    score: f32[B], how sure a probe is that the row is complete; None where there is none in this step.
    stats: the step's `TokenStats`, for the entropy and its status; needed if the rule has a plateau.
    tokens: i32|i64[B].  matched: bool|u8[B] of a `StopMatcher`, on the device of the tokens.
    state: updated in place.  A row that is done stays so, with its reasons, and nothing of it changes whatever comes; its bits
    SCORE_NAN and STATS_STATUS are those of all its steps.

    out: (done, reason) to write to; with it nothing is allocated. One small launch, no synchronisation, no workspace: the call
    can be captured in a graph, and replayed as it advances the state. The result of a row depends on that row alone, and is the
    same on every backend, bit for bit.  Raises ArgumentError for arrays that do not fit together.
    Source: patience and thresholds on a confidence, as in early-exit decoding (Schuster et al. 2022, CALM); the rest is what
    serving stacks do.
    """
    instance("termination_step", "rule", rule, TerminationRule)
    instance("termination_step", "state", state, TerminationState)
    if stats is not None:
        instance("termination_step", "stats", stats, TokenStats)
    seen = (None, None) if stats is None else (stats.entropy, stats.status)
    inputs = (
        tokens, score, *seen, matched, state.input_lens, state.generated, state.streak, state.recent, state.reason, *rule.inputs()
    )  # fmt: skip
    return call("head", "termination_step", inputs, outputs("termination_step", out, ("done", "reason")), None, backend)


def stop_rule(
    stops: Sequence[bytes | str] | None,
    tokenizer: Any,
    *,
    batch: int = 1,
    include: bool = False,
    **rule: Any,
) -> tuple[TerminationRule, StopMatcher]:
    """Stop sequences as a rule and a matcher: what is one special token becomes an eos id, the rest is matched as text.

    tokenizer: one of transformers', or a function from str to token ids (without special tokens around them). batch, include:
    of the matcher; all else goes to `TerminationRule`, whose eos_ids are added to.

    A special token has no text, so only its id can stop a row.  That of an ordinary string is not enough: "\\n" may also come as
    part of another token, so it is matched as text, though it is one token.  A function does not say which tokens are special:
    then a stop of one token is both, an id and a text.  Stops given as bytes are text.
    """
    encode, special = _encoder(tokenizer)
    if isinstance(stops, (str, bytes)) or not (stops is None or isinstance(stops, Sequence)):
        raise ArgumentError.of("stop_rule", "stops", type(stops).__name__, "a list of bytes or str")
    ids, texts = [], []
    for stop in stops or ():
        tokens = _tokens(encode, stop) if isinstance(stop, str) and stop else []
        single = len(tokens) == 1 and (special is None or tokens[0] in special)
        if single:
            ids.append(tokens[0])
        if not single or special is None:
            texts.append(stop)
    eos_ids = (*_eos_ids(rule.pop("eos_ids", ())), *ids)
    return TerminationRule(eos_ids=eos_ids, **rule), StopMatcher(texts, batch, include=include)


def _tokens(encode: Callable[[str], Any], text: str) -> list[int]:
    expected = "a function that gives the token ids of a text"
    tokens = encode(text)
    array = as_torch(tokens)
    tokens = array.tolist() if is_dense(array) else tokens
    if not isinstance(tokens, Sequence) or isinstance(tokens, (str, bytes)):
        raise ArgumentError.of("stop_rule", "tokenizer", f"{type(tokens).__name__} from it", expected)
    return [integer("stop_rule", "tokenizer", token, 0, expected) for token in tokens]


def _encoder(tokenizer: Any) -> tuple[Callable[[str], Iterable[int]], set[int] | None]:
    """A function from text to ids, and the special ids if they are known."""
    if hasattr(tokenizer, "encode") and hasattr(tokenizer, "all_special_ids"):
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
        return lambda text: tokenizer.encode(text, add_special_tokens=False), special
    if not callable(tokenizer):
        got = type(tokenizer).__name__
        raise ArgumentError.of("stop_rule", "tokenizer", got, "a transformers tokenizer, or a function of str")
    return tokenizer, None


def record_stops(reason: Array, complete: Array | None = None) -> None:
    """Add finished rows to `sic.metrics`: how many stopped for which reason, and (TA) how many at a complete answer.

    reason: u8[B] of `termination_step`; rows that are not done are not counted.  complete: bool[B], where somebody knows.
    Waits for the device: call it when rows are done, not every step.
    """
    bits = tensor("record_stops", "reason", reason, (torch.uint8,), (-1,)).cpu()
    right = (
        complete if complete is None else tensor("record_stops", "complete", complete, (torch.bool,), tuple(bits.shape))
    )
    done = bits & int(STOPS) != 0
    stopped = int(done.sum())
    by_reason = metrics.get("sic_stop_reason_ratio")
    by_reason.add(0, stopped, reason="eos")
    for name in ("EOS", "STRING", "SCORE", "LENGTH", "PLATEAU"):
        by_reason.add(int((bits[done] & int(Reason[name]) != 0).sum()), 0, reason=name.lower())
    if right is not None:
        metrics.get("sic_termination_accuracy_ratio").add(int(right.cpu()[done].sum()), stopped)
