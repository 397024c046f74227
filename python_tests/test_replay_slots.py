"""The store of hidden states: exact keys, order of eviction, pins, approximate ones, and slots in a pool's file."""

import array
import hashlib
import os
import re
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import sic_kernels as sic
from sic_kernels.replay import Fingerprint, MemoryPool, PoolExhausted, Slot, SlotStore, prefix_digest
from sic_kernels.runtime import trace

MODEL = Fingerprint("model", context_bucket=512)
KIB = 1024


def hidden(value, n=256):  # 1 KiB
    return torch.full((n,), float(value))


def store_of(slots, **options):
    """A store with room for so many `hidden`s."""
    pool = MemoryPool(2 * slots * KIB, parts=("boundary", "kv"), weights=(1, 1))
    return SlotStore(pool, **options)


def values(store, prefixes):
    slots = [store.get(MODEL, [i], 0) for i in prefixes]
    return [None if slot is None else slot.tensor[0].item() for slot in slots]


# --- keys ------------------------------------------------------------------------------------------------------------


def test_prefix_digest():
    message = struct.pack("<3i", 5, 0, 2**31 - 1)
    ids = [5, 0, 2**31 - 1]
    want = hashlib.blake2b(message, digest_size=16).digest()
    kinds = (ids, tuple(ids), np.array(ids), np.array(ids, np.int32), torch.tensor(ids), array.array("i", ids))
    assert {prefix_digest(x) for x in kinds} == {want}
    assert prefix_digest(torch.tensor(ids).repeat_interleave(2)[::2]) == want
    assert prefix_digest([]) == hashlib.blake2b(b"", digest_size=16).digest()
    assert prefix_digest([1, 2]) != prefix_digest([2, 1])


@pytest.mark.parametrize("wrong", [[-1], [2**31], [1.5], [[1, 2]], 7, "abc", None, torch.tensor([1.0]), [True], ["a"]])
def test_what_are_no_tokens(wrong):
    with pytest.raises(sic.ArgumentError, match="prefix_digest: tokens: got"):
        prefix_digest(wrong)


def test_only_the_same_key_is_found():
    store = store_of(10)
    slot = store.put(MODEL, [1, 2, 3], 7, hidden(5))
    assert isinstance(slot, Slot)
    assert store.get(MODEL, [1, 2, 3], 7) == slot == store.get(MODEL.digest, prefix_digest([1, 2, 3]), np.int64(7))
    assert (slot.exact, slot.layer, slot.tensor[0].item()) == (True, 7, 5)
    for model, tokens, layer in (
        (MODEL, [1, 2, 3], 6),
        (MODEL, [1, 2], 7),
        (MODEL, [1, 2, 3, 4], 7),
        (MODEL, [1, 2, 4], 7),
        (Fingerprint("model", context_bucket=1024), [1, 2, 3], 7),
    ):
        assert store.get(model, tokens, layer) is None
    stats = store.stats()
    assert (stats.hits, stats.misses, stats.entries, stats.insertions) == (2, 5, 1, 1)


@pytest.mark.parametrize(
    "args, message",
    [
        (("model", [1], 0), "fingerprint: got str, expected a digest of 16 bytes"),
        ((b"short", [1], 0), "fingerprint: got bytes"),
        ((MODEL, b"short", 0), "prefix: got bytes, expected a digest of 16 bytes"),
        ((MODEL, [1], -1), "layer: got -1, expected 0 to"),
        ((MODEL, [1], 2**31), "layer: got 2147483648"),
        ((MODEL, [1], 2**70), "layer: got an integer of more than 64 bits"),
        ((MODEL, [1], 1.5), "layer: got float"),
    ],
)
def test_wrong_keys(args, message):
    store = store_of(2)
    with pytest.raises(sic.ArgumentError, match=f"^SlotStore.get: {message}"):
        store.get(*args)
    with pytest.raises(sic.ArgumentError, match=f"^SlotStore.put: {message}"):
        store.put(*args, hidden(1))
    assert store._pool.stats().blocks == 0


