"""The delta family against what no caller should give it: memory that is not its own, other codecs, pages full of nonsense."""

import ctypes
import dataclasses
import mmap

import pytest
import torch
from delta_helpers import every_backend

import sic_kernels as sic
from sic_kernels import delta
from sic_kernels.testing import assert_close, assert_same_bits, generator, randn

PAGE, D = 16, 128


def codec(k_bits=4, v_bits=4, seed=0, count=8, heads=1, **options):
    gen = generator(seed)
    templates = [delta.fit_templates(randn(gen, 64, heads, D), count=count, iterations=2) for _ in range(2)]
    return delta.Codec(k_bits, v_bits, *templates, **{"sinks": 0, **options})


def coded(c, tokens=40, raw_rows=8):
    pages = delta.DeltaPages.allocate(c, 3, PAGE, 1, D, D, raw_rows=raw_rows)
    gen, at = generator(1), torch.arange(tokens)
    delta.encode(c, randn(gen, tokens, 1, D), randn(gen, tokens, 1, D), at, at, pages)
    return pages


def place(n):
    return torch.arange(3, dtype=torch.int32)[None], torch.tensor([n], dtype=torch.int32)


def before_a_guard(x):
    """A copy of x that ends where memory may not be read."""
    libc, size = ctypes.CDLL(None), mmap.PAGESIZE
    room = -(-x.numel() // size) * size
    memory = mmap.mmap(-1, room + size)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(ctypes.c_void_p(start + room), ctypes.c_size_t(size), 0) == 0
    tensor = torch.frombuffer(memory, dtype=torch.uint8, count=x.numel(), offset=room - x.numel())
    return tensor.view(x.shape).copy_(x)


@pytest.mark.parametrize("bits", [(8, 2), (4, 2), (5, 4), (4, 4), (2, 8)])
@pytest.mark.parametrize("n", [1, 2, 3, 17, 33])
def test_nothing_behind_a_row_is_read(bits, n):
    """Pages of one row: the first and the last of the sequence take turns at the end of memory."""
    c = codec(*bits)
    pages = delta.DeltaPages.allocate(c, n, 1, 1, D, D, raw_rows=0)
    gen, at = generator(1), torch.arange(n)
    delta.encode(c, randn(gen, n, 1, D), randn(gen, n, 1, D), at, at, pages)
    tight = dataclasses.replace(
        pages, **{name: before_a_guard(getattr(pages, name).contiguous()) for name in ("k_codes", "v_codes", "tags")}
    )
    q, lens = randn(generator(2), 1, 1, 4, D), torch.tensor([n], dtype=torch.int32)
    for table in (at[None].int(), at.flip(0)[None].int()):
        got, want = (delta.delta_attention(q, c, p, table, lens, backend=b) for p, b in ((tight, None), (pages, "ref")))
        assert_close(got[0], want[0], atol=2e-3)
        for x, y in zip(delta.decode(c, tight, table, lens), delta.decode(c, pages, table, lens)):
            assert_same_bits(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_results_that_go_past_the_caches_have_the_same_bits(dtype):
    """16 MB and more, in whole lines; an output that is not aligned takes the other way."""
    heads, n = 8, 4128
    c = codec(heads=heads, count=4)
    pages = delta.DeltaPages.allocate(c, n // PAGE, PAGE, heads, D, D, raw_rows=64)
    gen, at = generator(1), torch.arange(n)
    k, v = (randn(gen, n, heads, D) for _ in range(2))
    k[5, 2, 7] = torch.nan  # kept raw
    delta.encode(c, k, v, at, at, pages)
    where = torch.arange(n // PAGE, dtype=torch.int32)[None], torch.tensor([n - 3], dtype=torch.int32)
    skewed = [torch.empty(n * heads * D + 1, dtype=dtype)[1:].view(1, n, heads, D) for _ in "kv"]
    for x, y in zip(
        delta.decode(c, pages, *where, dtype=dtype), delta.decode(c, pages, *where, out=tuple(skewed), dtype=dtype)
    ):
        assert x.nbytes >= 8 << 20
        assert_same_bits(x, y.contiguous())


@every_backend
def test_entries_and_templates_that_are_none(backend):
    """Template 0 without a residual; template 0: on every backend."""
    c = codec(count=5)
    pages = coded(c)
    pages.tags[0, 0, 3] = torch.tensor([0, 0x7E, 0, 0, 0, 0], dtype=torch.uint8)
    pages.k_codes[0, 0, 3, :4] = torch.tensor([255, 255, 255, 127], dtype=torch.uint8)
    pages.tags[0, 0, 5] = torch.tensor([0, 0x7E, 0, 0, 0, 0], dtype=torch.uint8)
    pages.k_codes[0, 0, 5, :4] = 255
    pages.tags[0, 0, 7, 4:] = 200
    good = dataclasses.replace(pages, tags=pages.tags.clone())
    good.tags[0, 0, 7, 4:] = 0
    k, v = delta.decode(c, pages, *place(40), backend=backend)
    for x, templates in ((k, c.k_templates), (v, c.v_templates)):
        assert torch.equal(x[0, [3, 5], 0], templates.centres[0, :1].float().expand(2, D))
    for x, y in zip((k, v), delta.decode(c, good, *place(40), backend=backend)):
        assert torch.equal(x, y)
    q = randn(generator(2), 1, 1, 2, D)
    got, want = (delta.delta_attention(q, c, pages, *place(40), backend=b) for b in (backend, "ref"))
    assert_close(got[0], want[0], atol=2e-3)
    assert_close(got[1], want[1], atol=2e-3)


def test_a_workspace_in_the_memory_of_an_argument_is_refused():
    c = codec()
    pages = coded(c, raw_rows=64)
    before = [x.clone() for x in pages.inputs()]
    k = randn(generator(3), 40, 1, D)
    at = torch.arange(40)
    for x in (pages.raw, pages.k_codes, pages.raw_owner, k):
        room = x.contiguous().view(-1).view(torch.uint8)
        assert room.data_ptr() == x.data_ptr()
        with pytest.raises(sic.ArgumentError, match=r"^delta_encode: workspace: got .* in the memory of "):
            delta.encode(c, k, k, at, at, pages, workspace=room)
    q = randn(generator(2), 1, 64, 4, D)
    with pytest.raises(sic.ArgumentError, match=r"^delta_attention: workspace: got .* in the memory of "):
        delta.delta_attention(q, c, pages, *place(40), workspace=q.view(-1).view(torch.uint8))
    assert all(torch.equal(x, y) for x, y in zip(pages.inputs(), before))


def test_workspace_bytes():
    c = codec()
    pages = coded(c)
    k, at = randn(generator(3), 40, 1, D), torch.arange(40)
    size = delta.workspace_bytes("encode", c, k, k, at, at.flip(0), pages)
    assert size > 0
    before = pages.k_codes.clone()
    with pytest.raises(sic.ArgumentError, match="workspace"):
        delta.encode(c, k, k, at, at, pages, workspace=torch.empty(size - 1, dtype=torch.uint8))
    assert torch.equal(pages.k_codes, before)
    delta.encode(c, k, k, at, at, pages, workspace=torch.empty(size, dtype=torch.uint8))
    with pytest.raises(sic.ArgumentError, match="workspace_bytes: op"):
        delta.workspace_bytes("select")


def test_another_codec_is_refused():
    c, other = codec(), codec(seed=5)
    pages = coded(c)
    q, k, at = randn(generator(2), 1, 1, 2, D), randn(generator(3), 4, 1, D), torch.arange(4)
    calls = {
        "delta_encode": lambda: delta.encode(other, k, k, at, at, pages),
        "delta_decode": lambda: delta.decode(other, pages, *place(40)),
        "delta_attention": lambda: delta.delta_attention(q, other, pages, *place(40)),
        "pack_blob": lambda: delta.pack_blob(other, pages),
    }
    for op, call in calls.items():
        with pytest.raises(
            sic.ArgumentError, match=rf"^{op}: codec: got {other.fingerprint}, expected {c.fingerprint}"
        ):
            call()
    with pytest.raises(sic.ArgumentError, match="copy_from: source"):
        pages.copy_from(coded(other), torch.tensor([0]), torch.tensor([1]))
    unknown = dataclasses.replace(pages, codec=None)  # the caller's own matter
    delta.decode(other, unknown, *place(40))


@pytest.mark.parametrize(
    "source, ids",
    [([0], [3]), ([-1], [0]), ([0, 0], [1, 1]), ([0], [0, 1]), ([0.0], [1.0]), ([[0]], [[1]]), ([True], [True])],
)
def test_pages_are_copied_whole_or_not_at_all(source, ids):
    pages = coded(codec())
    before = [x.clone() for x in pages.inputs()]
    with pytest.raises(sic.ArgumentError, match=r"^copy_from: "):
        pages.copy_from(pages, torch.tensor(source), torch.tensor(ids))
    assert all(torch.equal(x, y) for x, y in zip(pages.inputs(), before))


@pytest.mark.parametrize("out", [3, "x", (torch.zeros(1),), (None, None), (torch.zeros(1), None)])
def test_outputs_of_another_kind(out):
    c = codec()
    pages = coded(c)
    with pytest.raises(sic.ArgumentError, match=r"^delta_decode: out: "):
        delta.decode(c, pages, *place(40), out=out)
    with pytest.raises(sic.ArgumentError, match=r"^delta_attention: out: "):
        delta.delta_attention(randn(generator(2), 1, 1, 2, D), c, pages, *place(40), out=out)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_row_does_not_depend_on_the_tokens_beside_it(group, interleaved):
    """Nor on whether all tokens are listed or none is."""
    c = codec(rope=delta.Rope(1e4, D, max_position=512, interleaved=interleaved), sinks=2)
    n, heads = 301, 1
    pages = delta.DeltaPages.allocate(c, 19, PAGE, heads, D, D, raw_rows=8)
    gen, at = generator(1), torch.arange(n)
    delta.encode(c, randn(gen, n, heads, D), randn(gen, n, heads, D), at, at, pages)
    table, lens = torch.arange(19, dtype=torch.int32)[None], torch.tensor([n], dtype=torch.int32)
    q = randn(gen, 1, 5, group, D)
    out, lse = delta.delta_attention(q, c, pages, table, lens, backend="cpu")
    alone, alone_lse = delta.delta_attention(q[:, 4:], c, pages, table, lens, backend="cpu")
    assert_same_bits(out[:, 4:], alone)
    assert_same_bits(lse[:, 4:], alone_lse)
    every = torch.arange(n, dtype=torch.int32).expand(1, 1, 1, n).contiguous()
    listed = sic.slicing.Selection(every, torch.full((1, 1, 1), n, dtype=torch.int32))
    assert_same_bits(delta.delta_attention(q[:, 4:], c, pages, table, lens, listed, backend="cpu")[0], alone)
