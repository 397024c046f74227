"""Blobs: pages of a cache as bytes, in memory, on disk or on the wire.

A blob is a header of 64 bytes, a table of sections and the sections, all little-endian (docs/delta.md draws it). Every byte is
covered by a CRC32C or checked to be zero, sizes are checked against each other before anything is allocated, and nothing in it
is executed. Whatever is wrong is a `BlobError`; there is no partial result.

Needs the packages of `pip install 'sic_kernels[blobs]'`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..runtime.errors import ArgumentError, SicError
from ..runtime.extras import extra
from ..slicing.types import KeySketch, SketchParams
from .codec import Codec
from .levels import BITS
from .pages import RAW_DTYPES, DeltaPages
from .reference_layout import TAG_BYTES, code_bytes, read_tags
from .templates import MAX_DIM

Tensor = torch.Tensor

MAGIC = b"SICBLOB\0"
MAJOR, MINOR = 1, 0
HEADER = struct.Struct(
    "<8sHHIIIQ16s8sII"
)  # magic, version, flags, sections, length, fingerprint, reserved, table CRC, header CRC
ENTRY = struct.Struct("<4sHHQQQII")  # kind, encoding, item bytes, offset, stored bytes, bytes, stored CRC, CRC
ALIGNMENT = 64
MAX_SECTIONS = 64
STORED, ZSTD, PLANES = 0, 1, 2  # encodings; PLANES: byte i of every item together, then zstd
KNOWN_REQUIRED = 0  # required flags that this version understands
LEVEL = 3  # of zstd

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class BlobError(SicError, ValueError):
    """The bytes are not a blob, are damaged or cut short, or were made with something else."""


@dataclasses.dataclass(frozen=True)
class Section:
    """One entry of the table."""

    kind: str
    encoding: int
    item: int
    offset: int
    stored: int
    size: int
    stored_crc: int
    crc: int


@dataclasses.dataclass(frozen=True, eq=False)
class Blob:
    """What `unpack_blob` found. meta: what it says about itself; tokens: i64 [n] or None.

    pages, index: of a coded blob, with pages 0, 1, .. in the order they were packed (pages is None if they were written to
    pages of the caller's).  k, v: of a lossless one, the same bits, shape and type as packed.
    """

    meta: Mapping[str, Any]
    tokens: Tensor | None
    pages: DeltaPages | None = None
    index: KeySketch | None = None
    k: Tensor | None = None
    v: Tensor | None = None


# --- writing ----------------------------------------------------------------------------------------------------------


def pack_blob(
    codec: Codec | None,
    pages: DeltaPages | tuple[Tensor, Tensor],
    page_ids: Sequence[int] | Tensor | None = None,
    *,
    tokens: Sequence[int] | Tensor | None = None,
    index: KeySketch | None = None,
    about: Mapping[str, str] | None = None,
) -> bytes:
    """Pages as bytes.

    Coded: `pages` written with `codec`; page_ids: which, in this order (None: all); index: their key sketch goes along.
    Lossless (codec None): pages = (k, v), float tensors of any shape; their bits are kept, NaN payloads and -0.0 included,
    in at most their own bytes and the header.
    tokens: what the pages hold, to be compared before they are used.  about: strings of the caller's.
    Deterministic: the same rows give the same bytes, wherever in the pages they lay.
    """
    if codec is None:
        for name, given in (("page_ids", page_ids), ("index", index)):
            if given is not None:
                raise ArgumentError.of("pack_blob", name, type(given).__name__, "None without a codec")
        meta, parts, fingerprint = _lossless_parts(pages)
    else:
        meta, parts, fingerprint = _coded_parts(codec, pages, page_ids, index)
    if tokens is not None:
        ids = _integers("pack_blob", "tokens", tokens).cpu().contiguous()
        meta["tokens"] = ids.numel()
        parts.append(("TOKN", 8, _bytes_of(ids)))
    meta["about"] = {str(k): str(v) for k, v in (about or {}).items()}
    encoded_meta = json.dumps(meta, sort_keys=True, separators=(",", ":")).encode()
    return _assemble([("META", 1, encoded_meta), *parts], fingerprint, compress=codec is None)


def _lossless_parts(pages: Any) -> tuple[dict[str, Any], list[tuple[str, int, bytes]], bytes]:
    if not isinstance(pages, tuple) or len(pages) != 2:
        raise ArgumentError.of("pack_blob", "pages", type(pages).__name__, "(k, v) without a codec")
    meta: dict[str, Any] = {"mode": "lossless"}
    parts = []
    for name, x in zip(("k", "v"), pages):
        if not isinstance(x, Tensor) or x.dtype not in RAW_DTYPES:
            got = str(x.dtype).removeprefix("torch.") if isinstance(x, Tensor) else type(x).__name__
            raise ArgumentError.of("pack_blob", name, got, "|".join(DTYPES))
        meta[name] = {"dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape)}
        parts.append((name.upper() + "RAW", x.element_size(), _bytes_of(x)))
    return meta, parts, bytes(16)


def _coded_parts(
    codec: Codec, pages: Any, page_ids: Any, index: KeySketch | None
) -> tuple[dict[str, Any], list[tuple[str, int, bytes]], bytes]:
    if not isinstance(codec, Codec) or not isinstance(pages, DeltaPages):
        got = f"{type(codec).__name__}, {type(pages).__name__}"
        raise ArgumentError.of("pack_blob", "codec, pages", got, "Codec, DeltaPages")
    if pages.codec not in (None, codec.fingerprint):
        raise ArgumentError.of("pack_blob", "codec", codec.fingerprint, f"{pages.codec}, which the pages are for")
    P, Hkv, page, _ = pages.k_codes.shape
    ids = _page_ids("pack_blob", page_ids, P, pages.k_codes.device)
    n, entries = ids.numel(), pages.raw_rows(ids)[0].numel()
    compact = DeltaPages.allocate(
        codec, n, page, Hkv, codec.Dk, codec.Dv, pages.k_codes.device, raw_rows=entries, raw_dtype=pages.raw.dtype
    )
    compact.copy_from(pages, ids, torch.arange(n, device=ids.device))
    meta: dict[str, Any] = {
        "mode": "coded", "pages": n, "page_size": page, "heads": Hkv, "Dk": codec.Dk, "Dv": codec.Dv,
        "k_bits": codec.k_bits, "v_bits": codec.v_bits, "raw_rows": entries,
        "raw_dtype": str(pages.raw.dtype).removeprefix("torch."), "codec": codec.fingerprint,
    }  # fmt: skip
    arrays = {"KCOD": compact.k_codes, "VCOD": compact.v_codes, "TAGS": compact.tags, "RAWR": compact.raw}
    parts = [(kind, 1, _bytes_of(array)) for kind, array in arrays.items()]
    parts.append(("RAWO", 8, _bytes_of(compact.raw_owner)))
    if index is not None:
        if not isinstance(index, KeySketch) or tuple(index.norm.shape) != (P, Hkv, page) or codec.Dk != index.D:
            got = f"of {list(index.norm.shape)}, D {index.D}" if isinstance(index, KeySketch) else type(index).__name__
            raise ArgumentError.of("pack_blob", "index", got, f"a KeySketch of {[P, Hkv, page]}, D {codec.Dk}")
        meta["sketch"] = {"planes": index.planes}
        parts += [("SBIT", 1, _bytes_of(index.bits[ids])), ("SNRM", 2, _bytes_of(index.norm[ids]))]
        parts += [("SCEN", 4, _bytes_of(index.params.centre)), ("SSCL", 4, _bytes_of(index.params.scale))]
    return meta, parts, bytes.fromhex(codec.fingerprint)


def _page_ids(op: str, page_ids: Any, pages: int, device: torch.device) -> Tensor:
    if page_ids is None:
        return torch.arange(pages, device=device)
    ids = _integers(op, "page_ids", page_ids).to(device)
    if bool(((ids < 0) | (ids >= pages)).any()) or ids.unique().numel() != ids.numel():
        raise ArgumentError.of(op, "page_ids", ids.tolist(), f"different pages from 0 to {pages - 1}")
    return ids


def _integers(op: str, arg: str, values: Any) -> Tensor:
    """int64 [n]; `ArgumentError` for what is none of it, fractions and booleans too."""
    try:
        x = torch.as_tensor(values)
        x = x.to(torch.int64) if x.numel() == 0 else x
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError.of(op, arg, f"{type(values).__name__} ({error})", "whole numbers [n]") from None
    if x.ndim != 1 or x.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8):
        raise ArgumentError.of(op, arg, f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}", "whole numbers [n]")
    return x.to(torch.int64)


def _bytes_of(x: Tensor) -> bytes:
    return x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _assemble(parts: list[tuple[str, int, bytes]], fingerprint: bytes, compress: bool) -> bytes:
    at = HEADER.size + ENTRY.size * len(parts)
    table, body = b"", b""
    for kind, item, data in parts:
        encoding, stored = _encoded(data, item) if compress or kind in ("META", "TOKN") else (STORED, data)
        gap = -(at + len(body)) % ALIGNMENT
        offset = at + len(body) + gap
        body += bytes(gap) + stored
        table += ENTRY.pack(kind.encode(), encoding, item, offset, len(stored), len(data), _crc(stored), _crc(data))
    fields = (MAGIC, MAJOR, MINOR, 0, 0, len(parts), at + len(body), fingerprint, bytes(8), _crc(table))
    head = HEADER.pack(*fields, 0)[:-4]
    return head + struct.pack("<I", _crc(head)) + table + body


def _encoded(data: bytes, item: int) -> tuple[int, bytes]:
    """The smallest of what the encodings make of it."""
    compress = _zstandard().ZstdCompressor(level=LEVEL, write_content_size=True).compress
    candidates = [(STORED, data), (ZSTD, compress(data))]
    if item > 1:
        candidates.append((PLANES, compress(_to_planes(data, item))))
    return min(candidates, key=lambda c: len(c[1]))


def _to_planes(data: bytes, item: int) -> bytes:
    return b"".join(data[i::item] for i in range(item))


def _from_planes(data: bytes, item: int) -> bytes:
    out = bytearray(len(data))
    n = len(data) // item
    for i in range(item):
        out[i::item] = data[i * n : (i + 1) * n]
    return bytes(out)


# --- reading ----------------------------------------------------------------------------------------------------------


def unpack_blob(
    data: bytes | bytearray | memoryview,
    codec: Codec | None = None,
    pages: DeltaPages | None = None,
    page_ids: Sequence[int] | Tensor | None = None,
) -> Blob:
    """What `pack_blob` packed.

    codec: of a coded blob, that it was made with (its fingerprint is compared).  pages, page_ids: pages of the caller's to
    write to, one for each of the blob; without, new ones are made on the codec's device.
    `BlobError` for whatever is wrong with the bytes, `ArgumentError` for pages without room; nothing is written then.
    """
    view = _view(data)
    sections, fingerprint = _table(view)
    meta = _meta(view, sections)
    _check_sizes(view, sections, meta)
    tokens = _tensor(view, sections, "TOKN", torch.int64, [meta["tokens"]]) if "tokens" in meta else None
    if meta["mode"] == "lossless":
        k, v = (_tensor(view, sections, f"{x.upper()}RAW", DTYPES[meta[x]["dtype"]], meta[x]["shape"]) for x in "kv")
        return Blob(meta, tokens, k=k, v=v)
    if not isinstance(codec, Codec):
        raise BlobError(f"a coded blob needs the codec it was made with, fingerprint {fingerprint.hex()}")
    if fingerprint.hex() != codec.fingerprint or meta.get("codec") != codec.fingerprint:
        raise BlobError(
            f"made with codec {fingerprint.hex()} (its templates, bits, RoPE), not with {codec.fingerprint}"
        )
    found = _coded(view, sections, meta, codec)
    index = _index(view, sections, meta, codec)
    if pages is None:
        return Blob(meta, tokens, found, index)
    if not isinstance(pages, DeltaPages):
        raise ArgumentError.of("unpack_blob", "pages", type(pages).__name__, "DeltaPages")
    device, n = pages.k_codes.device, meta["pages"]
    ids = _page_ids("unpack_blob", page_ids, pages.k_codes.shape[0], device)
    if ids.numel() != n:
        raise ArgumentError.of("unpack_blob", "page_ids", f"{ids.numel()} pages", f"{n}")
    pages.copy_from(found.to(device), torch.arange(n, device=device), ids)
    return Blob(meta, tokens, None, index)


def inspect_blob(data: bytes | bytearray | memoryview) -> dict[str, Any]:
    """What a blob says about itself: version, fingerprint, meta, sections with their sizes.

    All that is stored is checked against its checksums, and the sizes against the shapes; what is compressed is not unpacked,
    so that the memory it takes is that of the blob.
    """
    view = _view(data)
    sections, fingerprint = _table(view)
    meta = _meta(view, sections)
    _check_sizes(view, sections, meta)
    for section in sections.values():
        _stored(view, section)
    names = {STORED: "stored", ZSTD: "zstd", PLANES: "byte planes, zstd"}
    return {
        "version": f"{view[8] | view[9] << 8}.{view[10] | view[11] << 8}",
        "bytes": len(view),
        "codec": fingerprint.hex() if meta["mode"] == "coded" else None,
        "meta": meta,
        "sections": [
            {"kind": s.kind, "encoding": names[s.encoding], "stored": s.stored, "bytes": s.size}
            for s in sections.values()
        ],
    }


def _view(data: Any) -> memoryview:
    try:
        return memoryview(data).cast("B")
    except TypeError:
        raise ArgumentError.of("unpack_blob", "data", type(data).__name__, "bytes") from None


def _table(view: memoryview) -> tuple[dict[str, Section], bytes]:
    """Header and table, checked; sections by kind."""
    if len(view) < HEADER.size:
        raise BlobError(f"{len(view)} bytes: shorter than a header")
    magic, major, _minor, required, _, count, length, fingerprint, reserved, table_crc, crc = HEADER.unpack_from(view)
    if magic != MAGIC:
        raise BlobError("not a blob: it begins with other bytes")
    if crc != _crc(view[: HEADER.size - 4]):
        raise BlobError("the header is damaged")
    if major != MAJOR:
        raise BlobError(f"version {major}: this library reads version {MAJOR}")
    if required & ~KNOWN_REQUIRED or reserved != bytes(8):
        raise BlobError(f"needs features that this library does not know (flags {required:#x})")
    if length != len(view):
        raise BlobError(f"{len(view)} bytes of {length}")
    end = HEADER.size + ENTRY.size * count
    if count > MAX_SECTIONS or end > len(view):
        raise BlobError(f"{count} sections do not fit")
    if table_crc != _crc(view[HEADER.size : end]):
        raise BlobError("the table of sections is damaged")
    return _sections(view, count, end), fingerprint


def _sections(view: memoryview, count: int, end: int) -> dict[str, Section]:
    found: dict[str, Section] = {}
    at = end
    for i in range(count):
        kind, *rest = ENTRY.unpack_from(view, HEADER.size + ENTRY.size * i)
        section = Section(kind.decode("latin-1"), *rest)
        start = at + -at % ALIGNMENT
        if section.kind in found or section.offset != start or start + section.stored > len(view):
            raise BlobError(f"section {section.kind!r} does not lie where it should")
        if bytes(view[at:start]).strip(b"\0"):
            raise BlobError(f"bytes before section {section.kind!r} that belong to nothing")
        at = start + section.stored
        found[section.kind] = section
    if at != len(view):
        raise BlobError(f"{len(view) - at} bytes behind the last section")
    return found


def _stored(view: memoryview, section: Section) -> memoryview:
    stored = view[section.offset : section.offset + section.stored]
    if _crc(stored) != section.stored_crc:
        raise BlobError(f"section {section.kind!r} is damaged")
    if section.encoding not in (STORED, ZSTD, PLANES):
        raise BlobError(f"section {section.kind!r} has an unknown encoding, {section.encoding}")
    if section.encoding == PLANES and (section.item < 1 or section.size % section.item):
        raise BlobError(f"section {section.kind!r} has items of {section.item} bytes")
    return stored


def _decoded(view: memoryview, section: Section) -> bytes:
    stored = _stored(view, section)
    data = bytes(stored) if section.encoding == STORED else _decompressed(stored, section)
    if section.encoding == PLANES and len(data) == section.size:
        data = _from_planes(data, section.item)
    if len(data) != section.size or _crc(data) != section.crc:
        raise BlobError(f"section {section.kind!r} is not what was packed")
    return data


def _decompressed(stored: memoryview, section: Section) -> bytes:
    """At most the bytes that the table speaks of, whatever the stream says."""
    zstandard = _zstandard()
    out = bytearray()
    try:
        with zstandard.ZstdDecompressor().stream_reader(bytes(stored), read_across_frames=False) as reader:
            while len(out) <= section.size:
                more = reader.read(min(1 << 20, section.size + 1 - len(out)))
                if not more:
                    break
                out += more
    except zstandard.ZstdError as error:
        raise BlobError(f"section {section.kind!r}: {error}") from None
    return bytes(out)


def _meta(view: memoryview, sections: Mapping[str, Section]) -> dict[str, Any]:
    section = sections.get("META")
    if section is None:
        raise BlobError("section 'META' is missing")
    if section.size > 1 << 20:
        raise BlobError(f"section 'META' of {section.size} bytes")
    try:
        meta = json.loads(_decoded(view, section))
    except (ValueError, RecursionError) as error:
        if isinstance(error, BlobError):
            raise
        raise BlobError(f"section 'META': {error}") from None
    if not isinstance(meta, dict) or meta.get("mode") not in ("coded", "lossless"):
        raise BlobError("section 'META' names no mode")
    return meta


def _sizes(meta: Mapping[str, Any], *names: str) -> list[int]:
    values = [meta.get(name) for name in names]
    for name, value in zip(names, values):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 40:
            raise BlobError(f"section 'META': {name} is {value!r}")
    return values  # type: ignore[return-value]


def _dtype(name: Any) -> torch.dtype:
    if not isinstance(name, str) or name not in DTYPES:
        raise BlobError(f"section 'META': type {name!r}")
    return DTYPES[name]


def _shape(name: str, about: Any) -> list[int]:
    """Of a lossless tensor."""
    shape = about.get("shape") if isinstance(about, dict) else None
    if not isinstance(shape, list) or len(shape) > 8:
        raise BlobError(f"section 'META': shape of {name!r} is {shape!r}")
    return _sizes({str(i): n for i, n in enumerate(shape)}, *map(str, range(len(shape))))


def _check_sizes(view: memoryview, sections: Mapping[str, Section], meta: Mapping[str, Any]) -> None:
    """Every section that META speaks of is there, with as many bytes as its shape says; of others what is stored is whole."""
    wanted = _coded_sizes(meta) if meta["mode"] == "coded" else _lossless_sizes(meta)
    if "tokens" in meta:
        wanted["TOKN"] = 8 * _sizes(meta, "tokens")[0]
    for kind, size in wanted.items():
        if kind not in sections:
            raise BlobError(f"section {kind!r} is missing")
        if sections[kind].size != size:
            raise BlobError(f"section {kind!r} has {sections[kind].size} bytes, the shapes say {size}")
    for section in sections.values():
        if section.kind not in wanted:
            _stored(view, section)


def _lossless_sizes(meta: Mapping[str, Any]) -> dict[str, int]:
    wanted = {}
    for name in ("k", "v"):
        shape = _shape(name, meta.get(name))
        if math.prod(max(n, 1) for n in shape) >= 1 << 60:
            raise BlobError(f"section 'META': shape of {name!r} is {shape}")
        wanted[name.upper() + "RAW"] = math.prod(shape) * _dtype(meta[name].get("dtype")).itemsize
    return wanted


def _coded_sizes(meta: Mapping[str, Any]) -> dict[str, int]:
    names = ("pages", "page_size", "heads", "Dk", "Dv", "raw_rows", "k_bits", "v_bits")
    P, page, heads, Dk, Dv, E, k_bits, v_bits = sizes = _sizes(meta, *names)
    if (
        min(page, heads, Dk, Dv) < 1
        or max(Dk, Dv) > MAX_DIM
        or not {k_bits, v_bits} <= set(BITS)
        or math.prod((max(P, 1), page, heads, max(Dk, Dv))) >= 1 << 60
        or E * (Dk + Dv) >= 1 << 60
    ):
        raise BlobError(f"section 'META': {', '.join(f'{k} {v}' for k, v in zip(names, sizes))}")
    rows = P * heads * page
    wanted = {"KCOD": rows * code_bytes(Dk, k_bits), "VCOD": rows * code_bytes(Dv, v_bits), "TAGS": rows * TAG_BYTES,
              "RAWR": E * (Dk + Dv) * _dtype(meta.get("raw_dtype")).itemsize, "RAWO": 8 * E}  # fmt: skip
    about = meta.get("sketch")
    if about is not None:
        planes = _sizes(about, "planes")[0] if isinstance(about, dict) else 0
        if planes not in (1, 2):
            raise BlobError(f"section 'META': sketch is {about!r}")
        wanted |= {"SBIT": P * heads * planes * page * -(-Dk // 8), "SNRM": 2 * rows, "SCEN": 4 * heads * Dk,
                   "SSCL": 4 * heads}  # fmt: skip
    return wanted


def _tensor(
    view: memoryview, sections: Mapping[str, Section], kind: str, dtype: torch.dtype, shape: Sequence[int]
) -> Tensor:
    """A section whose size has been checked."""
    data = _decoded(view, sections[kind])
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(tuple(shape))


def _coded(view: memoryview, sections: Mapping[str, Section], meta: Mapping[str, Any], codec: Codec) -> DeltaPages:
    P, page, Hkv, E = (meta[name] for name in ("pages", "page_size", "heads", "raw_rows"))
    found = tuple(meta[name] for name in ("heads", "Dk", "Dv", "k_bits", "v_bits"))
    wanted = (codec.heads, codec.Dk, codec.Dv, codec.k_bits, codec.v_bits)
    if found != wanted:
        raise BlobError(f"heads, channels and bits {found}, not those of the codec, {wanted}")

    def part(kind: str, dtype: torch.dtype, *shape: int) -> Tensor:
        return _tensor(view, sections, kind, dtype, shape)

    widths = zip(("KCOD", "VCOD", "TAGS"), codec.widths)
    k_codes, v_codes, tags = (part(kind, torch.uint8, P, Hkv, page, width) for kind, width in widths)
    raw, owner = part("RAWR", DTYPES[meta["raw_dtype"]], E, codec.Dk + codec.Dv), part("RAWO", torch.int64, E)
    pages = DeltaPages(k_codes, v_codes, tags, raw, owner, torch.tensor([E, 0], dtype=torch.int32), codec.fingerprint)
    index, head, offset, entry = pages.raw_rows(torch.arange(P))
    slots = (index * page + offset) * Hkv + head
    if entry.numel() != E or bool((entry != torch.arange(E)).any()) or bool((owner != slots).any()):
        raise BlobError("raw rows and their entries do not belong together")
    _check_tags(tags, codec)
    return pages.to(codec.device)


def _check_tags(tags: Tensor, codec: Codec) -> None:
    """Scales that a row can have, templates that there are; nothing but its mark in the tag of a raw row."""
    k_scale, v_scale, k_id, v_id, raw = read_tags(tags)
    scales = torch.stack((k_scale, v_scale)).masked_fill(raw, 0)
    if not bool((scales.isfinite() & (scales >= 0)).all()) or bool(tags[..., 2:][raw].any()):
        raise BlobError("section 'TAGS' has scales that no row has")
    if bool((k_id >= codec.k_templates.count).any()) or bool((v_id >= codec.v_templates.count).any()):
        raise BlobError("section 'TAGS' names templates that the codec does not have")


def _index(
    view: memoryview, sections: Mapping[str, Section], meta: Mapping[str, Any], codec: Codec
) -> KeySketch | None:
    if meta.get("sketch") is None:
        return None
    P, page, Hkv, Dk = (meta[name] for name in ("pages", "page_size", "heads", "Dk"))

    def part(kind: str, dtype: torch.dtype, *shape: int) -> Tensor:
        return _tensor(view, sections, kind, dtype, shape).to(codec.device)

    bits = part("SBIT", torch.uint8, P, Hkv, meta["sketch"]["planes"] * page * -(-Dk // 8))
    params = SketchParams(part("SCEN", torch.float32, Hkv, Dk), part("SSCL", torch.float32, Hkv))
    if not bool(params.centre.isfinite().all()) or not bool((params.scale.isfinite() & (params.scale >= 0)).all()):
        raise BlobError("the key sketch's centre or scale is no number that a sketch has")
    return KeySketch(bits, part("SNRM", torch.bfloat16, P, Hkv, page), params, Dk, page)


def _crc(data: Any) -> int:
    return int(extra("google_crc32c", "blobs", "blobs").value(bytes(data)))


def _zstandard() -> Any:
    return extra("zstandard", "blobs", "blobs")
