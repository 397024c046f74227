"""Blobs: round trips, and no damage that goes unnoticed."""

import json
import random
import struct
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sic_kernels.cli import main
from sic_kernels.delta import BlobError, Codec, DeltaPages, Rope, Templates, inspect_blob, pack_blob, unpack_blob
from sic_kernels.delta import blob as blobs
from sic_kernels.runtime.errors import ArgumentError
from sic_kernels.slicing import KeySketch, SketchParams
from sic_kernels.testing import assert_same_bits, generator, randn

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import fuzz_blob

RAW = torch.tensor([0x00, 0x7E, 0, 0, 0, 0], dtype=torch.uint8)
CODEC = Codec(4, 3, Templates.zero(2, 64), Templates.zero(2, 32), Rope(1e4, 64))


def random_pages(seed=0, P=5, raw=((3, 1, 5), (0, 0, 0), (3, 0, 15))):
    """Pages full of random codes, with raw rows (page, head, offset) in shuffled entries."""
    gen = generator(seed)
    pages = DeltaPages.allocate(CODEC, P, 16, 2, 64, 32, raw_rows=9)
    for array in (pages.k_codes, pages.v_codes, pages.tags):
        array.copy_(torch.randint(0, 100, array.shape, generator=gen, dtype=torch.uint8))
    pages.tags[..., 4:] = 0  # the only template
    pages.raw.copy_(randn(gen, 9, 96))
    for entry, (p, h, o) in zip((7, 2, 4), raw):
        pages.tags[p, h, o], pages.k_codes[p, h, o] = RAW, 0
        pages.k_codes[p, h, o, 0] = entry
        pages.raw_owner[entry] = (p * 16 + o) * 2 + h
    pages.raw_state[0] = len(raw)
    return pages


def sketch(P=5, seed=1):
    gen = generator(seed)
    bits = torch.randint(0, 256, (P, 2, 2 * 16 * 8), generator=gen, dtype=torch.uint8)
    return KeySketch(bits, randn(gen, P, 2, 16).bfloat16(), SketchParams(randn(gen, 2, 64), torch.ones(2)), 64, 16)


def coded_blob():
    return pack_blob(CODEC, random_pages(), [3, 1, 0], tokens=range(48), index=sketch(), about={"model": "m"})


def raw_rows_of(pages, ids):
    page, head, offset, entry = pages.raw_rows(torch.tensor(ids))
    return list(zip(page.tolist(), head.tolist(), offset.tolist())), pages.raw[entry]


def test_coded_pages_come_back_in_the_order_they_were_packed():
    pages, ids = random_pages(), [3, 1, 0]
    found = unpack_blob(coded_blob(), CODEC)
    assert_same_bits(found.pages.v_codes, pages.v_codes[ids].contiguous())
    assert_same_bits(found.pages.tags, pages.tags[ids].contiguous())
    where, rows = raw_rows_of(pages, ids)
    assert where == [(0, 0, 15), (0, 1, 5), (2, 0, 0)]
    found_where, found_rows = raw_rows_of(found.pages, [0, 1, 2])
    assert found_where == where
    assert_same_bits(found_rows, rows)
    assert_same_bits(found.index.bits, sketch().bits[ids])
    assert found.index.params == sketch().params
    assert found.tokens.tolist() == list(range(48))
    assert found.meta["about"] == {"model": "m"}


def test_the_same_rows_give_the_same_bytes_wherever_they_lay():
    pages = random_pages()
    other = DeltaPages.allocate(CODEC, 8, 16, 2, 64, 32, raw_rows=20)
    other.copy_from(pages, torch.tensor([0, 3]), torch.tensor([6, 2]))
    assert pack_blob(CODEC, pages, [0, 3]) == pack_blob(CODEC, other, [6, 2])


def test_into_pages_of_the_callers():
    target = random_pages(seed=5)
    unpack_blob(coded_blob(), CODEC, target, [4, 0, 2])
    source = random_pages()
    assert_same_bits(target.v_codes[[4, 0, 2]].contiguous(), source.v_codes[[3, 1, 0]].contiguous())
    assert raw_rows_of(target, [4, 0, 2])[0] == raw_rows_of(source, [3, 1, 0])[0]
    assert_same_bits(raw_rows_of(target, [4, 0, 2])[1], raw_rows_of(source, [3, 1, 0])[1])
    assert int(target.raw_state[0]) == int((target.raw_owner >= 0).sum()) == 5