@pytest.mark.parametrize(
    "wrong", [None, [1.0], torch.empty(0), torch.empty(3, device="meta"), torch.ones(3).to_sparse()]
)
def test_wrong_tensors(wrong):
    store = store_of(2)
    with pytest.raises(
        sic.ArgumentError, match=r"^SlotStore.put: tensor: got .*expected a tensor on cpu that is not empty"
    ):
        store.put(MODEL, [1], 0, wrong)
    assert len(store) == 0


def test_wrong_stores():
    pool = MemoryPool(1 << 20)
    for args, options in (
        (("pool",), {}),
        ((pool, "other"), {}),
        ((pool,), {"capacity": 0}),
        ((pool,), {"capacity": 2**25}),
    ):
        with pytest.raises(sic.ArgumentError, match=r"^SlotStore: "):
            SlotStore(*args, **options)


def test_a_copy_is_kept():
    store = store_of(4)
    source = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
    slot = store.put(MODEL, [1], 0, source.t())
    source.zero_()
    assert torch.equal(slot.tensor, torch.arange(12, dtype=torch.bfloat16).view(3, 4).t())
    parameter = torch.ones(3, requires_grad=True)
    assert not store.put(MODEL, [2], 0, parameter).tensor.requires_grad


# --- eviction --------------------------------------------------------------------------------------------------------


def test_the_slot_used_longest_ago_goes_first():
    store = store_of(4)
    for i in range(4):
        store.put(MODEL, [i], 0, hidden(i))
    store.get(MODEL, [0], 0)
    evicted = store.get(MODEL, [1], 0)
    for i in (0, 2, 3):
        store.get(MODEL, [i], 0)
    store.put(MODEL, [4], 0, hidden(4))
    assert values(store, range(5)) == [0, None, 2, 3, 4]
    with pytest.raises(sic.ArgumentError, match="which was freed"):
        _ = evicted.tensor
    assert store.evict(2) == 2
    assert values(store, range(5)) == [None, None, None, 3, 4]
    assert store.evict(9) == 2
    assert store._pool.stats().used == 0


def test_pinned_slots_stay():
    store = store_of(3)
    first = store.put(MODEL, [0], 0, hidden(0))
    store.put(MODEL, [1], 0, hidden(1))
    store.put(MODEL, [2], 0, hidden(2))
    store.pin(first)
    assert store.get(MODEL, [1], 0, pin=True)
    store.put(MODEL, [3], 0, hidden(3))
    assert values(store, range(4)) == [0, 1, None, 3]
    with pytest.raises(PoolExhausted, match=r"MemoryPool.alloc: no room for 2048 bytes in part 'boundary'"):
        store.put(MODEL, [4], 0, hidden(4, 512))
    assert values(store, range(4)) == [0, 1, None, None]
    with pytest.raises(sic.ArgumentError, match=r"SlotStore.put: key: got one whose slot is pinned"):
        store.put(MODEL, [0], 0, hidden(9))
    with pytest.raises(sic.ArgumentError, match=r"SlotStore.remove: slot: got one that is pinned"):
        store.remove(first)
    assert store.stats().pinned == 2
    store.unpin(first)
    with pytest.raises(sic.ArgumentError, match=r"SlotStore.unpin: slot: got one that is not pinned"):
        store.unpin(first)
    store.remove(first)
    for use in (store.pin, store.unpin, store.remove):
        with pytest.raises(sic.ArgumentError, match="got one that is not in the store"):
            use(first)
        with pytest.raises(sic.ArgumentError, match="got another pool's"):
            use(store_of(1).put(MODEL, [0], 0, hidden(0)))


def test_a_slot_is_put_and_pinned_in_one_step():
    store = store_of(1)
    slot = store.put(MODEL, [1], 0, hidden(1), pin=True)
    assert store.stats().pinned == 1
    with pytest.raises(PoolExhausted):
        store.put(MODEL, [2], 0, hidden(2))
    with pytest.raises(sic.ArgumentError, match="pinned"):
        store.put(MODEL, [1], 0, hidden(3), pin=True)
    with pytest.raises(sic.ArgumentError, match=r"SlotStore.put: pin: got int"):
        store.put(MODEL, [2], 0, hidden(2), pin=1)
    store.unpin(slot)
    store.put(MODEL, [2], 0, hidden(2))
    assert values(store, [1, 2]) == [None, 2]


