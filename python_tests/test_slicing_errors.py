"""Bad arguments: one ArgumentError in the one format, before anything is touched; never a crash."""

import contextlib
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slicing_helpers import NATIVE, native_backend

from sic_kernels import ArgumentError
from sic_kernels.slicing import cases, cases_select
from sic_kernels.testing import RESULTS, assert_unchanged, copies, generator, guarded_like, randn, reference, run

FORMAT = re.compile(r"^(?P<op>\w+): (?P<arg>[\w.]+): got (?P<got>.+), expected (?P<expected>.+)$", re.DOTALL)
F64 = torch.float64


# --- a good call of every op ----------------------------------------------------------------------------------------


def attention_call(selection=True):
    case = cases.attention_case([30, 11], 2, 3, 2, 16, 8, torch.float32, density=0.5 if selection else None)
    return case.inputs()


def append_call():
    gen = generator(0)
    cache = torch.zeros(4, 2, 8, 16)
    bits, norm = torch.zeros(4, 2, 2 * 8 * 2, dtype=torch.uint8), torch.zeros(4, 2, 8, dtype=torch.bfloat16)
    rows, slots = randn(gen, 5, 2, 16), torch.tensor([3, 4, -1, 31, 0])
    return (rows, rows.clone(), cache, cache.clone(), slots, None, None, bits, norm, torch.zeros(2, 16), None)


def merge_call():
    return cases.merge_case((3, 4), 16, torch.float32).inputs()


def many_call():
    a, b, c, d = merge_call()
    return torch.stack((a, c)), torch.stack((b, d))


GOOD = {
    "append_kv": append_call,
    "key_sketch": lambda: cases.sketch_case([30, 11], 2, 16, 8, torch.float32, 2).inputs(),
    "score_tokens": lambda: cases.score_case([30, 11], 2, 3, 2, 16, 8, torch.float32, 2, 0).inputs(),
    "refine_tokens": lambda: cases.refine_case(
        cases.score_case([30, 11], 2, 3, 2, 16, 8, torch.float32, 2, 0)
    ).inputs(),
    "page_summary": lambda: cases.summary_case([30, 11], 8, 16, torch.float32).inputs(),
    "score_pages": lambda: cases.page_score_case([30, 11], 2, 3, 2, 16, 8, torch.float32, 0.5, 1).inputs(),
    "select": lambda: cases_select.topk_case(3, 50, 5, torch.float32, randn).inputs(),
    "gather": lambda: cases.gather_case([30, 11], 2, 3, 16, 24, 8, torch.float32, 0).inputs(),
    "sliced_attention": attention_call,
    "merge_states": merge_call,
    "merge_many": many_call,
}


@native_backend
@pytest.mark.parametrize("op", GOOD)
def test_the_unchanged_call_is_good(op, backend):
    run(op, GOOD[op](), backend)


# --- one wrong argument at a time -----------------------------------------------------------------------------------


def put(x, at, value):
    """A copy of x with x[at] = value."""
    x = x.clone()
    x[at] = value
    return x


def to(dtype):
    return lambda x: x.to(dtype)


def drop(x):
    """One dimension less."""
    return x[0]


def cut(x):
    """One less along the last dimension."""
    return x[..., :-1]


def gaps(x):
    """The last dimension not contiguous."""
    return torch.stack((x, x), -1)[..., 0]


def text(x):
    return "hello"


def is_(value):
    """Whatever it was, it is `value`."""
    return lambda _: value


def at(where, value):
    return lambda x: put(x, where, value)


def short(x):
    """One row less."""
    return x[:-1]


def first(x):
    return x[:1]


def repeated(x):
    """One row in place of all (stride 0)."""
    return x[:1].expand(x.shape)


