"""Reserved memory in parts with hard quotas, whose blocks are named by offset and generation, never by address.

    pool = MemoryPool(1 << 30, backing="state.pool")
    keys = pool.alloc((32, 4096, 64), torch.float16, part="kv", name="layer.3.k")
    keys.tensor.zero_()
    ...                                                # kill -9
    pool = MemoryPool.attach("state.pool")
    keys = pool.block("layer.3.k").tensor              # what was written

The allocator is native (csrc/replay/memory_pool.h). docs/replay_pool.md has the guarantees and the layout of the file.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import torch

from ..runtime import config, metrics, native
from ..runtime.arguments import file_path, flag, integer, real, torch_device
from ..runtime.errors import ArgumentError
from .errors import PoolError

PARTS = ("kv", "boundary", "scratch")  # keys and values in place; what a cursor resumes from; what lives for a step
UNIT = 256  # bytes: of every quota, offset and size
MOST_ALIGNMENT = 4096  # bytes
_BITS = 62  # of numbers of bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """A block of a pool. Equal where `identity` is, whatever it is called; it does not end with this object.

    offset, nbytes: in the pool's memory, bytes. generation: no other block of the pool ever has it. name: None, or how
    `MemoryPool.block` finds it. dtype, shape: of `tensor`.
    """

    part: str
    offset: int
    nbytes: int
    generation: int
    name: str | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    _pool: MemoryPool = dataclasses.field(repr=False)

    def __eq__(self, other: object) -> bool:
        return self.identity == other.identity if isinstance(other, Block) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.identity)

    @property
    def identity(self) -> tuple[str, str, int, int]:
        """(the pool's identity in hexadecimal, part, offset, generation): no other block of any pool ever has it."""
        return self._pool.identity.hex(), self.part, self.offset, self.generation

    @property
    def tensor(self) -> torch.Tensor:
        """A contiguous view, which keeps the memory mapped. What is in a new block is not defined.

        `ArgumentError` once the block is freed, `PoolError` once the pool is closed: always, not only in debug. Views taken
        before are not revoked; with `poison` a write through one is found when the memory is given out again.
        """
        return self._pool._view(self)

    @property
    def survives(self) -> bool:
        """Whether it outlives the process: it has a name, in a pool with a file."""
        return self.name is not None and self._pool.backing is not None

    @property
    def alive(self) -> bool:
        """Whether it is still this block: not freed, and the pool not closed."""
        return self._pool._native.is_alive(self.offset, self.generation)


@dataclasses.dataclass(frozen=True)
class PartStats:
    """Levels of one part, in bytes and counts; `allocations` since the pool was made or attached."""

    quota: int
    used: int
    peak: int
    largest_free: int
    blocks: int
    free_pieces: int
    allocations: int

    @property
    def free(self) -> int:
        return self.quota - self.used

    @property
    def fragmentation(self) -> float:
        """1 - largest free piece / free bytes: 0 where a block of all that is free can be had, and where nothing is."""
        return 1 - self.largest_free / self.free if self.free else 0.0


@dataclasses.dataclass(frozen=True)
class PoolStats:
    """Levels of a pool, in bytes: `parts` by name, and their sums."""

    parts: dict[str, PartStats]

    @property
    def nbytes(self) -> int:
        return sum(p.quota for p in self.parts.values())

    @property
    def used(self) -> int:
        return sum(p.used for p in self.parts.values())

    @property
    def blocks(self) -> int:
        return sum(p.blocks for p in self.parts.values())


class _Utilisation:
    """The gauge: bytes in use and reserved, of all pools of the process that are open.

    The garbage collector may end a pool at any moment, also while this thread holds a lock of the gauge: so `end` takes none,
    and the next `set` takes the pool out.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[int, tuple[int, int]] = {}
        self._ended: collections.deque[int] = collections.deque()
        self._used = self._reserved = 0

    def set(self, pool: int, used: Callable[[], int], reserved: int) -> None:
        """`used` is asked under the lock: of two threads the one that comes last has the newer level."""
        with self._lock:
            while self._ended:
                self._replace(self._ended.popleft(), 0, 0)
            self._replace(pool, used(), reserved)
            metrics.get("sic_mem_pool_utilization").set(self._used, self._reserved)

    def close(self, pool: int) -> None:
        self.set(pool, int, 0)

    def end(self, pool: int) -> None:
        self._ended.append(pool)

    def _replace(self, pool: int, used: int, reserved: int) -> None:
        before = self._pools.pop(pool, (0, 0))
        if reserved:
            self._pools[pool] = (used, reserved)
        self._used += used - before[0]
        self._reserved += reserved - before[1]


_utilisation = _Utilisation()


class MemoryPool:
    """Blocks of reserved memory, in named parts with hard quotas.

    nbytes: of the whole pool, rounded down to a multiple of 256; None: `fraction` of the device's memory (cpu: of the
    machine's). Parts get whole units of 256 bytes in proportion to `weights`; the units that are then left go, one each, to
    the parts that were cut the most, the first of equals first. So quotas sum to `pool.nbytes` exactly.
    device: "cpu": pages are reserved, and cost nothing until they are touched. Others: one tensor of torch's allocator.
    backing: the path of a file that the memory is mapped from (cpu only). It outlives the process, but not a loss of power. A
    file that is there is attached, and must have been made with the same arguments; one of another size than it was made with is
    a `PoolError`. One process at a time. Nobody may make the file shorter while it is mapped, which is as long as the pool or a
    tensor of it is held: an access behind its end would end the process (SIGBUS).
    poison: freed memory is filled with 0xFB, and checked when it is given out again: `PoolError` naming the block that was
    written after it was freed. None: as SIC_CHECK says. cpu only.
    max_names: blocks with a name, at a time, in a file (512 bytes each, reserved).

    Best fit with coalescing, O(log n); where blocks lie depends on the order of the calls alone. Thread-safe; a call that
    fails has changed nothing. `alloc` and `free` are host work: not to be captured, but what they gave may be.
    """

    def __init__(
        self,
        nbytes: int | None = None,
        *,
        fraction: float = 0.075,
        weights: Sequence[float] = (8, 3, 1),
        parts: Sequence[str] = PARTS,
        device: Any = "cpu",
        backing: str | os.PathLike[str] | None = None,
        poison: bool | None = None,
        max_names: int = 16384,
    ) -> None:
        op = "MemoryPool"
        place = torch_device(op, device)
        on_cpu = place.type == "cpu"
        share = real(op, "fraction", fraction, lambda x: 0 < x <= 1, "a number in (0, 1]")
        names = integer(op, "max_names", max_names, 1, "1 to 2^24")
        if nbytes is None:
            nbytes = _share_of_memory(op, place, share)
        quotas = _quotas(op, integer(op, "nbytes", nbytes, UNIT, f"at least {UNIT} bytes", _BITS), parts, weights)
        poisoned = _poison(op, poison, on_cpu)
        if backing is None:
            self._start(native.module().MemoryPool(quotas, on_cpu, poisoned), place, None)
            return
        if not on_cpu:
            raise ArgumentError.of(op, "backing", f"a file for {place}", "None: only the CPU's memory can be a file")
        path = _file(op, "backing", backing, "a path, or None")
        if not os.path.exists(path):
            self._start(native.module().MemoryPool.create(path, quotas, names, poisoned), place, path)
            return
        bound = native.module().MemoryPool.attach(path, poisoned)
        try:
            _require_same(path, bound, quotas, names)
        except ArgumentError:
            bound.close()
            raise
        self._start(bound, place, path)

    @classmethod
    def attach(cls, path: str | os.PathLike[str], *, poison: bool | None = None) -> MemoryPool:
        """The pool of a file, with its named blocks; those without a name are gone. Sizes and parts are the file's.

        `ArgumentError` if it cannot be opened; `PoolError` if it is no pool's, of another version, damaged, or in use.
        """
        op = "MemoryPool.attach"
        self, path = cls.__new__(cls), _file(op, "path", path, "a path")
        bound = native.module().MemoryPool.attach(path, _poison(op, poison, True))
        self._start(bound, torch.device("cpu"), path)
        return self

    def _start(self, bound: Any, device: torch.device, path: str | None) -> None:
        self._native = bound
        self._identity: bytes = bound.identity()
        self._quotas: dict[str, int] = dict(bound.parts())
        self._names = list(self._quotas)
        self._nbytes = sum(self._quotas.values())
        self._device, self._backing = device, path
        self._memory: torch.Tensor | None = _memory(bound, device, self._nbytes)
        self._undo = threading.local()
        weakref.finalize(self, _utilisation.end, id(self)).atexit = False
        self._publish()

    # ---- blocks ----

    def alloc(
        self,
        size: int | Sequence[int],
        dtype: torch.dtype | None = None,
        part: str = "boundary",
        *,
        name: str | None = None,
        alignment: int = UNIT,
    ) -> Block:
        """A block: of so many bytes, or with a dtype for a tensor of that shape.

        alignment: a power of two from 256 to 4096, of the offset and of the address. name: at most 123 bytes of UTF-8 that no
        other block has; at most 8 dimensions then. In a file such a block stays from this call on, whatever is in it.
        `PoolExhausted` with a breakdown if the part has no room: others' quotas are never used.
        """
        op = "MemoryPool.alloc"
        shape, kind = _shape(op, size, dtype)
        nbytes = math.prod(shape) * kind.itemsize
        if not 0 < nbytes < 1 << _BITS:
            raise ArgumentError.of(op, "size", size, f"a block of at least 1 byte, below 2^{_BITS} bytes")
        index = self._index(op, part)
        alignment = integer(op, "alignment", alignment, 1, "a power of two from 256 to 4096")
        label = _name(op, name)
        offset, generation = self._native.alloc(index, nbytes, alignment, label, _dtype_name(kind), shape)
        block = Block(part, offset, nbytes, generation, name, kind, shape, self)
        for undo in self._undo.__dict__.get("lists", ()):
            undo.append(block)
        self._publish()
        return block

    def free(self, block: Block) -> None:
        """Gives a block back. `ArgumentError` if it was freed before, or is another pool's."""
        self._require_own("MemoryPool.free", block)
        self._native.free(block.offset, block.generation)
        self._publish()

    def rename(self, block: Block, name: str | None) -> Block:
        """The block under another name, or none. So a block can be filled first, and stay in the file from then on."""
        op = "MemoryPool.rename"
        self._require_own(op, block)
        label = _name(op, name)
        self._native.rename(block.offset, block.generation, label, _dtype_name(block.dtype), block.shape)
        return dataclasses.replace(block, name=name)

    def block(self, name: str) -> Block:
        """The block of that name; `ArgumentError` if there is none."""
        found = self._native.named(_name("MemoryPool.block", name))
        if found is None:
            raise ArgumentError.of("MemoryPool.block", "name", repr(name), "the name of a block in use")
        return self._block(*found)

    def blocks(self) -> list[Block]:
        """All blocks that have names, in the order in which they were allocated."""
        return [self._block(*found) for found in self._native.all_named()]

    def alive(self, offset: int, generation: int) -> bool:
        """Whether the block that was given out at this offset with this generation is still in use."""
        op = "MemoryPool.alive"
        place = integer(op, "offset", offset, 0, "that of a block", 63)
        return self._native.is_alive(place, integer(op, "generation", generation, 0, "that of a block", 63))

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """If the body raises, what this thread allocated in it is freed: a capture that fails leaks nothing."""
        made: list[Block] = []
        lists = self._undo.__dict__.setdefault("lists", [])
        lists.append(made)
        try:
            yield
        except BaseException:
            for block in made:
                if block.alive:
                    self.free(block)
            raise
        finally:
            lists.pop()  # by place: lists that are equal are not the same

    # ---- the whole ----

    def stats(self) -> PoolStats:
        """Quota, levels, peak and fragmentation of each part."""
        return PoolStats({n: PartStats(*levels) for n, levels in zip(self._names, self._native.stats())})

    def trim(self) -> int:
        """Gives the pages that freed blocks may have touched back to the system; how many bytes. Devices: 0.

        `PoolError` where the file system cannot take pages out of a file.
        """
        return self._native.trim()

    def close(self) -> None:
        """Ends the use of the pool, and unlocks its file. Tensors that are still held keep the memory mapped."""
        self._native.close()
        self._memory = None
        _utilisation.close(id(self))

    def __enter__(self) -> MemoryPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def identity(self) -> bytes:
        """16 random bytes from when the pool was made. A file has them over all attachments, and so does a copy of it."""
        return self._identity

    @property
    def quotas(self) -> dict[str, int]:
        """Part -> bytes."""
        return dict(self._quotas)

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def backing(self) -> str | None:
        """The path of the file."""
        return self._backing

    @property
    def attachments(self) -> int:
        """How often the file was attached, with this time; 1 for a new pool."""
        return self._native.attachments()

    def __repr__(self) -> str:
        where = "" if self._backing is None else f", {self._backing}"
        state = "closed" if self._memory is None else f"{self._native.used()} of {self._nbytes} bytes in use"
        return f"MemoryPool({self._device}{where}: {state})"

    # ---- inside ----

    def _block(self, offset: int, nbytes: int, generation: int, name: str, dtype: str, shape: list[int]) -> Block:
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype) or math.prod(shape) * kind.itemsize != nbytes:
            raise PoolError(
                f"MemoryPool: the block {name!r} is {dtype}{shape}, which this torch cannot read as {nbytes} bytes"
            )
        part = self._names[self._native.part_of(offset)]
        return Block(part, offset, nbytes, generation, name, kind, tuple(shape), self)

    def _view(self, block: Block) -> torch.Tensor:
        memory = self._memory
        if memory is None:
            raise PoolError("Block.tensor: the pool is closed")
        if not self._native.is_alive(block.offset, block.generation):
            raise ArgumentError.of("Block.tensor", "block", f"{block}, which was freed", "a block in use")
        return memory[block.offset : block.offset + block.nbytes].view(block.dtype).view(block.shape)

    def _index(self, op: str, part: str) -> int:
        if not isinstance(part, str) or part not in self._quotas:
            raise ArgumentError.of(op, "part", repr(part), "|".join(self._names))
        return self._names.index(part)

    def _require_own(self, op: str, block: Block) -> None:
        if not isinstance(block, Block) or block._pool is not self:
            got = f"{block}, another pool's" if isinstance(block, Block) else type(block).__name__
            raise ArgumentError.of(op, "block", got, "a block of this pool")

    def _publish(self) -> None:
        _utilisation.set(id(self), self._native.used, self._nbytes)


