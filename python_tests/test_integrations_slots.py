"""Kept hidden states: drawn again and restored with the same bits, and never another's."""

import dataclasses
import logging

import pytest
import torch

pytest.importorskip("transformers", reason="pip install 'sic_kernels[demo]'")

from transformers import Qwen3Config, Qwen3ForCausalLM

from sic_kernels import metrics, replay
from sic_kernels.integrations.layers import LayeredModel
from sic_kernels.integrations.slots import SlotRow, evict_kv, resample, restore_kv
from sic_kernels.runtime import config
from sic_kernels.runtime.errors import ArgumentError, SicError
from sic_kernels.testing import assert_same_bits

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = torch.tensor([(7 * i + 3) % 160 for i in range(40)])
LAYERS = 3


def store(nbytes=1 << 20):
    return replay.SlotStore(replay.MemoryPool(nbytes))


def row(model, kept=None, keep=range(LAYERS + 1), **options):
    return SlotRow(model, store() if kept is None else kept, capacity=64, keep=keep, **{"chunk": 16, **options})


def kv_of(r):
    return {layer: kv[:, :, : len(r.tokens)].clone() for layer, kv in r.kv.items()}


# --- a row ----------------------------------------------------------------------------------------------------------------


def test_a_row_gives_the_models_tokens(plain):
    r = row(plain)
    tokens = r.generate(r.prefill(IDS), 8)
    with torch.inference_mode():
        expected = plain.generate(IDS[None], max_new_tokens=8, do_sample=False)[0, 40:]
    assert tokens == expected.tolist()
    assert [(s.begin, s.end) for s in r.spans] == [(0, 16), (16, 32), (32, 39), *((i, i + 1) for i in range(39, 47))]
    assert (r.layer_calls, r.head_calls) == (11 * LAYERS, 8)


def test_a_prompt_of_one_token(plain):
    r = row(plain)
    r.prefill(IDS[:1])
    assert [(s.begin, s.end) for s in r.spans] == [(0, 1)]


def test_slots_are_found_by_tokens_and_spans(plain):
    """Another row finds the states of the same tokens in the same spans, and of nothing else."""
    kept, names = store(), {}
    for name, ids, chunk in (("a", IDS, 16), ("b", IDS, 16), ("c", IDS, 8), ("d", IDS.flip(0), 16)):
        r = row(plain, kept, chunk=chunk)
        r.prefill(ids)
        names[name] = [span.digest for span in r.spans]
    assert names["a"] == names["b"]
    assert not set(names["c"]) & set(names["a"])
    assert not set(names["d"]) & set(names["a"])


# --- drawing again --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", range(LAYERS + 1))
def test_resample_has_the_bits_of_the_step(plain, layer):
    r = row(plain)
    logits = r.step(int(r.prefill(IDS).argmax())).clone()
    before, calls = kv_of(r), r.layer_calls
    again = resample(r, layer)
    assert_same_bits(again.logits, logits, "logits")
    assert (again.token, again.layers, again.exact, again.status) == (
        int(logits.argmax()),
        LAYERS - layer,
        True,
        "active",
    )
    assert r.layer_calls - calls == LAYERS - layer
    for i, kv in kv_of(r).items():
        assert_same_bits(kv, before[i], f"kv {i}")


def test_seed_and_temperature(plain):
    r = row(plain)
    logits = r.prefill(IDS)
    seen = {seed: resample(r, 2, temperature=2.0, seed=seed).token for seed in range(40)}
    assert seen == {seed: resample(r, 2, temperature=2.0, seed=seed).token for seed in range(40)}
    assert len(set(seen.values())) > 3
    assert {resample(r, 2, temperature=1e-3, seed=seed).token for seed in range(5)} == {int(logits.argmax())}


def test_a_missing_state(plain, monkeypatch, caplog):
    r = row(plain, keep=[1])
    logits = r.prefill(IDS).clone()
    with pytest.raises(SicError, match="no state before layer 2 is kept for the last of 40 tokens"):
        resample(r, 2)
    counted = metrics.get("sic_slot_hit_ratio").read()[""]
    with caplog.at_level(logging.WARNING, "sic_kernels"):
        again = resample(r, 2, on_missing="recompute")
    assert (again.status, again.layers) == ("fallback", LAYERS)
    assert "no state before layer 2" in again.reasons[0]
    assert "the whole step is run" in caplog.text
    assert_same_bits(again.logits, logits, "logits")
    now = metrics.get("sic_slot_hit_ratio").read()[""]
    assert (now.numerator - counted.numerator, now.denominator - counted.denominator) == (0, 1)
    monkeypatch.setattr(config, "_current", dataclasses.replace(config.current(), strict=True))
    with pytest.raises(SicError, match=r"^SIC_STRICT: resample: no state before layer 2"):
        resample(r, 2, on_missing="recompute")


def test_approximate_states_are_never_chosen_by_default(plain):
    """The state of another prefix, put under this one."""
    r = row(plain, keep=[])
    logits = r.prefill(IDS).clone()
    other = row(plain, keep=[2])
    other.prefill(IDS.flip(0))
    borrowed = other.state(other.spans[-1], 2).tensor
    r.store.put(r.fingerprint, r.digest, 2, borrowed, exact=False)
    with pytest.raises(SicError, match="no state before layer 2"):
        resample(r, 2)
    assert resample(r, 2, on_missing="recompute").layers == LAYERS
    asked = resample(r, 2, allow_approximate=True)
    assert not asked.exact
    assert not torch.equal(asked.logits, logits)
    with pytest.raises(SicError, match="no state before layer 2"):
        evict_kv(r, 2)


