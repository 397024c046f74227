"""`Cursor`: where an interrupted run goes on, in 64 bytes.

    bytes 0..3    magic "SICC"              24..31  seed of the run's random numbers
          4..5    version                   32..39  stamp: nanoseconds of the monotonic clock
          6..7    boot: which start of      40..55  digest of the fingerprint
                  the machine it counts     56..59  digest of the plan
          8..11   layer                     60..63  CRC-32 of the bytes before
          12..15  position
          16..23  epoch

Little endian. Nothing in it is an address: buffers are named by the plan.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
import zlib
from pathlib import Path

from ..runtime.errors import ArgumentError
from .errors import StaleCursor

MAGIC, VERSION = b"SICC", 1
NBYTES = 64
MAX_LAYERS, MAX_POSITIONS = 1 << 12, 1 << 28  # csrc/replay/cursor_word.h
_LAYOUT = struct.Struct("<4sHHIIQQQ16sI")
_CRC = struct.Struct("<I")


@functools.cache
def boot_id() -> int:
    """16 bits that name this start of the machine, 0 where it cannot be told: the monotonic clock begins anew with it."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return 0
    return zlib.crc32(text) & 0xFFFF


@dataclasses.dataclass(frozen=True)
class Cursor:
    """The segment (`layer`) and first token (`position`) that run `epoch` does next; immutable.

    fingerprint: the 16 bytes of `Fingerprint.digest`. rng: the seed of the run. stamp: when, in nanoseconds of the monotonic
    clock since the start of the machine (`boot`). plan: digest of the segments and buffers. Raises `ArgumentError` for what
    does not fit into the 64 bytes.
    """

    layer: int
    position: int
    epoch: int
    fingerprint: bytes
    rng: int = 0
    stamp: int = 0
    plan: int = 0
    boot: int = dataclasses.field(default_factory=boot_id)

    def __post_init__(self) -> None:
        limits = {"layer": MAX_LAYERS, "position": MAX_POSITIONS, "epoch": 1 << 64, "rng": 1 << 64, "stamp": 1 << 64,
                  "plan": 1 << 32, "boot": 1 << 16}  # fmt: skip
        for name, limit in limits.items():
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value < limit:
                raise ArgumentError.of(
                    "Cursor", name, repr(value), f"an integer from 0 to 2^{limit.bit_length() - 1} - 1"
                )
        if not isinstance(self.fingerprint, bytes) or len(self.fingerprint) != 16:
            raise ArgumentError.of(
                "Cursor", "fingerprint", repr(self.fingerprint), "the 16 bytes of Fingerprint.digest"
            )

    def to_bytes(self) -> bytes:
        """64 bytes, the same on every machine."""
        body = _LAYOUT.pack(MAGIC, VERSION, self.boot, self.layer, self.position, self.epoch, self.rng, self.stamp,
                            self.fingerprint, self.plan)  # fmt: skip
        return body + _CRC.pack(zlib.crc32(body))

    @classmethod
    def from_bytes(cls, data: bytes) -> Cursor:
        """The cursor that `to_bytes` wrote; `StaleCursor` for anything else, with what is wrong."""
        if not isinstance(data, bytes | bytearray | memoryview):
            raise ArgumentError.of("Cursor.from_bytes", "data", type(data).__name__, "bytes")
        data = bytes(data)
        if len(data) != NBYTES:
            raise StaleCursor(f"cursor: {len(data)} bytes, expected {NBYTES}")
        body = data[:-4]
        if data[:4] != MAGIC:
            raise StaleCursor("cursor: these bytes are not a cursor")
        if _CRC.unpack(data[-4:])[0] != zlib.crc32(body):
            raise StaleCursor("cursor: damaged (its checksum does not fit)")
        _, version, boot, layer, position, epoch, rng, stamp, fingerprint, plan = _LAYOUT.unpack(body)
        if version != VERSION:
            raise StaleCursor(f"cursor: version {version}, this library reads {VERSION}")
        if layer >= MAX_LAYERS or position >= MAX_POSITIONS:
            raise StaleCursor(f"cursor: layer {layer}, position {position} are beyond what a plan can have")
        return cls(layer, position, epoch, fingerprint, rng, stamp, plan, boot)
