"""The prefix-block index: keys, verified hits, order of eviction against a plain model, threads, names across processes."""

import array
import hashlib
import os
import struct
import subprocess
import sys
import threading
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sic_kernels as sic
from sic_kernels.delta.block_index import BlockIndex, IndexFull

KEY = b"sic_kernels.BlockIndex"


# --- keys ------------------------------------------------------------------------------------------------------------


def test_insert_and_lookup():
    index = BlockIndex(10)
    assert index.lookup("a", None, [1, 2, 3], None) is None
    root = index.insert("a", None, [1, 2, 3], None, value=7)
    child = index.insert("a", root, [1, 2, 3], None, value=8)
    assert index.lookup("a", None, [1, 2, 3]) == root != child == index.lookup("a", root, [1, 2, 3])
    assert index.insert("a", None, [1, 2, 3], None, value=9) == root
    assert (index.value(root), index.value(child)) == (7, 8)
    assert (index.parent(root), index.parent(child), index.children(root)) == (None, root, 1)
    assert len(index) == 2
    assert root in index
    assert max(root, child) + 1 not in index  # where an entry lies is random
    assert "x" not in index
    assert repr(index) == "BlockIndex(2 of 10 entries)"


def test_keys_that_must_differ():
    labels = [None, "", b"", "X", b"X", "XX", "X\0", "é", "é".encode()]
    index = BlockIndex(1000)
    handles, names = set(), set()
    for space in labels:
        for salt in labels:
            for tokens in ([1, 23], [12, 3], [123], [1, 2, 3], [1, 2**32 + 23]):
                assert index.lookup(space, None, tokens, salt) is None
                handles.add(index.insert(space, None, tokens, salt))
                names.update(index.digests(space, tokens, len(tokens), salt))
    assert len(handles) == len(names) == len(labels) ** 2 * 5


def test_another_namespace_never_hits():
    index = BlockIndex(100)
    root = index.insert("a", None, [1])
    index.insert("a", root, [2])
    for other in ("b", b"a", None, ""):
        assert index.lookup(other, None, [1]) is None
        assert index.lookup(other, root, [2]) is None
        assert index.match(other, [1, 2], 1) == []
        with pytest.raises(sic.ArgumentError, match=r"insert: parent_handle: got \d+ of another namespace"):
            index.insert(other, root, [3])


KINDS = {
    "list": list,
    "tuple": tuple,
    "int64": lambda ids: torch.tensor(ids, dtype=torch.int64),
    "int32": lambda ids: torch.tensor(ids, dtype=torch.int32),
    "strided": lambda ids: torch.tensor(ids).repeat_interleave(3)[::3],
    "numpy": np.array,
    "numpy32": lambda ids: np.array(ids, dtype=np.int32),
    "reversed": lambda ids: np.array(ids[::-1])[::-1],
    "read-only": lambda ids: np.frombuffer(np.array(ids).tobytes(), dtype=np.int64),
    "array": lambda ids: array.array("i", ids),
    "scalars": lambda ids: [np.int64(i) for i in ids],
}


