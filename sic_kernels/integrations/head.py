"""Rules of termination inside Hugging Face transformers 5: `model.generate(...)` ends each row when a `TerminationRule` says so.

    from sic_kernels.integrations.head import Termination
    rule, matcher = sic.head.stop_rule(["<|im_end|>", "\\n\\nUser:"], tokenizer, batch=2, max_tokens=200)
    ending = Termination(rule, matcher, tokenizer)
    model.generate(**inputs, logits_processor=[ending.processor], stopping_criteria=[ending.criteria])
    ending.reasons(), ending.texts()

Two parts: the processor looks at the logits once a step and changes nothing; the criteria take the step of the rule. Neither
waits for a device, except that stop strings need the new tokens on the host: one copy of B ids a step. (`generate` itself asks
every step whether all rows are done, which waits.)

Greedy and sampled decoding; beam search moves rows about without saying how.
"""

from __future__ import annotations

import json
import numbers
import re
from collections.abc import Callable
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria

from .. import head
from ..runtime.arguments import instance
from ..runtime.errors import ArgumentError

Tensor = torch.Tensor
Score = Callable[[head.TokenStats], Tensor]


def p_eos(stats: head.TokenStats) -> Tensor:
    """f32[B]: the probability of the watched ids, which `Termination` makes the rule's eos ids: the baseline of any score."""
    return stats.watch_logprobs.exp().sum(1)


class Termination:
    """Calls of `generate` under a rule, one after the other; reasons and texts are those of the last.

    A call begins when the processor gets anything but the ids that the criteria saw last. So a text that goes on, whose ids are
    just these, needs `reset`, and so do prompts whose lengths are given.

    matcher, tokenizer: for stop strings; the rows of the matcher are those of the batch.  A row's text is that of its tokens,
    special tokens left out.
    score: what to hold against the threshold, a function from the step's `TokenStats` to f32[B]; None: nothing.
    input_lens: tokens of the prompts of the next call without padding (default: the width of the input).
    options: of `logits_stats`, which runs on the scores after the processors before this one; watch_ids are the rule's eos ids
    unless they are given.
    """

    def __init__(
        self,
        rule: head.TerminationRule,
        matcher: head.StopMatcher | None = None,
        tokenizer: Any = None,
        *,
        score: Score | None = None,
        input_lens: Any = None,
        **options: Any,
    ) -> None:
        instance("Termination", "rule", rule, head.TerminationRule)
        if score is not None and not callable(score):
            raise ArgumentError.of("Termination", "score", type(score).__name__, "a function of TokenStats")
        if matcher is not None:
            instance("Termination", "matcher", matcher, head.StopMatcher)
            if tokenizer is None:
                raise ArgumentError.of(
                    "Termination", "tokenizer", None, "the model's tokenizer, for the matcher's bytes"
                )
        self.rule, self.matcher, self.score, self.options = rule, matcher, score, options
        self.processor, self.criteria = _Processor(self), _Criteria(self)
        self._bytes = [] if matcher is None else token_bytes(tokenizer)
        self.reset(input_lens)

    def reset(self, input_lens: Any = None) -> None:
        """Forget the texts; the next call of `generate` begins new ones, after prompts of these lengths."""
        known = input_lens is None or isinstance(input_lens, (numbers.Integral, list, tuple))
        if not known and not hasattr(input_lens, "dtype"):
            expected = "a number of tokens, one for each row, or None"
            raise ArgumentError.of("Termination", "input_lens", type(input_lens).__name__, expected)
        self.input_lens = input_lens
        self.state: head.TerminationState | None = None
        self.stats: head.TokenStats | None = None
        self._texts: list[bytearray] = []
        self._ids: Tensor | None = None  # that were seen last
        self._looked = False  # and no step since
        if self.matcher is not None:
            self.matcher.reset()

    def reasons(self) -> list[head.Reason]:
        """Why each row ended (0: `generate` ended it for a reason of its own). Waits for the device."""
        return [] if self.state is None else [head.Reason(bits) for bits in self.state.reason.tolist()]

    def texts(self) -> list[bytes]:
        """The new text of each row up to its stop string: for a matcher, and when `generate` has returned."""
        rest = self.matcher.finish() if self.matcher is not None else []
        for text, held in zip(self._texts, rest):
            text += held
        return [bytes(text) for text in self._texts]

    # --- one step

    def look(self, input_ids: Tensor, scores: Tensor) -> None:
        """The statistics of the step's scores [B,V]."""
        if self._ids is not None and not self._goes_on(self._ids, input_ids):
            if self.input_lens is not None:
                expected = f"the {list(self._ids.shape)} of the last step, or reset(input_lens) before a new text"
                raise ArgumentError.of("Termination", "input_ids", list(input_ids.shape), expected)
            self.reset()
        if self.state is None:
            self._begin(input_ids)
        self._ids, self._looked = input_ids, True
        self.stats = head.logits_stats(scores, **self.options)

    def _goes_on(self, last: Tensor, input_ids: Tensor) -> bool:
        """Whether these ids are the next step of the call whose ids were `last`. In `generate` they are one tensor: no wait."""
        if not self._looked:
            return input_ids is last or torch.equal(input_ids, last)
        if input_ids.shape == (last.shape[0], last.shape[1] + 1):
            raise ArgumentError.of(
                "Termination", "stopping_criteria", "none", "[termination.criteria] beside the processor"
            )
        return False

    def step(self, input_ids: Tensor) -> Tensor:
        """bool[B]: the rows that are done after the last column."""
        if self.state is None or self.stats is None or not self._looked:
            raise ArgumentError.of(
                "Termination", "logits_processor", "none", "[termination.processor] beside the criteria"
            )
        self._ids, self._looked = input_ids, False
        tokens = input_ids[:, -1].contiguous()
        score = None if self.score is None else self.score(self.stats)
        matched = None if self.matcher is None else self._match(self.matcher, tokens)
        return head.termination_step(self.rule, self.state, score, self.stats, tokens, matched=matched)[0]

    def _begin(self, input_ids: Tensor) -> None:
        B, width = input_ids.shape
        if self.matcher is not None and self.matcher.batch != B:
            raise ArgumentError.of("Termination", "matcher", self.matcher, f"one with a batch of {B}")
        lens = width if self.input_lens is None else self.input_lens
        window = max(1, self.rule.plateau_window)
        self.state = head.TerminationState.allocate(B, lens, input_ids.device, window=window)
        self._texts = [bytearray() for _ in range(B)]
        if self.rule.eos_ids and "watch_ids" not in self.options:
            self.options = {**self.options, "watch_ids": torch.tensor(self.rule.eos_ids, device=input_ids.device)}

    def _match(self, matcher: head.StopMatcher, tokens: Tensor) -> Tensor:
        """Feeds the bytes of the new tokens of rows that are not done; one copy to the host."""
        assert self.state is not None
        fed = torch.where(self.state.done, -1, tokens).tolist()
        # Ids behind the tokenizer's last, of a padded vocabulary, have no text.
        matched, safe, _ = matcher.feed([self._bytes[i] if 0 <= i < len(self._bytes) else b"" for i in fed])
        for text, piece in zip(self._texts, safe):
            text += piece
        return matched.to(tokens.device, non_blocking=True)


