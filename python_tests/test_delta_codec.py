"""Codes, levels, rotations, RoPE, codecs and pages: golden values worked by hand, independent formulas, theory."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from slicing_naive import sign_of

from sic_kernels import ArgumentError
from sic_kernels.delta import Codec, DeltaPages, Rope, Templates, cases, fit_templates, reference
from sic_kernels.delta.levels import BITS, DISTORTION, LEVELS, UNITS, thresholds
from sic_kernels.delta.reference_encode import divide, quantise, root
from sic_kernels.delta.reference_layout import (
    code_bytes,
    field_bytes,
    make_tags,
    pack_codes,
    parts,
    read_tags,
    unpack_codes,
)
from sic_kernels.delta.reference_rotation import rotate_keys, unrotate
from sic_kernels.slicing.reference_sketch import rotate
from sic_kernels.testing import assert_close, generator, randn

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import delta_levels

# --- layout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "D, bits, nbytes",
    [
        (64, 4, 32), (128, 4, 64), (256, 4, 128), (32, 4, 16), (80, 4, 48), (96, 4, 48), (100, 4, 64), (1, 4, 16),
        (64, 2, 16), (128, 2, 32), (32, 2, 16), (80, 2, 32), (64, 3, 24), (128, 3, 48), (33, 3, 40), (1, 3, 20),
        (64, 5, 40), (100, 5, 80), (31, 5, 20), (64, 8, 64), (33, 8, 36), (1, 8, 4),
    ],
)  # fmt: skip
def test_golden_code_bytes(D, bits, nbytes):
    assert code_bytes(D, bits) == nbytes


def test_golden_parts():
    """Powers of two of at most 32 bits: 5 groups of 4 bits are 16 + 4, 16 groups 32 + 32."""
    assert parts(80, 4) == [4, 1]
    assert parts(256, 4) == [8, 8]
    assert parts(256, 2) == [16]
    assert parts(100, 2) == [4, 2, 1]
    assert parts(1024, 4) == [8] * 8
    assert [field_bytes(80, w) for w in (1, 2, 4, 8)] == [10, 16 + 16, 32 + 16, 80]


def test_golden_four_bits():
    """D = 64: lane l is a 16-bit word of channels l, l + 16, l + 32, l + 48, the first in the lowest bits."""
    codes = torch.zeros(64, dtype=torch.uint8)
    codes[0], codes[16], codes[32], codes[48] = 0x1, 0x2, 0x3, 0x4
    codes[15], codes[63] = 0xF, 0xA
    row = pack_codes(codes, 4).tolist()
    assert row == [0x21, 0x43] + [0] * 28 + [0x0F, 0xA0]


def test_golden_two_bits_and_half_filled_bytes():
    """D = 32: two channels a lane, in the low 4 bits of a byte."""
    codes = torch.arange(32, dtype=torch.uint8) % 4
    assert pack_codes(codes, 2).tolist() == [0x0, 0x5, 0xA, 0xF] * 4


def test_golden_three_bits():
    """Low two bits by lanes, then the top bit as a mask in channel order; channels behind D are 0."""
    codes = torch.tensor([7, 0, 4, 1, 0, 0, 0, 6, 5], dtype=torch.uint8)
    row = pack_codes(codes, 3).tolist()
    assert row == [3, 0, 0, 1, 0, 0, 0, 2, 1] + [0] * 7 + [0b10000101, 0b1] + [0, 0]


def test_golden_parts_follow_each_other():
    """D = 80, 4 bits: sixteen 16-bit words of channels 0 .. 63, then sixteen bytes of channels 64 .. 79."""
    codes = torch.zeros(80, dtype=torch.uint8)
    codes[1], codes[17], codes[65] = 5, 6, 7
    row = pack_codes(codes, 4).tolist()
    assert row[:4] == [0, 0, 0x65, 0]
    assert row[32:36] == [0, 7, 0, 0]
    assert sum(row) == 0x65 + 7


def test_golden_eight_bits():
    assert pack_codes(torch.tensor([1, 255, 128], dtype=torch.uint8), 8).tolist() == [1, 255, 128, 0]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("D", [1, 2, 15, 16, 17, 31, 32, 33, 64, 80, 96, 100, 128, 200, 256, 1000, 1024])
def test_unpack_is_the_inverse(D, bits):
    codes = torch.randint(1 << bits, (3, 2, D), generator=generator(D)).to(torch.uint8)
    rows = pack_codes(codes, bits)
    assert rows.shape == (3, 2, code_bytes(D, bits))
    assert rows.dtype == torch.uint8
    assert torch.equal(unpack_codes(rows, D, bits), codes)


def test_golden_tags():
    """1.0 is 3C00, -2.0 C000 in half precision; a raw row says 7E00."""
    one, two = torch.tensor([1.0], dtype=torch.float16), torch.tensor([-2.0], dtype=torch.float16)
    tags = make_tags(one, two, torch.tensor([7]), torch.tensor([255]))
    assert tags.tolist() == [[0x00, 0x3C, 0x00, 0xC0, 7, 255]]
    assert [x.tolist() for x in read_tags(tags)] == [[1.0], [-2.0], [7], [255], [False]]
    assert read_tags(torch.tensor([[0, 0x7E, 0, 0, 0, 0]], dtype=torch.uint8))[4].tolist() == [True]


# --- levels ---------------------------------------------------------------------------------------------------------


def test_tables_are_what_the_tool_makes():
    for bits, (unit, levels, error) in delta_levels.tables().items():
        assert unit == UNITS.get(bits, unit)
        assert bits == 8 or levels == LEVELS[bits]
        assert error == pytest.approx(DISTORTION[bits], rel=1e-5)


def test_levels_are_near_lloyd_max():
    """Known distortions of the Lloyd-Max quantiser of a unit Gaussian (Max 1960)."""
    for bits, best in {2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499}.items():
        assert best * 0.999 < DISTORTION[bits] < best * 1.01
        levels = LEVELS[bits]
        assert list(levels) == sorted(levels)
        assert [-x for x in reversed(levels)] == list(levels)
        assert all(t * 2 == int(t * 2) for t in thresholds(bits))


@pytest.mark.parametrize("bits", BITS)
def test_the_code_is_that_of_the_nearest_level(bits):
    u = torch.linspace(-150, 150, 4001)
    levels = torch.tensor(LEVELS[bits], dtype=torch.float32)
    levels = levels[levels > -128]
    got = torch.tensor(LEVELS[bits], dtype=torch.float32)[quantise(u, bits)]
    assert_close((got - u).abs(), (levels - u[:, None]).abs().amin(-1), atol=0)


def test_golden_quantise():
    """Thresholds belong to the outer level; zero and minus zero to the upper of the innermost two."""
    u = torch.tensor([0.0, -0.0, 65.0, -65.0, 64.99, 1e30, -1e30])
    assert quantise(u, 2).tolist() == [2, 2, 3, 0, 2, 3, 0]
    assert quantise(torch.tensor([0.0, 0.5, 1.5, -1.5, 126.6, 500.0, -500.0]), 8).tolist() == [
        128,
        128,
        130,
        126,
        255,
        255,
        1,
    ]


def test_roots_and_quotients_are_ieee():
    """What every backend's hardware gives, bit for bit."""
    x = torch.rand(100_001, generator=generator(0)) * 4 + 1e-3
    assert torch.equal(root(x), torch.from_numpy(np.sqrt(x.numpy())))
    assert torch.equal(divide(32.5, x), torch.from_numpy(np.float32(32.5) / x.numpy()))


