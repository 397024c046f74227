"""Wrong types in every argument of replay, references, the roll-out and what looks at the machine and the metrics."""

import functools

import pytest
import torch
from argument_types import call, check, entered, triples, untried
from replay_helpers import CHUNK, FINGERPRINT, buffers, inputs, plan, segments, state

import sic_kernels as sic
from sic_kernels import references, replay
from sic_kernels.replay import faults
from sic_kernels.replay.cursor_word import RunRecord
from sic_kernels.runtime import advice, determinism, metrics, rollout, trace


def nothing(*args):
    return 0


# --- replay -----------------------------------------------------------------------------------------------------------


def plan_state(p):
    return lambda: (*state(p).values(), p.word.raw())


def cursor():
    return call(replay.Cursor, layer=1, position=2, epoch=3, fingerprint=bytes(16), rng=4, stamp=5, plan=6, boot=7)


def word():
    return call(replay.CursorWord, {"path": "none text"}, path=None, clock=lambda: 7)


def word_begin():
    w = replay.CursorWord()
    return call(w.begin, watch=lambda: (w.raw(),), record=RunRecord(1, 0, 4, 4, 0, 5, FINGERPRINT))


def word_mark():
    w = replay.CursorWord()
    return call(w.mark, watch=lambda: (w.raw(),), epoch=1, layer=2, position=3)


def word_set_raw():
    w = replay.CursorWord()
    return call(w.set_raw, watch=lambda: (w.raw(),), word=bytes(8))


def fingerprint():
    may = dict.fromkeys(("model", "revision", "dtype", "quantisation", "config"), "text")
    fields = {"model": "m", "revision": "r", "dtype": "f", "quantisation": "q", "context_bucket": 512, "config": "c"}
    return call(replay.Fingerprint, may, **fields)


def pool(**options):
    return replay.MemoryPool(1 << 20, **options)


def pool_state(p):
    return lambda: (p.stats(), [b.name for b in p.blocks()])


def make_pool():
    right = {
        "nbytes": 1 << 20,
        "fraction": 0.1,
        "weights": (1, 1),
        "parts": ("a", "b"),
        "device": "cpu",
        "poison": False,
    }
    may = {"nbytes": "none", "backing": "none text", "poison": "none"}
    return call(replay.MemoryPool, may, **right, backing="there.pool", max_names=4)


def attach():
    pool(backing="attached.pool").close()
    return call(replay.MemoryPool.attach, {"poison": "none"}, path="attached.pool", poison=False)


def alloc():
    p = pool()
    may = {"size": "list", "dtype": "none", "name": "none text"}
    return call(p.alloc, may, pool_state(p), size=512, dtype=torch.uint8, part="kv", name="a", alignment=256)


def pool_free():
    p = pool()
    return call(p.free, watch=pool_state(p), block=p.alloc(8))


def rename():
    p = pool()
    return call(p.rename, {"name": "none text"}, pool_state(p), block=p.alloc(8), name="b")


def pool_block():
    p = pool()
    p.alloc(8, name="b")
    return call(p.block, name="b")


def alive():
    b = pool().alloc(8)
    return call(b._pool.alive, offset=b.offset, generation=b.generation)


def rows():
    return call(replay.Rows, {"name": "text"}, name="kv", axis=0)


def segment():
    may = {"name": "text", "reads": "list", "writes": "list", "rows": "list"}
    return call(
        replay.Segment, may, name="a", fn=nothing, reads=["x"], writes=["y"], rows=[replay.Rows("z")], rng=False
    )


def capture():
    return call(
        replay.ReplayPlan.capture, {"inputs": "list", "outputs": "list", "word": "none", "timeout_ms": "none"},
        segments=segments(), buffers=buffers(), fingerprint=FINGERPRINT, inputs=["tokens"], outputs=[], backend="cpu",
        strategy="segments", word=replay.CursorWord(), timeout_ms=100,
    )  # fmt: skip


def run():
    p = plan()
    may = {"inputs": "none", "end": "none", "chunk": "none", "deadline_ms": "none real", "stop": "none"}
    return call(
        p.run, may, plan_state(p), inputs=inputs(), begin=0, end=CHUNK, chunk=CHUNK, seed=1, rows_given=True,
        deadline_ms=9e5, stop=lambda: False, retries=0,
    )  # fmt: skip


def interrupted():
    p = plan()
    return p, p.run(inputs(), end=CHUNK, deadline_ms=0).cursor


def resume():
    p, at = interrupted()
    return call(
        p.resume, {"deadline_ms": "none real", "stop": "none"}, plan_state(p), cursor=at, on_mismatch="raise", deadline_ms=9e5,
        stop=lambda: False, retries=0,
    )  # fmt: skip


