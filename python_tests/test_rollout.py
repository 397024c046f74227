"""The roll-out: who is answered how, when the gate moves, by an injected clock; alarms; the state in another process."""

import dataclasses
import json
import threading
from pathlib import Path

import pytest

import sic_kernels as sic
from sic_kernels.runtime import config
from sic_kernels.runtime import rollout as module

pytestmark = pytest.mark.usefixtures("from_zero")

Rollout, Thresholds = sic.rollout.Rollout, sic.rollout.Thresholds
HOUR = 3600.0
GOOD = {"agreement": True, "hit": (95, 100), "seconds_before": 0.10, "seconds_after": 0.06}  # RER 0.4, target 0.3


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def rollout(clock):
    return Rollout(clock=clock, min_samples=10)


def feed(rollout, clock, seconds, count=20, **changes):
    """`count` records, spread evenly over the time; returns the stages after each."""
    stages = []
    for _ in range(count):
        clock.now += seconds / count
        stages.append(rollout.record(**(GOOD | changes)))
    return stages


def to_full(rollout, clock):
    feed(rollout, clock, 2 * HOUR)
    feed(rollout, clock, 2 * HOUR)
    assert rollout.stage == "full"


# --- who is answered how ------------------------------------------------------------------------------------------------


def test_shadow_answers_dense_and_compares_everything(rollout):
    decision = rollout.decide("r1", 500)
    assert decision == sic.rollout.Decision("shadow", False, True, "active", ("shadow",))
    assert sic.metrics.snapshot()["sic_rollout_stage_ratio"]["ratio"] == 0


def test_mixed_takes_a_stated_share_by_the_id_alone(clock):
    rollout = Rollout(share=0.25, shadow_share=0.1, clock=clock)
    rollout.move("mixed", "test")
    ids = [f"request-{n}" for n in range(4000)]
    first = [rollout.decide(r, 100) for r in ids]
    clock.now += 100
    assert [rollout.decide(r, 9000) for r in reversed(ids)] == first[::-1]
    chosen = [d for d in first if d.use_sliced]
    assert abs(len(chosen) - 1000) < 5 * (4000 * 0.25 * 0.75) ** 0.5
    assert abs(sum(d.run_shadow for d in first) - 400) < 5 * (4000 * 0.1 * 0.9) ** 0.5
    assert 0 < sum(d.run_shadow for d in chosen) < len(chosen)  # both kinds are compared: the draws are independent
    assert {d.status for d in first} == {"active"}  # those that are not in the share are answered as the stage says
    assert {d.reasons for d in first if not d.use_sliced} == {("not in the share", "test")}
    wider = Rollout(share=0.5, clock=clock)
    wider.move("mixed", "test")
    assert all(
        wider.decide(r, 1).use_sliced for r, d in zip(ids, first) if d.use_sliced
    )  # a larger share keeps the smaller
    salted = Rollout(share=0.25, salt="x", clock=clock)
    salted.move("mixed", "test")
    assert [salted.decide(r, 1).use_sliced for r in ids] != [d.use_sliced for d in first]


def test_a_draw_by_hand(rollout):
    """blake2b of "answer", NUL, salt, NUL, id, in 8 bytes, worked with b2sum -l 64."""
    assert rollout._draw("answer", "r1") == int("a4663cefae6c202b", 16) / 2**64


def test_full_answers_all_sliced(rollout, clock):
    rollout.move("full", "test")
    decisions = [rollout.decide(str(n), 10) for n in range(2000)]
    assert all(d.use_sliced and d.status == "active" and d.reasons == () for d in decisions)
    assert 0 < sum(d.run_shadow for d in decisions) < 100
    assert sic.metrics.snapshot()["sic_rollout_sliced_ratio"]["ratio"] == 1


# --- the gate -----------------------------------------------------------------------------------------------------------