def test_slots_of_another_shape_are_refused(plain):
    r = row(plain, keep=[])
    r.prefill(IDS)
    r.store.put(r.fingerprint, r.digest, 2, torch.zeros(2, 64))
    with pytest.raises(SicError, match=r"a slot of \(2, 64\) for tokens 39 to 40"):
        resample(r, 2)
    assert r.store.stats().pinned == 0


# --- keys and values from states ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [4, 2])
def test_restored_with_the_same_bits(one_thread, heads):
    from tiny_llama import random_llama

    model = random_llama(kv_heads=heads)
    r = row(model)
    tokens = r.generate(r.prefill(IDS), 6)
    before = kv_of(r)
    for layer in range(LAYERS):
        assert evict_kv(r, layer) == 64 * r.model.kv_bytes
    assert r.store.stats().pinned == LAYERS * len(r.spans)
    with pytest.raises(SicError, match=r"keys and values of layers \[0, 1, 2\] were evicted"):
        r.step(1)
    for layer in (2, 0, 1):
        restore_kv(r, layer)
        assert_same_bits(r.kv[layer][:, :, : len(r.tokens)], before[layer], f"kv {layer}")
    assert r.store.stats().pinned == 0
    whole = row(model)
    assert r.generate(r.step(tokens[-1]), 6) == whole.generate(whole.prefill(IDS), 12)[6:]


def test_other_chunks_round_otherwise(plain):
    """The states are the same; a sum over 32 rows is another order, not another result."""
    r = row(plain)
    r.prefill(IDS)
    m, parts = r.model, [r.state(span, 1).tensor for span in r.spans]
    k, v = m.keys_values(1, torch.cat(parts), 0)
    torch.testing.assert_close(k, r.kv[1][0, :, :40])
    torch.testing.assert_close(v, r.kv[1][1, :, :40])


def test_a_layer_is_not_evicted_without_its_states(plain):
    r = row(plain, keep=[1])
    r.prefill(IDS)
    for layer in (0, 1):
        if layer == 1:
            r.store.evict(2)
        with pytest.raises(SicError, match=f"no state before layer {layer} is kept for tokens 0 to 16"):
            evict_kv(r, layer)
    assert r.store.stats().pinned == 0
    r.step(1)


def test_what_pays():
    """By hand: 64 floats a state; keys and values of 2 heads of 16 are 64, of 4 heads 128."""
    from tiny_llama import random_llama

    for heads, kv in ((2, 256), (4, 512)):
        m = LayeredModel(random_llama(kv_heads=heads))
        assert (m.state_bytes, m.kv_bytes) == (256, kv)


SMALL = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "pad_token_id": 0}  # fmt: skip


def test_keys_with_a_norm_for_each_head(one_thread):
    torch.manual_seed(0)
    r = row(Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=16)).eval(), keep=[0, 1])
    r.prefill(IDS)
    before = kv_of(r)
    for layer in (0, 1):
        evict_kv(r, layer)
        restore_kv(r, layer)
        assert_same_bits(r.kv[layer][:, :, :40], before[layer], f"kv {layer}")


def test_attention_of_another_kind_is_refused(one_thread):
    from tiny_llama import random_llama

    m = LayeredModel(random_llama())
    m.inner.layers[0].self_attn.add_module("gate", torch.nn.Identity())
    with pytest.raises(ArgumentError, match=r"keys_values: model: got attention of \['gate', 'k_proj'"):
        m.keys_values(0, torch.zeros(2, 64), 0)


# --- arguments ------------------------------------------------------------------------------------------------------------


def test_bad_arguments(plain):
    r = row(plain)
    kept = store()
    for call, message in [
        (lambda: SlotRow(plain, None, capacity=4), "store: got NoneType, expected a SlotStore"),
        (lambda: SlotRow(plain, kept, capacity=0), "capacity: got 0"),
        (lambda: SlotRow(plain, kept, capacity=4, keep=[4]), "keep: got 4, expected 0 to 3"),
        (lambda: SlotRow(plain, kept, capacity=4, fingerprint="m"), "fingerprint: got str"),
        (lambda: r.prefill(torch.zeros(65, dtype=torch.int64)), "ids: got 65 tokens after 0"),
        (lambda: r.prefill(IDS[:0]), "ids: got 0 tokens"),
        (lambda: r.prefill(torch.tensor([1, 10**6])), "SlotRow.prefill: ids: got 1 to 1000000, expected ids from 0 to"),
        (lambda: r.prefill(torch.tensor([-1])), "SlotRow.prefill: ids: got -1"),
        (lambda: r.step(-1), "token: got -1"),
        (lambda: r.step(10**6), "token: got 1000000, expected ids from 0 to"),
        (lambda: resample(r, 1), "row: got an empty row"),
        (lambda: resample(r, 4), "layer: got 4, expected 0 to 3"),
        (lambda: resample(r, 1, temperature=-1.0), "temperature: got -1"),
        (lambda: resample(r, 1, temperature=1e-9), "temperature: got 1e-09, expected 0, or 1e-06 to 1e9"),
        (lambda: resample(r, 1, on_missing="guess"), "on_missing: got 'guess'"),
        (lambda: resample(plain, 1), "row: got LlamaForCausalLM, expected a SlotRow"),
        (lambda: evict_kv(r, 3), "layer: got 3, expected 0 to 2"),
        (lambda: restore_kv(r, 1), r"layer: got 1, expected an evicted layer, of \[\]"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            call()
    r.prefill(torch.arange(64))
    for call, message in [
        (lambda: r.step(1), "the 65th"),
        (lambda: r.prefill(IDS), "ids: got 40 tokens after 64"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            call()
    evict_kv(r, 1)
    with pytest.raises(ArgumentError, match="layer: got 1, expected a layer whose keys and values are there"):
        evict_kv(r, 1)
