"""Fuzz the reading of blobs: python tools/fuzz_blob.py [--seconds 10] [--seed 0] [--guided]

Each input is a list of edits of a good blob: bytes of the header, the table, the JSON or a section replaced, sections cut,
numbers in the JSON changed. Checksums are then made right again, so that what lies behind them is reached. A blob must be
refused with `BlobError`, or be read whole: then it is packed again and read again, and coded pages are decoded.

--guided: atheris (pip install atheris) looks for inputs that reach new lines; without it edits are drawn at random. Whatever
is found ends the run with its traceback and the edits.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    16,
    255,
    1 << 16,
    1 << 31,
    1 << 32,
    (1 << 40) - 1,
    1 << 40,
    1 << 62,
    1 << 63,
    (1 << 64) - 1,
    -1,
)
VALUES = (
    *NUMBERS, True, None, 1.5, 1e300, "", "float32", "bfloat16", "int8", "coded", "lossless", [], {}, [1 << 32, 1 << 32],
    [0, 1 << 39, 1 << 39], [[1]], {"shape": [2], "dtype": "float16"}, {"shape": [0, 1 << 39, 1 << 39], "dtype": "float16"},
    {"planes": 1}, {"planes": 2}, {"planes": True}, {"planes": 1.0},
)  # fmt: skip


class Stream:
    """Small numbers from bytes; zeros behind the end."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def number(self, below: int) -> int:
        part = self.data[self.at : self.at + 2]
        self.at += 2
        return int.from_bytes(part, "little") % max(below, 1)

    def more(self) -> bool:
        return self.at < len(self.data)


