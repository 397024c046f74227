"""Runs that stop and go on: the same bits, exactly the missing segments, and refusals with a reason."""

import dataclasses
import re
import threading
from pathlib import Path

import pytest
import torch
from replay_helpers import (
    CHUNK,
    FINGERPRINT,
    LAYERS,
    RUN,
    TOKENS,
    TOTAL,
    assert_state,
    buffers,
    failing,
    inputs,
    interrupted,
    layer,
    nothing,
    plan,
    segments,
    state,
    weights,
)

from sic_kernels import replay
from sic_kernels.replay import CursorWord, Segment, StaleCursor, faults
from sic_kernels.replay.cursor import Cursor
from sic_kernels.runtime import metrics, trace
from sic_kernels.runtime.errors import ArgumentError
from sic_kernels.testing import assert_same_bits


def test_runs_all_segments_in_order():
    p = plan()
    result = p.run(inputs(), **RUN)
    names = ["embed", *(f"layer {i}" for i in range(LAYERS)), "head"]
    assert list(result.executed) == [(at, name) for at in range(0, TOKENS, CHUNK) for name in names]
    assert (result.status, result.reasons, result.epoch) == ("active", (), 1)
    assert p.cursor() is None


def test_chunks_do_not_change_a_golden_row():
    """The first row of h0 by hand: sin(3 * 1), sin(3 * 2), ..."""
    p = plan()
    with faults.stop_at(p, 1, "before"):
        p.run(inputs(), **RUN)
    assert_same_bits(p.tensors["h0"][0], torch.sin(torch.tensor(3) * torch.arange(1, 9)), "h0")


@pytest.mark.parametrize("moment", faults.MOMENTS)
@pytest.mark.parametrize("index", range(TOTAL))
def test_every_place_and_moment(want, index, moment):
    p = plan()
    with faults.stop_at(p, index, moment):
        stopped = p.run(inputs(), **RUN)
    assert (stopped.done, stopped.reason) == (False, "exception")
    assert isinstance(stopped.error, faults.Injected)
    first = index + (moment == "after")
    assert (stopped.executed.first, stopped.executed.last) == (0, first)
    if first == TOTAL:
        assert p.cursor() is None
    else:
        faults.poison(p, p.segments[first % (LAYERS + 2)].writes)
        result = p.resume(stopped.cursor)
        assert list(result.executed) == list(plan().run(inputs(), **RUN).executed)[first:]
    assert_state(p, want)


def test_six_thousand_interruptions():
    report = faults.campaign(plan(), inputs(), count=6000, seed=20, end=2 * CHUNK, chunk=CHUNK)
    assert report.failures == []
    assert report.runs == 6000 < report.interruptions


# --- what capture refuses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "hazard"),
    [
        ([Segment("a", nothing, writes=["h0"]), Segment("b", nothing, reads=["h0"], writes=["h0"])], "in_place"),
        ([Segment("a", nothing, reads=["h0"]), Segment("b", nothing, writes=["h0"])], "no_producer"),
        ([Segment("a", nothing, writes=["h0"]), Segment("b", nothing, writes=["h0"])], "stale_boundary"),
        ([Segment("a", nothing, writes=["h0"]), Segment("b", nothing, reads=["tokens"])], "stale_boundary"),
    ],
)
def test_hazards_that_the_declaration_shows(parts, hazard):
    with pytest.raises(replay.PlanError) as error:
        plan(segments=parts)
    assert error.value.hazard == hazard


def test_two_names_of_one_memory_are_in_place():
    x = torch.zeros(8)
    parts = [Segment("a", nothing, writes=["x"]), Segment("b", nothing, reads=["x"], writes=["y"])]
    with pytest.raises(replay.PlanError, match="share memory"):
        plan(segments=parts, buffers={"x": x[:6], "y": x[4:]}, inputs=[], outputs=["y"])
    with pytest.raises(replay.PlanError, match="same memory"):
        plan(segments=parts[1:], buffers={"x": x[:6], "y": x[4:]}, inputs=["x"], outputs=["y"])


STORAGE = torch.zeros(4, 100)