def test_a_stage_lasts_a_whole_window_and_then_the_gate_moves_on(rollout, clock, caplog):
    stages = feed(rollout, clock, 2 * HOUR - 60, count=30)
    assert set(stages) == {"shadow"}
    clock.now = 1000 + 2 * HOUR - 0.5
    assert rollout.record(**GOOD) == "shadow"
    clock.now = 1000 + 2 * HOUR
    assert rollout.record(**GOOD) == "mixed"
    assert "from shadow to mixed" in caplog.text
    assert rollout.report()["measures"]["agreement"]["samples"] == 0  # the window begins anew
    assert feed(rollout, clock, 2 * HOUR)[-2:] == ["mixed", "full"]
    assert set(feed(rollout, clock, 5 * HOUR)) == {"full"}
    assert sic.metrics.snapshot()["sic_rollout_stage_ratio"]["ratio"] == 1


@pytest.mark.parametrize(
    "missing",
    [{"agreement": None}, {"hit": None}, {"hit": (0, 0)}, {"seconds_before": None, "seconds_after": None}],
)
def test_what_is_not_measured_does_not_pass(rollout, clock, missing):
    assert set(feed(rollout, clock, 3 * HOUR, **missing)) == {"shadow"}
    name = next(iter({"seconds_before": "rrr"}.get(n, n) for n in missing))
    assert rollout.report()["measures"][name]["holds"] is None


def test_too_few_samples_do_not_pass(clock):
    rollout = Rollout(clock=clock, min_samples=21)
    assert set(feed(rollout, clock, 2 * HOUR, count=20)) == {"shadow"}
    assert rollout.record(**GOOD) == "mixed"


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"agreement": (98, 100)}, "agreement 0.98 is not above 0.99"),
        ({"agreement": (99, 100)}, "agreement 0.99 is not above 0.99"),
        ({"hit": 0.85}, "hit 0.85 is not above 0.85"),
        ({"seconds_after": 0.08}, "rrr -0.3333 is not above -0.1"),  # RER 0.2: (0.2 - 0.3) / 0.3
        ({"seconds_after": 0.12}, "rrr -1.667 is not above -0.1"),  # slower than before: (-0.2 - 0.3) / 0.3
        ({"recovery": (99, 100)}, "recovery 0.99 is not above 0.9995"),
        ({"collision": (1, 100)}, "collision 0.01 is not below 0.005"),
        ({"replay": (92, 100)}, "replay 0.92 is not above 0.92"),
    ],
)
def test_each_threshold(clock, caplog, changes, reason):
    rollout = Rollout(clock=clock, min_samples=10)
    assert set(feed(rollout, clock, 3 * HOUR, **changes)) == {"shadow"}
    assert rollout.reasons == (reason,)
    assert rollout.decide("r", 1).reasons == ("shadow", reason)
    rollout.move("full", "test")
    stages = feed(rollout, clock, 60, count=10, **changes)  # at once, not after a window
    assert stages == ["full"] * 9 + ["mixed"]
    assert f"from full back to mixed: {reason}" in caplog.text
    (request,) = [r for r in (rollout.decide(str(n), 1) for n in range(100)) if not r.use_sliced][:1]
    assert (request.status, request.reasons) == ("fallback", ("not in the share", reason))
    snapshot = sic.metrics.snapshot()["sic_rollout_fallback_ratio"]["by_stage"]
    assert (snapshot["full"]["numerator"], snapshot["shadow"]["numerator"]) == (1, 0)


def test_going_back_when_strict(rollout, clock, monkeypatch):
    chosen = dataclasses.replace(config.current(), strict=True)
    monkeypatch.setattr(config, "current", lambda: chosen)
    rollout.move("mixed", "test")
    feed(rollout, clock, 60, count=9, hit=0)
    with pytest.raises(sic.SicError, match=r"SIC_STRICT: from mixed back to shadow: hit 0 is not above 0.85"):
        rollout.record(**GOOD | {"hit": 0})
    assert rollout.stage == "shadow"


