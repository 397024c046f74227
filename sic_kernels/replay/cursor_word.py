"""`CursorWord`: the progress of a run, marked after every segment by one 64-bit store that outlives the process.

The memory (a page; csrc/replay/cursor_word.h describes the word):

    0..7      magic "SICWORD1"
    64..71    the word          72..79   nanoseconds of the monotonic clock at the mark
    512..     record of runs with an even epoch: epoch, begin, end, chunk, seed, plan, process, boot, anew, length of the
              fingerprint's JSON, CRC-32 of all this, the JSON
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
import weakref
import zlib
from collections.abc import Callable
from typing import Any

from ..runtime import native
from ..runtime.arguments import file_path, instance, integer
from ..runtime.errors import ArgumentError, SicError
from ..runtime.fingerprint import Fingerprint
from .cursor import Cursor, boot_id
from .errors import StaleCursor

MAGIC = b"SICWORD1"
PAGE = 4096
_WORD, _RECORDS, _RECORD_BYTES = 64, 512, 1792
_RECORD = struct.Struct("<QQQQQIIH?xH")
_CRC = struct.Struct("<I")
MAX_FINGERPRINT = _RECORD_BYTES - _RECORD.size - _CRC.size  # bytes of JSON
RETIRED = (1 << 12) - 1  # in place of a layer: the run cannot go on; its position is how far the rows are right
_START = os.urandom(8)  # numbers of processes are used again
EPOCH_MASK = (1 << 12) - 1  # what the word keeps of an epoch


def process_id() -> int:
    """32 bits that name this process; a forked child has others."""
    return zlib.crc32(_START + os.getpid().to_bytes(8, "little"))


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """A run: tokens begin .. end in chunks, the seed of its random numbers, and whose it is. anew: it stands in for one that
    could not be resumed."""

    epoch: int
    begin: int
    end: int
    chunk: int
    seed: int
    plan: int
    fingerprint: Fingerprint
    process: int = dataclasses.field(default_factory=process_id)
    boot: int = dataclasses.field(default_factory=boot_id)
    anew: bool = False

    def index(self, layer: int, position: int, layers: int) -> int:
        """The number of a segment over the whole run of a plan of `layers` segments; of (0, end): how many there are."""
        return -(-(position - self.begin) // self.chunk) * layers + layer

    def place(self, index: int, layers: int) -> tuple[int, int]:
        """(layer, position) of the segment of that number."""
        chunk, layer = divmod(index, layers)
        return layer, self.begin + chunk * self.chunk

    def to_bytes(self) -> bytes:
        text = self.fingerprint.to_json().encode()
        numbers = (self.epoch, self.begin, self.end, self.chunk, self.seed, self.plan, self.process, self.boot)
        head = _RECORD.pack(*numbers, self.anew, len(text))
        return head + _CRC.pack(zlib.crc32(text, zlib.crc32(head))) + text

    @classmethod
    def from_bytes(cls, data: bytes) -> RunRecord | None:
        """None: no whole record is there."""
        head, crc = data[: _RECORD.size], data[_RECORD.size : _RECORD.size + 4]
        epoch, begin, end, chunk, seed, plan, process, boot, anew, length = _RECORD.unpack(head)
        text = data[_RECORD.size + 4 :][:length]
        if _CRC.unpack(crc)[0] != zlib.crc32(text, zlib.crc32(head)):
            return None
        return cls(epoch, begin, end, chunk, seed, plan, Fingerprint.from_json(text.decode()), process, boot, anew)


class CursorWord:
    """Progress of one run at a time, in memory (`path` None) or in a mapped file that survives the death of the process.

    The file is made if there is none; it survives kill -9 and a crash of the process, not the loss of power. One process at
    a time may hold it (`SicError` otherwise); `StaleCursor` if the file is of another kind or size. Only the monotonic clock is
    used. `mark` costs a fraction of a microsecond.

    While the word is in use nobody may make the file shorter: the next access would be to memory that is not there, and end the
    process (SIGBUS). To be rid of a word, close it and delete its file.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        op = "CursorWord"
        now = clock() if callable(clock) else None
        if type(now) is not int or not 0 <= now < 1 << 64:
            raise ArgumentError.of(op, "clock", repr(now), "a function that returns nanoseconds, an int")
        self._file: int | None = None
        self._view: Any = None
        self._known: tuple[bytes, RunRecord | None] | None = None
        self._owner, self.clock = os.getpid(), clock
        self.holder: weakref.ref[Any] | None = None  # the plan that marks here
        self.path = None if path is None else file_path(op, "path", path, "a path, or None")
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # a forked child has its own
        if self.path is None:
            self._memory = mmap.mmap(-1, PAGE, flags=private)
            self._memory[:8] = MAGIC
        else:
            try:
                self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                self._memory = self._mapped(self.path, self._file)
            except (OSError, ValueError) as error:
                self.close()
                raise ArgumentError.of(
                    op, "path", repr(self.path), f"a file that can be made or opened ({error})"
                ) from None
            except BaseException:
                self.close()
                raise
        self._view = native.module().ProgressView(memoryview(self._memory)[_WORD : _WORD + 16])

    @staticmethod
    def _mapped(path: str, file: int) -> mmap.mmap:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SicError(f"{path}: the progress word is in use, by this process or another") from None
        size = os.fstat(file).st_size
        if size not in (0, PAGE):
            raise StaleCursor(f"{path}: {size} bytes, expected {PAGE}: not a file of progress words")
        os.posix_fallocate(file, 0, PAGE)  # a full disk is an error here, and not a signal at the first mark
        memory = mmap.mmap(file, PAGE)
        if size == 0:
            memory[:8] = MAGIC
        if memory[:8] != MAGIC:
            memory.close()
            raise StaleCursor(f"{path}: not a file of progress words")
        return memory

    @property
    def address(self) -> int:
        """Of the word, for a device that shall write it."""
        self._check_open()
        return self._view.address()

    def begin(self, record: RunRecord) -> None:
        """The next run: its record, then its first mark."""
        instance("CursorWord.begin", "record", record, RunRecord)
        if os.getpid() != self._owner:
            raise SicError("progress word: of the process that this one was forked from: make another")
        self._check_open()
        place = self._place(record.epoch)
        data = record.to_bytes()
        self._memory[place : place + len(data)] = data
        self.mark(record.epoch, 0, record.begin)

    def newest_epoch(self) -> int:
        """Of the records that are whole, whatever the word says; 0: there is none."""
        found = (self._record(parity) for parity in (0, 1))
        return max((record.epoch for record in found if record is not None), default=0)

    def mark(self, epoch: int, layer: int, position: int) -> None:
        """Run `epoch` goes on with segment `layer` at `position`; everything before is done."""
        try:  # what comes after every segment has no checks of its own
            self._view.mark(epoch, layer, position, self.clock())
        except (TypeError, AttributeError):
            self._check_open()
            for arg, value in (("epoch", epoch), ("layer", layer), ("position", position)):
                integer("CursorWord.mark", arg, value, 0, "an integer, 0 or more", 64)
            raise

    def read(self) -> tuple[RunRecord, Cursor] | None:
        """The last run and where it goes on; None if there was none. `StaleCursor` if the word or its record is damaged."""
        self._check_open()
        found = self._view.read()
        if found is None:
            if self.raw() == bytes(8):
                return None
            raise StaleCursor("progress word: damaged (its check does not fit)")
        epoch, layer, position, stamp = found
        record = self._record(epoch)
        if record is None or record.epoch & EPOCH_MASK != epoch:
            raise StaleCursor(f"progress word: no whole record of run {epoch}")
        digest = record.fingerprint.digest
        return record, Cursor(layer, position, record.epoch, digest, record.seed, stamp, record.plan, record.boot)

    def _record(self, epoch: int) -> RunRecord | None:
        place = self._place(epoch)
        data = self._memory[place : place + _RECORD_BYTES]
        if self._known is None or self._known[0] != data:  # reading it takes longer than comparing it
            self._known = data, RunRecord.from_bytes(data)
        return self._known[1]

    @property
    def is_open(self) -> bool:
        return self._view is not None

    def _check_open(self) -> None:
        if not self.is_open:
            raise SicError("progress word: it was closed")

    def raw(self) -> bytes:
        """The word as it lies there."""
        return bytes(self._memory[_WORD : _WORD + 8])

    def set_raw(self, word: bytes) -> None:
        """For fault injection: 8 bytes."""
        if not isinstance(word, bytes | bytearray) or len(word) != 8:
            raise ArgumentError.of("CursorWord.set_raw", "word", repr(word), "8 bytes")
        self._memory[_WORD : _WORD + 8] = word

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            self.close()

    def _place(self, epoch: int) -> int:
        return _RECORDS + (epoch & 1) * _RECORD_BYTES

    def close(self) -> None:
        """Gives the file free for others. The word must not be used again."""
        self._view = None
        if self._file is not None:
            if os.getpid() == self._owner:  # the mapping keeps the file open, and a child shares the lock
                fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)
            self._file = None