@pytest.mark.parametrize(
    ("views", "shared"),
    [
        ([STORAGE[0], STORAGE[0, 10:30:2], STORAGE[0, 40:50]], "'a' and 'b'"),
        ([STORAGE[0], STORAGE[0, 11:30:2], STORAGE[0, 10:30:2]], "'a' and 'c'"),
        ([STORAGE[0], STORAGE[1], STORAGE[0, 40:50]], "'a' and 'c'"),
        ([STORAGE[0, 0:30:2], STORAGE[0, 1:30:2], STORAGE[0, 5:10]], "'a' and 'c'"),
        ([STORAGE[:, :60], STORAGE[:, 60:], STORAGE[1::2, 59]], "'a' and 'c'"),
        ([STORAGE[0, 0:30:2], STORAGE[0, 1:30:2], STORAGE[1]], None),
        ([STORAGE[:, :60], STORAGE[:, 60:], STORAGE[:0]], None),
        ([STORAGE[0::2].T[::3], STORAGE[1::2], STORAGE[0::2].T[1::3]], None),
    ],
)
def test_buffers_that_are_written_share_no_byte(views, shared):
    """Also where another lies between the two, and in views with gaps; what is only interleaved shares none."""
    named = dict(zip("abc", views))
    parts = [Segment(f"to {name}", nothing, writes=[name]) for name in named]
    if shared is None:
        assert plan(segments=parts, buffers=named, inputs=[], outputs=list(named)).names == ("to a", "to b", "to c")
        return
    with pytest.raises(replay.PlanError, match=f"{shared}, which are both written, share memory") as error:
        plan(segments=parts, buffers=named, inputs=[], outputs=list(named))
    assert error.value.hazard == "in_place"


def test_views_that_take_long_to_tell_apart(monkeypatch):
    """Are refused, and not taken for apart."""
    views = {"a": STORAGE.as_strided((2, 2), (24, 54), 10), "b": STORAGE.as_strided((4, 4), (55, 20), 16)}
    parts = [Segment(f"to {name}", nothing, writes=[name]) for name in views]
    options = {"segments": parts, "buffers": views, "inputs": [], "outputs": list(views)}
    assert plan(**options).names == ("to a", "to b")
    monkeypatch.setattr("sic_kernels.replay.checks._MOST_WORK", 1)
    with pytest.raises(replay.PlanError, match="share memory"):
        plan(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segments": [Segment("a", nothing, reads=["none"])]}, "buffers: got none for 'none'"),
        ({"segments": [Segment("a", nothing), Segment("a", nothing)]}, "two of the name 'a'"),
        ({"inputs": ["h0"]}, "inputs: got 'h0'"),
        ({"inputs": "tokens"}, "inputs: got 'tokens'"),
        ({"inputs": [3]}, "inputs: got [3]"),
        ({"outputs": ["none"]}, "outputs: got 'none'"),
        ({"fingerprint": b"x"}, "fingerprint: got bytes"),
        ({"backend": "tpu"}, "backend: got 'tpu'"),
        ({"strategy": "none"}, "strategy: got 'none'"),
        ({"timeout_ms": 0}, "timeout_ms: got 0"),
        ({"buffers": {**buffers(), "h0": "no tensor"}}, "buffers['h0']: got str"),
        ({"fingerprint": dataclasses.replace(FINGERPRINT, model="m" * 2000)}, "bytes of JSON"),
    ],
)
def test_bad_arguments_of_capture(options, message):
    with pytest.raises(ArgumentError) as error:
        plan(**options)
    assert message in str(error.value)


@pytest.mark.parametrize("wrong", [{"fn": 3}, {"name": ""}, {"reads": "h0"}, {"rows": ["kv0"]}, {"writes": [1]}])
def test_bad_segments(wrong):
    with pytest.raises(ArgumentError, match=f"Segment: {next(iter(wrong))}: got"):
        Segment(**{"name": "a", "fn": nothing, **wrong})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"begin": -1}, "begin"), ({"begin": 4, "end": 4}, "end"), ({"end": 1 << 28}, "end"), ({"chunk": 0}, "chunk"),
        ({"end": TOKENS + 1}, "end"), ({"seed": -1}, "seed"), ({"seed": 1.0}, "seed"),
        ({"stop": 3}, "stop"), ({"retries": -1}, "retries"),
        ({"deadline_ms": -1}, "deadline_ms"), ({"deadline_ms": "x"}, "deadline_ms"),
        ({"inputs": {"h0": torch.zeros(1)}}, "inputs"), ({"inputs": {"tokens": torch.zeros(3)}}, "inputs['tokens']"),
    ],
)  # fmt: skip
def test_bad_arguments_of_run_touch_nothing(options, message):
    p = plan()
    before = state(p)
    with pytest.raises(ArgumentError) as error:
        p.run(options.pop("inputs", inputs()), **{**RUN, **options})
    assert f"ReplayPlan.run: {message}: got" in str(error.value)
    assert_state(p, before)
    assert p.word.read() is None


