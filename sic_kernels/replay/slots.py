"""Boundary hidden states of layers, kept in a pool and found again by exactly what they depend on.

    store = SlotStore(pool)
    store.put(fingerprint, tokens, layer=11, tensor=hidden)          # hidden: what layer 11 gave for these tokens
    slot = store.get(fingerprint, tokens, 11, pin=True)              # or None: never one of a similar prefix
    ...slot.tensor...
    store.unpin(slot)

The look-up is native (csrc/replay/slot_table.h). docs/replay_pool.md has the guarantees.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import threading
from typing import Any

import numpy as np
import torch

from ..runtime import metrics, native, trace
from ..runtime.arguments import described, flag, integer, is_dense
from ..runtime.errors import ArgumentError
from ..runtime.fingerprint import Fingerprint
from .errors import PoolExhausted
from .pool import Block, MemoryPool

_NAME = re.compile(r"slot:([0-9a-f]{32}):([0-9a-f]{32}):(0|[1-9][0-9]*):(exact|approximate)")


def prefix_digest(tokens: Any) -> bytes:
    """16 bytes for a sequence of token ids: BLAKE2b over them as little-endian int32. The same in every process.

    tokens: integers from 0 to 2^31 - 1: a sequence, a NumPy or a torch vector of any integer type.
    """
    return _digest("prefix_digest", "tokens", tokens)


def _digest(op: str, arg: str, tokens: Any) -> bytes:
    try:
        ids = np.asarray(tokens.cpu() if isinstance(tokens, torch.Tensor) else tokens)
    except (TypeError, ValueError, OverflowError):
        ids = np.empty((), dtype=object)
    if ids.size == 0 and ids.ndim == 1:
        ids = ids.astype(np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ArgumentError.of(op, arg, described(tokens), "a vector of integers")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < 1 << 31:
        raise ArgumentError.of(op, arg, f"{ids.min()} to {ids.max()}", "ids from 0 to 2^31 - 1")
    return hashlib.blake2b(ids.astype("<i4").tobytes(), digest_size=16).digest()


@dataclasses.dataclass(frozen=True)
class Slot:
    """A hidden state in the pool. `exact`: it is what the model computes for this prefix, and not an approximation."""

    fingerprint: bytes
    prefix: bytes
    layer: int
    exact: bool
    block: Block

    @property
    def tensor(self) -> torch.Tensor:
        """As `Block.tensor`: an error once the slot has been evicted. Pin the slot for as long as the view is used."""
        return self.block.tensor


@dataclasses.dataclass(frozen=True)
class SlotStats:
    """Levels now, and counts since the store was made. `collisions`: look-ups that met another key with the same hash."""

    capacity: int
    entries: int
    pinned: int
    approximate: int
    hits: int
    misses: int
    collisions: int
    insertions: int
    evictions: int
    table_bytes: int


class SlotStore:
    """Hidden states by (fingerprint, digest of the tokens before, layer), in one part of a pool.

    A look-up compares all 36 bytes of the key: a slot of other tokens, another layer or another fingerprint is never
    returned. Slots put with `exact=False` are returned only to those who ask for them. When the part is full, the slot that
    was used longest ago goes first; pinned ones never. Uses are `put`, a hit, and the last `unpin`.
    pool: one with a file keeps the slots too: they are found again by a new store on the attached pool, without their pins.
    part: others may have blocks in it; one store for each part. capacity: slots at most, and no fewer than the file has.
    Thread-safe: every call is atomic, and look-ups do not wait for a `put`'s copy.
    """

    def __init__(
        self, pool: MemoryPool, part: str = "boundary", *, capacity: int = 16384, _hash_bits: int = 64
    ) -> None:
        op = "SlotStore"
        if not isinstance(pool, MemoryPool):
            raise ArgumentError.of(op, "pool", type(pool).__name__, "a MemoryPool")
        if not isinstance(part, str) or part not in pool.quotas:
            raise ArgumentError.of(op, "part", repr(part), "|".join(pool.quotas))
        self._pool, self._part = pool, part
        self._capacity = integer(op, "capacity", capacity, 1, "1 to 2^24 entries")
        saved = self._saved()
        if len(saved) > self._capacity:
            raise ArgumentError.of(op, "capacity", self._capacity, f"at least the {len(saved)} slots in the file")
        self._native = native.module().SlotTable(self._capacity, _hash_bits)
        self._lookup = self._native.lookup
        self._lock = threading.RLock()  # of changes
        self._slots: dict[int, Slot] = {}  # by the generation of the block, which no other block ever has
        self._published = self._stats()
        for slot in saved:
            self._add(slot)

    def _saved(self) -> list[Slot]:
        """What the pool's file has, the oldest first."""
        saved = []
        for block in self._pool.blocks():
            match = _NAME.fullmatch(block.name or "")
            if match is None or block.part != self._part:
                continue
            fingerprint, prefix, layer, kind = match.groups()
            saved.append(Slot(bytes.fromhex(fingerprint), bytes.fromhex(prefix), int(layer), kind == "exact", block))
        return saved

    # ---- look-ups ----

    def get(
        self,
        fingerprint: Fingerprint | bytes,
        prefix: Any,
        layer: int,
        *,
        allow_approximate: bool = False,
        pin: bool = False,
    ) -> Slot | None:
        """The slot with exactly this key, or None.

        prefix: the tokens, or their `prefix_digest`. pin: in the same step; unpin it later.
        """
        if type(fingerprint) is Fingerprint:
            fingerprint = fingerprint.digest
        if type(prefix) is not bytes:
            prefix = _digest("SlotStore.get", "prefix", prefix)
        if (
            type(allow_approximate) is not bool or type(pin) is not bool
        ):  # which the native call would take as one of them
            allow_approximate = flag("SlotStore.get", "allow_approximate", allow_approximate)
            pin = flag("SlotStore.get", "pin", pin)
        slot = self._slots.get(self._lookup(fingerprint, prefix, layer, allow_approximate, pin))
        if trace.active():
            _record("get", layer, slot)
        return slot

    def pin(self, slot: Slot) -> None:
        """The slot is not evicted or replaced until it is unpinned as often as it was pinned."""
        self._native.pin(*self._entry("SlotStore.pin", slot))

    def unpin(self, slot: Slot) -> None:
        """One pin less; `ArgumentError` if it has none."""
        self._native.unpin(*self._entry("SlotStore.unpin", slot))

    # ---- changes ----

    def put(
        self,
        fingerprint: Fingerprint | bytes,
        prefix: Any,
        layer: int,
        tensor: torch.Tensor,
        *,
        exact: bool = True,
        pin: bool = False,
    ) -> Slot:
        """Copies a tensor into a slot; one with the same key is replaced, after which its tensors are no longer valid.

        `ArgumentError` if that one is pinned, or is exact and the new one is not. `PoolExhausted` if the part has no room even
        when all that is not pinned is evicted; what is larger than the part's quota evicts nothing.
        pin: in the same step, so that no other thread's `put` evicts it first; unpin it later.
        """
        op = "SlotStore.put"
        model = fingerprint.digest if isinstance(fingerprint, Fingerprint) else fingerprint
        digests = (model, prefix if isinstance(prefix, bytes) else _digest(op, "prefix", prefix))
        kind, pinned = flag(op, "exact", exact), flag(op, "pin", pin)
        if not is_dense(tensor) or tensor.device != self._pool.device or tensor.numel() == 0:
            got = f"{described(tensor)} on {getattr(tensor, 'device', None)}"
            raise ArgumentError.of(op, "tensor", got, f"a tensor on {self._pool.device} that is not empty")
        with self._lock:
            self._native.check_insert(*digests, layer, kind)
            block = self._room(tensor)
            try:
                block.tensor.copy_(tensor.detach())
                slot = self._add(Slot(*digests, int(layer), kind, block))
            except BaseException:
                self._pool.free(block)
                raise
            if pinned:  # still under the lock, without which nothing is evicted
                self.pin(slot)
        if trace.active():
            _record("put", slot.layer, slot)
        return slot

    def evict(self, n: int = 1) -> int:
        """Removes up to n slots, those used longest ago first, but no pinned one; how many there were."""
        wanted = integer("SlotStore.evict", "n", n, 0, "0 or more")
        with self._lock:
            return sum(1 for _ in range(min(wanted, len(self._slots))) if self._evict_one())

    def remove(self, slot: Slot) -> None:
        """Removes one slot; `ArgumentError` if it is pinned or not in the store."""
        with self._lock:
            self._native.remove(*self._entry("SlotStore.remove", slot))
            self._forget(slot.block.generation)

    def stats(self) -> SlotStats:
        """Counts and levels; what is new since the last call is also added to `sic_hash_collision_rate`."""
        with self._lock:
            before, now = self._published, self._stats()
            self._published = now
        lookups = now.hits + now.misses - before.hits - before.misses
        metrics.get("sic_hash_collision_rate").add(now.collisions - before.collisions, lookups)
        return now

    def __len__(self) -> int:
        return len(self._slots)

    def __repr__(self) -> str:
        return f"SlotStore({len(self)} slots in {self._part!r} of {self._pool!r})"

    # ---- inside ----

    def _stats(self) -> SlotStats:
        return SlotStats(**self._native.stats())

    def _entry(self, op: str, slot: Slot) -> tuple[bytes, bytes, int, int]:
        if not isinstance(slot, Slot) or slot.block._pool is not self._pool:
            got = "another pool's" if isinstance(slot, Slot) else type(slot).__name__
            raise ArgumentError.of(op, "slot", got, "a slot of this store")
        return slot.fingerprint, slot.prefix, slot.layer, slot.block.generation

    def _room(self, tensor: torch.Tensor) -> Block:
        shape, nbytes = tuple(tensor.shape), tensor.numel() * tensor.element_size()
        while len(self._slots) >= self._capacity:
            if not self._evict_one():
                raise PoolExhausted(f"SlotStore.put: all {self._capacity} slots (capacity) are pinned")
        while True:
            try:
                return self._pool.alloc(shape, tensor.dtype, self._part)
            except PoolExhausted:
                if nbytes > self._pool.quotas[self._part] or not self._evict_one():
                    raise

    def _add(self, slot: Slot) -> Slot:
        """Into the table, in the place of one with the same key. In a file the name makes a block a slot: it comes last."""
        block, kind = slot.block, "exact" if slot.exact else "approximate"
        name = f"slot:{slot.fingerprint.hex()}:{slot.prefix.hex()}:{slot.layer}:{kind}"
        self._slots[block.generation] = slot
        key = (slot.fingerprint, slot.prefix, slot.layer)
        try:
            before = self._native.insert(*key, block.offset, block.nbytes, block.generation, slot.exact)
        except BaseException:
            del self._slots[block.generation]
            raise
        if before is not None:
            self._forget(before)
        if self._pool.backing is not None and block.name != name:
            try:
                slot = dataclasses.replace(slot, block=self._pool.rename(block, name))
            except BaseException:
                self._native.remove(*key, block.generation)
                del self._slots[block.generation]
                raise
            self._slots[block.generation] = slot
        return slot

    def _evict_one(self) -> bool:
        generation = self._native.evict()
        if generation is not None:
            self._forget(generation)
        return generation is not None

    def _forget(self, generation: int) -> None:
        self._pool.free(self._slots.pop(generation).block)


def _record(action: str, layer: int, slot: Slot | None) -> None:
    """Into the active trace."""
    found: dict[str, Any] = {"hit": slot is not None}
    if slot is not None:
        block = slot.block
        found |= {"exact": slot.exact, "part": block.part, "offset": block.offset, "nbytes": block.nbytes}
    trace.record("slot", layer=layer, action=action, **found)
