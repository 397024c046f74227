"""The memory pool and the store of slots from Python: look-ups among 10 000 slots, blocks taken and given back, attaching."""

from __future__ import annotations

import random

import torch

from sic_kernels.replay import Fingerprint, MemoryPool, SlotStore, prefix_digest

SLOTS, LOOKUPS, BLOCKS, NAMED = 10_000, 20_000, 2_000, 300
LOOKUP_US, BLOCK_US, NAMED_US, ATTACH_US = 1.0, 15.0, 25.0, 1000.0  # targets


def bench_slot_lookup(benchmark, microseconds):
    store, model = SlotStore(MemoryPool(1 << 28)), Fingerprint("model")
    digests = [prefix_digest([i]) for i in range(SLOTS)]
    for digest in digests:
        store.put(model, digest, 3, torch.zeros(16))
    asked = random.Random(0).choices(digests, k=LOOKUPS)
    assert all(store.get(model, digest, 3).prefix == digest for digest in asked)

    def ask():
        for digest in asked:
            store.get(model, digest, 3)

    benchmark.pedantic(ask, rounds=30, warmup_rounds=2)
    microseconds(f"look-up of a slot among {SLOTS:,}, from Python", LOOKUP_US, LOOKUPS)


def bench_block(benchmark, microseconds):
    pool = MemoryPool(1 << 28)

    def take_and_give():
        for _ in range(BLOCKS):
            pool.free(pool.alloc(4096))

    benchmark.pedantic(take_and_give, rounds=20, warmup_rounds=2)
    microseconds("a block of a pool: alloc and free, from Python", BLOCK_US, BLOCKS)


def bench_named_block(benchmark, microseconds, tmp_path):
    with MemoryPool(1 << 24, backing=tmp_path / "pool") as pool:

        def take_and_give():
            for _ in range(BLOCKS):
                pool.free(pool.alloc(4096, name="x"))

        benchmark.pedantic(take_and_give, rounds=20, warmup_rounds=2)
    microseconds("a named block of a pool's file: alloc and free, from Python", NAMED_US, BLOCKS)


def bench_attach(benchmark, microseconds, tmp_path):
    with MemoryPool(1 << 26, backing=tmp_path / "pool") as pool:
        for i in range(NAMED):
            pool.alloc((16, 64), torch.float32, name=f"layer.{i}")
    benchmark.pedantic(lambda: MemoryPool.attach(tmp_path / "pool").close(), rounds=200, warmup_rounds=5)
    microseconds(f"a pool's file with {NAMED} named blocks attached and closed", ATTACH_US)
