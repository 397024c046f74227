"""The delta ops on every native backend: acceptance grids, sequences of calls, views, arguments that are wrong."""

import re

import numpy as np
import pytest
import torch
from delta_helpers import by_case, check_case, native_backend, run, thinned

from sic_kernels import ArgumentError, delta
from sic_kernels.delta import cases, reference
from sic_kernels.delta.cases import compare_pages
from sic_kernels.delta.levels import BITS
from sic_kernels.slicing import KeySketch, Selection, SketchParams
from sic_kernels.testing import assert_close, assert_same_bits, generator, randn, random_selection

FORMAT = re.compile(r"^(?P<op>\w+): (?P<arg>[\w.]+): got (?P<got>.+), expected (?P<expected>.+)$", re.DOTALL)


# --- grids ----------------------------------------------------------------------------------------------------------


@native_backend
@pytest.mark.parametrize("bits", BITS)
def test_pack_grid(bits, backend):
    """Grid 1: the same bits for all sizes; what is not written keeps its sentinel."""
    for case in thinned([c for c in cases.grid("pack") if c.shape["k"] == bits], backend, 7):
        check_case(case, backend)


@native_backend
@by_case(cases.grid("odd"))
def test_odd_grid(case, backend):
    """Grid 6."""
    check_case(case, backend)


@native_backend
@by_case(cases.grid("edge"))
def test_edge_grid(case, backend):
    """Grids 3 and 5, escapes, rotations, RoPE, sketches."""
    check_case(case, backend)


@native_backend
@by_case(cases.grid("decode"))
def test_decode_grid(case, backend):
    """Grid 2: within 1e-6."""
    check_case(case, backend)


@native_backend
@by_case(cases.grid("attention"))
def test_attention_grid(case, backend):
    """Grid 2: within 2e-3 of attention over what is decoded."""
    check_case(case, backend)


# --- sequences of calls ---------------------------------------------------------------------------------------------


def encoding(seed=0, **setting):
    """Inputs of an encode of 42 rows with outliers, into pages of 16."""
    case = cases.encode_case(cases.Setting(rope="full", **setting), 42, spoil=cases._outliers, planes=2)
    return case.inputs(seed)


@native_backend
def test_encode_is_idempotent(backend):
    inputs = encoding(raw_rows=200)  # rows without room are counted every time
    run("delta_encode", inputs, backend)
    once = [x.clone() for x in cases.written(inputs)]
    run("delta_encode", inputs, backend)
    compare_pages(cases.written(inputs), once, "second encode")


@native_backend
def test_rows_one_by_one_are_rows_at_once(backend):
    """A prefill gives the bits of its tokens appended one at a time."""
    whole, single = encoding(), encoding()
    run("delta_encode", whole, backend)
    for n in range(42):
        step = tuple(x[n : n + 1] for x in single[:4])
        run("delta_encode", (*step, *single[4:]), backend)
    compare_pages(cases.written(single), cases.written(whole), "one by one")


@native_backend
def test_entries_go_back_when_rows_fit(backend):
    """The raw table is full of outliers, then rewritten with rows that fit, then filled again."""
    inputs = encoding(raw_rows=200, sinks=0)
    _, _, _, _, _, _, pages, *_ = inputs
    run("delta_encode", inputs, backend)
    used = int(pages[5][0])
    assert used == int((pages[4] >= 0).sum()) > 0
    calm = cases.encode_case(cases.Setting(rope="full", sinks=0), 42).inputs()
    fitting = (calm[0], calm[1], *inputs[2:4], with_bounds(inputs[4], torch.inf), *inputs[5:])
    run("delta_encode", fitting, backend)
    assert pages[5].tolist() == [0, 0]
    assert (pages[4] == -1).all()
    run("delta_encode", inputs, backend)
    assert int(pages[5][0]) == used


def with_bounds(codec, bound):
    """The codec's inputs with another bound."""
    templates = [(*t[:5], torch.full_like(t[5], bound)) for t in codec[3:5]]
    return (*codec[:3], *templates, *codec[5:])