def test_the_residual_rate_by_hand(rollout, clock):
    """Sums first, then the ratio: (0.04 + 0.02) / (0.1 + 0.1) = 0.3 is the target itself."""
    rollout.record(seconds_before=0.1, seconds_after=0.06)
    rollout.record(seconds_before=0.1, seconds_after=0.08)
    assert rollout.report()["measures"]["rrr"]["value"] == pytest.approx(0)
    assert sic.metrics.snapshot()["sic_redundancy_residual_ratio"]["ratio"] == pytest.approx(0)
    rollout.record(seconds_before=0.1, seconds_after=0.01)  # RER 0.5: (0.5 - 0.3) / 0.3
    assert sic.metrics.snapshot()["sic_redundancy_residual_ratio"]["ratio"] == pytest.approx(2 / 3)


def test_the_window_rolls(rollout, clock):
    """What is older than two hours leaves with its five minutes, which began at 1000."""
    rollout.move("mixed", "test", hold=True)
    for _ in range(9):
        rollout.record(**GOOD | {"hit": (0, 100)})
        clock.now += 1
    clock.now = 1000 + 2 * HOUR + 299
    assert rollout.report()["measures"]["hit"] == {"value": 0, "above": 0.85, "samples": 9, "holds": None}
    clock.now = 1000 + 2 * HOUR + 300
    assert rollout.report()["measures"]["hit"] == {"value": None, "above": 0.85, "samples": 0, "holds": None}
    assert set(feed(rollout, clock, HOUR, count=12)) == {"mixed"}


def test_bad_news_within_the_window_counts(rollout, clock):
    """The same a little sooner: 9 of 10 are misses."""
    rollout.move("mixed", "test", hold=True)
    feed(rollout, clock, 60, count=9, hit=(0, 100))
    clock.now += 1.9 * HOUR
    assert rollout.record(**GOOD) == "shadow"


def test_by_hand_and_held(rollout, clock, caplog):
    rollout.move("mixed", "operator says so", hold=True)
    assert "from shadow to mixed by hand: operator says so" in caplog.text
    assert set(feed(rollout, clock, 4 * HOUR)) == {"mixed"}
    rollout.move("mixed", "go on")
    feed(rollout, clock, 2 * HOUR)
    assert rollout.stage == "full"
    with pytest.raises(sic.ArgumentError, match=r"move: stage: got 'ful', expected shadow\|mixed\|full"):
        rollout.move("ful", "")


def test_only_the_given_clock_is_read(monkeypatch, clock):
    for name in ("time", "monotonic", "perf_counter"):
        monkeypatch.setattr(module.time, name, lambda: 1 / 0)
    rollout = Rollout(clock=clock)
    rollout.decide("r", 1, session="s")
    rollout.record(**GOOD)
    rollout.report()


def test_a_fallback_lasts_until_the_stage_changes(rollout, clock):
    """Also while all measures hold again, and in another process; who is answered sliced all the same is no fallback."""
    rollout.move("full", "test")
    feed(rollout, clock, 60, count=10, hit=0)
    feed(rollout, clock, 2 * HOUR - 60, count=20)
    decisions = [rollout.decide(str(n), 1) for n in range(100)]
    assert {(d.use_sliced, d.status) for d in decisions} == {(True, "active"), (False, "fallback")}
    assert {d.reasons for d in decisions if not d.use_sliced} == {("not in the share", "hit 0 is not above 0.85")}
    again = Rollout.from_json(rollout.to_json(), clock=clock)
    assert [again.decide(str(n), 1) for n in range(100)] == decisions
    feed(rollout, clock, 60, count=2)
    assert rollout.stage == "full"
    rollout.move("mixed", "by hand")
    assert {rollout.decide(str(n), 1).status for n in range(100)} == {"active"}