class _Processor(LogitsProcessor):
    def __init__(self, termination: Termination) -> None:
        self.termination = termination

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.termination.look(input_ids, scores)
        return scores


class _Criteria(StoppingCriteria):
    def __init__(self, termination: Termination) -> None:
        self.termination = termination
        self.eos_token_id = termination.rule.eos_ids  # with this attribute `generate` pads the rows that are done

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return self.termination.step(input_ids)


# --- the bytes of tokens ------------------------------------------------------------------------------------------------


def token_bytes(tokenizer: Any) -> list[bytes]:
    """The bytes that each id adds to a text, so that no step decodes anything; b"" for special tokens.

    For byte-level BPE (GPT-2's and what followed) and for SentencePiece models with byte fallback (Llama 2): joined, they are
    what `decode(..., skip_special_tokens=True)` gives, apart from a leading space and from clean-up of spaces.
    Raises ArgumentError for other kinds, whose tokens have no bytes of their own.
    """
    to_bytes = _decoder(tokenizer)
    added = tokenizer.added_tokens_decoder
    special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
    table = []
    for i, token in enumerate(tokenizer.convert_ids_to_tokens(range(len(tokenizer)))):
        if i in special or token is None:
            table.append(b"")
        else:
            table.append(token.encode() if i in added else to_bytes(token))
    return table


def _decoder(tokenizer: Any) -> Callable[[str], bytes]:
    """How the tokenizer's own decoder turns a token into bytes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    steps = json.loads(backend.to_str())["decoder"] if backend is not None else None
    steps = steps["decoders"] if steps is not None and steps["type"] == "Sequence" else [steps or {"type": "none"}]
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        byte_of = _byte_of_letter()
        # A token with a letter that stands for no byte is text as it is, as in the tokenizer's decoder.
        return lambda token: bytes(map(byte_of.__getitem__, token)) if byte_of.keys() >= set(token) else token.encode()
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return _fallback_bytes
    got = f"{type(tokenizer).__name__} with the decoder {'+'.join(sorted(kinds))}"
    raise ArgumentError.of("token_bytes", "tokenizer", got, "byte-level BPE, or SentencePiece with byte fallback")


def _byte_of_letter() -> dict[str, int]:
    """Byte-level BPE writes bytes as letters: printable Latin-1 as itself, the others from U+0100 on in ascending order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _fallback_bytes(token: str) -> bytes:
    """ "<0x0A>" is a byte; U+2581 is a space."""
    if re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()