# --- stopping ---------------------------------------------------------------------------------------------------------


def test_a_deadline_stops_between_segments(want):
    clock = faults.Clock()
    parts = [dataclasses.replace(s, fn=lambda step, fn=s.fn: (clock.advance(1), fn(step))) for s in segments()]
    p = plan(segments=parts, word=CursorWord(clock=clock))
    stopped = p.run(inputs(), deadline_ms=7, **RUN)
    assert (stopped.reason, len(stopped.executed), stopped.error) == ("deadline", 7, None)
    assert (stopped.cursor.position, stopped.cursor.layer) == (CHUNK, 2)
    assert stopped.seconds == pytest.approx(0.007)
    again = p.resume(stopped.cursor, deadline_ms=3)
    assert (again.reason, len(again.executed)) == ("deadline", 3)
    assert len(p.resume(again.cursor).executed) == TOTAL - 10
    assert_state(p, want)


def test_an_event_stops(want):
    stop = threading.Event()
    parts = segments()
    parts[2] = dataclasses.replace(parts[2], fn=lambda step, fn=parts[2].fn: (stop.set(), fn(step)))
    p = plan(segments=parts)
    stopped = p.run(inputs(), stop=stop, **RUN)
    assert (stopped.reason, len(stopped.executed)) == ("stop", 3)
    assert p.resume(stopped.cursor, stop=lambda: False).done
    assert_state(p, want)


def test_retries(want):
    p = plan(segments=failing(OSError, 2))
    assert p.run(inputs(), retries=2, **RUN).done
    assert_state(p, want)


def test_what_is_no_exception_passes_through_and_leaves_a_cursor(want):
    p = plan(segments=failing(KeyboardInterrupt, 1))
    with pytest.raises(KeyboardInterrupt):
        p.run(inputs(), **RUN)
    cursor = p.cursor()
    assert (cursor.layer, cursor.position) == (1, CHUNK)
    assert p.resume(cursor).done
    assert_state(p, want)


def test_a_last_chunk_that_is_shorter():
    whole, p = plan(), plan()
    whole.run(inputs(), end=14, chunk=CHUNK)
    with faults.stop_at(p, TOTAL - 2):
        stopped = p.run(inputs(), end=14, chunk=CHUNK)
    assert p.resume(stopped.cursor).done
    assert p.cursor() is None
    for name in (
        "logits",
        *(f"kv{i}" for i in range(LAYERS)),
    ):  # of a boundary buffer only the chunk's rows mean something
        assert_same_bits(p.tensors[name], whole.tensors[name], name)


# --- what resume refuses ----------------------------------------------------------------------------------------------


def refused(p, cursor, error, text=""):
    """Refused, and explained so, and nothing was touched."""
    before = state(p)
    with pytest.raises(error) as raised:
        p.resume(cursor)
    assert text in str(raised.value)
    assert_state(p, before)
    return raised.value


@pytest.mark.parametrize(
    ("change", "text"),
    [({"epoch": 2}, "of run 2, the last one here is run 1"), ({"layer": LAYERS + 2}, "layer 5"),
     ({"position": TOKENS}, "position 16"), ({"position": 3}, "position 3"), ({"rng": 5}, "seed 5"),
     ({"plan": 1}, "other segments or buffers"), ({"boot": 1}, "started again"), ({"layer": 1}, "gone on")],
)  # fmt: skip
def test_cursors_that_do_not_fit(change, text):
    p, cursor = interrupted()
    if change == {"boot": 1}:
        change = {"boot": cursor.boot ^ 1}
    wrong = dataclasses.replace(cursor, **change)
    refused(p, wrong, StaleCursor, text)
    assert p.resume(cursor).done