def explain():
    p, at = interrupted()
    return call(p.explain, cursor=at)


def verify():
    p = plan()
    return call(p.verify, {"inputs": "none", "end": "none"}, plan_state(p), inputs=inputs(), begin=0, end=CHUNK, seed=1)


def slots():
    return call(replay.SlotStore, pool=pool(), part="kv", capacity=4)


def store():
    s = replay.SlotStore(pool())
    slot = s.put(FINGERPRINT, [1, 2], 3, torch.ones(4))
    return s, slot, lambda: (s.stats(), slot.tensor)


def slot_get():
    s, _, watch = store()
    right = {"fingerprint": FINGERPRINT, "prefix": [1, 2], "layer": 3, "allow_approximate": False, "pin": False}
    return call(s.get, {"prefix": "list"}, watch, **right)


def slot_put():
    s, _, watch = store()
    right = {
        "fingerprint": FINGERPRINT,
        "prefix": [5],
        "layer": 3,
        "tensor": torch.ones(2),
        "exact": True,
        "pin": False,
    }
    return call(s.put, {"prefix": "list"}, watch, **right)


def of_a_slot(name):
    def make():
        s, slot, watch = store()
        if name == "unpin":
            s.pin(slot)
        return call(getattr(s, name), watch=watch, slot=slot)

    return make


def evict():
    s, _, watch = store()
    return call(s.evict, watch=watch, n=1)


def uniform():
    out = torch.full((4,), 5.0)
    return call(sic.replay.uniform, {"backend": "none"}, lambda: (out,), key=(1, 2, 3), out=out, backend="cpu")


def stop_at():
    p = plan()
    return call(entered(faults.stop_at), watch=plan_state(p), plan=p, index=0, moment="after")


def tear():
    p, at = interrupted()
    return call(faults.tear, watch=plan_state(p), plan=p, before=at, after=at, low=4)


def poison():
    p = plan()
    return call(faults.poison, {"names": "list"}, plan_state(p), plan=p, names=["h0"])


def churn():
    p = pool()
    return call(faults.churn, {"part": "none"}, pool_state(p), pool=p, seed=1, steps=4, part="kv")


def campaign():
    p = plan()
    return call(
        faults.campaign, {"inputs": "none", "chunk": "none", "pool": "none"}, plan_state(p), plan=p, inputs=inputs(), count=1,
        seed=1, begin=0, end=CHUNK, chunk=CHUNK, pool=pool(),
    )  # fmt: skip


REPLAY = {
    "Cursor": (cursor, "layer position epoch fingerprint rng stamp plan boot"),
    "Cursor.from_bytes": (lambda: call(replay.Cursor.from_bytes, data=interrupted()[1].to_bytes()), "data"),
    "CursorWord": (word, "path clock"),
    "CursorWord.begin": (word_begin, "record"),
    "CursorWord.mark": (word_mark, "epoch layer position"),
    "CursorWord.set_raw": (word_set_raw, "word"),
    "Fingerprint": (fingerprint, "model revision dtype quantisation context_bucket config"),
    "Fingerprint.diff": (lambda: call(FINGERPRINT.diff, other=FINGERPRINT), "other"),
    "Fingerprint.from_json": (lambda: call(replay.Fingerprint.from_json, text=FINGERPRINT.to_json()), "text"),
    "context_bucket": (lambda: call(replay.context_bucket, tokens=5), "tokens"),
    "MemoryPool": (make_pool, "nbytes fraction weights parts device backing poison max_names"),
    "MemoryPool.attach": (attach, "path poison"),
    "MemoryPool.alloc": (alloc, "size dtype part name alignment"),
    "MemoryPool.free": (pool_free, "block"),
    "MemoryPool.rename": (rename, "block name"),
    "MemoryPool.block": (pool_block, "name"),
    "MemoryPool.alive": (alive, "offset generation"),
    "Rows": (rows, "name axis"),
    "Segment": (segment, "name fn reads writes rows rng"),
    "ReplayPlan.capture": (
        capture, "segments buffers fingerprint inputs outputs backend strategy word timeout_ms"
    ),
    "ReplayPlan.run": (run, "inputs begin end chunk seed rows_given deadline_ms stop retries"),
    "ReplayPlan.resume": (resume, "cursor on_mismatch deadline_ms stop retries"),
    "ReplayPlan.explain": (explain, "cursor"),
    "ReplayPlan.verify": (verify, "inputs begin end seed"),
    "SlotStore": (slots, "pool part capacity"),
    "SlotStore.get": (slot_get, "fingerprint prefix layer allow_approximate pin"),
    "SlotStore.put": (slot_put, "fingerprint prefix layer tensor exact pin"),
    "SlotStore.pin": (of_a_slot("pin"), "slot"),
    "SlotStore.unpin": (of_a_slot("unpin"), "slot"),
    "SlotStore.remove": (of_a_slot("remove"), "slot"),
    "SlotStore.evict": (evict, "n"),
    "prefix_digest": (lambda: call(replay.prefix_digest, {"tokens": "list"}, tokens=[1, 2]), "tokens"),
    "uniform": (uniform, "key out backend"),
    "faults.Clock": (lambda: call(faults.Clock, now=5), "now"),
    "faults.Clock.advance": (lambda: call(faults.Clock().advance, {"milliseconds": "real"}, milliseconds=5), "milliseconds"),
    "faults.stop_at": (stop_at, "plan index moment"),
    "faults.tear": (tear, "plan before after low"),
    "faults.poison": (poison, "plan names"),
    "faults.churn": (churn, "pool seed steps part"),
    "faults.campaign": (campaign, "plan inputs count seed begin end chunk pool"),
}  # fmt: skip


