"""The file of a memory pool: what is in it after the process died, damage, one process at a time."""

import itertools
import os
import random
import signal
import subprocess
import sys
import threading

import pytest
import torch

import sic_kernels as sic
from sic_kernels.replay import MemoryPool, PoolError, PoolExhausted

UNIT = 256


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "state.pool")


def test_named_blocks_are_there_again(path):
    with MemoryPool(12 << 20, backing=path) as pool:
        a = pool.alloc((2, 3), torch.bfloat16, part="kv", name="层.3.k")
        a.tensor.copy_(torch.arange(6).view(2, 3))
        lost = pool.alloc(5000)
        gone = pool.alloc(5000, name="gone")
        pool.free(gone)
    with MemoryPool.attach(path) as pool:
        assert (pool.attachments, pool.backing, pool.quotas["kv"]) == (2, path, 8 << 20)
        assert pool.blocks() == [a]
        assert torch.equal(pool.block("层.3.k").tensor, torch.arange(6).view(2, 3).bfloat16())
        assert not pool.alive(lost.offset, lost.generation)
        assert pool.stats().used == UNIT
        assert pool.alloc(1).generation > gone.generation
        assert pool.trim() >= 0
        assert torch.equal(pool.block("层.3.k").tensor, torch.arange(6).view(2, 3).bfloat16())
    with MemoryPool(12 << 20, backing=path) as pool:  # as it was made: attached
        assert pool.attachments == 3
        assert pool.blocks() == [a]


def test_a_file_made_anew_is_another_pool(path):
    with MemoryPool(12 << 20, backing=path) as pool:
        old = pool.alloc(64, name="x")
    with MemoryPool.attach(path) as pool:
        assert (pool.identity.hex(), pool.block("x")) == (old.identity[0], old)
        assert pool.block("x").identity == old.identity
    os.unlink(path)
    with MemoryPool(12 << 20, backing=path) as pool:
        new = pool.alloc(64, name="x")
        assert new.identity[1:] == old.identity[1:]
        assert new.identity != old.identity
        assert new != old


@pytest.mark.parametrize(
    "options, message",
    [
        ({"nbytes": 24 << 20}, "nbytes: got 25165824, expected 12582912, as in"),
        ({"parts": ("kv", "boundary", "other")}, r"parts: got \['kv', 'boundary', 'other'\], expected \['kv'"),
        ({"weights": (4, 1, 1)}, "weights: got {'kv': 8388608"),
        ({"max_names": 5}, "max_names: got 5, expected 16384, as in"),
    ],
)
def test_a_file_made_otherwise_is_refused_by_field(options, message, path):
    MemoryPool(12 << 20, backing=path).close()
    with pytest.raises(sic.ArgumentError, match=f"^MemoryPool: {message}"):
        MemoryPool(**{"nbytes": 12 << 20, "backing": path, **options})
    MemoryPool.attach(path).close()  # and is unlocked again


def test_what_cannot_be_opened(path, tmp_path):
    with pytest.raises(sic.ArgumentError, match=r"MemoryPool.attach: path: got .* expected the file of a pool"):
        MemoryPool.attach(path)
    with pytest.raises(PoolError, match="cannot create"):
        MemoryPool(1 << 20, backing=tmp_path / "missing" / "x")
    with pytest.raises(sic.ArgumentError, match=r"backing: got a disk with \d+ free bytes, expected \d+"):
        MemoryPool(1 << 55, backing=path)
    with open(path, "wb") as f:
        f.write(b"\0" * 100_000)
    for open_it in (lambda: MemoryPool.attach(path), lambda: MemoryPool(1 << 20, backing=path)):
        with pytest.raises(PoolError, match="not the file of a pool"):
            open_it()
    assert os.listdir(tmp_path) == ["state.pool"]  # no drafts are left