def test_a_cursor_is_used_up():
    p, cursor = interrupted()
    p.resume(cursor)
    refused(p, cursor, StaleCursor, "gone on")


def test_damaged_bytes():
    p, cursor = interrupted()
    data = bytearray(cursor.to_bytes())
    data[20] ^= 1
    refused(p, bytes(data), StaleCursor, "damaged")


def test_a_torn_word():
    p, cursor = interrupted()
    faults.tear(p, cursor, dataclasses.replace(cursor, position=cursor.position + CHUNK, layer=0), low=2)
    refused(p, cursor, StaleCursor, "damaged")
    with pytest.raises(StaleCursor):
        p.cursor()


@pytest.mark.parametrize(("age", "fine"), [(0, True), (8499, True), (8500, False), (8501, False)])
def test_the_time_out(age, fine, want):
    clock = faults.Clock()
    p, cursor = interrupted(word=CursorWord(clock=clock))
    clock.advance(age)
    if fine:
        assert p.resume(cursor).done
    else:
        refused(p, cursor, replay.CursorExpired, f"{age} ms old, the limit is 8500 ms")
        assert "refused" in str(p.explain(cursor))
        result = p.resume(cursor, on_mismatch="recompute")
        assert (result.status, len(result.executed), result.epoch) == ("fallback", TOTAL, 2)
        assert "8500 ms" in result.reasons[0]
    assert_state(p, want)


def test_only_the_monotonic_clock():
    """The wall clock can be set."""
    folder = Path(replay.__file__).parent
    used = {name for file in folder.glob("*.py") for name in re.findall(r"\btime\.(\w+)", file.read_text())}
    assert used == {"monotonic_ns"}


def test_a_clock_that_went_back():
    clock = faults.Clock()
    p, cursor = interrupted(word=CursorWord(clock=clock))
    clock.advance(-1)
    refused(p, cursor, StaleCursor, "clock")


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(replay.Fingerprint)])
def test_each_field_of_the_fingerprint(tmp_path, field, want):
    """The word is there, the model or the settings are others."""
    held = buffers()
    p, cursor = interrupted(word=CursorWord(tmp_path / "word"), buffers=held)
    p.word.close()
    saved = getattr(FINGERPRINT, field)
    live = saved + 1 if isinstance(saved, int) else saved + "x"
    other = plan(
        fingerprint=dataclasses.replace(FINGERPRINT, **{field: live}), word=CursorWord(tmp_path / "word"), buffers=held
    )
    error = refused(other, cursor, replay.FingerprintMismatch, field)
    assert (error.field, error.saved, error.live) == (field, saved, live)
    result = other.resume(cursor, on_mismatch="recompute")
    assert (result.status, result.epoch) == ("fallback", 2)
    assert_state(other, want)


def test_strict_makes_a_fallback_an_error(monkeypatch):
    from sic_kernels.runtime import config

    clock = faults.Clock()
    p, cursor = interrupted(word=CursorWord(clock=clock))
    clock.advance(9000)
    monkeypatch.setattr(config, "_current", dataclasses.replace(config.current(), strict=True))
    with pytest.raises(replay.CursorExpired):
        p.resume(cursor, on_mismatch="recompute")


def test_buffers_of_a_dead_process(tmp_path, monkeypatch):
    p, _ = interrupted(word=CursorWord(tmp_path / "word"))
    p.word.close()
    monkeypatch.setattr("sic_kernels.replay.checks.process_id", lambda: 1)
    again = plan(word=CursorWord(tmp_path / "word"))
    for on_mismatch in ("raise", "recompute"):
        with pytest.raises(StaleCursor, match="died with its process"):
            again.resume(again.cursor(), on_mismatch=on_mismatch)


def test_a_tensor_that_moved():
    p, cursor = interrupted()
    p.tensors["h0"].set_(torch.zeros(CHUNK, 8))
    refused(p, cursor, StaleCursor, "buffer 'h0'")
    with pytest.raises(StaleCursor, match="buffer 'h0'"):
        p.run(inputs(), **RUN)


