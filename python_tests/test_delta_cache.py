"""DeltaKVCache: what it holds after any step, cut or shuffle is what was given, coded once."""

import pytest
import torch

from sic_kernels.delta import Codec, DeltaKVCache, Rope, Templates
from sic_kernels.runtime.errors import ArgumentError
from sic_kernels.slicing import SketchParams, SlicePolicy, select_slice, sliced_attention
from sic_kernels.testing import assert_close, assert_same_bits, generator, randn

H, D, PAGE = 2, 32, 16
ROPE = Rope(1e4, D)


def codec(preset="k4v4", seed=0, **options):
    gen = generator(seed)
    made = [Templates(randn(gen, H, 8, D).half(), torch.full((H,), float(D))) for _ in range(2)]
    return Codec.preset(preset, *made, ROPE, **options)


def rows(B, T, seed=0):
    """Keys and values [B,H,T,D]; row 0 with an outlier now and then."""
    gen = generator(seed)
    k, v = randn(gen, B, H, T, D), randn(gen, B, H, T, D)
    k[0, :, ::11] *= 40
    return k, v


def filled(lengths=(70,), steps=1, seed=0, preset="k4v4", **options):
    """A cache of one layer whose rows have these lengths (left-padded together), and what was put in."""
    B, T = len(lengths), max(lengths)
    k, v = rows(B, T, seed)
    live = torch.arange(T) >= T - torch.tensor(lengths)[:, None]
    cache = DeltaKVCache([codec(preset)], batch=B, **options)
    for part in torch.arange(T).tensor_split(steps):
        cache.append(0, k[:, :, part], v[:, :, part], live[:, part])
    given = [(k[b, :, T - n :], v[b, :, T - n :]) for b, n in enumerate(lengths)]
    return cache, given


def assert_holds(cache, row, given, what=""):
    """The row is what was given: raw rows to half precision, the others as well as 4 bits can."""
    k, v = given
    got_k, got_v = cache.row(0, row)
    coded = cache.coded[row]
    assert got_k.shape == k.shape, what
    assert_close(got_k[:, coded:], k[:, coded:].half().float(), atol=0.0, what=f"{what}: tail keys")
    assert_close(got_v[:, coded:], v[:, coded:].half().float(), atol=0.0, what=f"{what}: tail values")
    sinks = min(4, coded)
    assert_close(
        got_k[:, :sinks], k[:, :sinks], atol=0.05, what=f"{what}: sinks"
    )  # half precision, turned back and forth
    for got, want in ((got_k, k), (got_v, v)):
        if coded > sinks:
            error = (got - want)[:, sinks:coded].norm() / want[:, sinks:coded].norm()
            assert error < 0.2, f"{what}: relative error {error:.3f}"


@pytest.mark.parametrize("steps", [1, 3, 70])
def test_a_row_does_not_depend_on_the_steps_it_came_in(steps):
    cache, given = filled(steps=steps)
    assert cache.coded == (64,)
    assert_holds(cache, 0, given[0])
    one, _ = filled(steps=1)
    for a, b in zip(cache.row(0, 0), one.row(0, 0)):
        assert (a - b).norm() < 0.02 * b.norm()  # the tail was rounded to half before it was coded


def test_left_padding_takes_no_place_and_changes_nothing():
    together, given = filled((70, 23, 16))
    for row, n in enumerate((70, 23, 16)):
        assert together.lengths[row] == n
        assert together.coded[row] == n // PAGE * PAGE
        assert_holds(together, row, given[row], f"row {row}")
    k, v = given[1]
    alone = DeltaKVCache([codec()])
    alone.append(0, k[None], v[None])
    for a, b in zip(together.row(0, 1), alone.row(0, 0)):
        assert_same_bits(a.contiguous(), b.contiguous())


@pytest.mark.parametrize("chosen", [[1, 0], [0, 0, 1], [1], []])
def test_reorder_moves_codes_raw_rows_tail_and_sketch_together(chosen):
    cache, given = filled((90, 75))
    before = [cache.row(0, row) for row in range(2)]
    cache.reorder(chosen)
    for row, old in enumerate(chosen):
        assert cache.coded[row] == (80, 64)[old]
        for a, b in zip(cache.row(0, row), before[old]):
            assert_same_bits(a.contiguous(), b.contiguous())
    if chosen:
        k, v = rows(len(chosen), 20, seed=9)
        cache.append(0, k, v)
        for row, old in enumerate(chosen):
            assert_holds(cache, row, [torch.cat((g, x[row]), 1) for g, x in zip(given[old], (k, v))], f"row {row}")


@pytest.mark.parametrize("n", [0, 3, 16, 35, 64, 66, 70, 99])
def test_crop_and_go_on(n):
    cache, given = filled()
    cache.crop(n)
    left = min(n, 70)
    assert cache.lengths == (left,)
    assert cache.coded == (min(64, left),)
    kept = [x[:, :left] for x in given[0]]
    assert_holds(cache, 0, kept, "cut")
    for seed in (3, 4):
        k, v = rows(1, 21, seed)
        cache.append(0, k, v)
        kept = [torch.cat((a, x[0]), 1) for a, x in zip(kept, (k, v))]
        assert_holds(cache, 0, kept, f"after step {seed}")


