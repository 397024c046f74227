"""The definition of the delta ops against a second one in plain loops, golden rows, and rules of the raw table."""

import dataclasses
import math

import delta_naive as naive
import numpy as np
import pytest
import slicing_naive
import torch
from delta_helpers import every_backend, run

from sic_kernels.delta import Codec, DeltaPages, Templates, cases, reference
from sic_kernels.delta.levels import DISTORTION
from sic_kernels.delta.reference_encode import last_writes, place_raw
from sic_kernels.delta.reference_layout import make_tags
from sic_kernels.slicing import reference as slicing
from sic_kernels.testing import assert_close, assert_same_bits, generator, randn


def numbers(x):
    """A row as a list of NumPy float32."""
    return list(x.float().numpy())


# --- encode ---------------------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize(
    "setting",
    [
        cases.Setting(4, 4, 64, rope="full", rotation=64, escape=2.0), cases.Setting(2, 3, 80, rope="partial", rotation=4),
        cases.Setting(3, 5, 33, Dv=31), cases.Setting(5, 2, 32, rope="interleaved", rotation=2, count=20),
        cases.Setting(8, 8, 20, rope="yarn", rotation=1), cases.Setting(4, 4, 1, count=1),
    ],
    ids=lambda s: f"{s.k_bits}{s.v_bits}-{s.Dk}",
)  # fmt: skip
def test_encode_against_loops(setting, backend):
    """Codes, ids, scales and who is raw, bit for bit, of 12 rows in order."""
    setting = dataclasses.replace(setting, raw_rows=24)
    inputs = cases.encode_case(setting, 12, slots="ordered", spoil=cases._row(7, 30.0)).inputs()
    k, v, positions, slots, codec, sinks, pages, *_ = inputs
    run("delta_encode", inputs, backend)
    lo, _, undo = codec[5]
    entry = 0
    for n, h in ((n, h) for n in range(12) for h in range(2)):
        key = numbers(k[n, h])
        if lo is not None:
            key = naive.undo_rope(key, int(positions[n]), lo.tolist(), undo.tolist(), codec[6])
        centres = [t[0][h].numpy() for t in codec[3:5]]
        made = (
            naive.encode_row(key, centres[0], codec[0], codec[2]),
            naive.encode_row(numbers(v[n, h]), centres[1], codec[1]),
        )
        raw = int(positions[n]) < sinks or any(m[3] > float(t[5][h]) for m, t in zip(made, codec[3:5]))
        page, offset = divmod(int(slots[n]), setting.page)
        got = [x[page, h, offset] for x in pages[:3]]
        if raw:
            assert got[0].tolist() == [*entry.to_bytes(4, "little"), *[0] * (len(got[0]) - 4)]
            assert not got[1].any()
            assert got[2].tolist() == [0, 0x7E, 0, 0, 0, 0]
            assert int(pages[4][entry]) == int(slots[n]) * 2 + h
            want = np.array([*key, *numbers(v[n, h])], dtype=np.float32).astype(np.float16)
            assert_same_bits(pages[3][entry], torch.from_numpy(want))
            entry += 1
            continue
        assert got[0].tolist() == naive.pack(made[0][0], codec[0])
        assert got[1].tolist() == naive.pack(made[1][0], codec[1])
        scales = b"".join(m[2].tobytes() for m in made)
        assert bytes(got[2].tolist()) == scales + bytes((made[0][1], made[1][1]))
    assert pages[5].tolist() == [entry, 0]
    assert 8 <= entry < 24


def coded_by_hand(value, rows, **given):
    """Pages of one head of 4 channels, 4 bits, templates of zeros and of `value`, after encoding `rows` as keys and values."""
    templates = Templates(torch.tensor([[[0.0] * 4, [value] * 4]], dtype=torch.float16), torch.ones(1))
    codec = Codec(4, 4, templates, templates, sinks=0, **{"escape": math.inf, **given})
    pages = DeltaPages.allocate(codec, 1, 8, 1, 4, 4, raw_rows=4)
    x = torch.tensor(rows)[:, None]
    pos = torch.arange(len(rows))
    return cases.encode_inputs(x, x, pos, pos, codec, pages), codec, pages