def test_pages_without_room_are_left_alone():
    target = DeltaPages.allocate(CODEC, 3, 16, 2, 64, 32, raw_rows=2)
    with pytest.raises(ArgumentError, match="raw: got 2 free entries, expected 3"):
        unpack_blob(coded_blob(), CODEC, target, [0, 1, 2])
    assert not target.k_codes.any()
    assert (target.raw_owner == -1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_lossless_keeps_every_bit_and_is_never_larger(dtype):
    ints = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    k = torch.randint(-(1 << 15), 1 << 15, (3, 2, 7, 16), generator=generator(2)).to(ints).view(dtype)  # NaN payloads
    k[0, 0, 0, 0] = -0.0
    v = torch.zeros(3, 2, 7, 8, dtype=dtype)
    data = pack_blob(None, (k, v))
    found = unpack_blob(data)
    assert_same_bits(found.k, k)
    assert_same_bits(found.v, v)
    noise = torch.randint(-128, 128, (1 << 16,), generator=generator(3)).to(torch.int8).view(dtype)
    head = blobs.HEADER.size + 4 * (blobs.ENTRY.size + blobs.ALIGNMENT) + 512
    assert len(pack_blob(None, (noise, noise[:0]))) <= noise.nbytes + head


@pytest.mark.parametrize(
    "make", [coded_blob, lambda: pack_blob(None, (torch.randn(2, 3), torch.randn(2, 3)), tokens=[1])]
)
def test_every_cut_and_every_flipped_byte_is_noticed(make):
    data, rng = make(), random.Random(0)
    for end in range(len(data)):
        with pytest.raises(BlobError):
            unpack_blob(data[:end], CODEC)
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= rng.randrange(1, 256)
        with pytest.raises(BlobError):
            unpack_blob(bad, CODEC)
    with pytest.raises(BlobError):
        unpack_blob(data + b"\0", CODEC)


def sealed(meta=None, parts=(), header=None):
    """A blob whose checksums are right, whatever it says."""
    sections = [("META", 1, json.dumps(meta).encode() if not isinstance(meta, bytes) else meta), *parts]
    data = bytearray(blobs._assemble(sections, bytes.fromhex(CODEC.fingerprint), compress=False))
    if header:
        struct.pack_into(header[0], data, header[1], header[2])
        struct.pack_into("<I", data, blobs.HEADER.size - 4, blobs._crc(data[: blobs.HEADER.size - 4]))
    return bytes(data)


GOOD = {
    "mode": "coded", "pages": 1, "page_size": 16, "heads": 2, "Dk": 64, "Dv": 32, "k_bits": 4, "v_bits": 3, "raw_rows": 0,
    "raw_dtype": "float16", "codec": CODEC.fingerprint,
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"pages": 0}, {"pages": 1 << 32, "page_size": 1 << 32}, {"heads": 0}, {"pages": -1}, {"pages": True}, {"pages": 1.0},
        {"pages": "1"}, {"page_size": 0}, {"raw_rows": 1 << 40}, {"raw_rows": 3}, {"raw_dtype": "int8"}, {"mode": "other"},
        {"mode": None}, {"codec": "0"}, {"tokens": 5}, {"sketch": {"planes": 3}}, {"sketch": []}, {"sketch": {"planes": 1}},
    ],
    ids=str,
)  # fmt: skip
def test_shapes_that_do_not_fit_are_refused(change):
    codes = [torch.zeros(1, 2, 16, w, dtype=torch.uint8).numpy().tobytes() for w in CODEC.widths]
    parts = [
        *((kind, 1, data) for kind, data in zip(("KCOD", "VCOD", "TAGS"), codes)),
        ("RAWR", 1, b""),
        ("RAWO", 8, b""),
    ]
    assert unpack_blob(sealed(GOOD, parts), CODEC).pages.k_codes.shape == (1, 2, 16, 32)
    with pytest.raises(BlobError):
        unpack_blob(sealed({**GOOD, **change}, parts), CODEC)


@pytest.mark.parametrize("meta", [b"", b"[]", b"{", b"[" * 100_000, b"\xff", b'{"mode": "coded"}', b"1" * 5000])
def test_a_meta_section_of_anything(meta):
    with pytest.raises(BlobError):
        unpack_blob(sealed(meta), CODEC)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (("<H", 8, 2), "version 2"),
        (("<H", 8, 0x0100), "version 256"),  # the bytes of version 1, swapped
        (("<I", 12, 1 << 31), "does not know"),
        (("<I", 20, 1 << 30), "do not fit"),
        (("<8s", 48, b"reserved"), "does not know"),
    ],
)
def test_versions_and_flags_that_are_not_known(header, message):
    with pytest.raises(BlobError, match=message):
        unpack_blob(sealed(GOOD, header=header), CODEC)


def test_a_later_minor_version_and_optional_flags_are_read():
    data = pack_blob(None, (torch.ones(2), torch.ones(3)))
    for place in (("<H", 10, 7), ("<I", 16, 5)):
        later = bytearray(data)
        struct.pack_into(place[0], later, place[1], place[2])
        struct.pack_into("<I", later, blobs.HEADER.size - 4, blobs._crc(later[: blobs.HEADER.size - 4]))
        assert unpack_blob(later).k.tolist() == [1, 1]


def test_templates_that_are_missing_or_others():
    with pytest.raises(BlobError, match="needs the codec it was made with"):
        unpack_blob(coded_blob())
    other = Codec(4, 3, Templates.zero(2, 64), Templates.zero(2, 32), Rope(5e5, 64))
    with pytest.raises(BlobError, match=other.fingerprint):
        unpack_blob(coded_blob(), other)


