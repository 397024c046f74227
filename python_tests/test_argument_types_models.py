"""Wrong types in every argument of what takes a transformers model: runners, rows, caches, drafts, terminations."""

import functools

import pytest
import torch

pytest.importorskip("transformers", reason="pip install 'sic_kernels[demo]'")

from argument_types import call, check, triples, untried
from test_integration_head import byte_level
from tiny_llama import prompt, random_llama

from sic_kernels import delta, head, replay, slicing
from sic_kernels.integrations import delta as delta_cache
from sic_kernels.integrations import early_exit, layers, lookup, slots, transformers
from sic_kernels.integrations import head as termination
from sic_kernels.integrations import replay as runner

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = torch.tensor([(7 * i + 3) % 160 for i in range(8)])


@functools.cache
def model():
    return random_llama()


@functools.cache
def sliced():
    return transformers.enable(random_llama())


def pool():
    return replay.MemoryPool(1 << 20)


def store():
    return replay.SlotStore(pool())


FINGERPRINT = replay.Fingerprint("tiny")


def make_runner():
    return call(
        runner.ReplayRunner, {"word": "none", "fingerprint": "none", "timeout_ms": "none", "name": "text"}, model=model(),
        pool=pool(), capacity=16, chunk=4, word=replay.CursorWord(), fingerprint=FINGERPRINT, timeout_ms=100, name="run",
        check_model=False,
    )  # fmt: skip


def of_runner(name, **arguments):
    def make():
        r = runner.ReplayRunner(model(), pool(), capacity=16, chunk=4, check_model=False)
        r.prefill(IDS)
        if name == "resume":
            arguments["cursor"] = r.step(1, deadline_ms=0).cursor
        return call(getattr(r, name), watch=lambda: (*r.plan.tensors.values(), r.plan.word.raw()), **arguments)

    return make


def make_row():
    right = {"capacity": 16, "keep": [1], "chunk": 4, "fingerprint": FINGERPRINT}
    return call(slots.SlotRow, {"keep": "list", "fingerprint": "none"}, model=model(), store=store(), **right)


def row(name, may=None, **arguments):
    def make():
        r = slots.SlotRow(model(), store(), capacity=16, keep=[1], chunk=4)
        logits = r.prefill(IDS) if name != "prefill" else None
        if name == "generate":
            arguments["logits"] = logits
        if name in ("prefill", "step", "generate"):
            return call(getattr(r, name), watch=lambda: (list(r.tokens), list(r.spans)), **arguments)
        if name == "restore_kv":
            slots.evict_kv(r, 1)
        return call(getattr(slots, name), may, watch=lambda: (list(r.tokens), sorted(r.evicted)), row=r, **arguments)

    return make


RESAMPLE = {"layer": 1, "temperature": 0.5, "seed": 1, "on_missing": "recompute", "allow_approximate": False}


def early():
    return call(
        early_exit.generate_early_exit, {"eos_ids": "list", "store": "none"}, model=model(), ids=IDS, count=2, exit_layer=1,
        draft=1, min_confidence=0.5, eos_ids=[1], store=store(), chunk=4,
    )  # fmt: skip


DRAFTING = {"longest": 3, "most": 4, "cost": 0.1}
COST = {"cost": "none real"}


def drafter(name, may=None, **arguments):
    def make():
        d = lookup.Drafter()
        d.extend([1, 2, 1, 2])
        return call(getattr(d, name), may, lambda: (list(d._text), dict(d._counts)), **arguments)

    return make


def generate():
    may = {"eos_ids": "list", "cache": "none"} | COST
    ids, cache = IDS[None], None
    return call(lookup.generate, may, model=model(), ids=ids, max_new_tokens=2, eos_ids=[1], cache=cache, **DRAFTING)


def replayed():
    return call(lookup.replay, {"ids": "list"} | COST, ids=[1, 2], tokens=[3, 4], entropy=[0.5, 0.5], **DRAFTING)


CACHE = {"page_size": 16, "params": None, "capacity": 0, "dtype": torch.float32, "keep": [[(0, 1)]]}
CACHE_MAY = {"policy": "none", "params": "none", "dtype": "none", "keep": "none list"}


def sliced_cache():
    policy = slicing.SlicePolicy()
    return call(transformers.SlicedCache, CACHE_MAY, config=model().config, policy=policy, shadow=False, **CACHE)


