"""Stop strings and the step of a rule: a batch of 32 rows from Python, a step at a time; two ways to do without a matcher."""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections.abc import Callable

import pytest
import torch

from sic_kernels.head import StopMatcher, TerminationRule, TerminationState, TokenStats, termination_step

STOPS, ROWS, STEPS, PIECE = 1000, 32, 500, 4  # bytes of a piece: about a token
EACH, ROUNDS = 50, 300  # steps in a round: short ones are seldom interrupted
FEED_US, STEP_US = 20.0, 10.0  # targets
PEER_STEPS = 20  # for what takes milliseconds


@functools.cache
def stops() -> list[str]:
    """Of 4 to 20 letters; none is in the text."""
    draw = random.Random(0)
    return ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz ", k=draw.randint(4, 20))) + "#" for _ in range(STOPS)]


@functools.cache
def pieces() -> list[list[bytes]]:
    """For each step a piece of text for each row: English-like words that often begin a stop, and never complete one."""
    draw = random.Random(1)
    beginnings = [stop[: draw.randint(1, 4)] for stop in stops()]
    texts = [
        "".join(draw.choice((" the", " of", "ing", draw.choice(beginnings))) for _ in range(STEPS * 2))
        for _ in range(ROWS)
    ]
    rows = [text.encode()[: STEPS * PIECE] for text in texts]
    return [[row[i * PIECE : (i + 1) * PIECE] for row in rows] for i in range(STEPS)]


def naive_feed(texts: list[bytearray], step: list[bytes], words: list[bytes]) -> list[bool]:
    """What a runner does without a matcher: look for every stop in the end of every row's text, where this piece can end it."""
    longest = max(map(len, words))
    matched = []
    for text, piece in zip(texts, step):
        text += piece
        end = bytes(text[-(longest + len(piece) - 1) :])
        matched.append(any(word in end for word in words))
    return matched


def microseconds_of(function: Callable[[int], object], calls: int) -> float:
    """Median over calls."""
    seconds = []
    for i in range(calls):
        begin = time.perf_counter()
        function(i)
        seconds.append(time.perf_counter() - begin)
    return 1e6 * sorted(seconds)[calls // 2]


def bench_feed(benchmark, microseconds, fact):
    words, steps = [stop.encode() for stop in stops()], pieces()
    matcher = StopMatcher(words, batch=ROWS)
    texts = [bytearray() for _ in range(ROWS)]
    for step in steps[:PEER_STEPS]:  # the same answers, before anything is timed
        assert matcher.feed(step).matched.tolist() == naive_feed(texts, step, words)
    assert matcher.feed([word + b"x" for word in words[:ROWS]]).matched.all()

    turns = itertools.cycle(range(0, STEPS, EACH))

    def feed(first):
        for step in steps[first : first + EACH]:
            matcher.feed(step)

    def fresh():
        matcher.reset()
        return (next(turns),), {}

    benchmark.pedantic(feed, setup=fresh, rounds=ROUNDS, warmup_rounds=1)
    microseconds(f"StopMatcher.feed: {STOPS} stops, {ROWS} rows, pieces of {PIECE} bytes", FEED_US, EACH)
    us = microseconds_of(lambda i: naive_feed(texts, steps[i], words), PEER_STEPS)
    fact(f"the same with `stop in text[-n:]` in Python, {STOPS} stops, {ROWS} rows", f"{us:.0f} us", us=us)
    fact(f"automaton of {STOPS} stops", f"{matcher.nbytes() / 1024:.0f} KiB", bytes=matcher.nbytes())


@pytest.mark.parametrize("count", [10, 100])
def bench_transformers(count, benchmark, fact):
    """StopStringCriteria with a vocabulary of 1000 tokens: it tabulates stops x vocabulary first, and does not hold text back."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = (letters + [a + b for a in letters[:90] for b in letters[:90]])[:1000]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({word: i for i, word in enumerate(vocabulary)}, []))
    backend.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    begin = time.perf_counter()
    criteria = transformers.generation.StopStringCriteria(tokenizer, stops()[:count])
    setup = time.perf_counter() - begin
    ids = torch.randint(0, 1000, (ROWS, 200), generator=torch.Generator().manual_seed(0))
    assert criteria(ids, None).shape == (ROWS,)
    benchmark.pedantic(lambda: criteria(ids, None), rounds=20, warmup_rounds=1)
    if benchmark.stats is not None:
        us = 1e6 * benchmark.stats.stats.median
        name = f"transformers' StopStringCriteria: {count} stops, {ROWS} rows, 1000 tokens ({setup:.1f} s to build)"
        fact(name, f"{us:.0f} us", us=us, setup_s=setup)


def bench_termination_step(benchmark, microseconds):
    """Every input is there, and no row is ever done."""
    rule = TerminationRule(threshold=0.98, patience=3, eos_ids=(2, 7))
    gen = torch.Generator().manual_seed(0)
    stats = TokenStats(*[None] * 8, torch.zeros(ROWS, dtype=torch.uint8))._replace(
        entropy=torch.rand(ROWS, generator=gen)
    )
    score, tokens = 0.9 * torch.rand(ROWS, generator=gen), torch.arange(ROWS) + 10
    matched = torch.zeros(ROWS, dtype=torch.bool)
    out = (torch.empty(ROWS, dtype=torch.bool), torch.empty(ROWS, dtype=torch.uint8))
    state, definition = (TerminationState.allocate(ROWS, 1000) for _ in range(2))
    for backend, rows in (("ref", definition), ("cpu", state)):
        termination_step(rule, rows, score, stats, tokens, matched=matched, out=out, backend=backend)
    assert torch.equal(state.reason, definition.reason)
    assert torch.equal(state.recent[:, 0], definition.recent[:, 0])

    def step():
        for _ in range(EACH):
            termination_step(rule, state, score, stats, tokens, matched=matched, out=out)

    benchmark.pedantic(step, rounds=ROUNDS, warmup_rounds=1)
    assert not out[0].any()
    microseconds(f"termination_step: {ROWS} rows, score, statistics and matches, from Python", STEP_US, EACH)
