"""SlicedKVCache: growth, padding, sharing, cropping; the index always equals one built from scratch."""

from __future__ import annotations

import pytest
import torch

from sic_kernels import ArgumentError, slicing
from sic_kernels.slicing.cache import SlicedKVCache
from sic_kernels.slicing.paged_rows import PagePool

LAYERS, HKV, D, DV = 2, 2, 16, 8
F8 = torch.float8_e4m3fn


def fresh(batch=1, page_size=4, unit="token", **options):
    return SlicedKVCache(LAYERS, HKV, D, DV, batch=batch, page_size=page_size, unit=unit, **options)


def params_of(heads, width, dtype=torch.float32):
    return slicing.SketchParams(torch.zeros(heads, width, dtype=dtype), torch.ones(heads))


def rows(batch, T, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(batch, HKV, T, D, generator=gen), torch.randn(batch, HKV, T, DV, generator=gen))
        for _ in range(LAYERS)
    ]


def append(cache, new, live=None):
    for layer, (k, v) in enumerate(new):
        cache.append(layer, k, v, live)


def assert_holds(cache, row, layer, k, v):
    got_k, got_v = cache.row(layer, row)
    assert torch.equal(got_k, k)
    assert torch.equal(got_v, v)


def assert_index_is_fresh(cache):
    """Incremental index == full rebuild, over the live entries of every row."""
    for layer in range(LAYERS):
        index = cache.index(layer)
        args = (cache.keys(layer), cache.block_table, cache.seq_lens)
        if cache.unit == "page":
            rebuilt = slicing.page_summary(*args)
            for row in range(cache.batch):
                assert torch.equal(index[list(cache.pages(row))], rebuilt[list(cache.pages(row))])
            continue
        rebuilt = slicing.key_sketch(*args, index.params, planes=cache.planes)
        for row, n in enumerate(cache.lengths):
            pages = list(cache.pages(row))
            assert torch.equal(
                index.norm[pages].transpose(1, 2).flatten(0, 1)[:n],
                rebuilt.norm[pages].transpose(1, 2).flatten(0, 1)[:n],
            )
            assert torch.equal(live_bits(index, pages, n), live_bits(rebuilt, pages, n))