def test_one_process_at_a_time(path):
    pool = MemoryPool(1 << 20, backing=path)
    block = pool.alloc(8, name="x")
    with pytest.raises(PoolError, match=f"in use by process {os.getpid()}"):
        MemoryPool.attach(path)
    code = f"from sic_kernels.replay import MemoryPool; MemoryPool.attach({path!r})"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"PoolError: MemoryPool.attach: {path} is in use by process {os.getpid()}" in other.stderr
    child = os.fork()
    if child == 0:  # what was forked is another process too
        try:
            pool.free(block)
        except PoolError as error:
            os._exit(0 if "one process at a time" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert block.alive
    pool.close()
    MemoryPool.attach(path).close()


def test_a_pool_without_a_file_is_the_childs_own_after_fork():
    pool = MemoryPool(1 << 20)
    block = pool.alloc(8)
    block.tensor.fill_(1)
    child = os.fork()
    if child == 0:
        block.tensor.fill_(2)
        pool.free(block)
        os._exit(int(pool.alloc(8).offset != block.offset))
    assert os.waitpid(child, 0)[1] == 0
    assert block.tensor.tolist() == [1] * 8


@pytest.mark.slow
def test_many_names(path):
    with MemoryPool(64 << 20, backing=path, max_names=3000) as pool:
        for i in range(3000):
            pool.alloc(8, name=f"block.{i}")
        with pytest.raises(PoolExhausted, match="3000 blocks have names, of 3000"):
            pool.alloc(8, name="one more")
        pool.free(pool.block("block.5"))
        pool.alloc(8, name="one more")
    with MemoryPool.attach(path) as pool:
        names = [block.name for block in pool.blocks()]
        assert len(names) == 3000
        assert names[-1] == "one more"


def change_at_random(path, seed, out):
    """Changes the named blocks until it is killed; writes what it is about to do before, and "done" after it."""
    pool, rng = MemoryPool.attach(path), random.Random(seed)
    held = {block.name: block for block in pool.blocks()}

    def say(*words):
        os.write(out, (" ".join(words) + "\n").encode())

    for step in itertools.count():
        name = rng.choice(sorted(held)) if held else None
        new = f"{seed}.{step}"
        if name and rng.random() < 0.4:
            say("free", name)
            pool.free(held.pop(name))
        elif name and rng.random() < 0.3:
            say("rename", name, new)
            held[new] = pool.rename(held.pop(name), new)
        elif len(held) < 20:
            say("alloc", new)
            part = rng.choice(("kv", "boundary"))
            held[new] = pool.alloc((rng.randrange(1, 3000),), torch.int64, part, name=new)
        else:
            continue
        say("done")


def applied(names, step):
    kind, *words = step.split()
    if kind == "alloc":
        return names | {words[0]}
    return (names - {words[0]}) | set(words[1:])


def said_until_killed(path, seed, seconds):
    """The lines of a child that runs for so long."""
    incoming, out = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(incoming)
        try:
            change_at_random(path, seed, out)
        finally:
            os._exit(1)
    os.close(out)
    timer = threading.Timer(seconds, os.kill, (child, signal.SIGKILL))
    timer.start()
    with os.fdopen(incoming) as f:
        lines = f.read().splitlines()
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    return lines


def test_killed_at_any_moment(path):
    """The file then has what it had before the last call, or after it."""
    MemoryPool(12 << 20, backing=path).close()
    names, generation, steps = set(), 0, 0
    rng = random.Random(0)
    for seed in range(40):
        pending = None
        for line in said_until_killed(path, seed, rng.uniform(0.01, 0.06)):
            steps += 1
            if line != "done":
                pending = line
            elif pending is not None:
                names, pending = applied(names, pending), None
        with MemoryPool.attach(path) as pool:
            blocks = pool.blocks()
            found = {block.name for block in blocks}
            assert found == names or (pending is not None and found == applied(names, pending))
            names = found
            spans = sorted((block.offset, block.offset + block.nbytes) for block in blocks)
            assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
            assert sum(-(-block.nbytes // UNIT) * UNIT for block in blocks) == pool.stats().used
            newest = pool.alloc(1).generation
            assert newest > max([generation, *(block.generation for block in blocks)])
            generation = newest
    assert steps > 1000


def test_a_process_that_dies_leaves_its_data(path):
    code = f"""
import os, signal, torch
from sic_kernels.replay import MemoryPool
pool = MemoryPool(1 << 20, backing={path!r})
pool.alloc((1000,), torch.int64, name="x").tensor.copy_(torch.arange(1000))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    with MemoryPool.attach(path) as pool:
        assert torch.equal(pool.block("x").tensor, torch.arange(1000))


def test_a_damaged_file_is_refused(path):
    """The C++ tests flip every byte."""
    with MemoryPool(1 << 20, backing=path) as pool:
        pool.alloc(8, name="x")
    for offset, message in (
        (0, "not the file"),
        (8, "version"),
        (20, "header is damaged"),
        (48, "header is damaged"),
        (4096 + 60, "place 0 .*damaged"),
    ):
        with open(path, "r+b") as f:
            f.seek(offset)
            byte = f.read(1)
            f.seek(offset)
            f.write(bytes([byte[0] ^ 64]))
        with pytest.raises(PoolError, match=message):
            MemoryPool.attach(path)
        with open(path, "r+b") as f:
            f.seek(offset)
            f.write(byte)


@pytest.mark.parametrize("change", [-1, 1, 4096, None])
def test_a_file_of_another_size_is_refused_and_kept(change, path):
    """As it is when it is opened: shorter, longer, empty."""
    with MemoryPool(1 << 20, backing=path) as pool:
        pool.alloc(8, name="x")
    size = 0 if change is None else os.path.getsize(path) + change
    os.truncate(path, size)
    for attach in (lambda: MemoryPool.attach(path), lambda: MemoryPool(1 << 20, backing=path)):
        with pytest.raises(PoolError, match="it was cut" if size else "not the file"):
            attach()
    assert os.path.getsize(path) == size


def test_a_dtype_that_torch_lacks_is_refused(path):
    with MemoryPool(1 << 20, backing=path) as pool:
        pool._native.alloc(0, 8, 256, "odd", "float9", [2])
    with MemoryPool.attach(path) as pool, pytest.raises(PoolError, match="'odd' is float9"):
        pool.block("odd")