def half(x):
    return x[..., : x.shape[-1] // 2]


def heads_7(q):
    return torch.zeros(2, 2, 7, 16)


def id_at(value, dtype=None):
    return lambda table: put(table.to(dtype or table.dtype), (0, 1), value)


def length(value):
    return lambda lens: put(lens, 0, value)


# op -> (position of the argument, its name in the message, what is done to it)
QUERY = [
    (0, "q", to(F64)), (0, "q", drop), (0, "q", gaps), (0, "q", heads_7), (0, "q", text),
    (0, "q", first), (0, "q", to(torch.int32)),
]  # fmt: skip


def places(table, lens):
    """Bad block tables and lengths; the good ones have 8 tokens a page and at least two pages in row 0."""
    return [
        (table, "block_table", to(torch.float32)),
        (table, "block_table", to(torch.int16)),
        (table, "block_table", drop),
        (table, "block_table", first),
        (table, "block_table", at((0, 1), 10_000)),
        (table, "block_table", id_at(-2)),
        (table, "block_table", id_at(2**31 - 1)),
        (table, "block_table", id_at(2**32 + 1, torch.int64)),
        (table, "block_table", gaps),
        (lens, "seq_lens", to(torch.float32)),
        (lens, "seq_lens", lambda n: n[:, None]),
        (lens, "seq_lens", length(-1)),
        (lens, "seq_lens", length(1000)),
    ]


BAD = {
    "append_kv": [
        (0, "k", to(F64)), (0, "k", drop), (0, "k", cut), (0, "k", gaps), (0, "k", to(torch.float16)), (0, "k", text),
        (1, "v", to(torch.float16)), (1, "v", cut), (1, "v", short),
        (2, "k_cache", to(F64)), (2, "k_cache", drop), (2, "k_cache", gaps), (2, "k_cache", repeated),
        (3, "v_cache", to(torch.float16)), (3, "v_cache", short),
        (4, "slots", to(torch.float32)), (4, "slots", short), (4, "slots", at(2, 32)),
        (4, "slots", at(2, -2)), (4, "slots", at(2, 2**40)),
        (5, "k_scale", is_(0.5)), (6, "v_scale", is_(torch.ones(2))),
        (7, "sketch.bits", to(torch.int8)), (7, "sketch.bits", cut), (8, "sketch.norm", to(torch.float32)),
        (8, "sketch.norm", cut), (8, "sketch.norm", is_(None)), (9, "params.centre", to(torch.float16)),
        (9, "params.centre", cut), (9, "params.centre", is_(None)),
        (10, "summary", is_(torch.zeros(4, 2, 3, 16))), (10, "summary", is_(torch.zeros(4, 2, 2, 16, dtype=F64))),
    ],
    "key_sketch": [
        (0, "k_cache", to(F64)), (0, "k_cache", drop), (0, "k_cache", gaps), *places(1, 2),
        (3, "params.centre", to(torch.float16)), (3, "params.centre", cut), (3, "params.centre", is_(None)),
        (4, "k_scale", is_(0.5)), (5, "planes", is_(3)), (5, "planes", is_(0)),
        (6, "start", is_(torch.tensor([1.0, 2.0]))), (6, "start", is_(torch.tensor([1]))),
        (6, "start", is_(torch.tensor([-1, 0]))),
    ],
    "score_tokens": [
        *QUERY, (0, "sketch.bits", half), (1, "sketch.bits", to(torch.int8)), (1, "sketch.bits", cut),
        (1, "sketch.bits", short), (2, "sketch.norm", to(torch.float32)), (2, "sketch.norm", cut), *places(3, 4),
        (6, "planes", is_(3)),
        (9, "max_seq_len", is_(1000)), (9, "max_seq_len", is_(-1)), (9, "seq_lens", is_(29)),
    ],
    "refine_tokens": [
        *QUERY, (0, "sketch.bits", half), (1, "sketch.bits", cut), (2, "sketch.norm", to(torch.float32)), *places(3, 4),
        (6, "selection.indices", to(torch.int64)), (6, "selection.indices", drop),
        (6, "selection.indices", at((0, 0, 0, 0), 29)),  # query 0 of 2 sees 29 of the 30 tokens
        (6, "selection.indices", at((0, 0, 0, 0), -1)),
        (7, "selection.counts", to(torch.int64)), (7, "selection.counts", at((0, 0, 0), 99)),
        (7, "selection.counts", at((0, 0, 0), -1)),
    ],
    "page_summary": [
        (0, "k_cache", to(F64)), (0, "k_cache", drop), *places(1, 2), (3, "k_scale", is_(0.5)),
        (4, "start", is_(torch.tensor([1]))),
    ],
    "score_pages": [
        *QUERY, (0, "summary", cut), (1, "summary", to(F64)), (1, "summary", lambda s: s[:, :, 0]),
        (1, "summary", lambda s: s[:, :, :1]), (1, "summary", cut),
        *places(2, 3), (4, "page_size", is_(0)), (8, "max_seq_len", is_(1000)),
    ],
    "select": [
        (0, "scores", to(F64)), (0, "scores", to(torch.int32)), (0, "scores", drop), (0, "scores", gaps),
        (0, "scores", text), (1, "seq_lens", to(torch.float32)), (1, "seq_lens", cut), (1, "seq_lens", length(51)),
        (1, "seq_lens", length(-1)),
        (4, "ratio", is_(1.5)), (4, "ratio", is_(-0.1)), (4, "ratio", is_(float("nan"))),
        (5, "budget", is_(-1)), (5, "budget", is_(torch.ones(3, 2, dtype=torch.int32))),
        (5, "budget", is_(torch.ones(3, 1))), (6, "top_p", is_(0.0)), (6, "top_p", is_(1.5)),
        (7, "sink", is_(-1)), (8, "recent", is_(-1)),
        (9, "keep", is_(torch.zeros(3, 2, 3, dtype=torch.int32))), (9, "keep", is_(torch.zeros(3, 2, 2))),
        (10, "indices", is_(4)),
    ],
    "gather": [
        (0, "k_cache", to(F64)), (0, "k_cache", drop), (1, "v_cache", to(torch.float16)), (1, "v_cache", short),
        *places(2, 3), (4, "selection.indices", to(torch.int64)), (4, "selection.indices", lambda i: i[:, :, :2]),
        (4, "selection.indices", at((0, 0, 0, 0), 29)), (5, "selection.counts", at((0, 0, 0), 99)),
        (5, "selection.counts", is_(None)),
    ],
    "sliced_attention": [
        *QUERY, (0, "q", cut), (1, "k_cache", to(F64)), (1, "k_cache", drop), (1, "k_cache", gaps),
        (1, "v_cache", to(torch.bfloat16)),
        (2, "v_cache", to(torch.float16)), (2, "v_cache", short), (2, "v_cache", gaps), *places(3, 4),
        (5, "selection.indices", to(torch.int64)), (5, "selection.indices", drop),
        (5, "selection.indices", first),
        (5, "selection.indices", at((0, 0, 0, 0), 29)), (5, "selection.indices", at((0, 0, 0, 0), -1)),
        (6, "selection.counts", to(torch.int64)), (6, "selection.counts", at((0, 0, 0), 99)),
        (6, "selection.counts", at((0, 0, 0), -1)), (6, "selection.counts", is_(None)),
        (8, "scale", is_(float("nan"))), (9, "key_bias", is_(torch.zeros(2, 1000, dtype=torch.float16))),
        (9, "key_bias", is_(torch.zeros(2, 10))), (9, "key_bias", is_(torch.zeros(1, 1000))),
        (10, "softcap", is_(-1.0)), (10, "softcap", is_(float("nan"))), (11, "window", is_(-1)),
        (12, "sinks", is_(torch.zeros(5))), (12, "sinks", is_(torch.zeros(6, dtype=F64))),
        (13, "k_scale", is_(0.5)), (14, "v_scale", is_(torch.ones(3))), (15, "max_seq_len", is_(1000)),
        (15, "seq_lens", is_(29)),
    ],
    "merge_states": [
        (0, "out_a", to(F64)), (0, "out_a", drop), (1, "lse_a", to(torch.float16)), (1, "lse_a", cut),
        (2, "out_b", to(torch.float16)), (2, "out_b", cut), (3, "lse_b", cut), (3, "lse_b", text),
    ],
    "merge_many": [(0, "outs", to(F64)), (0, "outs", drop), (1, "lses", to(torch.float16)), (1, "lses", cut)],
}  # fmt: skip

ONE_WRONG = [
    pytest.param(op, position, arg, change, id=f"{op}-{arg}-{n}")
    for op, changes in BAD.items()
    for n, (position, arg, change) in enumerate(changes)
]


@native_backend
@pytest.mark.parametrize("op, position, arg, change", ONE_WRONG)
def test_one_wrong_argument(op, position, arg, change, backend):
    """The message names the op and the argument; neither inputs nor outputs were touched."""
    good = GOOD[op]()
    inputs = (*good[:position], change(good[position]), *good[position + 1 :])
    before = copies(inputs)
    with pytest.raises(ArgumentError) as error:
        run(op, inputs, backend)
    found = FORMAT.match(str(error.value))
    assert found, str(error.value)
    assert found["op"] == op
    assert found["arg"] == arg, str(error.value)
    assert_unchanged(inputs, before)
    if RESULTS[op] == 0 or arg == "indices":
        return
    outs = guarded_like(reference(op)(*good))
    with pytest.raises(ArgumentError):
        run(op, inputs, backend, outs=[g.tensor for g in outs])
    for g in outs:
        g.assert_guards(op)
        assert g.untouched().all()


@native_backend
@pytest.mark.parametrize("op", [op for op in GOOD if RESULTS[op]])
def test_wrong_outputs(op, backend):
    """Every output with another dtype, one element too few, or one memory cell for several elements."""
    inputs = GOOD[op]()
    want = reference(op)(*inputs)
    for n, w in enumerate(want):
        fewer = torch.empty_like(w)[:-1]
        shared = torch.zeros((), dtype=w.dtype).expand(w.shape)
        other = torch.empty_like(w, dtype=torch.float64)
        for wrong in (other, fewer, shared):
            outs = [torch.empty_like(x) for x in want]
            outs[n] = wrong
            with pytest.raises(ArgumentError, match=rf"^{op}: [\w.]+: got .*, expected "):
                run(op, inputs, backend, outs=outs)


@native_backend
@pytest.mark.parametrize("page", [8, -2, 2**31 - 1, 2**32 + 1])
@pytest.mark.parametrize(
    "op", ["sliced_attention", "gather", "key_sketch", "page_summary", "score_tokens", "score_pages"]
)
def test_page_ids_out_of_range(op, page, backend):
    """Ids 8 of 8, -2, 2^31 - 1, int64 2^32 + 1: the message names the id, nothing is read."""
    cache = torch.zeros(8, 1, 4, 16)
    lens = torch.tensor([7], dtype=torch.int32)
    table = torch.tensor([[3, page]], dtype=torch.int64 if page > 2**31 else torch.int32)
    q, centre = torch.zeros(1, 1, 1, 16), torch.zeros(1, 16)
    bits, norm = torch.zeros(8, 1, 4 * 2 * 2, dtype=torch.uint8), torch.zeros(8, 1, 4, dtype=torch.bfloat16)
    one = torch.zeros(1, 1, 1, 1, dtype=torch.int32), torch.ones(1, 1, 1, dtype=torch.int32)
    inputs = {
        "sliced_attention": (q, cache, cache, table, lens, None, None, 0, *[None] * 8),
        "gather": (cache, cache, table, lens, *one, 0),
        "key_sketch": (cache, table, lens, centre, None, 2, None),
        "page_summary": (cache, table, lens, None, None),
        "score_tokens": (q, bits, norm, table, lens, 4, 2, 0, None, None),
        "score_pages": (q, torch.zeros(8, 1, 2, 16), table, lens, 4, 0.5, 1, None, None),
    }
    with pytest.raises(ArgumentError, match=rf"^{op}: block_table: got page {page} .*, expected 0 to 7$"):
        run(op, inputs[op], backend)
    # The same id past the end of the sequence is never read.
    index = next(i for i, x in enumerate(inputs[op]) if x is lens)
    run(op, (*inputs[op][:index], torch.tensor([4], dtype=torch.int32), *inputs[op][index + 1 :]), backend)


@native_backend
def test_dense_call_without_block_table_needs_matching_rows(backend):
    inputs = attention_call(selection=False)
    with pytest.raises(ArgumentError, match=r"^sliced_attention: k_cache: got "):
        run("sliced_attention", (*inputs[:3], None, *inputs[4:]), backend)


@native_backend
def test_the_format_of_the_documentation(backend):
    inputs = attention_call()
    with pytest.raises(ArgumentError) as error:
        run("sliced_attention", (inputs[0], inputs[1].double(), *inputs[2:]), backend)
    shape = ",".join(map(str, inputs[1].shape))
    assert str(error.value).startswith(
        f"sliced_attention: k_cache: got float64[{shape}], expected float32|float16|bfloat16"
    )
    assert str(error.value).endswith("of rank 4")
    assert isinstance(error.value, ValueError)


@native_backend
@pytest.mark.parametrize("op", ["append_kv", "sliced_attention"])
def test_a_bad_row_stops_the_whole_call(op, backend):
    """The last of many slots, or the last page id, is wrong: nothing at all was written."""
    if op == "append_kv":
        inputs = append_call()
        inputs = (*inputs[:4], put(inputs[4], 4, 99), *inputs[5:])
    else:
        inputs = attention_call()
        inputs = (*inputs[:3], put(inputs[3], (1, 1), -5), *inputs[4:])
    before = copies(inputs)
    with pytest.raises(ArgumentError):
        run(op, inputs, backend)
    assert_unchanged(inputs, before)


# --- fuzz: anything anywhere ----------------------------------------------------------------------------------------


def odd_tensor(dtype, shape):
    return torch.zeros(shape, dtype=dtype)


ODD_VALUES = st.one_of(
    st.none(),
    st.sampled_from(["", 3.5, float("nan"), float("inf"), -1, 0, 1, 2**31, [], object, b"x"]),
    st.builds(
        odd_tensor,
        st.sampled_from(
            [torch.float32, F64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.bool]
        ),
        st.lists(st.integers(0, 5), max_size=5),
    ),
)


@pytest.mark.parametrize("op", GOOD)
@pytest.mark.parametrize("backend", NATIVE)
@settings(max_examples=60)
@given(data=st.data())
def test_anything_anywhere(op, backend, data):
    """Any value in place of any argument is an error or a result, never a crash."""
    inputs = list(GOOD[op]())
    for position in data.draw(st.sets(st.integers(0, len(inputs) - 1), min_size=1, max_size=2)):
        inputs[position] = data.draw(ODD_VALUES)
    # TypeError: not even the kind of value that the argument takes.
    with contextlib.suppress(ArgumentError, TypeError):
        run(op, inputs, backend)