@every_backend
def test_golden_row(backend):
    """A residual of (4, 0, 0, 0): rotations make it +-(2, 2, 2, 2): the largest, 109.47 units, level 104.

    The scale is 2/104 in half precision, 0x24EC. A value's sign is that of its rotation's first channel.
    """
    inputs, codec, pages = coded_by_hand(100.0, [[104.0, 100.0, 100.0, 100.0]])
    run("delta_encode", inputs, backend)
    assert pages.k_codes[0, 0, 0].tolist() == [15] * 4 + [0] * 12
    assert pages.v_codes[0, 0, 0].tolist() == [15 if slicing_naive.sign_of(0) > 0 else 0] * 4 + [0] * 12
    assert pages.tags[0, 0, 0].tolist() == [0xEC, 0x24, 0xEC, 0x24, 1, 1]
    k, _ = reference.delta_decode(torch.tensor([1]), torch.tensor([[0]]), pages.inputs(), codec.inputs(), None, None, 0)
    scale = float(torch.tensor([0x24EC], dtype=torch.int16).view(torch.float16))
    assert k[0, 0, 0].tolist() == [100 + 208 * scale, 100.0, 100.0, 100.0]


@every_backend
@pytest.mark.parametrize("value", [0.0, 0.0099945068359375, -65504.0])
def test_constant_rows_are_exact(value, backend):
    """Grid 5: no residual: the middle code, scale 0, and the template itself."""
    inputs, codec, pages = coded_by_hand(value, [[value] * 4])
    run("delta_encode", inputs, backend)
    assert pages.k_codes[0, 0, 0].tolist() == [8] * 4 + [0] * 12
    assert pages.tags[0, 0, 0, :4].tolist() == [0] * 4
    got = run(
        "delta_decode", (torch.tensor([1]), torch.tensor([[0]]), pages.inputs(), codec.inputs(), None, None, 0), backend
    )
    assert got[0][0, 0].flatten().tolist() == got[1][0, 0].flatten().tolist() == [value] * 4


@every_backend
def test_constant_rows_far_from_templates_are_kept_raw(backend):
    """Grid 5: all -65504 where no template is near: exact through the raw table, no scale overflows."""
    inputs, codec, pages = coded_by_hand(1.0, [[-65504.0] * 4, [0.01] * 4], escape=4.0)
    run("delta_encode", inputs, backend)
    assert pages.raw_state.tolist() == [1, 0]
    got = run(
        "delta_decode", (torch.tensor([2]), torch.tensor([[0]]), pages.inputs(), codec.inputs(), None, None, 0), backend
    )
    assert got[0][0, 0].flatten().tolist() == [-65504.0] * 4


@every_backend
@pytest.mark.parametrize("size", [1e-8, 6e-8, 1e-5, 1.0, 1e4, 6e4, 1e9])
def test_scales_are_finite(size, backend):
    """Grid 5: from below the subnormals of half precision to rows that would need an infinite scale."""
    x = (size * randn(generator(0), 6, 4)).tolist()
    for escape in (4.0, math.inf):
        inputs, _, pages = coded_by_hand(1.0, x, escape=escape)
        run("delta_encode", inputs, backend)
        raw = pages.tags[0, 0, :6, 1] == 0x7E
        scales = pages.tags[0, 0, :6, :4].contiguous().view(torch.float16)[~raw]
        assert scales.isfinite().all()
        assert (scales >= 0).all()


# --- the raw table --------------------------------------------------------------------------------------------------


def test_golden_entries():
    """Entry by entry: one is kept, one freed, the lowest free ones taken, one row finds no room."""
    owner = torch.tensor([2, -1, 7])  # slot 1 head 0, free, slot 3 head 1
    state = torch.tensor([2, 5], dtype=torch.int32)
    slots = torch.tensor([1, 3, 4, 5])
    misfit = torch.tensor([[True, False], [False, False], [True, True], [True, False]])
    entries = place_raw(misfit, slots, owner, state)
    assert entries.tolist() == [[0, -1], [-1, -1], [1, 2], [-1, -1]]
    assert owner.tolist() == [2, 8, 9]
    assert state.tolist() == [3, 6]


