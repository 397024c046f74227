"""Prefix-block index: (namespace, parent, tokens, salt) -> handle, for the prefix caching of KV blocks.

    index = BlockIndex(100_000)
    root = index.insert("tenant-a", None, tokens[:16], None, value=page)
    index.insert("tenant-a", root, tokens[16:32], None, value=next_page)
    for handle in index.match("tenant-a", tokens, 16, pin=True):  # the longest chain that begins `tokens`
        pages.append(index.value(handle))

The table is native (csrc/delta/block_index.h). docs/block_index.md has the guarantees.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from ..runtime import metrics, native
from ..runtime.errors import SicError

Label = str | bytes | None  # a namespace or a salt: "x", b"x" and None are distinct
TokenIds = Any  # a sequence of integers, or an int32 or int64 vector: torch, NumPy, anything with a buffer or DLPack


class IndexFull(SicError, RuntimeError):
    """`insert` found no entry to evict: every one is pinned or has pinned descendants. The message names the capacity."""


@dataclasses.dataclass(frozen=True)
class IndexStats:
    """Counts since the index was made, and its levels now. `collisions` are part of `misses`."""

    capacity: int
    entries: int
    pinned: int
    hits: int
    misses: int
    collisions: int
    insertions: int
    evictions: int
    removals: int
    bytes: int  # reserved; the system lends pages as entries come

    @property
    def hit_ratio(self) -> float | None:
        """Hits per look-up; None before the first."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else None


class BlockIndex:
    """At most `capacity` blocks, the least recently used of them evicted for new ones.

    digest: what names a block outside of the process: "blake2b" (32 bytes, keyed with `key`); or, mostly for tests,
    "blake2b-8" to "blake2b-64" (so many bits) or a function of bytes that returns 1 to 32 bytes. The last two also probe
    the table, so that unequal blocks collide.
    block_size: tokens kept beside an entry; longer blocks work, and cost one more cache miss.

    Every call may come from any thread and is atomic (`match`, `evict`, `clear` in steps). Handles are positive, below 2^63, and
    never given twice.
    """

    def __init__(
        self,
        capacity: int,
        digest: str | Callable[[bytes], bytes] = "blake2b",
        *,
        block_size: int = 16,
        key: bytes = b"sic_kernels.BlockIndex",
    ) -> None:
        self._native = native.module().BlockIndex(capacity, digest, block_size, key)
        self._insert, self._lookup = self._native.insert, self._native.lookup
        self._lock = threading.Lock()
        self._published = IndexStats(**self._native.stats())

    def insert(
        self,
        namespace: Label,
        parent_handle: int | None,
        tokens: TokenIds,
        salt: Label = None,
        *,
        value: int = 0,
        pin: bool = False,
        evicted: list[int] | None = None,
    ) -> int:
        """The handle of the block: a new one with this value, or the one that is there, which keeps its own.

        The parent must be in the index and of the same namespace. The values of what was evicted for the block are appended
        to `evicted`. `pin` pins the handle in the same step. `IndexFull` if nothing can be evicted.
        """
        return self._insert(namespace, parent_handle, tokens, salt, value, pin, evicted)

    def lookup(
        self, namespace: Label, parent_handle: int | None, tokens: TokenIds, salt: Label = None, *, pin: bool = False
    ) -> int | None:
        """The handle of the block, or None. A hit is a use. A parent that is not alive is a miss."""
        return self._lookup(namespace, parent_handle, tokens, salt, pin)

    def match(
        self, namespace: Label, tokens: TokenIds, block_size: int, salt: Label = None, *, pin: bool = False
    ) -> list[int]:
        """Handles of the longest chain of full blocks that begins `tokens`, from the first block on."""
        return self._native.match(namespace, tokens, block_size, salt, pin)

    def pin(self, handle: int) -> None:
        """Count one more user of the block: it is not evicted until `unpin` was called as often."""
        self._native.pin(handle)

    def unpin(self, handle: int) -> None:
        """Count one user less. The last one's is a use: the block is then the newest."""
        self._native.unpin(handle)

    def evict(self, n: int) -> list[int]:
        """Remove up to n blocks, the least recently used first, and return their values."""
        return self._native.evict(n)

    def remove(self, handle: int) -> int:
        """Remove one block, which has neither pins nor children, and return its value."""
        return self._native.remove(handle)

    def clear(self) -> int:
        """Remove every block, and return how many went; an error if any is pinned. Others may call meanwhile."""
        return self._native.clear()

    def value(self, handle: int) -> int:
        """What the block was inserted with."""
        return self._native.value(handle)

    def pins(self, handle: int) -> int:
        """How many users the block has."""
        return self._native.pins(handle)

    def children(self, handle: int) -> int:
        """How many blocks in the index follow directly on this one."""
        return self._native.children(handle)

    def parent(self, handle: int) -> int | None:
        """The block before this one."""
        return self._native.parent(handle)

    def digest(self, handle: int) -> bytes:
        """The name of the block: the same in every process, for the same tokens from the first block on."""
        return self._native.digest(handle)

    def digests(self, namespace: Label, tokens: TokenIds, block_size: int, salt: Label = None) -> list[bytes]:
        """The names of the full blocks of a sequence, whether they are in the index or not."""
        return self._native.digests(namespace, tokens, block_size, salt)

    def stats(self) -> IndexStats:
        """Counts and levels; what is new since the last call is also added to `sic.metrics`."""
        with self._lock:
            before, now = self._published, IndexStats(**self._native.stats())
            self._published = now
        lookups = now.hits + now.misses - before.hits - before.misses
        metrics.get("sic_index_hit_ratio").add(now.hits - before.hits, lookups)
        metrics.get("sic_hash_collision_rate").add(now.collisions - before.collisions, lookups)
        metrics.get("sic_index_eviction_ratio").add(
            now.evictions - before.evictions, now.insertions - before.insertions
        )
        return now

    def __contains__(self, handle: object) -> bool:
        """Whether the handle's block is in the index. Not a use."""
        return handle in self._native

    def __len__(self) -> int:
        return len(self._native)

    def __repr__(self) -> str:
        return f"BlockIndex({len(self)} of {self._native.stats()['capacity']} entries)"