# ---- arguments ----


def _share_of_memory(op: str, device: torch.device, fraction: float) -> int:
    if device.type == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    elif device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        raise ArgumentError.of(op, "nbytes", None, f"a number of bytes: the memory of {device.type} has no known size")
    return int(total * fraction)


def _quotas(op: str, nbytes: int, parts: Sequence[str], weights: Sequence[float]) -> list[tuple[str, int]]:
    """Part and bytes: by the largest remainders, in units."""
    for arg, value, expected in (("parts", parts, "names"), ("weights", weights, "positive numbers")):
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise ArgumentError.of(op, arg, repr(value), f"a sequence of {expected}")
    names, shares = list(parts), list(weights)
    if not names or not all(isinstance(name, str) and name.isprintable() for name in names):
        raise ArgumentError.of(op, "parts", names, "printable names, one or more")
    right = all(isinstance(w, (int, float)) and not isinstance(w, bool) and 0 < w < math.inf for w in shares)
    if len(shares) != len(names) or not right:
        raise ArgumentError.of(op, "weights", shares, f"{len(names)} positive numbers, one for each of {names}")
    units = nbytes // UNIT
    total = sum(map(Fraction, shares))
    exact = [Fraction(w) * units / total for w in shares]
    whole = [int(share) for share in exact]
    most_cut_first = sorted(range(len(names)), key=lambda i: whole[i] - exact[i])
    for i in most_cut_first[: units - sum(whole)]:
        whole[i] += 1
    if 0 in whole:
        raise ArgumentError.of(
            op, "nbytes", nbytes, f"enough for {UNIT} bytes of each of {names} with weights {shares}"
        )
    return [(name, n * UNIT) for name, n in zip(names, whole)]