def test_golden_last_writes():
    assert last_writes(torch.tensor([4, -1, 2, 4, 2, 0, -1])).tolist() == [3, 4, 5]
    assert last_writes(torch.tensor([-1])).tolist() == []


@every_backend
@pytest.mark.parametrize("rows", [0, 3, 100])
def test_rows_without_room_are_counted_and_coded(rows, backend):
    inputs = cases.encode_case(cases.Setting(raw_rows=rows, sinks=0), 42, spoil=cases._outliers).inputs()
    pages = inputs[6]
    run("delta_encode", inputs, backend)
    page = torch.div(inputs[3], 16, rounding_mode="floor")
    raw = int((pages[2][page, :, inputs[3] % 16][..., 1] == 0x7E).sum())
    used, refused = pages[5].tolist()
    assert raw == used == int((pages[4] >= 0).sum()) == min(rows, used + refused)
    assert used + refused > 10


@every_backend
def test_what_is_no_number_comes_back_as_it_was(backend):
    """NaN and infinities in the raw table; without room they are coded as 0."""
    for room in (8, 0):
        codec = Codec(4, 4, Templates.zero(1, 4), Templates.zero(1, 4), sinks=0)
        pages = DeltaPages.allocate(codec, 1, 8, 1, 4, 4, raw_rows=room)
        x = torch.tensor([[[1.0, torch.nan, torch.inf, -2.0]]])
        one = torch.tensor([0])
        run("delta_encode", cases.encode_inputs(x, x, one, one, codec, pages), backend)
        inputs = (torch.tensor([1]), torch.tensor([[0]]), pages.inputs(), codec.inputs(), None, None, 0)
        k, v = run("delta_decode", inputs, backend)
        for row in (k[0, 0, 0], v[0, 0, 0]):
            if room:
                assert torch.equal(row.isnan(), torch.tensor([False, True, False, False]))
                assert row[[0, 2, 3]].tolist() == [1.0, torch.inf, -2.0]
            else:
                assert_close(row, torch.tensor([1.0, 0.0, 0.0, -2.0]), atol=0.3)