def coded_cache():
    config = model().config
    codec = delta.Codec.preset("raw", *(delta.Templates.zero(2, 16) for _ in range(2)), delta.Rope.from_config(config))
    right = {"config": config, "codecs": [codec] * 3, "policy": slicing.SlicePolicy(max_omitted_mass=None)}
    return call(delta_cache.DeltaCache, CACHE_MAY, **right, **CACHE)


def filled(name, may=None, **arguments):
    def make():
        cache = transformers.SlicedCache(sliced().config)
        with torch.inference_mode():
            sliced()(prompt(2, 8), cache=cache, use_cache=True)
        return call(getattr(cache, name), may, lambda: (cache.get_seq_length(), list(cache.pages.lengths)), **arguments)

    return make


def make_termination():
    rule, matcher = head.stop_rule(["ab"], byte_level(), batch=1, max_tokens=4)
    may = {"matcher": "none", "score": "none", "input_lens": "none list"}
    right = {"matcher": matcher, "tokenizer": byte_level(), "score": termination.p_eos, "input_lens": [4]}
    return call(termination.Termination, may, rule=rule, **right)


MODELS = {
    "fingerprint_of": (lambda: call(runner.fingerprint_of, model=model(), capacity=16), "model capacity"),
    "ReplayRunner": (make_runner, "model pool capacity chunk word fingerprint timeout_ms name check_model"),
    "ReplayRunner.prefill": (of_runner("prefill", ids=IDS), "ids"),
    "ReplayRunner.step": (of_runner("step", token=1), "token"),
    "ReplayRunner.generate": (of_runner("generate", count=1), "count"),
    "ReplayRunner.resume": (of_runner("resume"), "cursor"),
    "SlotRow": (make_row, "model store capacity keep chunk fingerprint"),
    "SlotRow.prefill": (row("prefill", ids=IDS), "ids"),
    "SlotRow.step": (row("step", token=1), "token"),
    "SlotRow.generate": (row("generate", count=2), "logits count"),
    "resample": (
        row("resample", {"temperature": "real"}, **RESAMPLE),
        "row layer temperature seed on_missing allow_approximate",
    ),
    "evict_kv": (row("evict_kv", layer=1), "row layer"),
    "restore_kv": (row("restore_kv", layer=1), "row layer"),
    "generate_early_exit": (early, "model ids count exit_layer draft min_confidence eos_ids store chunk"),
    "Drafter": (lambda: call(lookup.Drafter, COST, **DRAFTING), "longest most cost"),
    "Drafter.extend": (drafter("extend", {"tokens": "list"}, tokens=[1]), "tokens"),
    "Drafter.propose": (drafter("propose", {"entropy": "real"}, entropy=0.5, limit=2), "entropy limit"),
    "Drafter.judged": (drafter("judged", accepted=1, proposed=2), "accepted proposed"),
    "lookup.generate": (generate, "model ids max_new_tokens eos_ids longest most cost cache"),
    "lookup.replay": (replayed, "ids tokens entropy longest most cost"),
    "LayeredModel": (lambda: call(layers.LayeredModel, model=model(), check=False), "model check"),
    "enable": (lambda: call(transformers.enable, model=sliced()), "model"),
    "SlicedCache": (sliced_cache, "config policy page_size params capacity dtype shadow keep"),
    "SlicedCache.keep": (filled("keep", {"spans": "none list"}, spans=[[(0, 1)]]), "spans"),
    "SlicedCache.crop": (filled("crop", tokens_to_remove=-1), "tokens_to_remove"),
    "SlicedCache.reorder_cache": (filled("reorder_cache", beam_idx=torch.tensor([1, 0])), "beam_idx"),
    "SlicedCache.batch_repeat_interleave": (filled("batch_repeat_interleave", repeats=2), "repeats"),
    "SlicedCache.batch_select_indices": (filled("batch_select_indices", indices=torch.tensor([1])), "indices"),
    "DeltaCache": (coded_cache, "config codecs policy page_size params capacity dtype keep"),
    "Termination": (make_termination, "rule matcher tokenizer score input_lens"),
    "token_bytes": (lambda: call(termination.token_bytes, tokenizer=byte_level()), "tokenizer"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "argument", "wrong"), triples(MODELS))
def test_a_wrong_type_is_named_and_touches_nothing(make, argument, wrong):
    check(make, argument, wrong)


def test_every_argument_is_tried():
    assert untried(MODELS) == {}