def _file(op: str, arg: str, value: Any, expected: str) -> str:
    """For the native pool, whose messages name it."""
    path = file_path(op, arg, value, expected)
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ArgumentError.of(op, arg, repr(path), f"{expected}, in UTF-8") from None
    return path


def _poison(op: str, poison: bool | None, on_cpu: bool) -> bool:
    return (config.current().check and on_cpu) if poison is None else flag(op, "poison", poison)


def _require_same(path: str, bound: Any, quotas: list[tuple[str, int]], max_names: int) -> None:
    """That a file has what a new one would have been made with."""
    saved, wanted = dict(bound.parts()), dict(quotas)
    for arg, live, file in (
        ("nbytes", sum(wanted.values()), sum(saved.values())),
        ("parts", list(wanted), list(saved)),
        ("weights", wanted, saved),
        ("max_names", max_names, bound.max_names()),
    ):
        if live != file:
            raise ArgumentError.of(
                "MemoryPool", arg, live, f"{file}, as in {path} (MemoryPool.attach takes what is there)"
            )


def _memory(bound: Any, device: torch.device, nbytes: int) -> torch.Tensor:
    if device.type == "cpu":
        return torch.frombuffer(bound.memory(), dtype=torch.uint8)
    room = torch.empty(nbytes + MOST_ALIGNMENT, dtype=torch.uint8, device=device)
    return room.narrow(0, -room.data_ptr() % MOST_ALIGNMENT, nbytes)


def _shape(op: str, size: int | Sequence[int], dtype: torch.dtype | None) -> tuple[tuple[int, ...], torch.dtype]:
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ArgumentError.of(op, "dtype", repr(dtype), "a dtype of torch")
    is_shape = isinstance(size, (tuple, list, torch.Size))
    if is_shape and dtype is None:
        raise ArgumentError.of(op, "dtype", None, "the dtype of a tensor with that shape")
    sizes = size if isinstance(size, (tuple, list)) else (size,)
    expected = "sizes of 0 or more" if is_shape else "a number of bytes, at least 1, or a shape with a dtype"
    return tuple(integer(op, "size", n, 0, expected, _BITS) for n in sizes), dtype or torch.uint8


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _name(op: str, name: str | None) -> str:
    """For the native pool, to which "" is none."""
    if name is None:
        return ""
    if not isinstance(name, str) or not name or not name.isprintable():
        raise ArgumentError.of(op, "name", repr(name), "a printable str, not empty")
    return name
