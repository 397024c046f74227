"""Greedy answers of a model to many instructions, with the last hidden state and the logit statistics at every position.

Position i of an answer is where its token i has been fed: the hidden state there decides on token i + 1.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import head

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True)
class Answers:
    """Positions of all answers, one after the other.

    hidden: f16[N,D], as it enters the LM head.  entropy, eos_logprob: f32[N], of the next token.  token: i64[N], the one fed.
    prompt: i64[N].  finished: bool[prompts]: the answer ended by itself, before the cap.  asked: the ids of each prompt.
    """

    hidden: Tensor
    entropy: Tensor
    eos_logprob: Tensor
    token: Tensor
    prompt: Tensor
    finished: Tensor
    asked: list[list[int]]

    def tokens(self, prompt: int) -> list[int]:
        return self.token[self.prompt == prompt].tolist()


def eos_ids(model: Any) -> list[int]:
    """The ids that end an answer, those of the model's generation settings (an empty list: none does)."""
    found = model.generation_config.eos_token_id
    return found if isinstance(found, list) else [] if found is None else [found]


def answer(lm: Any, prompts: Sequence[str], cap: int, batch: int, advance: Callable[[int], None]) -> Answers:
    """Greedy answers of at most `cap` tokens. Prompts of like length share a batch, rows leave it when they are done."""
    asked = [prompt_ids(lm.tokenizer, prompt) for prompt in prompts]
    order = sorted(range(len(asked)), key=lambda i: len(asked[i]))
    parts: list[tuple[Tensor, ...]] = []
    finished = torch.zeros(len(asked), dtype=torch.bool)
    for first in range(0, len(order), batch):
        rows = order[first : first + batch]
        parts += _answer_batch(lm, [asked[i] for i in rows], torch.tensor(rows), cap, finished)
        advance(len(rows))
    hidden, entropy, eos, token, prompt = (torch.cat(column) for column in zip(*parts))
    by_prompt = prompt.argsort(stable=True)  # within a prompt the steps are in order already
    hidden, entropy, eos, token, prompt = (x[by_prompt] for x in (hidden, entropy, eos, token, prompt))
    return Answers(hidden, entropy, eos, token, prompt, finished, asked)


def prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    """The instruction as the model's chat template puts it; as it is where there is none."""
    if tokenizer.chat_template is None:
        return tokenizer(prompt).input_ids
    chat = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]


def _answer_batch(
    lm: Any, asked: list[list[int]], rows: Tensor, cap: int, finished: Tensor
) -> list[tuple[Tensor, ...]]:
    """hidden, entropy, log P(EOS), token, prompt of every step; marks which rows finish."""
    from transformers.cache_utils import DynamicCache

    width, ends = max(map(len, asked)), eos_ids(lm.model)
    ids = torch.tensor([[0] * (width - len(x)) + x for x in asked])
    mask = torch.tensor([[0] * (width - len(x)) + [1] * len(x) for x in asked])
    cache = DynamicCache(config=lm.model.config)
    steps: list[tuple[Tensor, ...]] = []
    with torch.inference_mode():
        for step in range(cap + 1):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            output = lm.model.base_model(
                input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True
            )
            hidden = output.last_hidden_state[:, -1]
            stats = head.logits_stats(lm.model.lm_head(hidden), watch_ids=torch.tensor(ends) if ends else None)
            if step:
                eos = stats.watch_logprobs.logsumexp(1) if ends else torch.full_like(stats.entropy, -torch.inf)
                steps.append((hidden.half(), stats.entropy, eos, ids[:, 0], rows))
            done = torch.isin(stats.argmax, torch.tensor(ends, dtype=torch.long))
            finished[rows[done]] = True
            rows, ids, mask = rows[~done], stats.argmax[~done, None], mask[~done]
            if not len(rows):
                break
            if done.any():
                cache.batch_select_indices((~done).nonzero()[:, 0])
            mask = torch.cat((mask, mask.new_ones(len(mask), 1)), 1)
    return steps


# --- when is an answer complete? --------------------------------------------------------------------------------------


def complete(prefixes: Sequence[str], finished: bool) -> list[bool]:
    """Where stopping loses nothing: the rest of the answer only repeats sentences (or lines) that are there already.

    prefixes: the text up to and with each token.  A sentence that is begun counts as one of its own, so that no stop leaves
    a piece of one behind.  An answer that was cut by the cap has such a place only if it was in a loop by then: its last
    whole sentence is a repetition, and so is the beginning of the one it was cut in.
    """
    whole = sentences(prefixes[-1])
    if not finished:
        *whole, cut = whole
        if not whole or whole[-1] not in whole[:-1] or not any(x.startswith(cut) for x in whole):
            return [False] * len(prefixes)
    wanted = set(whole)
    return [set(sentences(prefix)) == wanted for prefix in prefixes]


def sentences(text: str) -> list[str]:
    """Sentences and lines without the number in a list, cases and inner white space; the indentation (of code) is kept."""
    lines = (re.sub(r"^\s*(?:\d+[.)]|[-*])\s+", "", line) for line in text.split("\n"))
    parts = (part for line in lines for part in re.split(r"(?<=[.!?])[ \t]+", line))
    return [re.sub(r"(?<=\S)\s+", " ", part.lower()).rstrip() for part in parts if part.strip()]