def test_raw_rows_must_be_those_that_the_tags_speak_of():
    found = unpack_blob(coded_blob(), CODEC).pages
    found.k_codes[0, 1, 5, 0] = 200  # an entry that is not there
    arrays = {"KCOD": found.k_codes, "VCOD": found.v_codes, "TAGS": found.tags, "RAWR": found.raw}
    parts = [(kind, 1, blobs._bytes_of(x)) for kind, x in arrays.items()] + [
        ("RAWO", 8, blobs._bytes_of(found.raw_owner))
    ]
    with pytest.raises(BlobError, match="do not belong together"):
        unpack_blob(sealed({**GOOD, "pages": 3, "raw_rows": 3}, parts), CODEC)


def test_a_stream_that_unpacks_to_more_than_it_says_is_cut_off():
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    data = bytearray(pack_blob(None, (torch.zeros(256), torch.zeros(0))))
    at = blobs.HEADER.size + blobs.ENTRY.size  # of KRAW
    kind, _, item, offset, *_ = blobs.ENTRY.unpack_from(data, at)
    entry = blobs.ENTRY.pack(kind, blobs.ZSTD, item, offset, len(bomb), 1024, blobs._crc(bomb), 0)
    last = blobs.HEADER.size + 2 * blobs.ENTRY.size
    after = offset + len(bomb)
    vkind, venc, vitem, _, vstored, vsize, vc, vcrc = blobs.ENTRY.unpack_from(data, last)
    vdata = data[-vstored:] if vstored else b""
    voffset = after + -after % blobs.ALIGNMENT
    body = data[:offset] + bomb + bytes(voffset - after) + vdata
    body[at : at + blobs.ENTRY.size] = entry
    body[last : last + blobs.ENTRY.size] = blobs.ENTRY.pack(vkind, venc, vitem, voffset, vstored, vsize, vc, vcrc)
    table = bytes(body[blobs.HEADER.size : blobs.HEADER.size + 3 * blobs.ENTRY.size])
    struct.pack_into("<Q", body, 24, len(body))
    struct.pack_into("<I", body, blobs.HEADER.size - 8, blobs._crc(table))
    struct.pack_into("<I", body, blobs.HEADER.size - 4, blobs._crc(body[: blobs.HEADER.size - 4]))
    with pytest.raises(BlobError, match="not what was packed"):
        unpack_blob(body)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_bytes_in_a_sealed_blob_are_an_error_or_a_blob(data):
    """Fields of header and table drawn at random, checksums made right: never a crash."""
    original = bytearray(coded_blob())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(8, blobs.HEADER.size + 10 * blobs.ENTRY.size))
        original[at] = data.draw(st.integers(0, 255))
    count = struct.unpack_from("<I", original, 20)[0] % 64
    table = bytes(original[blobs.HEADER.size : blobs.HEADER.size + blobs.ENTRY.size * count])
    struct.pack_into("<I", original, blobs.HEADER.size - 8, blobs._crc(table))
    struct.pack_into("<I", original, blobs.HEADER.size - 4, blobs._crc(original[: blobs.HEADER.size - 4]))
    try:
        unpack_blob(original, CODEC)
        inspect_blob(original)
    except BlobError:
        pass


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"codec": None, "pages": 3}, r"pages: got int, expected \(k, v\)"),
        ({"codec": None, "pages": (torch.zeros(2, dtype=torch.int64), torch.zeros(2))}, "k: got int64"),
        ({"codec": CODEC, "pages": (1, 2)}, "expected Codec, DeltaPages"),
        (
            {"codec": CODEC, "pages": random_pages(), "page_ids": [5]},
            "page_ids: got .5., expected different pages from 0 to 4",
        ),
        ({"codec": CODEC, "pages": random_pages(), "page_ids": [1, 1]}, "page_ids"),
        ({"codec": CODEC, "pages": random_pages(), "tokens": [[1]]}, "tokens"),
    ],
)
def test_bad_arguments(args, message):
    with pytest.raises(ArgumentError, match=message):
        pack_blob(**args)


def test_inspect(tmp_path, capsys):
    file = tmp_path / "pages.blob"
    file.write_bytes(coded_blob())
    assert main(["inspect", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["codec"] == CODEC.fingerprint
    assert found["meta"]["pages"] == 3
    assert [s["kind"] for s in found["sections"]][:5] == ["META", "KCOD", "VCOD", "TAGS", "RAWR"]
    assert main(["inspect", str(file)]) == 0
    assert "KCOD" in capsys.readouterr().out
    file.write_bytes(coded_blob()[:-1])
    assert main(["inspect", str(file)]) == 1
    assert "inspect: " in capsys.readouterr().err
    templates = tmp_path / "t.safetensors"
    Templates.zero(2, 8).save(templates)
    assert main(["inspect", str(templates)]) == 0
    assert "centres" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "none")]) == 1
    assert "a readable file" in capsys.readouterr().err


def test_fuzz():
    """Edits behind right checksums: refused, or read whole."""
    tried, read = fuzz_blob.at_random(fuzz_blob.Target(), seconds=3, seed=0)
    assert tried > 100
    assert 0 < read < tried
