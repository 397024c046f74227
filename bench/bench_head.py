"""Head: statistics of logits and of an LM head against torch, at the vocabularies of the published table; a decode step."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
from smollm2 import model

from sic_kernels import head
from sic_kernels.head import benches

FAMILY = benches.FAMILY


@pytest.mark.parametrize("name", benches.NAMES)
def bench_op(name, shape, inputs, run):
    run(benches.build(name, inputs), inputs.sets)


# --- a decode step of a model ---------------------------------------------------------------------------------------

PROMPT, STEPS, BLOCK = 200, 12, 10
STOPS = ["\n\nUser:", "<|endoftext|>", "###", "In conclusion", "\n\n\n"]


class Decoding:
    """Greedy decoding of B copies of a prompt, a step at a time, and everything that a runner asks of the head."""

    def __init__(self, B: int) -> None:
        from transformers import DynamicCache

        from sic_kernels.integrations.head import token_bytes

        m = model()
        ids = m.tokens(models_text(), PROMPT).expand(B, -1)
        self.model, self.tokenizer, self.cache, self.ids = (
            m.model,
            m.tokenizer,
            DynamicCache(config=m.model.config),
            ids,
        )
        self.logits = self.forward(ids)
        gen = torch.Generator().manual_seed(0)
        D = m.model.config.hidden_size
        self.hidden = torch.randn(B, D, generator=gen)
        self.probe = torch.randn(16, D, generator=gen) / D**0.5, torch.randn(16, generator=gen) / 4, -4.0
        self.rule = head.TerminationRule(max_tokens=10_000, eos_ids=(int(self.tokenizer.eos_token_id),), patience=2)
        self.eos = torch.tensor(self.rule.eos_ids)
        self.state = head.TerminationState.allocate(B, PROMPT)
        self.matcher, self.bytes = head.StopMatcher(STOPS, batch=B), token_bytes(self.tokenizer)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].float()

    def step(self) -> None:
        self.logits = self.forward(self.logits.argmax(-1, keepdim=True))

    def head(self) -> torch.Tensor:
        """Statistics, probe, stop strings, rule."""
        stats = head.logits_stats(self.logits, k=8, watch_ids=self.eos)
        score = head.probe(self.hidden, *self.probe)
        matched = self.matcher.feed([self.bytes[i] for i in stats.argmax.tolist()]).matched
        return head.termination_step(self.rule, self.state, score, stats, stats.argmax, matched=matched)[0]


def models_text() -> str:
    from sic_kernels import models

    return models.text("hamlet")


@pytest.mark.parametrize("B", [1, 8])
def bench_decode_step(B, benchmark, fact):
    """What the head adds to a step of SmolLM2, and what transformers' own criteria take in the same loop."""
    transformers = pytest.importorskip("transformers")
    run = Decoding(B)
    ids = run.ids
    criteria = transformers.StoppingCriteriaList([
        transformers.MaxLengthCriteria(10_000), transformers.EosTokenCriteria(run.eos),
        transformers.StopStringCriteria(run.tokenizer, STOPS),
    ])  # fmt: skip
    times: dict[str, list[float]] = {"step": [], "head": [], "criteria": []}

    def timed(name, function, calls):
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        times[name].append((time.perf_counter() - begin) / calls)

    def turn():
        timed("step", run.step, 1)
        timed("head", run.head, BLOCK)
        timed("criteria", lambda: criteria(ids, run.logits), BLOCK)

    benchmark.pedantic(turn, rounds=STEPS, warmup_rounds=2)
    if benchmark.stats is None:
        return
    us = {name: 1e6 * statistics.median(values[2:]) for name, values in times.items()}
    share = us["head"] / us["step"]
    fact(f"the whole head beside a decode step of SmolLM2, B = {B}", f"{share:.2%} ({us['head']:.0f} us of {us['step']:.0f})",
         target="< 2 %", reached=share < 0.02, share=share, us=us)  # fmt: skip
    fact(
        f"transformers' criteria (length, EOS, {len(STOPS)} stop strings), B = {B}",
        f"{us['criteria']:.0f} us",
        us=us["criteria"],
    )