# --- the alarm ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("second, alarm", [(2024, False), (2025, True), (0, False), (1000, False)])
def test_a_jump_is_more_than_1024_tokens(rollout, caplog, second, alarm):
    assert rollout.decide("a", 1000, session="s").alarm == ""
    decision = rollout.decide("b", second, session="s")
    assert bool(decision.alarm) == alarm
    assert (f"session s: context went from 1000 to {second} tokens" in caplog.text) == alarm
    counted = sic.metrics.snapshot()["sic_context_jump_ratio"]
    assert (counted["numerator"], counted["denominator"]) == (alarm, 1)


def test_a_jump_down_and_other_sessions(rollout):
    rollout.decide("a", 5000, session="s")
    assert rollout.decide("b", 10, session="t").alarm == ""
    assert rollout.decide("c", 10).alarm == ""
    assert rollout.decide("d", 10, session="s").alarm == "context went from 5000 to 10 tokens"
    assert rollout.decide("e", 10, session="s").alarm == ""


def test_sessions_are_bounded(rollout, monkeypatch):
    monkeypatch.setattr(module, "SESSIONS", 3)
    for name in "abcd":
        rollout.decide("r", 10, session=name)
    assert list(rollout._sessions) == ["b", "c", "d"]
    rollout.decide("r", 10, session="b")
    rollout.decide("r", 10, session="e")
    assert list(rollout._sessions) == ["d", "b", "e"]


# --- the state ----------------------------------------------------------------------------------------------------------


def test_the_state_goes_on_in_another_process(rollout, clock):
    """Another clock, an hour later: the stage is as old as it was, plus that hour."""
    feed(rollout, clock, 0.9 * HOUR)
    text = rollout.to_json()
    other = Clock()
    other.now = 5.0
    again = Rollout.from_json(text, elapsed=HOUR, clock=other, min_samples=10)
    assert again.report()["age"] == pytest.approx(1.9 * HOUR)
    assert again.report()["measures"] == rollout.report()["measures"]
    assert again.record(**GOOD) == "shadow"
    other.now += 0.2 * HOUR
    assert again.record(**GOOD) == "mixed"
    assert Rollout.from_json(text, clock=clock).to_json() == text