# --- decode and attention -------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("rope", [None, "full", "partial", "interleaved", "yarn"])
def test_decode_against_loops(rope, backend):
    """Hand-made pages: random codes, ids and scales, at positions of their own."""
    gen = generator(4)
    setting = cases.Setting(3, 5, 20, Dv=33, page=4, rope=rope, rotation=4)
    codec, made = setting.codec(gen), setting.make_rope()
    pages = setting.pages(codec, 8)
    ids = torch.randint(7, (4, 2, 4, 2), generator=gen)
    scales = torch.rand(4, 2, 4, 2, generator=gen).half() * 0.01
    codes = [torch.randint(1 << b, (4, 2, 4, D), generator=gen) for b, D in ((3, 20), (5, 33))]
    for p in range(4):
        pages.tags[p] = make_tags(scales[p, ..., 0], scales[p, ..., 1], ids[p, ..., 0], ids[p, ..., 1])
        for h, i in ((h, i) for h in range(2) for i in range(4)):
            pages.k_codes[p, h, i] = torch.tensor(naive.pack(codes[0][p, h, i].tolist(), 3), dtype=torch.uint8)
            pages.v_codes[p, h, i] = torch.tensor(naive.pack(codes[1][p, h, i].tolist(), 5), dtype=torch.uint8)
    table, lens = torch.tensor([[2, 0, 99]], dtype=torch.int32), torch.tensor([7], dtype=torch.int32)
    at = torch.randint(4000, (1, 12), generator=gen, dtype=torch.int32)
    k, v = run("delta_decode", (lens, table, pages.inputs(), codec.inputs(), at, None, 0), backend)
    assert not k[0, 7:].any()
    assert not v[0, 7:].any()
    for s, h in ((s, h) for s in range(7) for h in range(2)):
        p, i = int(table[0, s // 4]), s % 4
        k_scale, v_scale, k_id, v_id = tag_of(pages.tags[p, h, i])
        centres = [t.centres[h].double().tolist() for t in (codec.k_templates, codec.v_templates)]
        key = naive.decode_row(codes[0][p, h, i].tolist(), k_id, k_scale, centres[0], 3, 4)
        if made is not None:
            key = naive.apply_rope(key, int(at[0, s]), made.inv_freq, made.attention_factor, made.interleaved)
        value = naive.decode_row(codes[1][p, h, i].tolist(), v_id, v_scale, centres[1], 5)
        assert_close(k[0, s, h].double(), torch.tensor(key).double(), atol=3e-6)
        assert_close(v[0, s, h].double(), torch.tensor(value).double(), atol=3e-6)


def tag_of(tag):
    """k_scale, v_scale, k_id, v_id of 6 bytes."""
    data = bytes(tag.tolist())
    return *(float(x) for x in np.frombuffer(data[:4], dtype="<f2")), data[4], data[5]


@every_backend
def test_decode_finds_what_was_encoded(backend):
    """Within twice a typical error (what is worse is raw), for pages read where they were written."""
    cache = cases.coded_cache(generator(3), cases.Setting(rope="full", rotation=64, escape=2.0, raw_rows=99), [100, 37])
    k, v = run("delta_decode", cases.decode_inputs(cache), backend)
    for got, want in ((k, cache.k), (v, cache.v)):
        error = ((got - want) ** 2).mean(-1)
        assert float(error.max()) < 4.1 * DISTORTION[4] * cases.RESIDUAL**2
    assert not k[1, 37:].any()


@every_backend
def test_pages_are_read_at_another_position(backend):
    """A page written at 0 .. 15 and read at 1000 .. 1015 holds the keys that were there, turned to those positions."""
    setting = cases.Setting(rope="full", escape=math.inf, sinks=0)
    cache = cases.coded_cache(generator(3), setting, [16], spread=False)
    at = torch.arange(1000, 1032, dtype=torch.int32)[None]
    here, _ = run("delta_decode", cases.decode_inputs(cache), backend)
    there, _ = run("delta_decode", cases.decode_inputs(cache, at), backend)
    rope = setting.make_rope()
    back = rope.undo(there[0, :16], at[0, :16]), rope.undo(here[0, :16], torch.arange(16))
    assert_close(*back, atol=3e-6)


@every_backend
@pytest.mark.parametrize("unit", [cases.TOKEN, cases.PAGE])
@pytest.mark.parametrize("tail", [0, 1, 9])
def test_attention_is_that_over_decoded_rows(unit, tail, backend):
    """Decode, put the tail in its place, attend with the slicing family."""
    case = cases.attention_case(
        cases.Setting(page=8, rope="full"),
        [60, 5, 33],
        2,
        2,
        density=0.5,
        unit=unit,
        tail=tail,
        extras=("sinks", "key_bias"),
    )
    inputs = case.inputs()
    q, pages, codec, table, lens, indices, counts, *_ = inputs
    start = lens if not tail else inputs[11]
    table = table.clone()
    for b, n in enumerate(lens.tolist()):
        table[b, -(-n // 8) :] = 0
    k, v = (x.transpose(1, 2).clone() for x in reference.delta_decode(lens, table, pages, codec, None, None, 0))
    for b in range(3):
        first, n = int(start[b]), int(lens[b])
        if first < n:
            k[b, :, first:n], v[b, :, first:n] = inputs[9][b, :, : n - first], inputs[10][b, :, : n - first]
    B, H, S, D = k.shape
    paged = [x.reshape(B, H, S // 8, 8, D).transpose(1, 2).reshape(-1, H, 8, D) for x in (k, v)]
    plain = torch.arange(B * S // 8).reshape(B, -1)
    want = slicing.sliced_attention(
        q, *paged, plain, lens, indices, counts, unit, None, inputs[13], None, None, inputs[16], None, None, None
    )
    got = run("delta_attention", inputs, backend)
    for g, w in zip(got, want):
        assert_close(g, w, atol=2e-3 if backend != "ref" else 1e-5)