def live_bits(sketch, pages, n):
    """Bytes of the live tokens; bits are [planes][block of 16][channel byte][token]: a page of <= 16 is one block."""
    page = sketch.page
    assert page <= 16
    planes = sketch.bits[pages].reshape(len(pages), HKV, -1, D // 8, page)
    return planes.permute(0, 4, 1, 2, 3).flatten(0, 1)[:n]


def test_lowest_free_page_first():
    pool = PagePool()
    pool.grow(4)
    assert [pool.take() for _ in range(3)] == [0, 1, 2]
    pool.share(1)
    pool.drop(1)
    assert pool.used == 3
    pool.drop(1)
    pool.drop(0)
    assert [pool.take(), pool.take(), pool.take()] == [0, 1, 3]


@pytest.mark.parametrize("unit", ["token", "page"])
@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_append_in_pieces_equals_append_at_once(unit, page_size):
    new = rows(1, 100)
    whole, pieces = fresh(page_size=page_size, unit=unit), fresh(page_size=page_size, unit=unit, capacity=8)
    append(whole, new)
    at = 0
    for step in (80, 1, 1, 7, 11):
        append(pieces, [(k[:, :, at : at + step], v[:, :, at : at + step]) for k, v in new])
        at += step
    for layer, (k, v) in enumerate(new):
        assert_holds(pieces, 0, layer, k[0], v[0])
        assert_holds(whole, 0, layer, k[0], v[0])
    assert_index_is_fresh(pieces)
    assert_index_is_fresh(whole)


def test_padding_takes_no_place():
    new = rows(2, 10)
    live = torch.ones(2, 10, dtype=torch.bool)
    live[1, :4] = False
    cache = fresh(batch=2)
    append(cache, new, live)
    assert cache.lengths == (10, 6)
    assert cache.seq_lens.tolist() == [10, 6]
    for layer, (k, v) in enumerate(new):
        assert_holds(cache, 0, layer, k[0], v[0])
        assert_holds(cache, 1, layer, k[1, :, 4:], v[1, :, 4:])
    assert cache.block_table.shape == (2, 3)


def test_no_index_before_calibration():
    cache = fresh()
    append(cache, rows(1, 30))
    assert cache.index(0) is None
    assert cache.params == [None, None]
    append(cache, rows(1, 40, seed=1))
    assert cache.index(0) is not None
    assert_index_is_fresh(cache)
    other = fresh(params=cache.params)
    append(other, rows(1, 3))
    assert other.index(1).params is cache.params[1]


@pytest.mark.parametrize("unit", ["token", "page"])
def test_crop_rebuilds_the_page_it_cuts(unit):
    new = rows(1, 90)
    cache = fresh(page_size=16, unit=unit)
    append(cache, new)
    cache.crop(70)
    assert cache.lengths == (70,)
    assert cache.pages_used == 5
    assert_index_is_fresh(cache)
    more = rows(1, 5, seed=2)
    append(cache, more)
    assert_index_is_fresh(cache)
    for layer, (k, v) in enumerate(new):
        assert_holds(
            cache,
            0,
            layer,
            torch.cat([k[0, :, :70], more[layer][0][0]], 1),
            torch.cat([v[0, :, :70], more[layer][1][0]], 1),
        )


def test_fork_shares_full_pages_and_copies_the_last():
    cache = fresh(page_size=16)
    new = rows(1, 70)
    append(cache, new)
    twin = cache.fork(0)
    assert twin == 1
    assert cache.pages(0)[:4] == cache.pages(1)[:4]
    assert cache.pages(0)[4] != cache.pages(1)[4]
    assert cache.pages_used == 6
    more = rows(2, 3, seed=5)
    append(cache, more)
    for row in range(2):
        for layer, (k, v) in enumerate(new):
            want_k = torch.cat([k[0], more[layer][0][row]], 1)
            assert_holds(cache, row, layer, want_k, torch.cat([v[0], more[layer][1][row]], 1))
    assert_index_is_fresh(cache)


def test_crop_into_a_shared_page_leaves_the_other_row_alone():
    cache = fresh(page_size=16)
    new = rows(1, 70)
    append(cache, new)
    cache.fork(0)
    cache.crop([70, 20])
    more = rows(2, 1, seed=6)
    append(cache, more)
    for layer, (k, v) in enumerate(new):
        assert_holds(cache, 0, layer, torch.cat([k[0], more[layer][0][0]], 1), torch.cat([v[0], more[layer][1][0]], 1))
        assert_holds(
            cache,
            1,
            layer,
            torch.cat([k[0, :, :20], more[layer][0][1]], 1),
            torch.cat([v[0, :, :20], more[layer][1][1]], 1),
        )
    assert_index_is_fresh(cache)


def test_reorder_repeat_and_give_back():
    cache = fresh(batch=3, page_size=8, params=[params_of(HKV, D)] * LAYERS)
    new = rows(3, 37)
    append(cache, new)
    cache.reorder([2, 2, 0, 2])
    order = [2, 2, 0, 2]
    for layer, (k, v) in enumerate(new):
        for row, source in enumerate(order):
            assert_holds(cache, row, layer, k[source], v[source])
    assert cache.pages_used == 5 + 5 + 2  # rows 2 and 0, and two more copies of row 2's last page
    assert_index_is_fresh(cache)
    cache.reorder([1])
    assert cache.pages_used == 5
    cache.repeat(3)
    assert cache.batch == 3
    assert cache.pages_used == 7
    cache.reset()
    assert cache.pages_used == 0
    assert cache.lengths == (0, 0, 0)


def test_attend_on_a_forked_row_equals_the_row_alone():
    gen = torch.Generator().manual_seed(3)
    cache = fresh(page_size=16)
    append(cache, rows(1, 90))
    alone = fresh(page_size=16, params=cache.params)
    append(alone, rows(1, 90))
    q = torch.randn(1, 1, 4, D, generator=gen)
    want = slicing.attend(
        q, *alone.tensors(0), policy=slicing.SlicePolicy(ratio=0.25, sink=2, recent=4, min_len=0), layer=0
    )
    cache.repeat(3)
    policy = slicing.SlicePolicy(ratio=0.25, sink=2, recent=4, min_len=0)
    got = slicing.attend(q.expand(3, -1, -1, -1), *cache.tensors(0), policy=policy, layer=0)
    for row in range(3):
        assert torch.equal(got.out[row], want.out[0])


def test_consecutive_pages_are_read_in_place():
    cache = fresh(page_size=4, capacity=64)
    append(cache, rows(1, 30))
    k, _ = cache.row(0, 0)
    assert k.data_ptr() == cache.keys(0).data_ptr()


def test_no_copy_within_capacity():
    cache = fresh(page_size=4, capacity=64)
    append(cache, rows(1, 10))
    before = cache.keys(0).data_ptr()
    for step in range(5):
        append(cache, rows(1, 10, seed=step))
    assert cache.keys(0).data_ptr() == before
    parts = cache.nbytes_by_part()
    assert parts["keys"] == LAYERS * HKV * 64 * D * 4
    assert cache.nbytes() == sum(parts.values())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.append(5, *rows(1, 1)[0]), r"append: layer: got 5, expected 0 to 1"),
        (lambda c: c.append(0, rows(2, 1)[0][0], rows(1, 1)[0][1]), r"append: k: got \[2, 2, 1, 16\]"),
        (lambda c: c.append(0, *rows(1, 2)[0], torch.ones(1, 3)), r"append: live: got float32\[1, 3\]"),
        (lambda c: c.crop(-1), r"crop: lengths"),
        (lambda c: c.reorder([1]), r"reorder: rows"),
        (lambda c: c.fork(3), r"fork: row"),
        (lambda c: c.repeat(0), r"repeat: times"),
        (lambda c: SlicedKVCache(0, 1, 1), r"SlicedKVCache: layers"),
        (lambda c: SlicedKVCache(1, 1, 1, unit="word"), r"SlicedKVCache: unit"),
        (lambda c: SlicedKVCache(1, 1, 1, unit=["page"]), r"SlicedKVCache: unit"),
        (lambda c: SlicedKVCache(1.5, 1, 1), r"SlicedKVCache: layers: got 1.5"),
        (lambda c: SlicedKVCache(1, 1, 8, 0), r"SlicedKVCache: v_head_dim: got 0"),
        (lambda c: SlicedKVCache(1, 1, 8, batch=-1), r"SlicedKVCache: batch: got -1"),
        (lambda c: SlicedKVCache(1, 1, 8, planes=3), r"SlicedKVCache: planes: got 3, expected 1 or 2"),
        (lambda c: SlicedKVCache(1, 1, 8, planes=0), r"SlicedKVCache: planes: got 0"),
        (lambda c: SlicedKVCache(1, 1, 8, dtype=torch.float64), r"SlicedKVCache: dtype: got float64, expected float32"),
        (lambda c: SlicedKVCache(1, 1, 2000), r"SlicedKVCache: head_dim: got 2000, expected 1 to 1024 for a sketch"),
        (lambda c: fresh(params=[None]), r"SlicedKVCache: params: got 1 entries"),
        (lambda c: fresh(params=[None, "x"]), r"SlicedKVCache: params\[1\]: got str, expected SketchParams"),
        (
            lambda c: fresh(params=[params_of(HKV, 8)] * 2),
            r"params\[0\]: got centre float32\[2, 8\], .*float32\[2,16\]",
        ),
        (lambda c: fresh(params=[params_of(HKV, D, torch.float64)] * 2), r"params\[0\]: got centre float64"),
        (
            lambda c: c.append(0, *(x.int() for x in rows(1, 1)[0])),
            r"append: k: got int32 on cpu, expected a float tensor",
        ),
        (lambda c: c.append(0, None, rows(1, 1)[0][1]), r"append: k: got NoneType"),
    ],
)
def test_bad_arguments_change_nothing(call, message):
    cache = fresh()
    append(cache, rows(1, 5))
    with pytest.raises(ArgumentError, match=message):
        call(cache)
    assert cache.lengths == (5,)
    append(cache, rows(1, 5))
    assert cache.lengths == (10,)


