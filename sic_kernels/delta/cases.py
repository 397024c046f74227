"""What the delta ops are tested and measured on: one description of a case feeds tests, benches and docs.

As in `slicing.cases`: a `Case` names an op, says its shape in words, and builds the op's inputs (in the order of the native op)
from a seed. `grid(name)` are the lists of the acceptance grid.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from .. import testing
from ..slicing import cases as slicing_cases
from ..slicing.reference_layout import visible
from ..testing import EXACT, SHORT_NAME, Tolerance, assert_close, assert_same_bits, generator, randn, random_selection
from . import reference
from .codec import Codec
from .levels import BITS
from .pages import DeltaPages
from .reference_decode import DTYPES
from .rope import Rope
from .templates import Templates

Tensor = torch.Tensor

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TOKEN, PAGE = slicing_cases.TOKEN, slicing_cases.PAGE
SENTINEL = 123  # what pages hold before they are written
POSITIONS = 4096  # of the ropes here
RESIDUAL = 0.5  # standard deviation of rows around their templates

# Of attention against decode-then-attend (acceptance: 2e-3), plus one rounding of the output's type.
# Tensor cores take keys rounded to half precision: what 16-bit queries lose by it grows with the logits.
TOLERANCE = {F32: Tolerance(2e-3, 0.0, 2e-3), F16: Tolerance(4e-3, 1e-3, 2e-3), BF16: Tolerance(8e-3, 8e-3, 2e-3)}


def written(inputs: tuple) -> tuple[Tensor, ...]:
    """What delta_encode writes: the tensors of the pages and of the sketch."""
    return (*inputs[6], *(x for x in inputs[7:9] if x is not None))


class Case(testing.Case):
    """One call of one delta op; delta_encode's results are the tensors that it writes to."""

    def written(self, inputs: tuple) -> tuple[Tensor, ...]:
        return written(inputs) if self.op == "delta_encode" else ()

    def compare(self, got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
        if self.op == "delta_encode":
            compare_pages(got, want, str(self))
        elif self.op == "delta_attention":
            assert_close(got[0], want[0], atol=self.tolerance.atol, rtol=self.tolerance.rtol, what=f"{self}: out")
            assert_close(got[1], want[1], atol=self.tolerance.lse, rtol=1e-5, what=f"{self}: lse")
        else:
            for name, g, w in zip("kv", got, want, strict=True):
                _compare_rows(g, w, self.tolerance, f"{self}: {name}")


def compare_pages(got: Sequence[Tensor], want: Sequence[Tensor], what: str) -> None:
    """Bit for bit, but that one NaN of the raw table is as good as another."""
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        if w.dtype.is_floating_point:
            assert torch.equal(g.isnan(), w.isnan()), f"{what}: NaN in result {i}"
            g, w = g.nan_to_num(nan=0.0), w.nan_to_num(nan=0.0)
        assert_same_bits(g, w, f"{what}: result {i}")


def _compare_rows(got: Tensor, want: Tensor, t: Tolerance, what: str) -> None:
    """A channel may be off by one unit of the output's type, and by float rounding of the row's largest."""
    size = want.float().abs().amax(-1, keepdim=True).clamp(min=1)
    error = (got.float() - want.float()).abs() / (t.atol * size + t.rtol * want.float().abs())
    assert_close(error, torch.zeros_like(error), atol=1.0, what=what)


def _case(op: str, build: Callable[[torch.Generator], tuple], tolerance: Tolerance, shape: dict[str, Any]) -> Case:
    words = [f"{k}{SHORT_NAME.get(v, v)}" for k, v in shape.items() if v is not None]
    return Case(op, "-".join(words), MappingProxyType(shape), build, tolerance, family="delta")


# --- codecs, rows, pages --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A codec and the pages that it is used with, in words.

    rope: None, "full", "partial", "interleaved" or "yarn" (whose attention factor is not 1).  bias: of every channel of a key,
    in standard deviations.  escape, sinks, rotation as in Codec.  raw_rows: room in the raw table.
    """

    k_bits: int = 4
    v_bits: int = 4
    Dk: int = 64
    Dv: int | None = None
    heads: int = 2
    page: int = 16
    count: int = 7
    rope: str | None = None
    bias: float = 0.0
    rotation: int | None = None
    sinks: int = 4
    escape: float = 1.3
    raw_rows: int | None = None
    raw_dtype: torch.dtype = F16
    layout: str = "HPND"

    @property
    def value_dim(self) -> int:
        return self.Dk if self.Dv is None else self.Dv

    def words(self) -> dict[str, Any]:
        """What differs from the defaults."""
        changed = {k: v for k, v in vars(self).items() if v != getattr(Setting, k)}
        return {"k": self.k_bits, "v": self.v_bits, "D": self.Dk, **changed}

    def codec(self, gen: torch.Generator) -> Codec:
        """Random templates; residuals of `rows` are typical for them."""
        offset = self.bias * randn(gen, self.heads, 1, self.Dk)
        k = _templates(gen, self.heads, self.count, self.Dk, offset)
        v = _templates(gen, self.heads, self.count, self.value_dim, torch.zeros(1))
        rope = self.make_rope()
        return Codec(
            self.k_bits, self.v_bits, k, v, rope, sinks=self.sinks, escape=self.escape, k_rotation=self.rotation
        )

    def make_rope(self) -> Rope | None:
        if self.rope is None:
            return None
        even = self.Dk // 2 * 2
        dim = max(2, even // 4 * 2) if self.rope == "partial" else even
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
        return Rope(10000.0, dim, yarn if self.rope == "yarn" else None, POSITIONS, self.rope == "interleaved")

    def pages(self, codec: Codec, tokens: int) -> DeltaPages:
        """Room for so many tokens and two pages more, all of it junk but the raw table's index."""
        P = -(-tokens // self.page) + 2
        room = self.raw_rows
        made = DeltaPages.allocate(
            codec, P, self.page, self.heads, self.Dk, self.value_dim, raw_rows=room, raw_dtype=self.raw_dtype
        )
        for x in (made.k_codes, made.v_codes, made.tags, made.raw):
            x.fill_(SENTINEL)
        k_codes, v_codes, tags = (_laid(x, self.layout) for x in (made.k_codes, made.v_codes, made.tags))
        return dataclasses.replace(made, k_codes=k_codes, v_codes=v_codes, tags=tags)


def _templates(gen: torch.Generator, heads: int, n: int, D: int, offset: Tensor) -> Templates:
    centres = (randn(gen, heads, n, D) + offset).to(F16)
    return Templates(centres, torch.full((heads,), D * RESIDUAL**2))


def _laid(x: Tensor, layout: str) -> Tensor:
    """[P,H,page,bytes] with another order in memory: NHD has the heads of a token side by side; "skew" starts at byte 2."""
    if layout == "NHD":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "skew":
        return torch.full((x.numel() + 2,), SENTINEL, dtype=x.dtype)[2:].view(x.shape)
    return x


def rows(gen: torch.Generator, templates: Templates, N: int) -> Tensor:
    """f32[N,Hkv,D]: a random template each, and noise."""
    H, n, D = templates.centres.shape
    ids = torch.randint(n, (N, H), generator=gen)
    return templates.centres[torch.arange(H), ids].float() + RESIDUAL * randn(gen, N, H, D)


def keys(gen: torch.Generator, codec: Codec, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of keys at their positions."""
    x = rows(gen, codec.k_templates, len(positions))
    return (x if codec.rope is None else codec.rope.apply(x, positions)).to(dtype)


# --- encode ---------------------------------------------------------------------------------------------------------

Spoil = Callable[[Tensor, Tensor], None]  # changes keys and values in place


def encode_inputs(k, v, positions, slots, codec: Codec, pages: DeltaPages, sketch=(None, None, None)) -> tuple:
    """Inputs of delta_encode."""
    return (k, v, positions, slots, codec.inputs(), codec.sinks, pages.inputs(), *sketch)


def encode_case(
    setting: Setting, tokens: int, dtype: torch.dtype = F32, *, slots: str = "shuffled", spoil: Spoil | None = None,
    planes: int = 0, index: torch.dtype = torch.int64, before: int = 0, **words: Any,
) -> Case:  # fmt: skip
    """`tokens` rows into pages of sentinels.

    slots: "ordered", "shuffled", "holes" (every third is -1), "none" (all are -1) or "repeated" (a few slots many times).
    before: rows encoded earlier, into the same slots, every second an outlier.  planes: of a sketch kept up to date.
    """

    def build(gen: torch.Generator) -> tuple:
        codec = setting.codec(gen)
        pages = setting.pages(codec, tokens)
        place = _slots(gen, slots, tokens, pages.k_codes.shape[0] * setting.page)
        positions = torch.randint(POSITIONS, (tokens,), generator=gen)
        positions[: setting.sinks] = torch.arange(setting.sinks)[:tokens]
        k, v = keys(gen, codec, positions, dtype), rows(gen, codec.v_templates, tokens).to(dtype)
        if before:
            first = k[:before].clone()
            first[::2] *= 9
            reference.delta_encode(*encode_inputs(first, v[:before], positions[:before], place[:before], codec, pages))
        if spoil is not None:
            spoil(k, v)
        sketch = _sketch(gen, setting, pages, planes) if planes else (None, None, None)
        return encode_inputs(k, v, positions.to(index), place.to(index), codec, pages, sketch)

    shown = {"slots": slots if slots != "shuffled" else None, "planes": planes or None, "before": before or None}
    return _case("delta_encode", build, EXACT, {**setting.words(), "n": tokens, "dt": dtype, **shown, **words})


def _slots(gen: torch.Generator, kind: str, tokens: int, room: int) -> Tensor:
    if kind == "ordered":
        return torch.arange(tokens)
    if kind == "repeated":
        return torch.randint(5, (tokens,), generator=gen)
    slots = torch.randperm(room, generator=gen)[:tokens]
    if kind == "none":
        return torch.full_like(slots, -1)
    if kind == "holes":
        slots[::3] = -1
    return slots


def _sketch(gen: torch.Generator, setting: Setting, pages: DeltaPages, planes: int) -> tuple[Tensor, Tensor, Tensor]:
    P, H, page = pages.tags.shape[:3]
    bits = torch.full((P, H, planes * page * -(-setting.Dk // 8)), SENTINEL, dtype=torch.uint8)
    return bits, torch.full((P, H, page), 123.0, dtype=BF16), 0.3 * randn(gen, H, setting.Dk)


SIZES = (32, 64, 80, 96, 128, 256)
PAGES = (1, 3, 16, 32, 64)
TOKENS = (1, 7, 37, 42, 2048)


def pack_grid() -> Iterator[Case]:
    """Grid 1: bits, head sizes, page sizes, numbers of rows; layouts, index types and Dv other than Dk in turn."""
    sizes = itertools.product(BITS, SIZES, PAGES, TOKENS)
    for n, (bits, D, page, tokens) in enumerate(sizes):
        if tokens == 2048 and (n // 5 % 5 or SIZES.index(D) != BITS.index(bits)):  # one of each bits
            continue
        layout = ("HPND", "NHD", "skew")[n % 3]
        index = (torch.int32, torch.int64)[n // 5 % 2]
        v_bits = BITS[(BITS.index(bits) + n) % 5]
        setting = Setting(bits, v_bits, D, 128 if D == 64 else None, page=page, layout=layout)
        yield encode_case(setting, tokens, (F32, F16, BF16)[n // 3 % 3], index=index, idx=str(index)[6:])


def odd_grid() -> Iterator[Case]:
    """Grid 6: head sizes that no rotation fits, with and without RoPE."""
    for n, (D, bits, page) in enumerate(itertools.product((100, 33, 31, 1), BITS, (3, 16))):
        rope = ("full", None, "partial")[n % 3] if D > 1 else None
        yield encode_case(Setting(bits, bits, D, page=page, rope=rope), 21)


def _row(at: int, key: float | None = None, value: float | None = None) -> Spoil:
    """One channel of row `at` (or all rows: slice) set."""

    def spoil(k: Tensor, v: Tensor) -> None:
        if key is not None:
            k[at, :, -1] = key
        if value is not None:
            v[at, 0, 0] = value

    return spoil


def _constant(value: float) -> Spoil:
    def spoil(k: Tensor, v: Tensor) -> None:
        k[5:15], v[8:19] = value, value

    return spoil


def _scaled(factor: float) -> Spoil:
    def spoil(k: Tensor, v: Tensor) -> None:
        k[5:15] *= factor
        v[8:19] *= factor

    return spoil


def _outliers(k: Tensor, v: Tensor) -> None:
    k[::5] *= 7
    v[3::7] *= 7


CONSTANTS = ((0.0, F32), (0.01, F16), (-65504.0, F16), (3e38, BF16), (-3e38, F32), (1e-30, F32), (6e-8, F16))


def edge_grid() -> Iterator[Case]:
    """Sinks, escapes and a full table, rewrites, constants, what is not finite, RoPE of every kind, rotations, sketches."""
    base = Setting()
    for raw_rows in (0, 3, 200):
        for slots in ("ordered", "holes", "repeated"):
            yield encode_case(Setting(raw_rows=raw_rows, page=3), 42, spoil=_outliers, slots=slots, out="liers")
    for raw_rows in (5, 40, 200):
        yield encode_case(Setting(raw_rows=raw_rows), 42, spoil=_outliers, before=42, out="liers")
    yield encode_case(base, 17, slots="none")
    yield encode_case(base, 0)
    for escape in (torch.inf, -torch.inf, 0.0):
        yield encode_case(Setting(escape=escape, raw_rows=90), 42, spoil=_outliers)
    for value, dtype in CONSTANTS:
        for escape in (4.0, torch.inf):
            yield encode_case(Setting(escape=escape), 21, dtype, spoil=_constant(value), const=value)
    for factor, dtype in ((1e-3, F16), (1e-38, F32), (1e-42, F32), (1e19, F32), (1e34, BF16)):
        yield encode_case(
            Setting(escape=torch.inf, raw_rows=3, count=1), 21, dtype, spoil=_scaled(factor), times=factor
        )
    unusual: tuple[tuple[float | None, float | None], ...]
    unusual = ((torch.nan, None), (torch.inf, None), (None, torch.nan), (-torch.inf, torch.inf))
    for key, val in unusual:
        for raw_rows in (9, 100):
            setting = Setting(raw_rows=raw_rows, rope="full")
            yield encode_case(setting, 21, spoil=_row(6, key, val), key=key, value=val)
    for rope, rotation in itertools.product(("full", "partial", "interleaved", "yarn"), (1, 2, 8, 64)):
        yield encode_case(Setting(rope=rope, rotation=rotation), 37, BF16)
    for rotation, D in ((1, 96), (4, 96), (32, 96), (16, 80), (128, 128), (4, 100)):
        yield encode_case(Setting(3, 5, D, rotation=rotation, rope="full"), 37)
    for count in (1, 16, 17, 256):
        yield encode_case(Setting(count=count), 37)
    for planes, page, D in itertools.product((1, 2), (3, 16, 40), (64, 80)):
        yield encode_case(Setting(Dk=D, page=page, rope="full"), 42, BF16, planes=planes, slots="repeated")
        yield encode_case(Setting(Dk=D, page=page, rope="full"), 42, BF16, planes=planes, slots="holes")
    for raw_dtype in (F32, BF16):
        yield encode_case(Setting(raw_dtype=raw_dtype, bias=50.0), 37, spoil=_outliers)


# --- caches ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CodedCache:
    """Sequences in shuffled coded pages; what no sequence owns is junk, block-table entries behind their end impossible."""

    codec: Codec
    pages: DeltaPages
    block_table: Tensor
    seq_lens: Tensor
    k: Tensor  # f32 [B,S,Hkv,Dk], rotated: what was encoded
    v: Tensor


def coded_cache(
    gen: torch.Generator, setting: Setting, lens: list[int], table: torch.dtype = torch.int32, spread: bool = True
) -> CodedCache:
    """Random rows of the given lengths, encoded by the definition; outliers among them if `spread`."""
    codec, page = setting.codec(gen), setting.page
    M = -(-max(lens, default=0) // page) + 1
    pages = setting.pages(codec, sum(-(-n // page) * page for n in lens))
    order = torch.randperm(pages.k_codes.shape[0], generator=gen)
    block_table = torch.full((len(lens), M), torch.iinfo(torch.int32).max, dtype=table)
    k = torch.zeros(len(lens), M * page, setting.heads, setting.Dk)
    v = torch.zeros(len(lens), M * page, setting.heads, setting.value_dim)
    first = 0
    for b, n in enumerate(lens):
        pos = torch.arange(n)
        k[b, :n], v[b, :n] = keys(gen, codec, pos, F32), rows(gen, codec.v_templates, n)
        if spread and n > 5:
            k[b, 5:n:13] *= 4
        own = order[first : first + -(-n // page)]
        first += len(own)
        block_table[b, : len(own)] = own.to(table)
        slots = own[pos // page] * page + pos % page
        reference.delta_encode(*encode_inputs(k[b, :n], v[b, :n], pos, slots, codec, pages))
    return CodedCache(codec, pages, block_table, torch.tensor(lens, dtype=table), k, v)


# --- decode ---------------------------------------------------------------------------------------------------------


def decode_inputs(cache: CodedCache, positions=None, max_seq_len=None, dtype: torch.dtype = F32) -> tuple:
    """Inputs of delta_decode."""
    pages, codec = cache.pages.inputs(), cache.codec.inputs()
    return cache.seq_lens, cache.block_table, pages, codec, positions, max_seq_len, DTYPES.index(dtype)


def decode_case(
    setting: Setting, lens: list[int], dtype: torch.dtype = F32, *, moved: bool = False, short: bool = False
) -> Case:
    """Whole sequences; `moved`: keys at other positions than they were written at; `short`: max_seq_len below M * page."""

    def build(gen: torch.Generator) -> tuple:
        cache = coded_cache(gen, setting, lens, (torch.int32, torch.int64)[len(lens) % 2])
        S = max(lens) if short else cache.block_table.shape[1] * setting.page
        at = torch.randint(POSITIONS, (len(lens), S), generator=gen, dtype=torch.int32) if moved else None
        return decode_inputs(cache, at, S if short else None, dtype)

    tolerance = {F32: Tolerance(1e-6, 0, 0), F16: Tolerance(1e-6, 2**-10, 0), BF16: Tolerance(1e-6, 2**-7, 0)}[dtype]
    shape = {"lens": "_".join(map(str, lens)), "dt": dtype, "moved": moved or None, "short": short or None}
    return _case("delta_decode", build, tolerance, {**setting.words(), **shape})


def decode_grid() -> Iterator[Case]:
    """Grid 2: bits, head sizes and pages; RoPE of every kind at the rows' own and at other positions; raw rows among them."""
    for n, (bits, D) in enumerate(itertools.product(BITS, (*SIZES, 100, 33, 31, 1))):
        rope = ("full", None, "partial", "interleaved", "yarn")[n % 5] if D > 1 else None
        setting = Setting(bits, BITS[(n + 2) % 5], D, 128 if D == 64 else None, page=PAGES[n % 5], rope=rope)
        yield decode_case(setting, [37, 0, 20], (F32, F16, BF16)[n % 3], moved=n % 2 == 1, short=n % 4 == 2)
    for layout, rotation in itertools.product(("NHD", "skew"), (1, 2, 64)):
        yield decode_case(Setting(layout=layout, rotation=rotation, rope="full"), [42, 16])
    yield decode_case(Setting(escape=-torch.inf, raw_rows=99, raw_dtype=BF16, rope="full"), [42])
    yield decode_case(Setting(bias=50.0, rope="full"), [42, 5], moved=True)


# --- attention ------------------------------------------------------------------------------------------------------


def attention_inputs(q, cache: CodedCache, selection=None, unit: int = TOKEN, **extra: Any) -> tuple:
    """Inputs of delta_attention; `selection` is (indices, counts) or None; tail (k, v, start); the others by name."""
    indices, counts = (None, None) if selection is None else selection
    return (
        q, cache.pages.inputs(), cache.codec.inputs(), cache.block_table, cache.seq_lens, indices, counts, unit,
        extra.get("positions"), *extra.get("tail", (None, None, None)), extra.get("scale"), extra.get("key_bias"),
        extra.get("softcap"), extra.get("window"), extra.get("sinks"), extra.get("max_seq_len"),
    )  # fmt: skip


def attention_case(
    setting: Setting, lens: list[int], T: int, group: int, dtype: torch.dtype = F32, *, density: float | None = None,
    unit: int = TOKEN, tail: int = 0, moved: bool = False, extras: tuple[str, ...] = (),
) -> Case:  # fmt: skip
    """Attention over a random share of the visible units (None: dense).

    tail: rows of every sequence that are not coded.  moved: RoPE positions other than the index.  extras: names of sinks,
    key_bias, window, softcap, scale.
    """

    def build(gen: torch.Generator) -> tuple:
        cache = coded_cache(gen, setting, lens)
        q = randn(gen, len(lens), T, setting.heads * group, setting.Dk, dtype=dtype)
        S = cache.block_table.shape[1] * setting.page
        more = {name: _extra(gen, name, len(lens), S, q.shape[2]) for name in extras}
        if moved:
            more["positions"] = torch.randint(POSITIONS, (len(lens), S), generator=gen, dtype=torch.int32)
        if tail:
            more["tail"] = _tail(gen, cache, setting, tail, dtype)
        size = 1 if unit == TOKEN else setting.page
        seen = visible(cache.seq_lens, T, S)
        units = S // size
        chosen = None if density is None else random_selection(gen, seen, setting.heads, units, density, size)
        return attention_inputs(q, cache, chosen, unit, **more)

    shown = {"tail": tail or None, "moved": moved or None, "extras": "_".join(extras) or None, "density": density}
    shape = {"lens": "_".join(map(str, lens)), "T": T, "G": group, "dt": dtype, "unit": "tp"[unit], **shown}
    return _case("delta_attention", build, TOLERANCE[dtype], {**setting.words(), **shape})


def _extra(gen: torch.Generator, name: str, B: int, S: int, Hq: int) -> Any:
    if name == "key_bias":
        return randn(gen, B, S)
    return randn(gen, Hq) if name == "sinks" else {"window": 9, "softcap": 5.0, "scale": 0.2}[name]


def _tail(gen: torch.Generator, cache: CodedCache, setting: Setting, size: int, dtype: torch.dtype) -> tuple:
    """The last `size` rows of every sequence, or all of a shorter one, before junk that is behind the sequence's end."""
    start = (cache.seq_lens - size).clamp(min=0)
    k = 1e4 * torch.ones(len(start), setting.heads, size + 2, setting.Dk)
    v = 1e4 * torch.ones(len(start), setting.heads, size + 2, setting.value_dim)
    for b, (first, n) in enumerate(zip(start.tolist(), cache.seq_lens.tolist())):
        k[b, :, : n - first] = keys(gen, cache.codec, torch.arange(first, n), F32).transpose(0, 1)
        v[b, :, : n - first] = rows(gen, cache.codec.v_templates, n - first).transpose(0, 1)
    return k.to(dtype), v.to(dtype), start.to(torch.int32)


EXTRAS = ((), ("sinks",), ("key_bias",), ("window",), ("softcap", "scale"), ("sinks", "key_bias", "window", "softcap"))


def attention_grid() -> Iterator[Case]:
    """Grid 2: bits, head sizes, groups, several query tokens; dense, tokens and pages; RoPE, positions, tails, extras."""
    for n, (bits, D, density) in enumerate(itertools.product(BITS, (32, 64, 80, 128, 256), (None, 0.4))):
        rope = ("full", "partial", None, "interleaved", "yarn")[n % 5]
        setting = Setting(bits, BITS[(n + 3) % 5], D, 128 if D == 64 else None, page=PAGES[n % 4 + 1], rope=rope)
        yield attention_case(setting, [77, 0, 130], 1 + n % 2, (4, 1, 3)[n % 3], (F32, BF16, F16)[n % 3],
                             density=density, unit=n // 2 % 2)  # fmt: skip
    for n, (extras, tail, density) in enumerate(itertools.product(EXTRAS, (0, 5), (None, 0.5))):
        rope = ("full", None)[n % 2]
        yield attention_case(Setting(page=(3, 16)[n // 2 % 2], rope=rope), [60, 3, 33], 2, 2, density=density,
                             unit=n // 4 % 2, tail=tail, moved=n % 4 == 1, extras=extras)  # fmt: skip
    for D, bits in itertools.product((100, 33, 31, 1), (2, 3, 4, 8)):
        rope = "full" if D > 1 and bits != 3 else None
        yield attention_case(Setting(bits, bits, D, page=16, rope=rope), [45, 17], 2, 3, density=0.6)
    for Hkv, group in ((4, 7), (3, 3), (4, 5), (4, 6), (4, 16), (1, 7)):
        yield attention_case(Setting(heads=Hkv, rope="full"), [77, 130], 2, group, density=0.4)
    for rotation, rope in itertools.product((1, 2, 16, 64), ("full", None)):
        yield attention_case(Setting(rope=rope, rotation=rotation), [77, 40], 1, 4)
    yield attention_case(Setting(escape=-torch.inf, raw_rows=999, rope="full"), [77, 40], 2, 4, BF16, tail=9)
    yield attention_case(Setting(escape=torch.inf, sinks=0, raw_rows=0, count=256), [300, 40], 1, 4)
    yield attention_case(Setting(bias=50.0, rope="full"), [77, 40], 1, 2, extras=("scale",))
    yield attention_case(Setting(layout="NHD", rope="full"), [777, 1500], 3, 4, F16, density=0.3)
    yield attention_case(Setting(Dk=128, rope="full"), [2048], 1, 4, BF16, tail=16)


_GRIDS: dict[str, Callable[[], Iterator[Case]]] = {
    "pack": pack_grid, "odd": odd_grid, "edge": edge_grid, "decode": decode_grid, "attention": attention_grid,
}  # fmt: skip


def grid(name: str) -> list[Case]:
    """The cases of one list of the acceptance grid, by name (`grids()`)."""
    return list(_GRIDS[name]())


def grids() -> list[str]:
    return list(_GRIDS)


def example(seed: int = 0) -> CodedCache:
    """A small cache, for tests that need just any."""
    return coded_cache(generator(seed), Setting(page=8, Dk=32, rope="full"), [30, 11])
