"""Cursors as bytes and progress words: what is written is read, and nothing else is."""

import dataclasses
import os
import struct
import zlib

import pytest
from replay_helpers import FINGERPRINT

from sic_kernels import replay
from sic_kernels.replay import Cursor, CursorWord, StaleCursor
from sic_kernels.replay.cursor_word import PAGE, RunRecord
from sic_kernels.replay.faults import Clock
from sic_kernels.runtime.errors import ArgumentError, SicError

CURSOR = Cursor(3, 1000, 7, FINGERPRINT.digest, rng=11, stamp=12345, plan=99, boot=5)


def record(epoch=1, **changes):
    return dataclasses.replace(RunRecord(epoch, 0, 4096, 512, 11, 99, FINGERPRINT), **changes)


def test_bytes_by_hand():
    body = struct.pack("<4sHHIIQQQ16sI", b"SICC", 1, 5, 3, 1000, 7, 11, 12345, FINGERPRINT.digest, 99)
    assert CURSOR.to_bytes() == body + struct.pack("<I", zlib.crc32(body))
    assert len(CURSOR.to_bytes()) == 64


def test_round_trip():
    assert Cursor.from_bytes(CURSOR.to_bytes()) == CURSOR
    assert Cursor.from_bytes(bytearray(CURSOR.to_bytes())) == CURSOR


@pytest.mark.parametrize("bit", [1, 0x80, 0xFF])
def test_every_byte_changed_is_refused(bit):
    data = CURSOR.to_bytes()
    for i in range(64):
        wrong = bytearray(data)
        wrong[i] ^= bit
        with pytest.raises(StaleCursor):
            Cursor.from_bytes(bytes(wrong))


@pytest.mark.parametrize("size", [0, 1, 63, 65, 128])
def test_other_sizes_are_refused(size):
    with pytest.raises(StaleCursor, match=f"{size} bytes"):
        Cursor.from_bytes(bytes(size))


def with_crc(body):
    return body + struct.pack("<I", zlib.crc32(body))


def test_another_version_is_named():
    data = bytearray(CURSOR.to_bytes()[:-4])
    data[4] = 2
    with pytest.raises(StaleCursor, match="version 2, this library reads 1"):
        Cursor.from_bytes(with_crc(bytes(data)))


@pytest.mark.parametrize(("offset", "what"), [(8, "layer 4096"), (12, "position 268435456")])
def test_places_beyond_any_plan(offset, what):
    data = bytearray(CURSOR.to_bytes()[:-4])
    struct.pack_into("<I", data, offset, 4096 if offset == 8 else 1 << 28)
    with pytest.raises(StaleCursor, match=what):
        Cursor.from_bytes(with_crc(bytes(data)))


@pytest.mark.parametrize(
    "wrong",
    [{"layer": -1}, {"layer": 4096}, {"position": 1 << 28}, {"epoch": 1 << 64}, {"epoch": -1}, {"rng": 1.5},
     {"fingerprint": b"short"}, {"fingerprint": "0" * 16}, {"plan": 1 << 32}, {"boot": 65536}, {"stamp": True}, {"layer": True}],
)  # fmt: skip
def test_bad_fields(wrong):
    with pytest.raises(replay.CursorError.__mro__[1]) as error:  # SicError
        dataclasses.replace(CURSOR, **wrong)
    assert f"Cursor: {next(iter(wrong))}: got" in str(error.value)


# --- the word ---------------------------------------------------------------------------------------------------------


def test_word_golden():
    """Fields in their bits, the check over them."""
    word = CursorWord()
    word.begin(record(0x123))
    word.mark(0x123, 0x045, 0x6789ABC)
    value = struct.unpack("<Q", word.raw())[0]
    assert value & ((1 << 52) - 1) == 0x123_045_6789ABC
    crc = 0xA5A
    for i in range(51, -1, -1):
        top = (crc >> 11) ^ (0x1230456789ABC >> i & 1)
        crc = (crc << 1 & 0xFFF) ^ (0x80F if top & 1 else 0)
    assert value >> 52 == crc


def test_nothing_was_run():
    assert CursorWord().read() is None


def test_read_what_was_marked():
    clock = Clock(1_000)
    word = CursorWord(clock=clock)
    word.begin(record(5))
    clock.advance(2)
    word.mark(5, 17, 1024)
    found, cursor = word.read()
    assert found == record(5)
    assert (cursor.layer, cursor.position, cursor.epoch, cursor.stamp) == (17, 1024, 5, 2_001_000)
    assert (cursor.rng, cursor.plan, cursor.fingerprint) == (11, 99, FINGERPRINT.digest)


@pytest.mark.parametrize("bit", range(64))
def test_a_bit_of_the_word_is_noticed(bit):
    word = CursorWord()
    word.begin(record(5))
    word.mark(5, 17, 1024)
    value = struct.unpack("<Q", word.raw())[0] ^ (1 << bit)
    word.set_raw(struct.pack("<Q", value))
    with pytest.raises(StaleCursor):
        word.read()