def test_wide_heads_are_fine_in_pages():
    cache = SlicedKVCache(1, 1, 2000, unit="page")
    cache.append(0, torch.ones(1, 1, 3, 2000), torch.ones(1, 1, 3, 2000))
    assert cache.index(0).shape == (1, 1, 2, 2000)


@pytest.mark.parametrize("unit", ["token", "page"])
def test_f8(unit):
    cache = fresh(page_size=16, unit=unit, dtype=F8)
    new = [(k * 200, v) for k, v in rows(1, 90)]  # some keys beyond 448, the largest number: they saturate
    append(cache, new)
    append(cache, rows(1, 3, seed=1))
    assert (cache.index(0).dtype if unit == "page" else cache.index(0).norm.dtype) == (
        torch.float32 if unit == "page" else torch.bfloat16
    )
    assert_index_is_fresh(cache)
    for layer, (k, _) in enumerate(new):
        assert torch.equal(cache.row(layer, 0)[0][:, :90].float(), k[0].clamp(-448, 448).to(F8).float())
    policy = slicing.SlicePolicy(unit=unit, ratio=0.25, sink=2, recent=4)
    q = torch.randn(1, 1, 4, D, generator=torch.Generator().manual_seed(4))
    assert slicing.attend(q, *cache.tensors(0), policy=policy, layer=0).out.isfinite().all()
    cache.repeat(2)
    cache.crop([93, 70])
    assert_index_is_fresh(cache)