# --- rotations ------------------------------------------------------------------------------------------------------


def test_golden_key_rotation():
    """Two channels each, D / 2 apart: (a + b, a - b) / sqrt 2."""
    r = torch.tensor([1.0, 2.0, 10.0, 20.0])
    assert_close(rotate_keys(r, 2), torch.tensor([11.0, 22.0, -9.0, -18.0]) / math.sqrt(2), atol=2e-6)
    assert torch.equal(rotate_keys(r, 1), r)
    assert_close(rotate_keys(r, 4), torch.tensor([33.0, -11.0, -27.0, 9.0]) / 2, atol=0)


def test_golden_way_back():
    """Blocks of 2 and 1: ((a + b, a - b) / sqrt 2, c), then the signs of the rotation."""
    y = torch.tensor([3.0, 1.0, 5.0], dtype=torch.float64)
    signs = torch.tensor([float(sign_of(d)) for d in range(3)])
    assert_close(unrotate(y), torch.tensor([4 / math.sqrt(2), 2 / math.sqrt(2), 5.0]).double() * signs, atol=1e-6)


@pytest.mark.parametrize("D", [1, 31, 33, 64, 80, 96, 100, 128, 256])
def test_rotations_keep_norms_and_have_inverses(D):
    x = randn(generator(D), 5, D)
    assert_close(unrotate(rotate(x)), x, atol=2e-6)
    assert_close(rotate(x).norm(dim=-1), x.norm(dim=-1), atol=1e-5)
    R = D & -D
    while R:
        y = rotate_keys(x, R)
        assert_close(rotate_keys(y, R), x, atol=2e-6)
        assert_close(y.norm(dim=-1), x.norm(dim=-1), atol=1e-5)
        R //= 2