def test_reasons_and_hold_are_kept(rollout, clock):
    rollout.move("mixed", "operator", hold=True)
    again = Rollout.from_json(rollout.to_json(), clock=clock)
    assert (again.stage, again.reasons, again.held) == ("mixed", ("operator",), True)


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2}, {"stage": "ful"}, {"age": -1}, {"age": None}, {"reasons": [3]}, {"reasons": 3}, {"held": 1},
        {"buckets": [{}]}, {"buckets": [{"age": 1, "sums": {"hit": [1, 2]}}]}, {"buckets": 3},
        {"buckets": [{"age": 1, "sums": {"hit": [1, float("nan"), 1]}}]},
        {"version": True}, {"age": 10**400}, {"age": float("inf")}, {"reasons": "abc"}, {"reasons": ["\ud800"]},
        {"buckets": {}}, {"went_back": 1}, {"stage": "full", "went_back": True}, {"stage": []},
        *({"age": 10, "buckets": [{"age": 1, "sums": {name: sums}}]} for name, sums in (
            ("hit", [5, 1, 10**9]), ("hit", [1, 1, -1]), ("hit", [1, 1, 0]), ("hit", [1, 1, True]), ("hit", [-1, 1, 1]),
            ("hit", [0, 0, 1]), ("rrr", [1, 1, 1]), ("hit", [10**400, 1, 1]), ("hit", [1, 10**400, 1]),
            ("hit", [1, 1, 10**400]), ("hit", [1, 1e300, 1]), ("rer", [2, 1, 1]), ("hit", [True, 1, 1]),
        )),
        {"age": 10, "buckets": [{"age": 11, "sums": {}}]}, {"age": 10, "buckets": [{"age": 10**400, "sums": {}}]},
    ],
)  # fmt: skip
def test_other_states_are_refused(rollout, clock, changes):
    text = json.dumps(json.loads(rollout.to_json()) | changes)
    with pytest.raises(sic.ArgumentError, match=r"Rollout: text: got .*, expected what to_json wrote"):
        Rollout.from_json(text, clock=clock)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", "[" * 100_000], ids=range(6))
def test_no_state_is_refused(text):
    with pytest.raises(sic.ArgumentError, match="Rollout: text: got"):
        Rollout.from_json(text)


@pytest.mark.parametrize("text", [None, 5, b"{}", []])
def test_what_is_no_text_is_refused(text):
    with pytest.raises(sic.ArgumentError, match=r"Rollout: text: got .*, expected what to_json wrote"):
        Rollout.from_json(text)


@pytest.mark.parametrize("elapsed", ["x", None, -1, float("nan"), float("inf"), 10**400, True], ids=range(7))
def test_other_times_elapsed_are_refused(rollout, elapsed):
    with pytest.raises(sic.ArgumentError, match=r"Rollout: elapsed: got .*, expected seconds from 0 on"):
        Rollout.from_json(rollout.to_json(), elapsed=elapsed)


@pytest.mark.parametrize(
    "fields",
    [{"hit": (2.0**53, 2.0**53)}, {"hit": (0, 5e-324)}, {"hit": (0.1, 0.1)}, {"agreement": (0, 0)}, {"collision": False},
     {"seconds_before": 1e-9, "seconds_after": 2.0**53}, {"seconds_before": 2.0**53, "seconds_after": 0}],
    ids=range(7),
)  # fmt: skip
def test_every_state_is_read_again(clock, fields):
    rollout = Rollout(clock=clock, min_samples=10**6)
    rollout.move("mixed", "\u4e0a", hold=True)
    feed(rollout, clock, HOUR, count=50, agreement=None, hit=None, seconds_before=None, seconds_after=None)
    for _ in range(50):
        rollout.record(**fields)
    again = Rollout.from_json(rollout.to_json(), clock=clock, min_samples=10**6)
    assert again.to_json() == rollout.to_json()
    assert again.report() == rollout.report()


# --- wrong use ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, value",
    [("share", 0), ("share", 1.1), ("shadow_share", 0), ("window", 0), ("window", float("inf")), ("min_samples", 0),
     ("min_samples", 1.5), ("min_samples", True), ("share", "x"), ("share", None), ("window", "x"), ("window", None),
     ("window", 10**400), ("window", 10**5000), ("thresholds", 5), ("thresholds", 0), ("clock", 5), ("salt", 5),
     ("salt", "\ud800"), ("clock", str)],
    ids=range(20),
)  # fmt: skip
def test_wrong_settings(name, value):
    with pytest.raises(sic.ArgumentError, match=f"Rollout: {name}: got "):
        Rollout(**{name: value})


@pytest.mark.parametrize(
    "name, value",
    [("hit", 1.5), ("rrr", -2), ("rer_target", 0), ("rer_target", 1e-320), ("rer_target", 9e-10), ("agreement", True)],
)
def test_wrong_thresholds(name, value):
    with pytest.raises(sic.ArgumentError, match=f"Thresholds: {name}: got"):
        Thresholds(**{name: value})


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"hit": 1.5}, "record: hit: got 1.5"),
        ({"hit": (3, 2)}, r"record: hit: got \(3, 2\)"),
        ({"agreement": float("nan")}, "record: agreement: got nan"),
        ({"hit": "0.5"}, "record: hit: got '0.5'"),
        ({"hit": (1, 2, 3)}, "record: hit: got"),
        ({"seconds_before": 1.0}, "record: seconds_after: got None, expected both times or none"),
        ({"seconds_before": -1, "seconds_after": 1}, "record: seconds_before: got -1"),
        ({"seconds_before": 1, "seconds_after": float("inf")}, "record: seconds_after: got inf"),
        ({"seconds_before": 0, "seconds_after": 1}, "record: seconds_before: got 0, expected seconds above 0"),
        ({"seconds_before": 10**400, "seconds_after": 1}, "record: seconds_before: got 1000"),
        ({"hit": 10**400}, "record: hit: got 1000"),
        ({"hit": (1, 10**400)}, r"record: hit: got \(1, 1000"),
        ({"hit": (1e308, 1e308)}, r"record: hit: got \(1e\+308, 1e\+308\)"),
    ],
)
def test_wrong_records_change_nothing(rollout, fields, message):
    with pytest.raises(sic.ArgumentError, match=message):
        rollout.record(**{"agreement": True, **fields})
    assert rollout.report()["measures"]["agreement"]["samples"] == 0
    assert sic.metrics.snapshot()["sic_rollout_agreement_ratio"]["ratio"] is None