@pytest.mark.parametrize("broken", ["append_kv", "calibrate", "key_sketch"])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_failed_append_changes_nothing(broken, layer, monkeypatch):
    """Whatever fails, the step can be done again, and ends as if it had never failed."""
    from sic_kernels.slicing import cache as cache_module
    from sic_kernels.slicing import paged_rows

    module = paged_rows if broken == "calibrate" else cache_module
    new, more, want = rows(1, 30), rows(1, 50, seed=1), fresh(page_size=4)
    append(want, new)
    append(want, more)
    cache = fresh(page_size=4)
    append(cache, new)
    for at in range(layer):
        cache.append(at, *more[at])
    before = cache.lengths, cache.pages(0), cache.pages_used, cache.params, cache.block_table.tolist()
    with monkeypatch.context() as patch:
        patch.setattr(module, broken, fail)
        with pytest.raises(MemoryError):
            cache.append(layer, *more[layer])
    assert (cache.lengths, cache.pages(0), cache.pages_used, cache.params, cache.block_table.tolist()) == before
    assert cache.index(layer) is None
    if layer == 0:
        cache.crop(30)  # no step is under way
    for at in range(layer, LAYERS):
        cache.append(at, *more[at])
    assert cache.lengths == (80,)
    assert cache.params == want.params
    for at, (k, v) in enumerate(new):
        assert_holds(cache, 0, at, torch.cat([k[0], more[at][0][0]], 1), torch.cat([v[0], more[at][1][0]], 1))
    assert_index_is_fresh(cache)


def fail(*args, **kwargs):
    raise MemoryError


def test_memory_that_runs_out_while_growing(monkeypatch):
    cache, new, more = fresh(page_size=4), rows(1, 80), rows(1, 300, seed=1)
    append(cache, new)
    grown, calls = type(cache._store[0])._grown, []

    def second_fails(*args, **kwargs):
        calls.append(1)
        return fail() if len(calls) == 2 else grown(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(type(cache._store[0]), "_grown", second_fails)
        with pytest.raises(MemoryError):
            cache.append(0, *more[0])
    assert cache.lengths == (80,)
    assert cache.keys(0).shape[0] == cache.values(0).shape[0]
    append(cache, more)
    assert cache.lengths == (380,)
    assert_index_is_fresh(cache)


@pytest.mark.parametrize("spread", [[93, 1, 1, 1, 1, 1, 1, 1], [13, 13, 13, 13, 12, 12, 12, 12], [1] * 8])
def test_no_copy_within_capacity_however_tokens_are_spread(spread):
    cache = fresh(batch=8, page_size=16, capacity=100)
    live = torch.zeros(8, max(spread), dtype=torch.bool)
    append(cache, rows(8, 1), torch.tensor([[True]] + [[False]] * 7))
    before = cache.keys(0).data_ptr(), cache.nbytes_by_part()["keys"]
    cache.reset()
    for row, n in enumerate(spread):
        live[row, :n] = True
    append(cache, rows(8, max(spread)), live)
    assert cache.lengths == tuple(spread)
    assert (cache.keys(0).data_ptr(), cache.nbytes_by_part()["keys"]) == before


def test_neighbours_do_not_change_the_first_row_that_calibrates():
    new, alone = rows(3, 100), fresh()
    append(alone, [(k[1:2], v[1:2]) for k, v in new])
    live = torch.ones(3, 100, dtype=torch.bool)
    live[0, :70] = False  # 30 tokens are too few
    together = fresh(batch=3)
    append(together, new, live)
    assert together.params == alone.params
    assert None not in together.params


def test_short_rows_do_not_add_up_to_a_calibration():
    cache = fresh(batch=2)
    append(cache, rows(2, 67))
    assert cache.params == [None, None]
    append(cache, rows(2, 1, seed=1))
    assert None not in cache.params
    assert_index_is_fresh(cache)


def test_a_step_must_reach_every_layer():
    cache = fresh()
    (k, v), _ = rows(1, 5)
    cache.append(0, k, v)
    with pytest.raises(ArgumentError, match="crop: state"):
        cache.crop(0)
    with pytest.raises(ArgumentError, match="append: layer"):
        cache.append(0, k, v)
    cache.append(1, k, v)
    cache.crop(0)
