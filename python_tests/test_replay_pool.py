"""The memory pool: quotas, blocks and their generations, trim, poison, threads."""

import gc
import os
import random
import threading
import time

import pytest
import torch

import sic_kernels as sic
from sic_kernels.replay import Block, MemoryPool, PoolError, PoolExhausted
from sic_kernels.replay import pool as pool_module

UNIT = 256


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "state.pool")


# --- parts and quotas ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "nbytes, weights, expected",
    [
        (12 << 20, (8, 3, 1), [8 << 20, 3 << 20, 1 << 20]),
        (13 * UNIT, (8, 3, 1), [9 * UNIT, 3 * UNIT, UNIT]),  # 8.67, 3.25, 1.08
        (7 * UNIT, (1, 1, 1), [3 * UNIT, 2 * UNIT, 2 * UNIT]),
        (3 * UNIT + 255, (1, 1, 1), [UNIT, UNIT, UNIT]),
    ],
)
def test_quotas_by_the_largest_remainders(nbytes, weights, expected):
    assert list(MemoryPool(nbytes, weights=weights).quotas.values()) == expected


def test_a_part_that_would_have_nothing_is_refused():
    with pytest.raises(sic.ArgumentError, match="nbytes: got 1536, expected enough for 256 bytes of each"):
        MemoryPool(
            6 * UNIT, weights=(4, 1.5, 0.5)
        )  # 4, 1.5, 0.5: the unit that is left goes to the first of two equals


@pytest.mark.parametrize("nbytes", [3 * UNIT, 12_000_000, 99_999, 1 << 30])
@pytest.mark.parametrize("weights", [(8, 3, 1), (4, 1.5, 0.5), (1, 1, 1), (0.1, 0.2, 0.3)])
def test_quotas_sum_to_the_pool_exactly(nbytes, weights):
    if nbytes == 3 * UNIT and weights != (1, 1, 1):
        weights = (1, 1.1, 0.9)
    pool = MemoryPool(nbytes, weights=weights)
    assert sum(pool.quotas.values()) == pool.nbytes == nbytes // UNIT * UNIT
    assert all(quota % UNIT == 0 for quota in pool.quotas.values())
    for quota, weight in zip(pool.quotas.values(), weights):
        assert abs(quota - pool.nbytes * weight / sum(weights)) < UNIT


def test_the_default_is_a_share_of_the_machines_memory():
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert MemoryPool().nbytes == int(total * 0.075) // UNIT * UNIT
    assert MemoryPool(fraction=0.01).nbytes == int(total * 0.01) // UNIT * UNIT
    assert list(MemoryPool(12 << 20).quotas) == ["kv", "boundary", "scratch"]


def test_a_part_never_uses_the_room_of_another():
    pool = MemoryPool(12 << 10)
    pool.alloc(3 << 10, part="boundary")
    with pytest.raises(
        PoolExhausted,
        match="no room for 1 bytes in part 'boundary': quota 3072, in use 3072 in 1 blocks, free 0 in 0 pieces, the largest 0",
    ):
        pool.alloc(1, part="boundary")
    pool.alloc(8 << 10, part="kv")
    assert pool.stats().used == 11 << 10