@pytest.mark.parametrize("low", range(1, 8))
def test_torn_between_two_marks(low):
    """A word cut in two anywhere: between layers of a chunk, from chunk to chunk, from run to run."""
    for first, second in [((5, 17, 1024), (5, 18, 1024)), ((5, 29, 1024), (5, 0, 1536)), ((5, 0, 4096), (6, 0, 0))]:
        word = CursorWord()
        word.begin(record(5))
        word.begin(record(6))
        marks = []
        for mark in (first, second):
            word.mark(*mark)
            marks.append(word.raw())
        torn = marks[1][:low] + marks[0][low:]
        word.set_raw(torn)
        if torn in marks:
            word.read()
        else:
            with pytest.raises(StaleCursor, match="damaged"):
                word.read()


def test_a_run_that_dies_between_its_record_and_its_mark():
    """The word is of the run before, whose record is still whole."""
    word = CursorWord()
    word.begin(record(5))
    word.mark(5, 2, 512)
    data = record(6).to_bytes()
    place = 512
    word._memory[place : place + len(data)] = data
    found, cursor = word.read()
    assert (found.epoch, cursor.layer) == (5, 2)


def test_a_record_that_is_half_written():
    word = CursorWord()
    word.begin(record(5))
    word._memory[2304 + 20] ^= 1
    with pytest.raises(StaleCursor, match="no whole record of run 5"):
        word.read()


@pytest.mark.parametrize("clock", [5, lambda: -1, lambda: 0.5, lambda: None])
def test_clocks_that_are_none(clock):
    with pytest.raises(ArgumentError, match="CursorWord: clock: got"):
        CursorWord(clock=clock)


@pytest.mark.parametrize("path", ["/none/word", "/tmp", "\0", "a" * 300, 5])
def test_paths_that_cannot_be(path):
    with pytest.raises(ArgumentError, match="CursorWord: path: got"):
        CursorWord(path)


@pytest.mark.parametrize(
    "use",
    [
        lambda word: word.read(), lambda word: word.raw(), lambda word: word.set_raw(bytes(8)), lambda word: word.address,
        lambda word: word.mark(1, 0, 0), lambda word: word.begin(record()),
    ],
)  # fmt: skip
def test_a_closed_word(use):
    word = CursorWord()
    word.close()
    with pytest.raises(SicError, match="closed"):
        use(word)


@pytest.mark.parametrize("wrong", [None, "x", 5, [300], 10**12])
def test_what_is_no_bytes(wrong):
    with pytest.raises(ArgumentError, match="data: got"):
        Cursor.from_bytes(wrong)


# --- the file ---------------------------------------------------------------------------------------------------------


def closed_word(folder):
    """The file of a word with one mark of run 3."""
    word = CursorWord(folder / "word")
    word.begin(record(3))
    word.mark(3, 1, 512)
    word.close()
    return folder / "word"


def test_file_is_read_again(tmp_path):
    path = closed_word(tmp_path)
    again = CursorWord(path)
    assert again.read()[0] == record(3)
    assert path.stat().st_size == PAGE


def test_two_holders_are_refused(tmp_path):
    word = CursorWord(tmp_path / "word")
    with pytest.raises(replay.StaleCursor.__mro__[2], match="another"):
        CursorWord(tmp_path / "word")
    word.close()
    CursorWord(tmp_path / "word").close()


def test_other_files_are_refused_and_kept(tmp_path):
    for name, content in (("short", b"hello"), ("page", b"x" * PAGE)):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(StaleCursor, match="not a file of progress words"):
            CursorWord(path)
        assert path.read_bytes() == content


@pytest.mark.parametrize("size", [1, 64, PAGE - 1, PAGE + 1, 2 * PAGE])
def test_a_word_of_another_size_is_refused_and_kept(size, tmp_path):
    path = tmp_path / "word"
    CursorWord(path).close()
    os.truncate(path, size)
    before = path.read_bytes()
    with pytest.raises(StaleCursor, match=f"{size} bytes, expected {PAGE}"):
        CursorWord(path)
    assert path.read_bytes() == before


def test_every_byte_of_the_file_changed(tmp_path):
    """Never another place than the one marked: refused, the same, or (before the first run) nothing."""
    path = closed_word(tmp_path)
    data = path.read_bytes()
    for i in range(PAGE):
        if data[i] == 0 and i % 16:  # of empty regions a sample
            continue
        wrong = bytearray(data)
        wrong[i] ^= 0x41
        path.write_bytes(wrong)
        try:
            again = CursorWord(path)
        except StaleCursor:
            continue
        try:
            found = again.read()
            assert found[0] == record(3)
            assert (found[1].layer, found[1].position) == (1, 512)
        except StaleCursor:
            pass
        finally:
            again.close()