# --- RoPE -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim, D", [(64, 64), (32, 80), (2, 3)])
def test_rope_against_the_formula(dim, D, interleaved):
    rope = Rope(10000.0, dim, max_position=5000, interleaved=interleaved)
    x, pos = randn(generator(0), 7, 2, D), torch.tensor([0, 1, 63, 64, 65, 1000, 4999])
    got = rope.apply(x, pos)
    for n, p in enumerate(pos.tolist()):
        for d in range(dim // 2):
            a, b = (2 * d, 2 * d + 1) if interleaved else (d, d + dim // 2)
            z = complex(x[n, 1, a], x[n, 1, b]) * complex(
                math.cos(p * 1e4 ** (-2 * d / dim)), math.sin(p * 1e4 ** (-2 * d / dim))
            )
            # The frequency is a float32, as in models.
            assert abs(complex(got[n, 1, a], got[n, 1, b]) - z) < 1e-6 + 2e-7 * p
    assert torch.equal(got[..., dim:], x[..., dim:])
    assert_close(rope.undo(got, pos), x, atol=2e-6)


def hugging_face_config(**given):
    transformers = pytest.importorskip("transformers", reason="pip install 'sic_kernels[demo]'")
    base = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    return transformers.LlamaConfig(**base, **given)


SCALINGS = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn_mscale": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 1024, "mscale": 0.9,
        "mscale_all_dim": 0.7, "beta_fast": 16, "beta_slow": 2,
    },
    "yarn_factor": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024,
        "attention_factor": 1.3, "truncate": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SCALINGS)
def test_rope_is_that_of_transformers(name):
    config = hugging_face_config(rope_parameters=SCALINGS[name])
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    theirs = LlamaRotaryEmbedding(config)
    ours = Rope.from_config(config)
    assert_close(ours.inv_freq, theirs.inv_freq, atol=0, rtol=2e-7)
    assert ours.attention_factor == pytest.approx(theirs.attention_scaling)
    x, pos = randn(generator(1), 50, 2, 64), torch.arange(0, 4000, 80)
    cos, sin = theirs(x, pos[None])
    want = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)[1][0].transpose(0, 1)
    # Theirs computes the angle in float32: off by up to half a unit in the last place of the position.
    assert_close(ours.apply(x, pos), want, atol=2e-3)
    assert_close(ours.apply(x[:4], pos[:4]), want[:4], atol=1e-4)
    assert_close(ours.undo(want, pos), x, atol=2e-3)


def test_rope_refuses_what_has_no_single_angle():
    for kind in ("dynamic", "longrope", "proportional", "new"):
        with pytest.raises(ArgumentError, match=r"Rope: scaling.rope_type: got '\w+', expected default\|linear"):
            Rope(10000.0, 64, {"rope_type": kind, "factor": 2.0})
    config = hugging_face_config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(ArgumentError, match="dynamic"):
        Rope.from_config(config)


def test_rope_of_configurations():
    """Old and new names, a share of the head, sets by type of layer."""

    class Config:
        hidden_size, num_attention_heads, max_position_embeddings = 512, 4, 200_000

    old = Config()
    old.rope_theta, old.rope_scaling, old.partial_rotary_factor = 5000.0, {"type": "linear", "factor": 2.0}, 0.5
    rope = Rope.from_config(old)
    assert (rope.theta, rope.dim, rope.hi.shape[0]) == (5000.0, 64, 3125)
    assert rope.inv_freq[0] == 0.5
    layers = Config()
    layers.rope_parameters = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert Rope.from_config(layers, layer_type="sliding_attention").theta == 1e4
    assert Rope.from_config(layers, layer_type="full_attention").inv_freq[0] == 0.125
    with pytest.raises(ArgumentError, match=r"layer_type: got None, expected full_attention\|sliding_attention"):
        Rope.from_config(layers)


@pytest.mark.parametrize(
    "args, arg",
    [
        ((0.5, 64), "theta"), ((math.nan, 64), "theta"), (("x", 64), "theta"), ((1e4, 63), "dim"), ((1e4, 0), "dim"),
        ((1e4, 64, 7), "scaling"), ((1e4, 64, {"rope_type": "linear"}), r"scaling\.factor"),
        ((1e4, 64, {"rope_type": "llama3", "factor": 2.0}), r"scaling\.original"), ((1e4, 64, None, 0), "max_position"),
    ],
)  # fmt: skip
def test_wrong_ropes(args, arg):
    with pytest.raises(ArgumentError, match=f"^Rope: {arg}"):
        Rope(*args)