def test_what_can_never_fit_evicts_nothing():
    store = store_of(2)
    store.put(MODEL, [0], 0, hidden(0))
    with pytest.raises(PoolExhausted, match="quota 2048"):
        store.put(MODEL, [1], 0, hidden(1, 600))
    assert values(store, [0, 1]) == [0, None]


def test_others_may_use_the_part():
    store = store_of(3)
    block = store._pool.alloc(KIB)
    for i in range(4):
        store.put(MODEL, [i], 0, hidden(i))
    assert values(store, range(4)) == [None, None, 2, 3]
    assert block.alive


def test_capacity():
    store = store_of(100, capacity=3)
    for i in range(5):
        store.put(MODEL, [i], 0, hidden(i))
    assert values(store, range(5)) == [None, None, 2, 3, 4]
    for i in (2, 3, 4):
        store.get(MODEL, [i], 0, pin=True)
    with pytest.raises(PoolExhausted, match=r"all 3 slots \(capacity\) are pinned"):
        store.put(MODEL, [5], 0, hidden(5))


def test_a_slot_is_replaced():
    store = store_of(2)
    old = store.put(MODEL, [0], 0, hidden(1))
    new = store.put(MODEL, [0], 0, hidden(2))
    assert (len(store), store.get(MODEL, [0], 0), new.tensor[0].item()) == (1, new, 2)
    with pytest.raises(sic.ArgumentError, match="freed"):
        _ = old.tensor
    assert store._pool.stats().blocks == 1


# --- approximate slots -----------------------------------------------------------------------------------------------


def test_approximate_slots_are_only_for_those_who_ask():
    store = store_of(4)
    slot = store.put(MODEL, [0], 0, hidden(1), exact=False)
    assert not slot.exact
    assert store.get(MODEL, [0], 0) is None
    assert store.get(MODEL, [0], 0, allow_approximate=True) == slot
    exact = store.put(MODEL, [0], 0, hidden(2))
    assert store.get(MODEL, [0], 0) == exact == store.get(MODEL, [0], 0, allow_approximate=True)
    with pytest.raises(
        sic.ArgumentError, match=r"SlotStore.put: exact: got False, expected True: there is an exact slot"
    ):
        store.put(MODEL, [0], 0, hidden(3), exact=False)
    with pytest.raises(sic.ArgumentError, match="exact: got int"):
        store.put(MODEL, [0], 0, hidden(3), exact=1)
    assert store.get(MODEL, [0], 0).tensor[0].item() == 2
    assert store._pool.stats().blocks == 1


# --- metrics, collisions, threads ------------------------------------------------------------------------------------


def test_collisions_are_counted_and_told_apart():
    store = store_of(100, _hash_bits=2)
    for i in range(100):
        store.put(MODEL, [i], 0, hidden(i))
    metric = sic.metrics.get("sic_hash_collision_rate")
    metric.reset()
    assert values(store, range(100)) == list(range(100))
    stats = store.stats()
    read = metric.read()[""]
    assert (read.numerator, read.denominator) == (stats.collisions, 100)
    assert stats.collisions > 50
    store.stats()
    assert metric.read()[""].denominator == 100
    assert "100 slots in 'boundary'" in repr(store)


def test_threads():
    store = store_of(50)
    wrong = []

    def work(self):
        for i in range(200):
            key = [self, i % 20]
            slot = store.get(MODEL, key, 0, pin=True)
            if slot is None:
                store.put(MODEL, key, 0, hidden(self))
                continue
            if not bool((slot.tensor == self).all()):
                wrong.append(slot)
            store.unpin(slot)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    stats = store.stats()
    assert (stats.pinned, stats.entries) == (0, len(store))
    assert store._pool.stats().parts["boundary"].blocks == len(store)
    assert stats.insertions - stats.evictions == len(store)


# --- in a file -------------------------------------------------------------------------------------------------------