class Target:
    """Good blobs and the codec that two of them were made with."""

    def __init__(self) -> None:
        import torch

        from sic_kernels import delta
        from sic_kernels.delta import blob

        self.torch, self.delta, self.blob = torch, delta, blob
        gen = torch.Generator().manual_seed(0)
        rows = [torch.randn(64, 2, 32, generator=gen) for _ in range(3)]
        templates = [delta.fit_templates(x, count=4, iterations=2) for x in rows[:2]]
        self.codec = delta.Codec(4, 3, *templates, sinks=2)
        pages = delta.DeltaPages.allocate(self.codec, 3, 16, 2, 32, 32, raw_rows=16)
        delta.encode(self.codec, rows[2][:40], rows[1][:40], torch.arange(40), torch.arange(40), pages)
        k = rows[0].half()
        self.good = [
            blob.pack_blob(self.codec, pages, [2, 0], tokens=range(32), about={"a": "b"}),
            blob.pack_blob(None, (k, rows[1][:3]), tokens=[5]),
            blob.pack_blob(None, (k[:0], k[:1])),
        ]

    def edited(self, data: bytes) -> bytes:
        """The blob that the edits in `data` make, its checksums right."""
        s = Stream(data)
        x = bytearray(self.good[s.number(len(self.good))])
        while s.more():
            kind = s.number(6)
            if kind == 0:  # a byte anywhere
                x[s.number(len(x))] = s.number(256)
            elif kind == 1:  # a number of the table
                count = struct.unpack_from("<I", x, 20)[0]
                at = 64 + 40 * s.number(count) + (8, 16, 24)[s.number(3)]
                if at + 8 <= len(x):
                    struct.pack_into("<Q", x, at, NUMBERS[s.number(len(NUMBERS))] & (1 << 64) - 1)
            elif kind == 2:  # a number of the header
                at, form = ((8, "<H"), (10, "<H"), (12, "<I"), (16, "<I"), (20, "<I"), (24, "<Q"))[s.number(6)]
                bits = 8 * struct.calcsize(form)
                struct.pack_into(form, x, at, NUMBERS[s.number(len(NUMBERS))] & (1 << bits) - 1)
            elif kind == 3:
                x = self.other_meta(x, s)
            elif kind == 4:  # an end
                del x[s.number(len(x)) :]
            else:
                x += bytes(s.number(80))
            if len(x) < 64:
                return bytes(x)
        return self.sealed(x)

    def other_meta(self, x: bytearray, s: Stream) -> bytearray:
        """Another value in the JSON, which is stored as it is, behind everything else."""
        view = memoryview(self.sealed(x))
        try:
            sections, fingerprint = self.blob._table(view)
            meta = self.blob._meta(view, sections)
            parts = [(i.kind, i.item, self.blob._decoded(view, i)) for i in sections.values()]
        except self.blob.BlobError:
            return x
        names = [*meta, "sketch", "extra"]
        meta[names[s.number(len(names))]] = VALUES[s.number(len(VALUES))]
        text = json.dumps(meta).encode()
        parts[0] = ("META", 1, text)
        return bytearray(self.blob._assemble(parts, fingerprint, compress=bool(s.number(2))))

    def sealed(self, x: bytearray) -> bytes:
        """Checksums of sections that lie inside, of the table and of the header made right; and the length."""
        crc = self.blob._crc
        x = bytearray(x)
        if len(x) < 64:
            return bytes(x)
        count = min(struct.unpack_from("<I", x, 20)[0], 64)
        for at in range(64, 64 + 40 * count, 40):
            if at + 40 <= len(x):
                offset, stored = struct.unpack_from("<QQ", x, at + 8)
                if offset + stored <= len(x):
                    struct.pack_into("<I", x, at + 32, crc(x[offset : offset + stored]))
                    if struct.unpack_from("<H", x, at + 4)[0] == 0:
                        struct.pack_into("<I", x, at + 36, crc(x[offset : offset + stored]))
        struct.pack_into("<Q", x, 24, len(x))
        struct.pack_into("<I", x, 56, crc(x[64 : 64 + 40 * count]))
        struct.pack_into("<I", x, 60, crc(x[:60]))
        return bytes(x)

    def check(self, data: bytes) -> bool:
        """Whether the blob was read."""
        blob = self.edited(data)
        for read in (self.blob.inspect_blob, lambda b: self.blob.unpack_blob(b, self.codec)):
            try:
                found: Any = read(blob)
            except self.blob.BlobError:
                return False
        again = self.blob.pack_blob(None, (found.k, found.v)) if found.pages is None else self.packed(found)
        self.blob.unpack_blob(again, self.codec)
        return True

    def packed(self, found: Any) -> bytes:
        pages, page = found.pages, found.pages.page_size
        if 0 < pages.k_codes.shape[0] * page < 1 << 16:
            table = self.torch.arange(pages.k_codes.shape[0], dtype=self.torch.int32)[None]
            length = self.torch.tensor([table.numel() * page], dtype=self.torch.int32)
            self.delta.decode(self.codec, pages, table, length)
        return self.blob.pack_blob(self.codec, pages, index=found.index)


def at_random(target: Target, seconds: float, seed: int) -> tuple[int, int]:
    """Inputs tried, and how many of them were read."""
    draw, end = random.Random(seed), time.monotonic() + seconds
    tried = read = 0
    while time.monotonic() < end:
        data = draw.randbytes(draw.choice((2, 8, 8, 14, 20, 40)))
        try:
            read += target.check(data)
        except Exception:
            print(f"fuzz: edits {data.hex()}", file=sys.stderr)
            raise
        tried += 1
    return tried, read


def guided(make: Callable[[], Target], seconds: float, seed: int) -> None:
    """Ends the process."""
    import atheris

    with atheris.instrument_imports(include=["sic_kernels.delta.blob"]):
        target = make()
    arguments = [sys.argv[0], f"-max_total_time={int(seconds)}", f"-seed={seed + 1}", "-max_len=64", "-rss_limit_mb=4096",
                 "-timeout=20", "-print_final_stats=1"]  # fmt: skip
    atheris.Setup(arguments, target.check)
    atheris.Fuzz()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--guided", action="store_true")
    args = parser.parse_args(arguments)
    if args.guided:
        guided(Target, args.seconds, args.seed)
    tried, read = at_random(Target(), args.seconds, args.seed)
    print(f"fuzz: {tried} blobs, {read} read, the others refused")
    return 0


if __name__ == "__main__":
    sys.exit(main())