@pytest.mark.parametrize(
    "options, message",
    [
        ({"nbytes": 0}, "nbytes: got 0"),
        ({"nbytes": -1}, "nbytes: got -1"),
        ({"nbytes": 1.5}, "nbytes: got 1.5"),
        ({"nbytes": 1 << 62}, "nbytes: got 4611686018427387904"),
        ({"fraction": 0}, "fraction: got 0"),
        ({"fraction": 1.5}, "fraction: got 1.5"),
        ({"fraction": float("nan")}, "fraction: got nan"),
        ({"weights": (1, 2)}, "weights: got .*3 positive numbers"),
        ({"weights": (1, 2, 0)}, "weights"),
        ({"weights": (1, 2, float("inf"))}, "weights"),
        ({"parts": ("a", "b", "a")}, "parts: got 'a' twice"),
        ({"parts": ("a", "b", "")}, "parts: got ''"),
        ({"parts": ("a", "b", "c" * 24)}, "parts"),
        ({"parts": (1, 2, 3)}, "parts"),
        ({"parts": ("a", "b", "\ud800")}, "parts: got .*printable names"),
        ({"parts": [str(n) for n in range(20_000)], "weights": [1] * 20_000, "nbytes": 1 << 30}, "parts: got 20000"),
        ({"backing": "a\0b"}, "backing: got 'a.x00b', expected a path, or None, without a NUL"),
        ({"backing": "a\udcff"}, "backing: got .*, in UTF-8"),
        ({"parts": tuple("abcdefghi"), "weights": (1,) * 9}, "parts: got 9"),
        ({"device": "nowhere"}, "device: got 'nowhere'"),
        ({"device": "meta", "poison": True}, "poison: got True"),
        ({"device": "meta", "backing": "x"}, "backing: got a file for meta"),
        ({"poison": 1}, "poison: got int"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(sic.ArgumentError, match=f"^MemoryPool: {message}"):
        MemoryPool(**{"nbytes": None if "fraction" in options else 1 << 20, **options})


# --- blocks ----------------------------------------------------------------------------------------------------------


def test_a_block_is_a_view_of_the_pool():
    pool = MemoryPool(1 << 20)
    a = pool.alloc((3, 5), torch.float16, part="kv", name="layer.3.k")
    b = pool.alloc(100)
    assert (a.part, a.offset, a.nbytes, a.name, a.dtype, a.shape) == ("kv", 0, 30, "layer.3.k", torch.float16, (3, 5))
    assert (b.part, b.offset, b.nbytes, b.name, b.dtype, b.shape) == (
        "boundary", pool.quotas["kv"], 100, None, torch.uint8, (100,),
    )  # fmt: skip
    a.tensor.copy_(torch.arange(15).view(3, 5))
    assert torch.equal(a.tensor, torch.arange(15).view(3, 5).half())
    assert torch.equal(pool.block("layer.3.k").tensor, a.tensor)
    assert pool.block("layer.3.k") == a
    assert a.tensor.is_contiguous()
    assert "generation" in repr(a)
    assert "_pool" not in repr(a)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64])
def test_dtypes_and_scalars(dtype, path):
    with MemoryPool(1 << 20, backing=path) as pool:
        pool.alloc((), dtype, name="x").tensor.fill_(1)
    with MemoryPool.attach(path) as pool:
        x = pool.block("x").tensor
        assert (x.dtype, x.shape, x.to(torch.complex64).item()) == (dtype, (), 1)


def test_alignment():
    pool = MemoryPool(1 << 20)
    pool.alloc(1)
    for alignment in (256, 512, 1024, 2048, 4096):
        block = pool.alloc(1, alignment=alignment)
        assert block.offset % alignment == block.tensor.data_ptr() % alignment == 0
    for wrong in (0, 1, 128, 300, 8192, -256, 256.0):
        with pytest.raises(
            sic.ArgumentError, match=r"MemoryPool.alloc: alignment: got .*power of two from 256 to 4096"
        ):
            pool.alloc(1, alignment=wrong)


@pytest.mark.parametrize(
    "args, options, message",
    [
        ((0,), {}, "size: got 0, expected a block of at least 1 byte"),
        ((-1,), {}, "size: got -1"),
        ((1.5,), {}, "size: got 1.5"),
        (((2, 3),), {}, "dtype: got None"),
        (((2, 0), torch.int8), {}, "size"),
        (((2, -3), torch.int8), {}, "size: got -3"),
        (((1 << 31, 1 << 31), torch.float32), {}, "size: got .2147483648, 2147483648., expected .* below 2.62 bytes"),
        ((8, "float32"), {}, "dtype: got 'float32'"),
        ((8,), {"part": "other"}, r"part: got 'other', expected kv\|boundary\|scratch"),
        ((8,), {"name": ""}, "name: got ''"),
        ((8,), {"name": 3}, "name: got 3"),
        ((8,), {"name": "a\0b"}, "name"),
        ((8,), {"name": "é" * 62}, "name.*at most 123 bytes"),
        ((8,), {"name": "taken"}, "name: got 'taken', expected one that no other block has"),
        (((1,) * 9, torch.int8), {"name": "x"}, "shape: got 9 dimensions"),
    ],
)
def test_wrong_requests_change_nothing(args, options, message):
    pool = MemoryPool(1 << 20)
    pool.alloc(8, name="taken")
    before = pool.stats()
    with pytest.raises(sic.ArgumentError, match=f"^MemoryPool.alloc: {message}"):
        pool.alloc(*args, **options)
    assert pool.stats() == before


def test_freed_foreign_and_stale_blocks_are_refused():
    pool, other = MemoryPool(1 << 20), MemoryPool(1 << 20)
    a, foreign = pool.alloc(64), other.alloc(64)
    assert (a.part, a.offset, a.generation) == (foreign.part, foreign.offset, foreign.generation)  # and yet
    assert a != foreign
    view = a.tensor
    pool.free(a)
    b = pool.alloc(64)
    assert (b.offset, b.alive, a.alive) == (a.offset, True, False)
    assert b.generation > a.generation
    for use in (pool.free, lambda block: pool.rename(block, "x")):
        with pytest.raises(sic.ArgumentError, match=r"block: got offset .* this one was freed, or is another pool's"):
            use(a)
        with pytest.raises(sic.ArgumentError, match="another pool's, expected a block of this pool"):
            use(foreign)
        with pytest.raises(sic.ArgumentError, match="block: got int, expected a block of this pool"):
            use(3)
    with pytest.raises(sic.ArgumentError, match=r"Block.tensor: block: got Block\(.*which was freed"):
        _ = a.tensor
    assert pool.alive(b.offset, b.generation)
    assert not pool.alive(b.offset, a.generation)
    with pytest.raises(sic.ArgumentError, match=r"MemoryPool.alive: offset: got -1"):
        pool.alive(-1, 1)
    view.zero_()  # a view that was taken before stays memory of the pool


def test_blocks_are_told_apart_by_the_pools_identity():
    pool, other = MemoryPool(1 << 20), MemoryPool(1 << 20)
    assert len(pool.identity) == len(other.identity) == 16
    assert pool.identity != other.identity
    a = pool.alloc(64)
    assert a.identity == (pool.identity.hex(), "boundary", a.offset, a.generation)
    named = pool.rename(a, "a")
    assert (named, hash(named)) == (a, hash(a))  # the same block under a name
    assert len({a, named, other.alloc(64), pool.alloc(64)}) == 3
    assert a != a.identity
    pool.close()
    assert a == named  # numbers stay, also when the memory is gone


def test_names():
    pool = MemoryPool(1 << 20)
    a = pool.alloc(8)
    named = pool.rename(a, "a")
    assert (a.name, named.name, pool.block("a")) == (None, "a", named)
    pool.rename(named, "b")
    with pytest.raises(
        sic.ArgumentError, match=r"MemoryPool.block: name: got 'a', expected the name of a block in use"
    ):
        pool.block("a")
    second = pool.alloc(8, name="a")
    assert [block.name for block in pool.blocks()] == ["b", "a"]
    with pytest.raises(sic.ArgumentError, match="no other block"):
        pool.rename(second, "b")
    pool.rename(second, None)
    pool.free(a)  # whatever it is called by now
    assert pool.blocks() == []
    assert pool.stats().blocks == 1


def test_statistics_by_hand():
    pool = MemoryPool(12 << 10, parts=("boundary",), weights=(1,))
    blocks = [pool.alloc(n) for n in (1000, 3000, 5000)]  # 1024, 3072, 5120: 3072 of 12288 are left
    pool.free(blocks[0])
    one = pool.stats().parts["boundary"]
    assert (one.quota, one.used, one.peak, one.free) == (12288, 8192, 9216, 4096)
    assert (one.blocks, one.allocations, one.free_pieces, one.largest_free) == (2, 3, 2, 3072)
    assert one.fragmentation == 1 - 3072 / 4096
    pool.alloc(1024)
    pool.alloc(3072)
    assert pool.stats().parts["boundary"].fragmentation == 0.0
    assert "12288 of 12288 bytes in use" in repr(pool)


def test_the_gauge_has_all_open_pools():
    def read():
        value = sic.metrics.get("sic_mem_pool_utilization").read()[""]
        return value.numerator, value.denominator

    gc.collect()
    MemoryPool(12 << 10).close()  # takes out what earlier tests dropped
    used, reserved = read()
    a, b = MemoryPool(12 << 10), MemoryPool(24 << 10)
    block = a.alloc(300)
    b.alloc(1000)
    assert read() == (used + 512 + 1024, reserved + (36 << 10))
    a.free(block)
    b.close()
    assert read() == (used, reserved + (12 << 10))
    del a, block
    with MemoryPool(12 << 10):  # the next call of any pool takes out those that ended
        assert read() == (used, reserved + (12 << 10))
    assert read() == (used, reserved)


def test_a_pool_may_be_collected_while_the_gauge_is_set(monkeypatch):
    gauge = pool_module._Utilisation()
    monkeypatch.setattr(pool_module, "_utilisation", gauge)

    def collect():
        cycle = [MemoryPool(12 << 10)]
        cycle.append(cycle)
        with gauge._lock:
            del cycle
            gc.collect()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert not thread.is_alive()
    MemoryPool(12 << 10).close()
    assert gauge._pools == {}


def test_the_gauge_has_the_newest_level():
    pool = MemoryPool(12 << 10)
    with pool_module._utilisation._lock:
        thread = threading.Thread(target=pool.alloc, args=(1,))
        thread.start()
        while pool._native.used() == 0:
            time.sleep(0.001)
        time.sleep(0.05)  # it now waits for the lock
        pool._native.alloc(0, 1, UNIT, "", "uint8", [1])
    thread.join()
    assert pool_module._utilisation._pools[id(pool)] == (2 * UNIT, pool.nbytes)


def test_a_failed_capture_leaks_nothing():
    pool = MemoryPool(12 << 20)
    kept = pool.alloc(100)
    before = pool.stats().used
    for i in range(100):
        with pytest.raises(RuntimeError, match="capture"), pool.all_or_nothing():  # noqa: PT012
            pool.alloc(1000, name="x")
            with pool.all_or_nothing():
                pool.free(pool.alloc(5000, part="kv"))
                pool.alloc(100 * (i + 1), part="scratch")
            raise RuntimeError("capture")
    assert pool.stats().used == before
    with pool.all_or_nothing():
        pool.alloc(100)
    assert pool.stats().used > before
    assert kept.alive


@pytest.mark.parametrize("inside", [0, 1])
def test_a_failed_capture_also_frees_what_came_after_a_nested_one(inside):
    pool = MemoryPool(12 << 20)
    with pytest.raises(RuntimeError, match="capture"), pool.all_or_nothing():  # noqa: PT012
        with pool.all_or_nothing():
            for _ in range(inside):
                pool.alloc(100)
        pool.alloc(1000)
        raise RuntimeError("capture")
    assert pool.stats().blocks == 0


def test_threads_do_not_overlap_or_leak():
    pool = MemoryPool(48 << 20)
    wrong = []

    def work(self):
        rng, held = random.Random(self), []

        def give():
            block = held.pop(rng.randrange(len(held)))
            if not bool((block.tensor == self).all()):
                wrong.append(block)
            pool.free(block)

        for _ in range(500):
            if held and rng.random() < 0.5:
                give()
                continue
            block = pool.alloc(rng.randrange(1, 50_000), part=rng.choice(("kv", "boundary")))
            block.tensor.fill_(self)
            held.append(block)
        while held:
            give()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    stats = pool.stats()
    assert stats.used == stats.blocks == 0
    assert all(part.fragmentation == 0 for part in stats.parts.values())


def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_untouched_memory_costs_nothing_and_trim_gives_it_back():
    before = resident()
    pool = MemoryPool(1 << 40, parts=("boundary",), weights=(1,))
    block = pool.alloc(64 << 20)
    assert resident() - before < 8 << 20
    block.tensor.fill_(1)
    assert resident() - before > 60 << 20
    assert pool.trim() == 0
    pool.free(block)
    assert pool.trim() == 64 << 20
    assert resident() - before < 8 << 20
    assert int(pool.alloc(64 << 20).tensor.sum()) == 0


def test_tensors_keep_the_memory_and_a_closed_pool_refuses():
    pool = MemoryPool(1 << 20)
    block = pool.alloc((1000,), torch.int32)
    view = block.tensor
    view.fill_(7)
    pool.close()
    pool.close()
    assert int(view.sum()) == 7000
    for use in (
        lambda: block.tensor,
        lambda: pool.alloc(1),
        lambda: pool.free(block),
        pool.stats,
        pool.trim,
        pool.blocks,
    ):
        with pytest.raises(PoolError, match="the pool is closed"):
            use()
    assert not block.alive
    assert repr(pool) == "MemoryPool(cpu: closed)"


def test_other_devices_have_one_tensor_of_torch():
    with pytest.raises(sic.ArgumentError, match="nbytes: got None"):
        MemoryPool(device="meta")
    pool = MemoryPool(12 << 10, device="meta")
    block = pool.alloc((4, 4), torch.float32, part="kv", alignment=4096)
    assert (block.tensor.device.type, block.tensor.shape, pool.trim()) == ("meta", (4, 4), 0)
    pool.free(block)
    with pytest.raises(sic.ArgumentError, match="freed"):
        _ = block.tensor


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_device():
    pool = MemoryPool(12 << 20, device="cuda")
    block = pool.alloc((1000,), torch.float32, alignment=4096)
    block.tensor.fill_(2)
    assert block.tensor.data_ptr() % 4096 == 0
    assert float(block.tensor.sum()) == 2000


# --- poison ----------------------------------------------------------------------------------------------------------


def test_poison_finds_a_write_after_free():
    pool = MemoryPool(1 << 20, poison=True)
    block = pool.alloc((100,), torch.int32, name="hidden")
    view = block.tensor
    view.zero_()
    pool.free(block)
    assert set(view.view(torch.uint8).tolist()) == {0xFB}
    view[10] = 5
    with pytest.raises(
        PoolError, match=r"MemoryPool.alloc: written to after free: byte \d+ of the pool, once of the block 'hidden'"
    ):
        pool.alloc(100)
    assert pool.stats().blocks == 0
    pool.alloc(100)


def test_poison_is_off_unless_asked_for(monkeypatch):
    def poisoned(**options):
        pool = MemoryPool(1 << 20, **options)
        block = pool.alloc(4)
        view = block.tensor
        view.zero_()
        pool.free(block)
        return view.tolist() == [0xFB] * 4

    assert not poisoned()
    assert poisoned(poison=True)
    monkeypatch.setattr("sic_kernels.runtime.config.current", lambda: sic.runtime.config.Config(check=True))
    assert poisoned()
    assert not poisoned(poison=False)
    assert MemoryPool(1 << 20, device="meta").nbytes == 1 << 20  # where there is none, the setting asks for none


def test_public_names():
    assert isinstance(MemoryPool(1 << 20).alloc(1), Block)
    assert issubclass(PoolExhausted, MemoryError)
    assert issubclass(PoolError, sic.SicError)