# --- references -------------------------------------------------------------------------------------------------------

ANSWER = "Reasons:\n1. one\n2. two\n3. three\n"


@functools.cache
def outline():
    return references.outline(ANSWER)


def make_outline():
    offsets = [(i, i + 1) for i in range(len(ANSWER))]
    may = {"text": "text", "offsets": "none list", "grammar": "none"}
    return call(references.outline, may, text=ANSWER, offsets=offsets, first_token=0, grammar=references.load_grammar())


def outline_by_a_tokenizer():
    def tokenizer(text, **options):
        return {"offset_mapping": [(i, i + 1) for i in range(len(text))]}

    return call(references.outline, {"tokenizer": "none"}, text=ANSWER, tokenizer=tokenizer)


def parse():
    may = {"text": "text", "depth": "none", "grammar": "none"}
    return call(references.parse, may, text="the third reason", depth=2, lang="en", grammar=references.load_grammar())


def resolve():
    (ref,) = references.parse("the third reason")
    return call(
        references.resolve, {"grammar": "none"}, ref=ref, outline_or_slots=outline(), grammar=references.load_grammar()
    )


REFERENCES = {
    "outline": (make_outline, "text offsets first_token grammar"),
    "outline by a tokenizer": (outline_by_a_tokenizer, "tokenizer"),
    "parse": (parse, "text depth lang grammar"),
    "resolve": (resolve, "ref outline_or_slots grammar"),
    "pages": (lambda: call(references.pages, span=(0, 5), page_size=16), "span page_size"),
    "Outline.within": (lambda: call(lambda point: list(outline().within(point)), point=outline().points[0]), "point"),
}  # fmt: skip


# --- what measures and decides ----------------------------------------------------------------------------------------


def thresholds():
    right = {
        "agreement": 0.9,
        "hit": 0.8,
        "rer_target": 0.3,
        "rrr": -0.1,
        "recovery": 0.9,
        "collision": 0.1,
        "replay": 0.9,
    }
    return call(rollout.Thresholds, **right)


def make_rollout():
    return call(
        rollout.Rollout, {"thresholds": "none", "salt": "text", "window": "real"}, share=0.1, shadow_share=0.1,
        thresholds=rollout.Thresholds(), window=60.0, min_samples=5, salt="s", clock=lambda: 1.0,
    )  # fmt: skip


def of_rollout(name, may, **arguments):
    def make():
        r = rollout.Rollout(clock=lambda: 1.0)
        return call(getattr(r, name), may, lambda: (r.to_json(),), **arguments)

    return make


RECORD = dict.fromkeys(("agreement", "hit", "recovery", "collision", "replay"), (1, 2))
RECORD_MAY = dict.fromkeys(RECORD, "none") | {"seconds_before": "real", "seconds_after": "real"}


def from_json():
    return call(rollout.Rollout.from_json, {"elapsed": "real"}, text=rollout.Rollout().to_json(), elapsed=0.0)


def metric(kind, name, **arguments):
    def make():
        m = metrics.Registry().register("sic_test_ratio", "a", "b", "c", kind=kind)
        return call(getattr(m, name), dict.fromkeys(arguments, "real"), lambda: (m.read(),), **arguments)

    return make


def register():
    r = metrics.Registry()
    right = {
        "name": "sic_test_ratio",
        "about": "a",
        "numerator": "b",
        "denominator": "c",
        "kind": "counter",
        "label": "reason",
    }
    may = dict.fromkeys(("name", "about", "numerator", "denominator"), "text") | {"label": "none text"}
    return call(r.register, may, lambda: (r.snapshot(),), **right)