def test_slots_in_a_file_are_there_again(tmp_path):
    path = tmp_path / "state.pool"
    with MemoryPool(1 << 20, backing=path) as pool:
        store = SlotStore(pool)
        store.put(MODEL, [1], 3, hidden(1))
        store.put(MODEL, [2], 3, hidden(2), exact=False)
        store.put(MODEL, [3], 3, hidden(0))
        store.put(MODEL, [3], 3, hidden(3))
        store.remove(store.put(MODEL, [4], 3, hidden(4)))
        store.pin(store.get(MODEL, [1], 3))
        SlotStore(pool, "scratch").put(MODEL, [5], 3, hidden(5))
        pool.alloc(8, name="slot:of someone else")
    with MemoryPool.attach(path) as pool:
        store = SlotStore(pool)
        assert len(store) == 3
        assert store.get(MODEL, [1], 3).tensor[0].item() == 1
        assert store.get(MODEL, [2], 3) is None
        assert store.get(MODEL, [2], 3, allow_approximate=True).tensor[0].item() == 2
        assert store.get(MODEL, [3], 3).tensor[0].item() == 3
        assert store.get(MODEL, [5], 3) is None
        assert store.stats().pinned == 0
        assert store.evict(1) == 1  # in the order in which they were put, but for uses
        store.put(MODEL, [3], 3, hidden(9))
    with MemoryPool.attach(path) as pool:
        assert SlotStore(pool).get(MODEL, [3], 3).tensor[0].item() == 9


def test_a_capacity_below_what_the_file_has_is_refused(tmp_path):
    with MemoryPool(12 << 20, backing=tmp_path / "slots.pool") as pool:
        store = SlotStore(pool)
        for i in range(3):
            store.put(MODEL, [i], 0, hidden(i))
        with pytest.raises(
            sic.ArgumentError, match=r"^SlotStore: capacity: got 2, expected at least the 3 slots in the file$"
        ):
            SlotStore(pool, capacity=2)
        assert len(SlotStore(pool, capacity=3)) == 3


def test_a_name_that_cannot_be_given_leaves_nothing(tmp_path):
    with MemoryPool(1 << 20, backing=tmp_path / "state.pool", max_names=1) as pool:
        store = SlotStore(pool)
        store.put(MODEL, [1], 0, hidden(1))
        with pytest.raises(PoolExhausted, match="1 blocks have names"):
            store.put(MODEL, [2], 0, hidden(2))
        assert (len(store), store.stats().entries, pool.stats().blocks) == (1, 1, 1)
        assert store.get(MODEL, [2], 0) is None


def test_a_slot_that_was_being_filled_is_no_slot(tmp_path):
    path = str(tmp_path / "state.pool")
    code = f"""
import os, signal, torch
from sic_kernels.replay import Fingerprint, MemoryPool, SlotStore
store = SlotStore(MemoryPool(1 << 20, backing={path!r}))
store.put(Fingerprint("m"), [1], 0, torch.ones(100))
class Dying(torch.Tensor):
    def detach(self):
        os.kill(os.getpid(), signal.SIGKILL)
store.put(Fingerprint("m"), [2], 0, torch.ones(100).as_subclass(Dying))
"""
    assert subprocess.run([sys.executable, "-c", code], env=dict(os.environ)).returncode == -signal.SIGKILL
    with MemoryPool.attach(path) as pool:
        store = SlotStore(pool)
        assert store.get(Fingerprint("m"), [1], 0).tensor.sum() == 100
        assert store.get(Fingerprint("m"), [2], 0) is None
        assert pool.stats().blocks == 1


def test_the_example_of_the_docs_runs():
    text = (Path(__file__).parents[1] / "docs" / "replay_pool.md").read_text()
    names = {}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], names)
    assert float(names["again"].tensor[:, 0].sum()) == 9 * 64
    assert float(names["slot"].tensor.sum()) == 3 * 576
    names["pool"].close()


def test_a_trace_has_puts_and_gets():
    store = SlotStore(MemoryPool(1 << 16))
    with trace.trace() as step:
        slot = store.put(b"f" * 16, [1, 2], 3, torch.ones(4))
        store.get(b"f" * 16, [1, 2], 3)
        store.get(b"f" * 16, [1], 3)
    place = {"exact": True, "part": "boundary", "offset": slot.block.offset, "nbytes": 16}
    assert step.records == [
        {"op": "slot", "layer": 3, "action": "put", "hit": True, **place},
        {"op": "slot", "layer": 3, "action": "get", "hit": True, **place},
        {"op": "slot", "layer": 3, "action": "get", "hit": False},
    ]