@native_backend
def test_attention_repeats_and_does_not_depend_on_the_batch(backend):
    case = cases.attention_case(cases.Setting(rope="full"), [77, 130, 5], 2, 4, density=0.5, tail=6)
    inputs = case.inputs()
    out, lse = run(case.op, inputs, backend)
    for got, want in zip(run(case.op, inputs, backend), (out, lse)):
        assert_same_bits(got, want)
    per_row = {0, 3, 4, 5, 6, 9, 10, 11}
    for b in range(3):
        alone = tuple(x[b : b + 1] if i in per_row else x for i, x in enumerate(inputs))
        for got, want in zip(run(case.op, alone, backend), (out, lse)):
            assert_same_bits(got, want[b : b + 1])


@native_backend
def test_all_selected_is_dense(backend):
    cache = cases.example()
    q = randn(generator(1), 2, 1, 4, 32)
    seen = cache.seq_lens[:, None]
    S = cache.block_table.shape[1] * 8
    for unit, size in ((cases.TOKEN, 1), (cases.PAGE, 8)):
        chosen = random_selection(generator(2), seen, 2, S // size, 1.0, size)
        got = run("delta_attention", cases.attention_inputs(q, cache, chosen, unit), backend)
        want = run("delta_attention", cases.attention_inputs(q, cache), backend)
        for g, w in zip(got, want):
            assert_close(g, w, atol=1e-5)


# --- the public functions -------------------------------------------------------------------------------------------


@native_backend
def test_public_functions(backend):
    """A coded prefill, a tail, a selection: encode, decode and attend as a runner does."""
    gen = generator(5)
    setting = cases.Setting(page=8, rope="full")
    codec = setting.codec(gen)
    pages = delta.DeltaPages.allocate(codec, 6, 8, 2, 64, 64)
    k, v = cases.keys(gen, codec, torch.arange(30), torch.float32), cases.rows(gen, codec.v_templates, 30)
    index = KeySketch(
        torch.zeros(6, 2, 2 * 8 * 8, dtype=torch.uint8), torch.zeros(6, 2, 8, dtype=torch.bfloat16),
        SketchParams(torch.zeros(2, 64), torch.ones(2)), 64, 8,
    )  # fmt: skip
    table = torch.tensor([[4, 1, 5, 0]])
    pos = torch.arange(30)
    slots = table[0, pos // 8] * 8 + pos % 8
    assert delta.encode(codec, k, v, pos, slots, pages, index=index, backend=backend) is None
    lens = torch.tensor([30])
    decoded = delta.decode(codec, pages, table, lens, dtype=torch.float16, backend=backend)
    assert decoded[0].shape == (1, 32, 2, 64)
    assert decoded[0].dtype == torch.float16
    assert_close(decoded[0][0, :30].float(), k, atol=1.0)
    assert not decoded[1][0, 30:].any()
    tail = delta.RawTail(k[None, 24:].transpose(1, 2), v[None, 24:].transpose(1, 2), torch.tensor([24]))
    selection = Selection(
        torch.arange(0, 30, 3, dtype=torch.int32).repeat(1, 2, 1), torch.full((1, 2), 10, dtype=torch.int32)
    )
    q = randn(gen, 1, 8, 64)
    out, lse = delta.delta_attention(q, codec, pages, table, lens, selection, raw_tail=tail, backend=backend)
    assert (out.shape, lse.shape) == ((1, 8, 64), (1, 8))
    want = reference.delta_attention(
        q[:, None], pages.inputs(), codec.inputs(), table, lens, selection.indices[:, None], selection.counts[:, None], 0, None,
        *tail, None, None, None, None, None, None,
    )  # fmt: skip
    assert_close(out, want[0][:, 0], atol=2e-3)
    assert_close(lse, want[1][:, 0], atol=2e-3)
    into = torch.empty_like(out), torch.empty_like(lse)
    delta.delta_attention(q, codec, pages, table, lens, selection, raw_tail=tail, out=into, backend=backend)
    assert_same_bits(into[0], out)


@native_backend
def test_numpy_in_numpy_out(backend):
    cache = cases.example()
    q = randn(generator(1), 2, 1, 4, 32)
    want = delta.delta_attention(q, cache.codec, cache.pages, cache.block_table, cache.seq_lens, backend=backend)
    got = delta.delta_attention(
        q.numpy(), cache.codec, cache.pages, cache.block_table.numpy(), cache.seq_lens.numpy(), backend=backend
    )
    assert isinstance(got[0], np.ndarray)
    assert_same_bits(torch.from_numpy(got[0]), want[0])


# --- wrong arguments ------------------------------------------------------------------------------------------------


def put(x, at, value):
    x = x.clone()
    x[at] = value
    return x


ENCODE = {
    "k": [lambda x: x.double(), lambda x: x[0], lambda x: x[..., :-1], lambda x: "hello"],
    "v": [lambda x: x[:-1], lambda x: x.to(torch.float16), lambda x: None],
    "positions": [lambda x: x[:-1], lambda x: x.float(), lambda x: put(x, 3, -1), lambda x: put(x, 3, cases.POSITIONS)],
    "slots": [lambda x: x[:-1], lambda x: put(x, 0, -2), lambda x: put(x, 0, 10**6), lambda x: None],
}


@native_backend
@pytest.mark.parametrize("arg, change", [(arg, change) for arg in ENCODE for change in ENCODE[arg]])
def test_wrong_rows(arg, change, backend):
    """ArgumentError in the one format, and nothing is written."""
    inputs = list(encoding())
    place = ["k", "v", "positions", "slots"].index(arg)
    inputs[place] = change(inputs[place])
    before = [x.clone() for x in cases.written(tuple(inputs))]
    with pytest.raises(ArgumentError) as error:
        run("delta_encode", tuple(inputs), backend)
    match = FORMAT.match(str(error.value))
    assert match, str(error.value)
    assert match["op"] == "delta_encode"
    compare_pages(cases.written(tuple(inputs)), before, "after the error")


PAGES = {
    "k_codes": [lambda x: x[..., :-1], lambda x: x.to(torch.int8), lambda x: x[0]],
    "v_codes": [lambda x: x[:, :1], lambda x: x.float()],
    "tags": [lambda x: x[..., :5], lambda x: None],
    "raw": [lambda x: x[:, :-1], lambda x: x.double()],
    "raw_owner": [lambda x: x[:-1], lambda x: x.int()],
    "raw_state": [lambda x: x[:1], lambda x: x.long()],
}


@native_backend
@pytest.mark.parametrize("arg, change", [(arg, change) for arg in PAGES for change in PAGES[arg]])
def test_wrong_pages(arg, change, backend):
    inputs = list(encoding())
    pages = list(inputs[6])
    place = list(PAGES).index(arg)
    pages[place] = change(pages[place])
    inputs[6] = tuple(pages)
    with pytest.raises(ArgumentError, match=r"^delta_encode: pages\.\w+: got "):
        run("delta_encode", tuple(inputs), backend)


@native_backend
def test_wrong_sequences(backend):
    cache = cases.example()
    q = randn(generator(1), 2, 1, 4, 32)
    good = cases.attention_inputs(q, cache)
    assert run("delta_attention", good, backend)[0].shape == q.shape
    wrong = {
        0: [q.double(), q[:1], q[..., :-1], randn(generator(1), 2, 1, 3, 32)],
        3: [put(cache.block_table, (0, 1), 99), cache.block_table[:1], cache.block_table.float()],
        4: [put(cache.seq_lens, 0, 1000), put(cache.seq_lens, 0, -1), cache.seq_lens[:1]],
        8: [torch.zeros(2, 3, dtype=torch.int32), torch.full((2, 40), 10**6, dtype=torch.int32)],
        9: [torch.zeros(2, 2, 4, 32)],
    }
    for place, values in wrong.items():
        for value in values:
            inputs = (*good[:place], value, *good[place + 1 :])
            with pytest.raises(ArgumentError, match=r"^delta_attention: [\w.]+: got .+, expected "):
                run("delta_attention", inputs, backend)


@native_backend
def test_wrong_objects(backend):
    cache = cases.example()
    rows = torch.zeros(1, 2, 32)
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ArgumentError, match="delta_encode: codec: got str, expected a Codec"):
        delta.encode("k4v4", rows, rows, one, one, cache.pages, backend=backend)
    with pytest.raises(ArgumentError, match="delta_encode: pages: got tuple, expected DeltaPages"):
        delta.encode(cache.codec, rows, rows, one, one, cache.pages.inputs(), backend=backend)
    with pytest.raises(ArgumentError, match=r"delta_decode: dtype: got torch\.float64"):
        delta.decode(cache.codec, cache.pages, cache.block_table, cache.seq_lens, dtype=torch.float64, backend=backend)