def test_wrong_requests(rollout):
    with pytest.raises(sic.ArgumentError, match="decide: request_id: got int, expected a string"):
        rollout.decide(3, 1)
    with pytest.raises(sic.ArgumentError, match="decide: context_length: got -1"):
        rollout.decide("r", -1)


@pytest.mark.parametrize(
    "request_id, length, session, message",
    [
        ("\ud800", 5, "s", r"request_id: got '\\ud800', expected a string of whole characters"),
        ("r", 10**5000, "s", "context_length: got int, expected tokens"),
        ("r", 5, [], "session: got list, expected a string"),
        ("r", 5, "\ud800", r"session: got '\\ud800', expected a string of whole characters"),
    ],
    ids=range(4),
)
@pytest.mark.parametrize("stage", ["shadow", "mixed"])
def test_wrong_requests_are_not_remembered(rollout, stage, request_id, length, session, message):
    rollout.move(stage, "test")
    with pytest.raises(sic.ArgumentError, match="decide: " + message):
        rollout.decide(request_id, length, session=session)
    assert not rollout._sessions


@pytest.mark.parametrize(
    "stage, reason, hold, message",
    [
        ("mixed", None, False, "reason: got NoneType, expected a string"),
        ("mixed", "\ud800", False, r"reason: got '\\ud800'"),
        ("mixed", "r", "no", "hold: got 'no', expected True or False"),
        ([], "r", False, r"stage: got \[\]"),
    ],
)
def test_wrong_moves_change_nothing(rollout, stage, reason, hold, message):
    with pytest.raises(sic.ArgumentError, match="move: " + message):
        rollout.move(stage, reason, hold=hold)
    assert (rollout.stage, rollout.held) == ("shadow", False)


def test_a_zero_denominator_is_no_sample(clock):
    rollout = Rollout(clock=clock)
    for _ in range(9):
        rollout.record(agreement=(0, 0), hit=(0, 0))
    measures = rollout.report()["measures"]
    assert [measures[name]["samples"] for name in ("agreement", "hit")] == [0, 0]


def test_the_page_names_the_defaults():
    text = (Path(__file__).parents[1] / "docs" / "rollout.md").read_text()
    for measure in Thresholds().measures():
        sign, required = ">" if measure.above else "<", "required" if measure.required else "where it is recorded"
        (line,) = [line for line in text.splitlines() if line.startswith(f"| `{measure.name}` |")]
        assert f"| {sign} {measure.threshold:g} |" in line
        assert required in line
    assert f"`min_samples` ({Rollout().min_samples})" in text
    assert f"`rer_target` ({Thresholds().rer_target})" in text
    assert f"more than {module.JUMP} tokens" in text


def test_threads_lose_nothing(clock):
    rollout = Rollout(clock=clock, min_samples=10**6)
    start = threading.Barrier(8)

    def work():
        start.wait()
        for n in range(200):
            rollout.decide(str(n), n, session="s")
            rollout.record(agreement=(1, 2))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rollout.report()["measures"]["agreement"] == {"value": 0.5, "above": 0.99, "samples": 1600, "holds": None}