def test_a_page_that_was_cut_is_copied_with_raw_rows_of_its_own():
    cache, given = filled()
    cache.repeat(2)
    cache.crop([5, 70])  # the first page, sinks and all, was shared
    k, v = rows(2, 30, seed=5)
    cache.append(0, k, v)
    for row, n in enumerate((5, 70)):
        assert_holds(cache, row, [torch.cat((g[:, :n], x[row]), 1) for g, x in zip(given[0], (k, v))], f"row {row}")


def test_raw_rows_always_find_room():
    cache, given = filled((200,), rows_per_outlier=1 << 20)
    pages = cache.coded_pages(0)
    assert int(pages.raw_state[0]) == int((pages.raw_owner >= 0).sum()) > 4 * H
    assert cache.rows_without_room() == 0
    assert_holds(cache, 0, given[0])


def test_raw_preset_keeps_every_row():
    cache, given = filled(preset="raw")
    for got, want in zip(cache.row(0, 0), given[0]):
        assert_close(got, want, atol=0.05)


@pytest.mark.parametrize("T", [1, 3])
def test_attention_is_that_over_the_decoded_rows(T):
    cache, _ = filled((150, 37))
    q = randn(generator(7), 2, T, 2 * H, D)
    out, lse = cache.attention(0, q)
    for row, n in enumerate((150, 37)):
        k, v = (x[None].contiguous() for x in cache.row(0, row))
        want, want_lse = sliced_attention(q[row : row + 1], k, v, None, torch.tensor([n], dtype=torch.int32))
        assert_close(out[row : row + 1], want, atol=2e-3)
        assert_close(lse[row : row + 1], want_lse, atol=2e-3)


def test_a_selection_by_the_sketch():
    cache, _ = filled((400,), steps=4)
    q = randn(generator(8), 1, 1, 2 * H, D)
    index = cache.index(0)
    assert index is not None
    whole, _ = select_slice(q, index, cache.block_table, cache.seq_lens, policy=SlicePolicy(ratio=1.0))
    dense, dense_lse = cache.attention(0, q)
    out, lse = cache.attention(0, q, whole)
    assert_close(out, dense, atol=1e-5)
    few, log_unread = select_slice(q, index, cache.block_table, cache.seq_lens, policy=SlicePolicy(ratio=0.2))
    out, lse = cache.attention(0, q, few)
    assert int(few.counts.max()) == 80
    assert (lse <= dense_lse).all()
    assert log_unread.shape == lse.shape


def test_a_failed_first_layer_leaves_no_trace(monkeypatch):
    cache, given = filled()
    k, v = rows(1, 40, seed=2)

    def fail(*args, **kwargs):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(DeltaKVCache, "_encode", fail)
        with pytest.raises(MemoryError):
            cache.append(0, k, v)
    assert cache.lengths == (70,)
    assert cache.coded == (64,)
    assert_holds(cache, 0, given[0])
    cache.append(0, k, v)
    assert_holds(cache, 0, [torch.cat((g, x[0]), 1) for g, x in zip(given[0], (k, v))])


def test_a_step_that_cannot_begin_leaves_no_trace(monkeypatch):
    cache, given = filled(steps=2)  # its last step coded some of the tail

    def fail(pages):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(cache._pool, "grow", fail)
        with pytest.raises(MemoryError):
            cache.append(0, *rows(1, 4000, seed=2))
    assert cache.coded == (64,)
    assert_holds(cache, 0, given[0])


def test_sizes_are_itemised():
    cache, _ = filled((160,), capacity=160)
    parts = cache.nbytes_by_part()
    tokens = 10 * PAGE * H
    assert parts["k_codes"] == parts["v_codes"] == tokens * D // 2
    assert parts["scales"] == 4 * tokens
    assert parts["ids"] == 2 * tokens
    assert parts["tail"] == 2 * PAGE * H * D * 2
    assert cache.nbytes() == sum(parts.values())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DeltaKVCache([]), "codecs"),
        (lambda: DeltaKVCache([3]), "codecs"),
        (lambda: DeltaKVCache([codec()], dtype=torch.int8), "dtype"),
        (lambda: DeltaKVCache([codec()], rows_per_outlier=0), "rows_per_outlier"),
        (lambda: DeltaKVCache([codec()], params=[None, None]), "params"),
        (lambda: DeltaKVCache([codec()]).append(1, *rows(1, 2)), "layer"),
        (lambda: DeltaKVCache([codec()]).append(0, *rows(2, 2)), "k"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()


def test_an_index_with_given_params_is_of_the_keys_as_they_come():
    """However they come, and whatever was there before."""
    params = [SketchParams(torch.zeros(1, 64), torch.ones(1))]
    codec = Codec(4, 4, Templates.zero(1, 64), Templates.zero(1, 64), sinks=0)
    keys = randn(generator(0), 1, 1, 64, 64)
    made = []
    for chunks in ([64], [16, 48], [1] * 64):
        cache = DeltaKVCache([codec], params=params, dtype=torch.float32)
        for again in range(2):
            for k in keys.split(chunks, 2):
                cache.append(0, k, k)
            index = cache.index(0)
            made.append((index.bits[list(cache.pages(0))], index.norm[list(cache.pages(0))]))
            if not again:
                cache.reset()
    for bits, norm in made[1:]:
        assert_same_bits(bits, made[0][0])
        assert_same_bits(norm, made[0][1])
