"""The prefix-block index at a million entries: look-ups of present and absent blocks from Python, and the name of a block."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from sic_kernels.delta.block_index import BlockIndex

ENTRIES, BLOCK, LOOKUPS = 1_000_000, 16, 20_000
LOOKUP_US, NAME_US = 1.0, 0.5  # targets


@functools.cache
def filled() -> tuple[BlockIndex, np.ndarray]:
    """An index of chains of 100 blocks, and for each of its blocks the parent, the handle and the tokens."""
    tokens = np.random.default_rng(0).integers(0, 128_000, (ENTRIES, BLOCK))
    index, blocks = BlockIndex(ENTRIES), np.empty((ENTRIES, 2 + BLOCK), dtype=np.int64)
    handle = 0
    for i, ids in enumerate(tokens):
        parent = handle if i % 100 else 0
        handle = index.insert("tenant", parent or None, ids)
        blocks[i] = parent, handle, *ids
    return index, blocks


def questions(kind: str, turn: int) -> list[tuple[int | None, int, object]]:
    """Blocks in random order, others each turn: (parent, handle, tokens)."""
    blocks = filled()[1]
    chosen = blocks[np.random.default_rng(turn).integers(0, ENTRIES, LOOKUPS)]
    ids = list(chosen[:, 2:].astype(np.int32)) if kind == "array" else chosen[:, 2:].tolist()
    return [(parent or None, handle, tokens) for (parent, handle), tokens in zip(chosen[:, :2].tolist(), ids)]


@pytest.mark.parametrize("kind", ["list", "array"])
def bench_lookup(kind, benchmark, microseconds):
    index, _ = filled()
    assert all(index.lookup("tenant", parent, tokens) == handle for parent, handle, tokens in questions(kind, 0))
    turns = iter(range(1, 1000))

    def ask(blocks):
        for parent, _, tokens in blocks:
            index.lookup("tenant", parent, tokens)

    benchmark.pedantic(ask, setup=lambda: ((questions(kind, next(turns)),), {}), rounds=15)
    microseconds(
        f"look-up of a present block of {BLOCK} tokens ({kind}) among {ENTRIES:,}, from Python", LOOKUP_US, LOOKUPS
    )


def bench_name(benchmark, microseconds):
    """A chain of 1000 blocks in one call, so that the call itself does not count."""
    index = BlockIndex(1)
    tokens = np.arange(1000 * BLOCK, dtype=np.int32)
    assert index.digests("tenant", tokens, BLOCK)[0] == index.digest(index.insert("tenant", None, tokens[:BLOCK]))
    benchmark.pedantic(lambda: index.digests("tenant", tokens, BLOCK), rounds=50, warmup_rounds=2)
    microseconds(f"BLAKE2b name of a block of {BLOCK} tokens", NAME_US, 1000)
