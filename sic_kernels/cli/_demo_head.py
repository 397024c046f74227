"""The part of the demo that is about the head: what the model is unsure of while it writes, when a rule would stop it, and how
much of prompt lookup is verified.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from .. import head
from ..integrations import lookup
from ._answers import eos_ids, prompt_ids

TOKENS = 64
PASSAGE = 60  # tokens of the text that the model is asked about
COST = 0.1  # of verifying a token, in forwards of one
PLATEAU_WINDOW, PLATEAU_WIDTH = 8, 0.05  # steps, nats
BLOCKS = "▁▂▃▄▅▆▇█"
FULL = 6.0  # nats of a full block


def write(lm: Any, passage: torch.Tensor, bar: Any) -> dict[str, Any]:
    """The model rewrites `passage` int64 [1,n], plainly and with prompt lookup: the same tokens, entropies, when a rule stops."""
    ids = question(lm, passage)
    task, ends = bar.add_task(f"write {TOKENS} tokens", total=2), eos_ids(lm.model)
    found = {}
    for name, cost in (("all", None), ("budget", COST)):
        found[name] = lookup.generate(lm.model, ids, TOKENS, eos_ids=ends, cost=cost)
        bar.advance(task)
    budget = found["budget"]
    stop, reason = stopped(budget, ends, ids.shape[1])
    per_token = {
        name: {"forwards": x.forwards_per_token, "verified": x.verified_per_token} for name, x in found.items()
    }
    return {
        "text": lm.tokenizer.decode(budget.tokens), "entropy": budget.entropy, "stop_after": stop, "stop_reason": reason,
        "per_token": per_token,
    }  # fmt: skip


def question(lm: Any, passage: torch.Tensor) -> torch.Tensor:
    """int64 [1,N]: what the model is asked about `passage` int64 [1,n]."""
    prompt = f"Copy these lines, then say what they mean:\n\n{lm.tokenizer.decode(passage[0, :PASSAGE])}"
    return torch.tensor([prompt_ids(lm.tokenizer, prompt)])


def stopped(written: lookup.Generated, ends: list[int], prompt_len: int) -> tuple[int, str]:
    """After how many tokens `termination_step` stops the row, and why."""
    rule = head.TerminationRule(
        eos_ids=ends, max_tokens=len(written.tokens), plateau_window=PLATEAU_WINDOW, plateau_width=PLATEAU_WIDTH
    )
    state = head.TerminationState.allocate(1, prompt_len)
    for count, (token, entropy) in enumerate(zip(written.tokens, written.entropy), 1):
        done, reason = head.termination_step(rule, state, None, _stats(entropy), torch.tensor([token]))
        if done[0]:
            return count, "|".join(str(bit.name).lower() for bit in head.Reason if bit & int(reason[0]))
    raise AssertionError("max_tokens is a reason")


def _stats(entropy: float) -> head.TokenStats:
    """What a rule reads of one step's statistics."""
    unknown = dict.fromkeys(head.TokenStats._fields)
    return head.TokenStats(
        **{**unknown, "entropy": torch.tensor([entropy]), "status": torch.zeros(1, dtype=torch.uint8)}
    )


def sparkline(entropy: list[float]) -> str:
    """A character a token: the lowest for 0, the highest for `FULL` nats and above."""
    return "".join(BLOCKS[min(len(BLOCKS) - 1, int(h / FULL * len(BLOCKS)))] for h in entropy)


def lines(found: dict[str, Any]) -> list[str]:
    """What `write` found, for people."""
    entropy, place = found["entropy"], found["stop_after"]
    mean = sum(entropy) / len(entropy)
    all_, budget = (found["per_token"][name] for name in ("all", "budget"))
    return [
        f"the model writes: {json.dumps(found['text'], ensure_ascii=False)}",
        f"entropy per token: {sparkline(entropy)}  ({FULL:g} nats are full, mean {mean:.2f})",
        f"                   {'^':>{place}} a rule (end of text, or {PLATEAU_WINDOW} steps within "
        f"{PLATEAU_WIDTH} nats) stops after {place} of {len(entropy)} tokens: {found['stop_reason']}",
        f"prompt lookup: {all_['forwards']:.2f} forwards and {all_['verified']:.2f} verified tokens per token; "
        f"with a budget {budget['forwards']:.2f} and {budget['verified']:.2f}, the same text",
    ]