def test_wrong_rows_of_a_rope():
    rope = Rope(1e4, 8, max_position=100)
    for x, pos, arg in (
        (torch.zeros(3, 6), torch.zeros(3).long(), "x"),
        (torch.zeros(3, 8), torch.zeros(2).long(), "positions"),
        (torch.zeros(3, 8), torch.zeros(3), "positions"),
        (torch.zeros(3, 8), torch.tensor([0, 1, 128]), "positions"),
        (torch.zeros(3, 8), torch.tensor([0, -1, 1]), "positions"),
    ):
        with pytest.raises(ArgumentError, match=rf"^Rope\.\w+: {arg}: got"):
            rope.apply(x, pos)


# --- codecs and pages -----------------------------------------------------------------------------------------------


def some_codec(D=64, **given):
    return Codec(k_templates=Templates.zero(2, D), v_templates=Templates.zero(2, D), **given)


def test_presets():
    zero = Templates.zero(2, 64)
    made = {name: Codec.preset(name, zero, zero) for name in ("k4v4", "k3v3", "k2v2", "q8", "raw")}
    assert {name: (c.k_bits, c.v_bits) for name, c in made.items()} == {
        "k4v4": (4, 4), "k3v3": (3, 3), "k2v2": (2, 2), "q8": (8, 8), "raw": (2, 2),
    }  # fmt: skip
    assert {name: c.row_bytes for name, c in made.items()} == {"k4v4": 70, "k3v3": 54, "k2v2": 38, "q8": 134, "raw": 38}
    assert [c.keeps_all_raw for c in made.values()] == [False] * 4 + [True]
    assert Codec.preset("k4v4", zero, zero, sinks=9).sinks == 9
    with pytest.raises(ArgumentError, match=r"Codec\.preset: name: got 'k9', expected k4v4\|k3v3"):
        Codec.preset("k9", zero, zero)


@pytest.mark.parametrize(
    "given, arg",
    [
        ({"k_bits": 6}, "k_bits"), ({"v_bits": 1}, "v_bits"), ({"k_bits": 4.0}, "k_bits"), ({"sinks": -1}, "sinks"),
        ({"escape": math.nan}, "escape"), ({"escape": "4"}, "escape"), ({"escape": -1.0}, "escape"), ({"rope": 1e4}, "rope"),
        ({"rope": Rope(1e4, 128, max_position=64)}, "rope"), ({"rotate": 1}, "rotate"), ({"k_rotation": 3}, "k_rotation"),
        ({"k_rotation": 128}, "k_rotation"), ({"rotate": False, "k_rotation": 2}, "k_rotation"),
    ],
)  # fmt: skip
def test_wrong_codecs(given, arg):
    with pytest.raises(ArgumentError, match=f"^Codec: {arg}: got"):
        some_codec(**given)


def test_wrong_templates_of_a_codec():
    zero = Templates.zero(2, 64)
    for k, v, arg in (
        (None, zero, "k_templates"),
        (zero, None, "v_templates"),
        (zero, Templates.zero(3, 64), "v_templates"),
    ):
        with pytest.raises(ArgumentError, match=f"^Codec: {arg}: got"):
            Codec(k_templates=k, v_templates=v)


def test_rotation_of_a_codec():
    assert [some_codec(D).k_rotation for D in (64, 80, 100, 33)] == [8, 8, 4, 1]
    assert some_codec(rotate=False).k_rotation == 1
    assert some_codec(k_rotation=64).k_rotation == 64


def test_fingerprints_tell_codecs_apart():
    rope = Rope(1e4, 64, max_position=64)
    made = [
        some_codec(), some_codec(k_bits=3), some_codec(v_bits=3), some_codec(rope=rope), some_codec(rotate=False),
        some_codec(rope=Rope(1e4, 64, max_position=64, interleaved=True)), some_codec(D=32),
    ]  # fmt: skip
    assert len({c.fingerprint for c in made}) == len(made)
    assert some_codec(sinks=0).fingerprint == some_codec().fingerprint  # read alike


def test_pages_count_every_byte():
    """Two sequences of 6000 tokens of three heads: k4v4, k3v3 and k2v2 within their shares of half precision."""
    for name, share in (("k4v4", 0.285), ("k3v3", 0.22), ("k2v2", 0.16)):
        zero = Templates.zero(3, 64)
        pages = DeltaPages.allocate(Codec.preset(name, zero, zero), 375, 16, 3, 64, 64)
        sizes = pages.sizes()
        assert sum(sizes.values()) == pages.nbytes() == sum(x.nbytes for x in pages.inputs())
        assert sizes["scales"] == 2 * sizes["ids"] == 4 * 18000
        assert pages.nbytes() <= share * 18000 * 2 * 64 * 2
        assert pages.k_codes.stride(0) < pages.k_codes.stride(1)
        assert pages.page_size == 16