@pytest.mark.parametrize("length", [1, 16, 33, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_any_kind(kind, length):
    ids = list(range(5, 5 + length))
    index = BlockIndex(10)
    handle = index.insert(None, None, ids)
    assert index.lookup(None, None, KINDS[kind](ids)) == handle
    assert index.lookup(None, None, KINDS[kind]([*ids[:-1], 4])) is None
    assert index.digests(None, KINDS[kind](ids), length) == [index.digest(handle)]


def test_ranges_and_large_ids():
    index = BlockIndex(10)
    assert index.insert(None, None, range(16)) == index.lookup(None, None, list(range(16)))
    edge = [2**63 - 1, -(2**63), 0, -1]
    assert index.insert(None, None, edge) == index.lookup(None, None, np.array(edge))
    mixed = [1, 2, 2**40, 4]
    a = index.insert(None, None, [1, 2])
    b = index.insert(None, a, [2**40, 4])
    assert index.match(None, mixed, 2) == [a, b]


# --- verified hits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("digest", ["blake2b-8", lambda message: b"always", lambda message: message[-1:]])
def test_collisions_are_counted_misses(digest):
    index = BlockIndex(2000, digest)
    handles = {}
    for i in range(600):
        assert index.lookup("a", None, [i, i]) is None
        handles[i] = index.insert("a", None, [i, i], value=i)
    stats = index.stats()
    assert stats.misses == 600
    assert stats.collisions >= 600 - 256
    assert len(set(handles.values())) == 600
    assert all(index.lookup("a", None, [i, i]) == handle for i, handle in handles.items())
    assert index.stats().collisions == stats.collisions
    for i in range(0, 600, 2):
        assert index.remove(handles[i]) == i
    for i, handle in handles.items():
        assert index.lookup("a", None, [i, i]) == (handle if i % 2 else None)


def test_chains_with_colliding_parents_stay_apart():
    index = BlockIndex(100, lambda message: b"x")
    a, b = index.insert(None, None, [1]), index.insert(None, None, [2])
    c = index.insert(None, a, [3])
    assert index.lookup(None, b, [3]) is None
    assert index.match(None, [1, 3], 1) == [a, c]
    assert index.match(None, [2, 3], 1) == [b]


def test_a_digest_may_use_the_index():
    seen = []

    def digest(message):
        seen.append(len(index))
        return hashlib.sha256(message).digest()

    index = BlockIndex(10, digest)
    handle = index.insert(None, None, [1])
    assert index.lookup(None, None, [1]) == handle
    assert seen == [0, 1]


def test_errors_of_a_digest_are_the_callers():
    def broken(message):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        BlockIndex(1, broken).insert(None, None, [1])
    for result in (b"", b"x" * 33, 7, None, "text"):
        with pytest.raises(sic.ArgumentError, match="BlockIndex: digest: got"):
            BlockIndex(1, lambda message, result=result: result).lookup(None, None, [1])


# --- names -----------------------------------------------------------------------------------------------------------


def name_of(namespace, parent, tokens, salt, size=32, key=KEY):
    """As docs/block_index.md has it."""

    def label(x):
        kind = 0 if x is None else 1 if isinstance(x, str) else 2
        text = x.encode() if kind == 1 else x or b""
        return struct.pack("<BI", kind, len(text)) + text

    width, code = (4, "i") if all(-(2**31) <= t < 2**31 for t in tokens) else (8, "q")
    message = b"\1" + label(namespace) + label(salt) + bytes([len(parent)]) + parent
    message += struct.pack(f"<BI{len(tokens)}{code}", width, len(tokens), *tokens)
    return hashlib.blake2b(message, digest_size=size, key=key).digest()


def test_names_are_what_the_documentation_says():
    tokens = [1, 2, 3, 2**40, 5, 6]
    for digest, size in (("blake2b", 32), ("blake2b-8", 1), ("blake2b-64", 8)):
        for key in (KEY, b"", b"k" * 64):
            index = BlockIndex(10, digest, key=key)
            parent, handle, wanted = b"", None, []
            for at in (0, 2, 4):
                parent = name_of("X", parent, tokens[at : at + 2], b"s", size, key)
                handle = index.insert("X", handle, tokens[at : at + 2], b"s")
                assert index.digest(handle) == parent
                wanted.append(parent)
            assert index.digests("X", tokens, 2, b"s") == wanted


def test_blake2b_agrees_with_hashlib_at_every_length():
    index = BlockIndex(1)
    for n in range(1, 100):
        tokens = list(range(n))
        assert index.digests("x" * n, tokens, n) == [name_of("x" * n, b"", tokens, None)]


def test_two_processes_name_alike():
    code = (
        "from sic_kernels.delta.block_index import BlockIndex\n"
        "for d in ('blake2b', 'blake2b-8'):\n"
        "    index = BlockIndex(10, d)\n"
        "    root = index.insert('X', None, [1, 23], None)\n"
        "    print(index.digest(root).hex(), index.digest(index.insert('X', root, [4], b's')).hex())\n"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1]
    assert len(runs[0].split()) == 4


# --- life of an entry ------------------------------------------------------------------------------------------------


def test_match_and_pins():
    index = BlockIndex(100)
    tokens = torch.arange(100)
    handles = []
    for at in range(0, 80, 16):
        handles.append(index.insert("a", handles[-1] if handles else None, tokens[at : at + 16], value=at))
    assert index.match("a", tokens, 16) == handles
    assert index.match("a", tokens[:79], 16) == handles[:4]
    assert index.match("a", [], 16) == index.match("a", [5] * 16, 16) == []
    assert index.match("a", tokens[:32], 16, pin=True) == handles[:2]
    assert [index.pins(h) for h in handles] == [1, 1, 0, 0, 0]
    assert index.evict(100) == [64, 48, 32]
    with pytest.raises(sic.ArgumentError, match="clear: pins: got 2 pinned blocks, expected none"):
        index.clear()
    for handle in handles[:2]:
        index.unpin(handle)
    assert index.clear() == 2
    assert len(index) == 0


def test_long_chains_match_without_the_gil():
    index = BlockIndex(5000)
    handle, handles = None, []
    for i in range(5000):
        handle = index.insert(None, handle, [i])
        handles.append(handle)
    assert index.match(None, range(6000), 1) == handles
    assert index.evict(4000) == [0] * 4000
    assert index.match(None, range(6000), 1) == handles[:1000]


def test_insert_reports_what_it_evicts():
    index = BlockIndex(2)
    freed = []
    for i in range(5):
        index.insert(None, None, [i], value=10 * i, evicted=freed)
    assert freed == [0, 10, 20]


def test_full_of_pins():
    index = BlockIndex(2)
    a = index.insert(None, None, [1], pin=True)
    b = index.insert(None, a, [2], pin=True)
    index.unpin(a)  # pinned by its child
    with pytest.raises(IndexFull, match="insert: capacity: got 2 entries, of which 1 are pinned"):
        index.insert(None, None, [3])
    with pytest.raises(sic.SicError):
        index.insert(None, b, [3])
    assert index.evict(10) == []
    index.unpin(b)
    assert index.insert(None, None, [3])
    assert b not in index
    assert a in index


def test_capacity_one():
    index = BlockIndex(1)
    handles = [index.insert(None, None, [i], value=i) for i in range(100)]
    assert len(set(handles)) == 100
    assert [h in index for h in handles] == [False] * 99 + [True]
    with pytest.raises(IndexFull):
        index.insert(None, handles[-1], [1])
    assert index.value(handles[-1]) == 99


def test_stale_handles():
    index = BlockIndex(4)
    old = index.insert("a", None, [1], value=1)
    index.remove(old)
    new = index.insert("a", None, [1], value=2)
    assert new != old
    for call in ("pin", "unpin", "remove", "value", "pins", "children", "parent", "digest"):
        with pytest.raises(sic.ArgumentError, match=f"BlockIndex.{call}: handle: got {old}, expected"):
            getattr(index, call)(old)
    with pytest.raises(sic.ArgumentError, match="insert: parent_handle"):
        index.insert("a", old, [2])
    assert index.lookup("a", old, [2]) is None
    assert index.pins(new) == 0


def test_values_are_64_bits():
    index = BlockIndex(2)
    assert index.value(index.insert(None, None, [1], value=2**63 - 1)) == 2**63 - 1
    assert index.value(index.insert(None, None, [2], value=-(2**63))) == -(2**63)


def test_huge_block():
    index = BlockIndex(2)
    tokens = np.arange(3_000_000)
    handle = index.insert(None, None, tokens)
    before = index.stats().bytes
    assert index.lookup(None, None, tokens.astype(np.int32)) == handle
    tokens[-1] = 0
    assert index.lookup(None, None, tokens) is None
    index.remove(handle)
    assert before - index.stats().bytes == 12_000_000


# --- a plain model ---------------------------------------------------------------------------------------------------


class Model:
    """The same promises, kept by a dictionary in order of use and a search."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.entries = OrderedDict()  # key -> [handle, value, pins], oldest first; the parent is part of the key

    def has_children(self, handle):
        return any(key[1] == handle for key in self.entries)

    def evict(self, n):
        values = []
        for _ in range(n):
            free = (k for k, e in self.entries.items() if not e[2] and not self.has_children(e[0]))
            key = next(free, None)
            if key is None:
                break
            values.append(self.entries.pop(key)[1])
        return values

    def use(self, key):
        self.entries.move_to_end(key)

    def of(self, handle):
        return next((key for key, e in self.entries.items() if e[0] == handle), None)


OPS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert", "insert", "lookup", "lookup", "pin", "unpin", "remove", "evict"]),
        st.integers(0, 2),  # namespace
        st.integers(0, 40),  # which of the handles so far
        st.integers(0, 3),  # tokens
        st.integers(0, 1),  # salt
    ),
    max_size=120,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(ops=OPS, capacity=st.integers(1, 12), digest=st.sampled_from(["blake2b", "blake2b-8", "same"]))
def test_against_the_model(ops, capacity, digest):
    index = BlockIndex(capacity, (lambda message: b"same") if digest == "same" else digest)
    model = Model(capacity)
    seen = [None]
    for step, (op, space, which, tokens, salt) in enumerate(ops):
        handle = seen[which % len(seen)]
        key = ((None, "X", b"X")[space], handle, (tokens, 7), (None, "X")[salt])
        if op == "insert":
            insert(index, model, seen, key, step)
        elif op == "lookup":
            entry = model.entries.get(key)
            assert index.lookup(*key) == (entry and entry[0])
            if entry and not entry[2]:
                model.use(key)
        elif op == "evict":
            assert index.evict(tokens) == model.evict(tokens)
        elif handle is not None:
            change(index, model, op, handle)
        check(index, model, seen)


def insert(index, model, seen, key, value):
    known, parent = model.entries.get(key), model.of(key[1])
    freed, gone = [], []
    if key[1] is not None and (parent is None or parent[0] != key[0]):
        with pytest.raises(sic.ArgumentError):
            index.insert(*key, value=value)
        return
    if known is None and len(model.entries) == model.capacity:
        if parent:
            model.entries[parent][2] += 1  # not evicted for its child
        gone = model.evict(1)
        if parent:
            model.entries[parent][2] -= 1
        if not gone:
            with pytest.raises(IndexFull):
                index.insert(*key, value=value)
            return
    handle = index.insert(*key, value=value, evicted=freed)
    assert freed == gone
    if known is None:
        assert handle not in seen
        seen.append(handle)
        model.entries[key] = [handle, value, 0]
    elif not known[2]:
        assert handle == known[0]
        model.use(key)


def change(index, model, op, handle):
    key = model.of(handle)
    pins = model.entries[key][2] if key else 0
    allowed = key and (op == "pin" or (op == "unpin" and pins) or (op == "remove" and not pins))
    if not allowed or (op == "remove" and model.has_children(handle)):
        with pytest.raises(sic.ArgumentError):
            getattr(index, op)(handle)
        return
    result = getattr(index, op)(handle)
    if op == "remove":
        assert result == model.entries.pop(key)[1]
    else:
        model.entries[key][2] += 1 if op == "pin" else -1
        if model.entries[key][2] == 0:
            model.use(key)


def check(index, model, seen):
    alive = {e[0]: (e[1], e[2], key) for key, e in model.entries.items()}
    assert len(index) == len(alive)
    assert {h for h in seen[1:] if h in index} == set(alive)
    for handle, (value, pins, key) in alive.items():
        assert (index.value(handle), index.pins(handle), index.parent(handle)) == (value, pins, key[1])
        assert (index.children(handle) > 0) == model.has_children(handle)
    stats = index.stats()
    assert stats.entries == stats.insertions - stats.evictions - stats.removals
    assert stats.pinned == sum(e[2] > 0 for e in model.entries.values())


# --- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("digest", ["blake2b", "blake2b-8", lambda message: message[-4:]])
def test_threads(digest):
    index = BlockIndex(50, digest)
    wrong, failed = [], []

    def work(seed):
        rng = np.random.default_rng(seed)
        try:
            for step, i in enumerate(rng.integers(0, 150, 2000).tolist()):
                tokens = [i] * (i % 30 + 1)
                handle = index.insert("a", None, tokens, value=i, pin=True)
                if index.value(handle) != i:
                    wrong.append(handle)
                index.unpin(handle)
                found = index.match("a", [i] * 70, i % 30 + 1, pin=True)
                for handle in found:
                    if index.value(handle) != i:
                        wrong.append(handle)
                    index.unpin(handle)
                if step % 100 == 0:
                    index.evict(int(rng.integers(0, 80)))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == wrong == []
    assert index.stats().pinned == 0
    assert index.stats().entries == len(index) == index.clear()


# --- metrics and errors ----------------------------------------------------------------------------------------------


def test_metrics_are_fed_once():
    def read():
        snapshot = sic.metrics.snapshot()
        names = ("sic_index_hit_ratio", "sic_hash_collision_rate", "sic_index_eviction_ratio")
        return np.array([(snapshot[n]["numerator"], snapshot[n]["denominator"]) for n in names])

    index = BlockIndex(2, lambda message: b"x")
    assert index.stats().hit_ratio is None
    before = read()
    for i in range(3):
        index.insert(None, None, [i])
    assert index.lookup(None, None, [2])
    assert index.lookup(None, None, [5]) is None
    stats = index.stats()
    assert (stats.hits, stats.misses, stats.collisions, stats.insertions, stats.evictions) == (1, 1, 1, 3, 1)
    assert stats.hit_ratio == 0.5
    index.stats()
    assert (read() - before).tolist() == [[1, 2], [1, 2], [1, 3]]


BAD_TOKENS = [
    ([], "got 0 tokens, expected 1 to"),
    (np.array([], dtype=np.int64), "got 0 tokens"),
    ([1.5], "got float at position 0"),
    ([1, None], "got NoneType at position 1"),
    ([1, 2**63], "got an integer of more than 64 bits at position 1"),
    (None, "got NoneType"),
    (7, "got int"),
    ("text", "got str"),
    ({1, 2}, "got set"),
    (b"bytes", "got bytes of format 'B'"),
    (np.array([1.0]), "got numpy.ndarray of format 'd'"),
    (np.array([1], dtype=np.uint32), "got numpy.ndarray of format 'I'"),
    (np.array([1], dtype=">i4"), "got numpy.ndarray of format '>i'"),
    (np.array([[1]]), "got numpy.ndarray of format .l. and rank 2"),
    (np.array(1), "got numpy.ndarray of format .l. and rank 0"),
    (torch.tensor([1.0]), r"got float32\[1\]"),
    (torch.tensor([[1]]), r"got int64\[1,1\]"),
    (torch.tensor([1], dtype=torch.int16), r"got int16\[1\]"),
]


@pytest.mark.parametrize("tokens, message", BAD_TOKENS, ids=lambda x: type(x).__name__)
def test_bad_tokens(tokens, message):
    index = BlockIndex(4)
    for call in (index.insert, index.lookup):
        with pytest.raises(sic.ArgumentError, match=f"BlockIndex.{call.__name__}: tokens: {message}"):
            call(None, None, tokens)
    assert len(index) == 0


def test_bad_arguments():
    index = BlockIndex(4)
    handle = index.insert("a", None, [1])
    cases = [
        (lambda: index.lookup(7, None, [1]), "lookup: namespace: got int, expected str, bytes or None"),
        (lambda: index.lookup("\ud800", None, [1]), "lookup: namespace: got a string with lone surrogates"),
        (lambda: index.insert("a", None, [1], 1.5), "insert: salt: got float"),
        (lambda: index.insert("a", 0, [1]), "insert: parent_handle: got 0"),
        (lambda: index.insert("a", -5, [1]), "insert: parent_handle: got -5"),
        (lambda: index.insert("a", 2**70, [1]), "insert: parent_handle: got 1180591620717411303424"),
        (lambda: index.insert("a", "x", [1]), "insert: parent_handle: got str"),
        (lambda: index.insert("a", None, [1], value=1.5), "insert: value: got float"),
        (lambda: index.insert("a", None, [1], value=2**63), "insert: value: got an integer of more than 64 bits"),
        (lambda: index.insert("a", None, [1], evicted=()), "insert: evicted: got tuple"),
        (lambda: index.match("a", [1], 0), "match: block_size: got 0"),
        (lambda: index.match("a", [1], None), "match: block_size: got NoneType"),
        (lambda: index.digests("a", [1], -1), "digests: block_size: got -1"),
        (lambda: index.evict(-1), "evict: n: got -1"),
        (lambda: index.evict("all"), "evict: n: got str"),
        (lambda: index.value(None), "value: handle: got NoneType"),
        (lambda: index.value(0), "value: handle: got 0"),
        (lambda: index.unpin(handle), f"unpin: handle: got {handle} without pins, expected a pinned block"),
        (lambda: BlockIndex(0), ": capacity: got 0, expected 1 to"),
        (lambda: BlockIndex(-1), ": capacity: got -1"),
        (lambda: BlockIndex(2**40), ": capacity: got 1099511627776"),
        (lambda: BlockIndex("x"), ": capacity: got str"),
        (lambda: BlockIndex(1, "md5"), ": digest: got 'md5'"),
        (lambda: BlockIndex(1, "blake2b-12"), ": digest: got 'blake2b-12'"),
        (lambda: BlockIndex(1, 8), ": digest: got int"),
        (lambda: BlockIndex(1, block_size=0), ": block_size: got 0"),
        (lambda: BlockIndex(1, key=b"k" * 65), ": key: got 65 bytes"),
        (lambda: BlockIndex(1, key="text"), ": key: got str"),
    ]
    for call, message in cases:
        with pytest.raises(sic.ArgumentError) as error:
            call()
        assert f"BlockIndex{'' if message[0] == ':' else '.'}{message}" in str(error.value)
    assert len(index) == 1
