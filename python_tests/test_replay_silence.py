"""What would give wrong results without an error: inputs, rows, words and buffers that are not what a run takes them for."""

import dataclasses
import os

import pytest
import torch
from replay_helpers import (
    CHUNK,
    FINGERPRINT,
    RUN,
    assert_state,
    buffers,
    failing,
    inputs,
    interrupted,
    nothing,
    plan,
)

from sic_kernels import replay
from sic_kernels.replay import CursorWord, Segment, StaleCursor, faults
from sic_kernels.runtime.errors import ArgumentError, SicError


def test_a_new_run_ends_the_last_one_before_its_inputs_are_there():
    """Killed between the two, the old cursor must not go on over new inputs."""
    p, cursor = interrupted()

    def killed(record):
        raise KeyboardInterrupt

    begin, p.word.begin = p.word.begin, killed
    with pytest.raises(KeyboardInterrupt):
        p.run({"tokens": inputs()["tokens"] + 1}, **RUN)
    p.word.begin = begin
    assert p.cursor() is None
    assert p.length == 0
    with pytest.raises(StaleCursor, match="gone on"):
        p.resume(cursor)


def test_rows_before_the_first_token_must_be_there():
    p = plan()
    with pytest.raises(ArgumentError, match="begin: got 4, expected at most 0"):
        p.run(inputs(), begin=4, end=8)
    assert p.run(inputs(), begin=4, end=8, rows_given=True).done
    p.run(inputs(), end=8, chunk=CHUNK)
    assert p.length == 8
    assert p.run(inputs(), begin=8, end=12).done
    with faults.stop_at(p, 1):
        p.run(inputs(), begin=12, end=16)
    assert p.length == 12
    assert p.run(inputs(), begin=4, end=8).done
    assert p.length == 8


def test_rows_of_another_model_do_not_count(tmp_path):
    held = buffers()
    p = plan(word=CursorWord(tmp_path / "word"), buffers=held)
    p.run(inputs(), end=8, chunk=CHUNK)
    with faults.stop_at(p, 1):
        cursor = p.run(inputs(), begin=8, end=12).cursor
    p.word.close()
    fingerprint = dataclasses.replace(FINGERPRINT, model="another")
    other = plan(word=CursorWord(tmp_path / "word"), buffers=held, fingerprint=fingerprint)
    assert other.length == 0
    for on_mismatch in ("raise", "recompute"):  # token 8 alone would stand on rows of the first model
        with pytest.raises(replay.FingerprintMismatch):
            other.resume(cursor, on_mismatch=on_mismatch)


def test_a_fallback_that_is_interrupted_stays_one():
    clock = faults.Clock()
    p, cursor = interrupted(word=CursorWord(clock=clock))
    clock.advance(9000)
    with faults.stop_at(p, 3):
        stopped = p.resume(cursor, on_mismatch="recompute")
    assert (stopped.status, stopped.reason) == ("fallback", "exception")
    result = p.resume(stopped.cursor)
    assert (result.status, result.reasons) == ("fallback", stopped.reasons)


def test_a_word_is_for_one_set_of_buffers():
    held = buffers()
    p = plan(buffers=held)
    with pytest.raises(ArgumentError, match="word: got one that a plan of other buffers marks"):
        plan(word=p.word)
    with faults.stop_at(p, 3):
        cursor = p.run(inputs(), **RUN).cursor
    assert plan(word=p.word, buffers=held).resume(cursor).done


def test_a_damaged_word_is_no_dead_end(want):
    p, cursor = interrupted()
    faults.tear(p, cursor, dataclasses.replace(cursor, position=cursor.position + CHUNK, layer=0), low=2)
    assert p.length == 0
    result = p.run(inputs(), **RUN)
    assert (result.done, result.epoch) == (True, 2)
    assert_state(p, want)


def test_a_forked_child_is_another_process():
    p, cursor = interrupted()
    child = os.fork()
    if child == 0:
        again = plan()
        status = 0 if again.word.read() is None and again.length == 0 else 1
        p.word.close()
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert p.resume(cursor).done


def test_a_childs_close_keeps_the_lock(tmp_path):
    word = CursorWord(tmp_path / "word")
    child = os.fork()
    if child == 0:
        word.close()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(SicError, match="in use"):
        CursorWord(tmp_path / "word")
    del word
    CursorWord(tmp_path / "word").close()


def test_retries_end_with_the_deadline():
    p = plan(segments=failing(OSError, 1 << 30))
    stopped = p.run(inputs(), retries=1 << 30, deadline_ms=20, **RUN)
    assert stopped.reason in ("exception", "deadline")
    assert len(stopped.executed) <= 6


def test_buffers_cannot_be_exchanged():
    p = plan()
    with pytest.raises(TypeError):
        p.tensors["h0"] = torch.zeros(CHUNK, 8)


def test_declarations_from_iterators_are_kept():
    segment = Segment("a", nothing, reads=iter(["x"]), writes=map(str, ["y"]), rows=(replay.Rows(n) for n in "z"))
    assert segment.names == ("x", "y", "z")


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(4).requires_grad_(),
        torch.zeros(1).expand(4),
        torch.zeros(4, device="meta"),
        torch.zeros(4).to_sparse(),
    ],
)
def test_buffers_that_cannot_be_written(wrong):
    with pytest.raises(ArgumentError, match=r"buffers\['h0'\]: got"):
        plan(buffers={**buffers(), "h0": wrong})


def test_of_two_words_over_the_same_buffers_one_does_not_know_what_is_there(want):
    held = buffers()
    p, other = plan(buffers=held), plan(buffers=held)
    with faults.stop_at(p, 7):
        cursor = p.run(inputs(), **RUN).cursor
    assert other.run({"tokens": inputs()["tokens"] + 1}, **RUN).done
    assert (p.length, other.length) == (0, RUN["end"])
    with pytest.raises(StaleCursor, match="marked in another progress word"):
        p.resume(cursor)
    with pytest.raises(StaleCursor, match="marked in another progress word"):
        p.resume(cursor, on_mismatch="recompute")
    assert "another progress word" in str(p.explain(cursor).refusal)
    assert p.run(inputs(), **RUN).done
    assert_state(p, want)
    assert (p.length, other.length) == (RUN["end"], 0)


def test_a_word_that_was_closed_owns_nothing(tmp_path, want):
    held = buffers()
    p = plan(buffers=held, word=CursorWord(tmp_path / "word"))
    with faults.stop_at(p, 7):
        cursor = p.run(inputs(), **RUN).cursor
    p.word.close()
    again = plan(buffers=held, word=CursorWord(tmp_path / "word"))
    assert again.resume(cursor).done
    assert_state(again, want)


def test_buffers_do_not_remember_how_they_came_about():
    weight = torch.ones(4, requires_grad=True)
    held = {"x": torch.zeros(4), "y": torch.zeros(4)}
    double = Segment("double", lambda step: step["y"].copy_(step["x"] * weight), ["x"], ["y"])
    p = replay.ReplayPlan.capture([double], buffers=held, fingerprint=FINGERPRINT, inputs=["x"], outputs=["y"])
    assert p.run({"x": torch.ones(4, requires_grad=True)}).done
    assert p.verify() == []
    assert torch.is_grad_enabled()
    assert [x.requires_grad for x in held.values()] == [False, False]


def test_a_closed_word_says_so():
    word = CursorWord()
    word.close()
    for use in (lambda: word.mark(1, 0, 0), lambda: word.address, word.read):
        with pytest.raises(SicError, match="it was closed"):
            use()