def test_wrong_pages():
    codec = some_codec()
    good = {"codec": codec, "num_pages": 3, "page_size": 16, "Hkv": 2, "Dk": 64, "Dv": 64}
    assert DeltaPages.allocate(**good, raw_rows=7).raw.shape == (7, 128)
    for arg, value in (("codec", "k4v4"), ("num_pages", -1), ("page_size", 0), ("Hkv", 3), ("Dk", 32), ("Dv", 1.5),
                       ("raw_rows", -1), ("raw_dtype", torch.float64)):  # fmt: skip
        with pytest.raises(ArgumentError, match=rf"^DeltaPages\.allocate: {arg}: got"):
            DeltaPages.allocate(**{**good, arg: value})


def test_raw_keeps_everything():
    """Each row in the table, to half precision."""
    gen = generator(0)
    zero = Templates.zero(2, 64)
    codec = Codec.preset("raw", zero, zero)
    pages = DeltaPages.allocate(codec, 2, 16, 2, 64, 64)
    k, v = randn(gen, 32, 2, 64, dtype=torch.float16), randn(gen, 32, 2, 64, dtype=torch.float16)
    pos = torch.arange(32)
    reference.delta_encode(*cases.encode_inputs(k, v, pos, pos, codec, pages))
    got = reference.delta_decode(
        torch.tensor([32]), torch.tensor([[0, 1]]), pages.inputs(), codec.inputs(), None, None, 1
    )
    assert torch.equal(got[0][0], k)
    assert torch.equal(got[1][0], v)
    assert pages.raw_state.tolist() == [64, 0]


# --- theory ---------------------------------------------------------------------------------------------------------


def errors(codec, k, v):
    """Mean squared errors of keys and values that are encoded and decoded, none kept raw."""
    N, page = len(k), 64
    pages = DeltaPages.allocate(codec, N // page, page, codec.heads, codec.Dk, codec.Dv, raw_rows=0)
    pos = torch.arange(N)
    reference.delta_encode(*cases.encode_inputs(k, v, pos, pos, codec, pages))
    table = torch.arange(N // page)[None]
    got = reference.delta_decode(torch.tensor([N]), table, pages.inputs(), codec.inputs(), None, None, 0)
    return [float(((g[0] - x.float()) ** 2).mean()) for g, x in zip(got, (k, v))]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_error_is_that_of_lloyd_max(D, bits):
    """Gaussian rows lose what theory says, less the share of 1 / D that a scale fitted to each row wins back.

    With more than 3 bits less: the levels of every row reach to its own largest channel.
    """
    x = randn(generator(bits), 512, 2, D)
    zero = Templates.zero(2, D)
    for error in errors(Codec(bits, bits, zero, zero), x, x.flip(0)):
        least = 0.85 if bits < 4 else 0.3
        assert least * DISTORTION[bits] < error < 1.05 * DISTORTION[bits]


@pytest.mark.parametrize("kind", ["channel", "constant"])
def test_rotation_spreads_what_is_uneven(kind):
    """One loud channel in a row, or a constant row, is coded about as well as a Gaussian one of its norm."""
    x = torch.ones(128, 2, 64)
    if kind == "channel":
        x = 0.1 * randn(generator(0), 128, 2, 64)
        x[:, :, 3] = 8
    zero = Templates.zero(2, 64)
    error = errors(Codec(4, 4, zero, zero, k_rotation=64), x, x)[1]
    assert error < 3 * DISTORTION[4] * float((x**2).mean())


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_constant_offset_costs_nothing(bits):
    """Grid 4: keys with a bias of 50 standard deviations per channel lose as much as those without."""
    gen = generator(3)
    rope = Rope(10000.0, 64, max_position=2048)
    sample, x = randn(gen, 1024, 2, 64), randn(gen, 1024, 2, 64)
    bias = 50 * randn(gen, 2, 64)
    pos = torch.arange(1024)
    lost = []
    for offset in (torch.zeros(2, 64), bias):
        k_templates = fit_templates(sample + offset, count=8, iterations=3)
        codec = Codec(bits, bits, k_templates, Templates.zero(2, 64), rope, escape=math.inf)
        lost.append(errors(codec, rope.apply(x + offset, pos), x)[0])
    assert lost[1] < 1.1 * lost[0]
