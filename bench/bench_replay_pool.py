"""The memory pool and the store of slots from Python: look-ups among 10 000 slots, beside a Redis GET of the same entries;
blocks taken and given back, attaching.
"""

from __future__ import annotations

import random
import statistics
import time

import pytest
import redis_peer
import torch

from sic_kernels.replay import Fingerprint, MemoryPool, SlotStore, prefix_digest

SLOTS, LOOKUPS, BLOCKS, NAMED = 10_000, 20_000, 2_000, 300
LOOKUP_US, BLOCK_US, NAMED_US, ATTACH_US = 1.0, 15.0, 25.0, 1000.0  # targets

# Of SmolLM2-135M, float32: what an entry is -> its part of the pool, its shape, how many there are.
ENTRIES = {
    "the state of a token": ("boundary", (1, 576), 10_000),
    "keys and values of 16 tokens, a layer": ("kv", (2, 3, 16, 64), 1000),
    "keys and values of 16 tokens, 30 layers": ("kv", (30, 2, 3, 16, 64), 32),
}
TURNS = 2000


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


def in_turn(ways, turns):
    """Microseconds of single calls: in every turn each of `ways` is called once, with the number of the turn, in any order."""
    laps, order = {name: [] for name in ways}, list(ways.items())
    shuffle = random.Random(0).shuffle  # what was called before decides what the processor's caches hold
    for i in range(turns):
        shuffle(order)
        for name, way in order:
            begin = time.perf_counter_ns()
            way(i)
            laps[name].append((time.perf_counter_ns() - begin) / 1000)
    return laps


def filled_store(part, shape, count):
    """A store with `count` entries, its fingerprint, the digests of their prefixes."""
    store, model = SlotStore(MemoryPool(1 << 28), part), Fingerprint("model")
    digests = [prefix_digest([i]) for i in range(count)]
    for digest in digests:
        store.put(model, digest, 3, torch.rand(shape))
    return store, model, digests


@pytest.mark.parametrize("what", ENTRIES)
def bench_beside_redis(benchmark, fact, absent, what):
    """One entry at a time: found, read in place, copied out of the pool; and got from a Redis server that has the same bytes."""
    store, model, digests = filled_store(*ENTRIES[what])
    asked = random.Random(0).choices(digests, k=TURNS)

    def get(i):
        return store.get(model, asked[i], 3)

    ways = {
        "SlotStore.get": get,
        "and its tensor, in place": lambda i: get(i).tensor,
        "and a copy of that": lambda i: get(i).tensor.clone(),
    }
    if reason := redis_peer.why_not():
        absent("redis", f"{what}: GET of Redis", reason)
        laps = benchmark.pedantic(in_turn, args=(ways, TURNS), rounds=1)
    else:
        with redis_peer.clients() as clients:
            for digest in digests:
                clients["TCP"].set(model.digest + digest, get_bytes(store, model, digest))
            for name, client in clients.items():
                assert all(client.get(model.digest + d) == get_bytes(store, model, d) for d in digests[:32])
                ways[f"GET of Redis, {name}"] = lambda i, client=client: client.get(model.digest + asked[i])
            laps = benchmark.pedantic(in_turn, args=(ways, TURNS), rounds=1)
    report_laps(fact, what, laps)


def get_bytes(store, model, digest):
    return store.get(model, digest, 3).tensor.numpy().tobytes()


def report_laps(fact, what, laps):
    """A line for each way; a server's bytes are a copy, so the copy is what it stands beside."""
    _, shape, count = ENTRIES[what]
    size = f"{torch.Size(shape).numel() * 4 / 1024:g} KiB, among {count:,}"
    median = {name: statistics.median(times) for name, times in laps.items()}
    for name, times in laps.items():
        p95 = statistics.quantiles(times, n=20)[-1]
        against = {way: median[name] / median[way] for way in ("SlotStore.get", "and a copy of that")}
        times_as_long = " ({:.0f}x the look-up, {:.1f}x the copy)".format(*against.values()) if "GET" in name else ""
        fact(f"{what} ({size}): {name}", f"{median[name]:.1f} us, 95 % below {p95:.1f} us{times_as_long}",
             us=median[name], p95_us=p95, against=against)  # fmt: skip


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