def serve():
    return call(metrics.serve, port=0, addr="127.0.0.1")


def of_metrics(function, may=None, **arguments):
    return lambda: call(function, may, lambda: (metrics.prometheus_text(),), **arguments)


def gate():
    hardware = sic.probe_hardware()
    may = {"require": "list", "hardware": "none", "strict": "none"}
    return call(sic.gate, may, require=["memory"], hardware=hardware, strict=False)


def traced(name, **arguments):
    def make():
        with trace.trace() as step:
            trace.record("a", value=1)
        return call(getattr(step, name), {"path": "text", "indent": "none"}, **arguments)

    return make


RUNTIME = {
    "Thresholds": (thresholds, "agreement hit rer_target rrr recovery collision replay"),
    "Rollout": (make_rollout, "share shadow_share thresholds window min_samples salt clock"),
    "Rollout.decide": (
        of_rollout("decide", {"request_id": "text", "session": "none text"}, request_id="a", context_length=5, session="s"),
        "request_id context_length session",
    ),
    "Rollout.record": (
        of_rollout("record", RECORD_MAY, **RECORD, seconds_before=2.0, seconds_after=1.0),
        "agreement hit recovery collision replay seconds_before seconds_after",
    ),
    "Rollout.move": (of_rollout("move", {"reason": "text"}, stage="mixed", reason="r", hold=False), "stage reason hold"),
    "Rollout.from_json": (from_json, "text elapsed"),
    "Metric.add": (metric("counter", "add", numerator=1, denominator=2), "numerator denominator"),
    "Metric.set": (metric("gauge", "set", numerator=1, denominator=2), "numerator denominator"),
    "metrics.register": (register, "name about numerator denominator kind label"),
    "metrics.get": (of_metrics(metrics.get, name="sic_slice_hit_ratio"), "name"),
    "metrics.record_time_per_token": (
        of_metrics(metrics.record_time_per_token, {"before": "real", "after": "real"}, before=2.0, after=1.0), "before after"
    ),
    "metrics.record_hit_rates": (of_metrics(metrics.record_hit_rates, old=0.5, new=0.5), "old new"),
    "metrics.record_tokens": (of_metrics(metrics.record_tokens, useful=1, computed=2), "useful computed"),
    "metrics.timed_predictions": (of_metrics(entered(metrics.timed_predictions), count=1), "count"),
    "metrics.serve": (serve, "port addr"),
    "advise": (lambda: call(advice.advise, snapshot={}), "snapshot"),
    "advice.read": (lambda: call(lambda snapshot: advice.read(snapshot), snapshot="{}"), "snapshot"),
    "trace": (lambda: call(entered(trace.trace), max_values=4, max_records=4), "max_values max_records"),
    "Trace.save": (traced("save", path="step.json"), "path"),
    "Trace.to_json": (traced("to_json", indent=1), "indent"),
    "probe_hardware": (lambda: call(sic.probe_hardware, {"root": "text", "nvml": "none"}, root="/", nvml=None), "root nvml"),
    "gate": (gate, "require hardware strict"),
    "verify_determinism": (
        lambda: call(determinism.verify_determinism, fn=lambda: 1, runs=2, measure=False), "fn runs measure"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "argument", "wrong"), triples(REPLAY | REFERENCES | RUNTIME))
def test_a_wrong_type_is_named_and_touches_nothing(make, argument, wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(make, argument, wrong)


# What the library makes itself, errors, and load_grammar, whose files and paths test_references_parse.py has.
MADE = {
    "replay": {
        "Block", "ContextPoisoned", "CursorError", "CursorExpired", "Explanation", "FingerprintMismatch", "Interrupted",
        "PartStats", "PlanError", "PoolError", "PoolExhausted", "PoolStats", "Progress", "Result", "Slot", "SlotStats",
        "StaleCursor", "Step",
    },
    "references": {"Ambiguous", "Grammar", "load_grammar", "Outline", "Point", "PointList", "Reference", "Resolved",
                   "Unresolved"},
}  # fmt: skip


@pytest.mark.parametrize(("module", "cases"), [(replay, REPLAY), (references, REFERENCES)])
def test_every_public_name_is_tried(module, cases):
    tried = {name.partition(".")[0].partition(" ")[0] for name in cases}
    assert tried | MADE[module.__name__.rpartition(".")[2]] >= set(module.__all__)


def test_every_argument_is_tried(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert untried(REPLAY | REFERENCES | RUNTIME) == {}
