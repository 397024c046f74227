"""`CursorWord`: the progress of a run, marked after every segment by one 64-bit store that outlives the process.

The memory (a page; csrc/replay/cursor_word.h describes the word):

    0..7      magic "SICWORD1"
    64..71    the word          72..79   nanoseconds of the monotonic clock at the mark
    512..     record of runs with an even epoch: epoch, begin, end, chunk, seed, plan, process, boot, length of the fingerprint's
              JSON, CRC-32 of all this, the JSON
    2304..    the same of odd epochs

A run writes its record before its first mark, into the place of the run before last, so at any moment the word's own record
is whole.
"""

from __future__ import annotations

import dataclasses
import fcntl
import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable
from typing import Any

from ..runtime import native
from ..runtime.errors import SicError
from ..runtime.fingerprint import Fingerprint
from .cursor import Cursor, boot_id
from .errors import StaleCursor

MAGIC = b"SICWORD1"
PAGE = 4096
_WORD, _RECORDS, _RECORD_BYTES = 64, 512, 1792
_RECORD = struct.Struct("<QQQQQIIHH")
_CRC = struct.Struct("<I")
MAX_FINGERPRINT = _RECORD_BYTES - _RECORD.size - _CRC.size  # bytes of JSON
PROCESS = int.from_bytes(os.urandom(4), "little")  # names this process; numbers of processes are used again
EPOCH_MASK = (1 << 12) - 1  # what the word keeps of an epoch


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """A run: tokens begin .. end in chunks, the seed of its random numbers, and whose it is."""

    epoch: int
    begin: int
    end: int
    chunk: int
    seed: int
    plan: int
    fingerprint: Fingerprint
    process: int = PROCESS
    boot: int = dataclasses.field(default_factory=boot_id)

    def to_bytes(self) -> bytes:
        text = self.fingerprint.to_json().encode()
        head = _RECORD.pack(
            self.epoch, self.begin, self.end, self.chunk, self.seed, self.plan, self.process, self.boot, len(text)
        )
        return head + _CRC.pack(zlib.crc32(text, zlib.crc32(head))) + text

    @classmethod
    def from_bytes(cls, data: bytes) -> RunRecord | None:
        """None: no whole record is there."""
        head, crc = data[: _RECORD.size], data[_RECORD.size : _RECORD.size + 4]
        epoch, begin, end, chunk, seed, plan, process, boot, length = _RECORD.unpack(head)
        text = data[_RECORD.size + 4 :][:length]
        if _CRC.unpack(crc)[0] != zlib.crc32(text, zlib.crc32(head)):
            return None
        return cls(epoch, begin, end, chunk, seed, plan, Fingerprint.from_json(text.decode()), process, boot)


class CursorWord:
    """Progress of one run at a time, in memory (`path` None) or in a mapped file that survives the death of the process.

    The file is made if there is none; it survives kill -9 and a crash of the process, not the loss of power. One process at
    a time may hold it (`SicError` otherwise); `StaleCursor` if the file is of another kind. Only the monotonic clock is used.
    `mark` costs a fraction of a microsecond.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.path, self.clock = None if path is None else os.fspath(path), clock
        self._file: int | None = None
        self._memory = mmap.mmap(-1, PAGE) if path is None else self._mapped(os.fspath(path))
        if self._memory[:8] == bytes(8):
            self._memory[:8] = MAGIC
        if self._memory[:8] != MAGIC:
            self._memory.close()
            self.close()
            raise StaleCursor(f"{self.path}: not a file of progress words")
        self._view: Any = native.module().ProgressView(memoryview(self._memory)[_WORD : _WORD + 16])

    def _mapped(self, path: str) -> mmap.mmap:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise SicError(f"{path}: another process runs with this progress word") from None
        size = os.fstat(self._file).st_size
        if size not in (0, PAGE):
            self.close()
            raise StaleCursor(f"{path}: {size} bytes, expected {PAGE}: not a file of progress words")
        os.ftruncate(self._file, PAGE)
        return mmap.mmap(self._file, PAGE)

    @property
    def address(self) -> int:
        """Of the word, for a device that shall write it."""
        return self._view.address()

    def begin(self, record: RunRecord) -> None:
        """The next run: its record, then its first mark."""
        place = self._place(record.epoch)
        data = record.to_bytes()
        self._memory[place : place + len(data)] = data
        self.mark(record.epoch, 0, record.begin)

    def mark(self, epoch: int, layer: int, position: int) -> None:
        """Run `epoch` goes on with segment `layer` at `position`; everything before is done."""
        self._view.mark(epoch, layer, position, self.clock())

    def read(self) -> tuple[RunRecord, Cursor] | None:
        """The last run and where it goes on; None if there was none. `StaleCursor` if the word or its record is damaged."""
        found = self._view.read()
        if found is None:
            if self._memory[_WORD : _WORD + 8] == bytes(8):
                return None
            raise StaleCursor("progress word: damaged (its check does not fit)")
        epoch, layer, position, stamp = found
        for parity in (0, 1):
            place = self._place(parity)
            record = RunRecord.from_bytes(self._memory[place : place + _RECORD_BYTES])
            if record is not None and record.epoch & EPOCH_MASK == epoch:
                return record, Cursor(layer, position, record.epoch, record.fingerprint.digest, record.seed, stamp, record.plan,
                                      record.boot)  # fmt: skip
        raise StaleCursor(f"progress word: no whole record of run {epoch}")

    def raw(self) -> bytes:
        """The word as it lies there."""
        return bytes(self._memory[_WORD : _WORD + 8])

    def set_raw(self, word: bytes) -> None:
        """For fault injection."""
        self._memory[_WORD : _WORD + 8] = word

    def _place(self, epoch: int) -> int:
        return _RECORDS + (epoch & 1) * _RECORD_BYTES

    def close(self) -> None:
        """Gives the file free for others. The word must not be used again."""
        self._view = None
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)  # the mapping keeps the file open
            os.close(self._file)
            self._file = None