def test_a_lost_context():
    parts = segments()

    def lost(step):
        raise replay.ContextPoisoned("an illegal memory access was encountered")

    p = plan(segments=[*parts[:2], dataclasses.replace(parts[2], fn=lost), *parts[3:]])
    with pytest.raises(replay.ContextPoisoned, match="segment 'layer 1': an illegal"):
        p.run(inputs(), **RUN)
    for call in (lambda: p.run(inputs(), **RUN), lambda: p.resume(Cursor(2, 0, 1, FINGERPRINT.digest))):
        with pytest.raises(replay.ContextPoisoned, match="lost in segment 'layer 1'"):
            call()


def test_bad_resume_arguments():
    p, cursor = interrupted()
    with pytest.raises(ArgumentError, match="on_mismatch: got 'ignore'"):
        p.resume(cursor, on_mismatch="ignore")
    with pytest.raises(ArgumentError, match="cursor: got int"):
        p.resume(3)
    with pytest.raises(ArgumentError, match="stop: got int"):
        p.resume(cursor, stop=3)
    assert p.resume(cursor).done


def test_the_example_of_the_docs_runs():
    text = (Path(__file__).parents[1] / "docs" / "replay.md").read_text()
    names = {}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], names)
    assert names["outcome"].done
    assert names["plan"].verify(names["inputs"], end=4) == []


def test_freed_blocks_are_refused():
    pool = replay.MemoryPool(1 << 16)
    blocks = {name: pool.alloc(tuple(x.shape), x.dtype, name=name) for name, x in buffers().items()}
    p, cursor = interrupted(buffers=blocks)
    faults.churn(pool, seed=1)
    pool.free(blocks["kv1"])
    again = pool.alloc(tuple(blocks["kv1"].shape), blocks["kv1"].dtype, name="kv1")
    assert again.offset == blocks["kv1"].offset
    for call in (lambda: p.resume(cursor), lambda: p.run(inputs(), **RUN)):
        with pytest.raises(StaleCursor, match="buffer 'kv1': its block was freed"):
            call()


def test_the_campaign_takes_whole_chunks():
    with pytest.raises(ArgumentError, match="chunk: got 3"):
        faults.campaign(plan(), inputs(), count=1, end=8, chunk=3)


def test_the_campaign_with_a_pool_in_use():
    pool = replay.MemoryPool(1 << 20, poison=True)
    blocks = {name: pool.alloc(tuple(x.shape), x.dtype) for name, x in buffers().items()}
    before = pool.stats()
    report = faults.campaign(plan(buffers=blocks), inputs(), count=100, seed=3, end=CHUNK, pool=pool)
    assert report.failures == []
    assert pool.stats().blocks == before.blocks


# --- around it --------------------------------------------------------------------------------------------------------


def test_explain():
    p, cursor = interrupted(7)
    found = p.explain(cursor)
    assert found.refusal is None
    assert next(iter(found.remaining)) == (CHUNK, "layer 1")
    assert str(found) == f"runs {TOTAL - 7} segments, from 'layer 1' at token {CHUNK}"
    assert p.resume(cursor.to_bytes()).done


def test_metrics_and_trace():
    metrics.reset()
    p, cursor = interrupted(7)
    with trace.trace() as step:
        p.resume(cursor)
    with pytest.raises(StaleCursor):
        p.resume(cursor)
    assert metrics.get("sic_cursor_recovery_rate").read()[""] == metrics.Value(1, 2)
    assert metrics.get("sic_cursor_skipped_ratio").read()[""] == metrics.Value(7, TOTAL)
    assert metrics.get("sic_graph_replay_ratio").read()[""].ratio is None  # the CPU launches nothing
    assert [(r["op"], r["first"], r["stop"], r["segments"], r["status"]) for r in step.records] == [
        ("replay.resume", 7, TOTAL, TOTAL, "done")
    ]


def test_bad_arguments_of_verify():
    p = plan()
    for options, name in (({"begin": -1}, "begin"), ({"begin": 4, "end": 4}, "end"), ({"end": TOKENS + 1}, "end")):
        with pytest.raises(ArgumentError, match=f"ReplayPlan.verify: {name}: got"):
            p.verify(inputs(), **options)


def test_an_axis_that_is_not_there():
    with pytest.raises(ArgumentError, match="axis 2"):
        plan(segments=[*segments()[:-1], dataclasses.replace(segments()[-1], rows=[replay.Rows("logits", 2)])])


def test_what_a_segment_names():
    assert layer(0, weights()[0]).names == ("h0", "h1", "kv0")
