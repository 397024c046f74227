"""SlicedCache in transformers: a small random Llama, and SmolLM2 where its package is installed."""

from __future__ import annotations

import dataclasses

import pytest
import torch

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'sic_kernels[demo]'"
)

from tiny_llama import generate, padded, policy, prompt  # noqa: E402
from transformers.cache_utils import DynamicCache  # noqa: E402

from sic_kernels import ArgumentError, SicError, metrics, trace  # noqa: E402
from sic_kernels.integrations.transformers import SlicedCache, enable  # noqa: E402
from sic_kernels.runtime import config  # noqa: E402

ALL = {"ratio": 1.0, "sink": 0, "recent": 0}  # reads everything: must answer as the plain model


pytestmark = pytest.mark.usefixtures("one_thread")


def test_everything_selected_equals_the_plain_model(plain, model):
    ids = prompt()
    want = generate(plain, ids, attention_mask=torch.ones_like(ids))
    got = generate(model, ids, SlicedCache(model.config, policy(**ALL)), attention_mask=torch.ones_like(ids))
    assert torch.equal(got, want)


def test_without_a_sliced_cache_the_model_is_the_plain_one(plain, model):
    ids, mask, _ = padded([40, 25])
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, atol=1e-4, rtol=1e-4)
    assert torch.equal(generate(model, ids, attention_mask=mask), generate(plain, ids, attention_mask=mask))


def test_logits_of_every_step_equal_the_plain_model(plain, model):
    ids = prompt(1, 90)
    cache, reference = SlicedCache(model.config, policy(**ALL)), DynamicCache(config=plain.config)
    with torch.inference_mode():
        for part in ids.split([70, 1, 1, 5, 13], dim=1):
            got = model(part, cache=cache, use_cache=True).logits
            want = plain(part, cache=reference, use_cache=True).logits
            torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)
    assert cache.get_seq_length() == 90


@pytest.mark.parametrize("chunk", [None, 17, 64])
def test_left_padding_with_everything_selected(plain, model, chunk):
    ids, mask, _ = padded([96, 70, 33])
    want = generate(plain, ids, attention_mask=mask)
    got = generate(model, ids, SlicedCache(model.config, policy(**ALL)), attention_mask=mask, prefill_chunk_size=chunk)
    assert torch.equal(got, want)


@pytest.mark.parametrize("ratio", [0.12, 0.3])
def test_a_padded_row_answers_as_alone(model, ratio):
    ids, mask, rows = padded([120, 90, 77])
    chosen = policy(ratio=ratio, sink=2, recent=4)
    warm = SlicedCache(model.config, chosen)
    generate(model, prompt(1, 100, seed=9), warm, steps=1)  # one calibration for all
    together = SlicedCache(model.config, chosen, params=warm.params)
    got = generate(model, ids, together, attention_mask=mask)
    for i, row in enumerate(rows):
        alone = generate(
            model, row, SlicedCache(model.config, chosen, params=warm.params), attention_mask=torch.ones_like(row)
        )
        assert torch.equal(got[i, ids.shape[1] :], alone[0, row.shape[1] :])
    assert together.stats().totals["sliced"] > 0


def test_chunked_prefill_equals_one_prefill(model):
    ids = prompt(2, 150)
    chosen = policy(**ALL)
    whole = generate(model, ids, SlicedCache(model.config, chosen), attention_mask=torch.ones_like(ids))
    parts = generate(
        model, ids, SlicedCache(model.config, chosen), attention_mask=torch.ones_like(ids), prefill_chunk_size=32
    )
    assert torch.equal(whole, parts)


@pytest.mark.parametrize("lengths", [[80, 80], [80, 51]])
def test_beam_search(plain, model, lengths):
    ids, mask, _ = padded(lengths)
    want = generate(plain, ids, attention_mask=mask, num_beams=3)
    cache = SlicedCache(model.config, policy(**ALL))
    assert torch.equal(generate(model, ids, cache, attention_mask=mask, num_beams=3), want)
    assert cache.pages.batch == 6


def test_beams_share_pages(model):
    ids = prompt(1, 160)
    cache = SlicedCache(model.config, policy(**ALL), page_size=16)
    with torch.inference_mode():
        model(ids, cache=cache, use_cache=True)
        cache.batch_repeat_interleave(4)
        assert cache.pages.pages_used == 10  # 160 tokens fill their pages: nothing was copied
        model(prompt(4, 1), cache=cache, use_cache=True)
    assert cache.pages.pages_used == 14


def test_crop_goes_back(model):
    ids, mask, _ = padded([90, 60])
    cache = SlicedCache(model.config, policy(ratio=0.25, sink=2, recent=4))
    with torch.inference_mode():
        model(ids, attention_mask=mask, cache=cache, use_cache=True)
        more = torch.cat([mask, torch.ones(2, 7, dtype=torch.long)], 1)
        first = model(prompt(2, 7), attention_mask=more, cache=cache, use_cache=True).logits
        model(prompt(2, 3, seed=4), attention_mask=torch.cat([more, mask[:, -3:]], 1), cache=cache, use_cache=True)
        cache.crop(-10)
        assert cache.get_seq_length() == 90
        assert cache.pages.lengths == (90, 60)
        again = model(prompt(2, 7), attention_mask=more, cache=cache, use_cache=True).logits
    assert torch.equal(first, again)


def test_reorder_selects_rows(model):
    ids = prompt(3, 100)
    cache = SlicedCache(model.config, policy(ratio=0.25, sink=2, recent=4))
    token = prompt(3, 1, seed=3)
    with torch.inference_mode():
        model(ids, cache=cache, use_cache=True)
        logits = model(token, cache=cache, use_cache=True).logits
        cache.crop(-1)
        cache.reorder_cache(torch.tensor([2, 0, 2]))
        got = model(token[[2, 0, 2]], cache=cache, use_cache=True).logits
    assert torch.equal(got, logits[[2, 0, 2]])


def test_stats_and_metrics(model):
    metrics.reset()
    ids = prompt(1, 120)
    cache = SlicedCache(model.config, policy(ratio=0.12, sink=2, recent=4))
    generate(model, ids, cache, steps=5)
    stats = cache.stats()
    layers, heads = 3, 4
    assert stats.totals["sliced"] == 4 * layers * heads  # the first token comes from prefill
    assert stats.totals["dense_prefill"] == 120 * layers * heads
    assert stats.hit_ratio == 1.0
    assert 0 < stats.bytes_read < stats.bytes_dense
    counted = metrics.snapshot()["sic_slice_hit_ratio"]
    assert (counted["numerator"], counted["denominator"]) == (48, 48)
    cache.reset()
    assert cache.stats().hit_ratio is None
    assert cache.get_seq_length() == 0


def test_fallbacks_are_counted_logged_and_an_error_when_strict(model, caplog, monkeypatch):
    chosen = policy(ratio=0.12, sink=2, recent=4, max_omitted_mass=1e-4)
    cache = SlicedCache(model.config, chosen)
    with caplog.at_level("INFO", logger="sic_kernels"):
        generate(model, prompt(1, 120), cache, steps=3)
    stats = cache.stats()
    assert stats.totals["fallback_mass"] > 0
    assert sum(sum(heads.values()) for heads in stats.fallback_heads) == stats.totals["fallback_mass"]
    assert "recomputed dense" in caplog.text
    strict = dataclasses.replace(config.current(), strict=True)
    monkeypatch.setattr(config, "current", lambda: strict)
    with pytest.raises(SicError, match="SIC_STRICT"):
        generate(model, prompt(1, 120), SlicedCache(model.config, chosen), steps=3)


def test_trace_records_every_layer(model):
    cache = SlicedCache(model.config, policy(ratio=0.12, sink=2, recent=4))
    with torch.inference_mode():
        model(prompt(1, 100), cache=cache, use_cache=True)
        with trace() as step:
            model(prompt(1, 1), cache=cache, use_cache=True)
    layers = [r["layer"] for r in step.as_dict()["records"] if r["op"] == "transformers.attend"]
    assert layers == [0, 1, 2]


def test_shadow_answers_dense_and_says_how_far_sliced_is(plain, model):
    ids = prompt(1, 120)
    cache = SlicedCache(model.config, policy(ratio=0.12, sink=2, recent=4), shadow=True)
    assert torch.equal(generate(model, ids, cache), generate(plain, ids))
    assert cache.stats().shadow_error is not None
    assert max(cache.stats().shadow_error) > 0


def test_pages_as_units(plain, model):
    ids = prompt(1, 120)
    everything = SlicedCache(model.config, policy(unit="page", **ALL), page_size=8)
    assert torch.equal(generate(model, ids, everything), generate(plain, ids))
    some = SlicedCache(model.config, policy(unit="page", ratio=0.25, sink=8, recent=8), page_size=8)
    generate(model, ids, some)
    assert some.stats().totals["sliced"] > 0


SMALL = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    "initializer_range": 0.3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("Gemma2", {"head_dim": 16, "sliding_window": 32, "query_pre_attn_scalar": 16}),  # soft capping and windows
        ("GptOss", {"head_dim": 16, "sliding_window": 32, "num_local_experts": 4, "num_experts_per_tok": 2}),  # sinks
        ("Mistral", {"sliding_window": 32}),
        ("Qwen3", {"head_dim": 16}),
    ],
)
def test_other_kinds_of_attention(family, extra):
    config = getattr(transformers, f"{family}Config")(**SMALL, **extra, attn_implementation="eager")
    kind = getattr(transformers, f"{family}ForCausalLM")
    torch.manual_seed(0)
    plain = kind(config).eval()
    want = generate(plain, prompt(1, 100))
    cache = SlicedCache(config, policy(**ALL))
    assert torch.equal(generate(enable(plain), prompt(1, 100), cache), want)
    assert cache.stats().totals["dense_prefill"] == 100 * 2 * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cache_of_another_type(model, dtype):
    cache = SlicedCache(model.config, policy(ratio=0.2, sink=2, recent=4), dtype=dtype)
    generate(model, prompt(1, 120), cache)
    assert cache.pages.keys(0).dtype == dtype
    assert cache.stats().hit_ratio == 1.0


def test_assisted_decoding_crops(plain, model):
    ids = prompt(1, 100)
    cache = SlicedCache(model.config, policy(**ALL))
    got = generate(model, ids, cache, steps=30, prompt_lookup_num_tokens=4)
    assert torch.equal(got, generate(plain, ids, steps=30))


def test_a_second_turn_with_padding_of_its_own(plain, model):
    first, first_mask, _ = padded([60, 44])
    second, second_mask, _ = padded([9, 5], seed=50)
    mask = torch.cat([first_mask, second_mask], 1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    logits = []
    for which, cache in ((plain, DynamicCache(config=plain.config)), (model, SlicedCache(model.config, policy(**ALL)))):
        with torch.inference_mode():
            which(first, attention_mask=first_mask, cache=cache, use_cache=True, position_ids=positions[:, :60])
            out = which(second, attention_mask=mask, cache=cache, use_cache=True, position_ids=positions[:, 60:])
        logits.append(out.logits[second_mask.bool()])
    torch.testing.assert_close(logits[1], logits[0], atol=1e-3, rtol=1e-3)
    assert cache.pages.lengths == (69, 49)


def test_right_padding_is_refused(model):
    ids = prompt(2, 30)
    mask = torch.ones_like(ids)
    mask[1, -5:] = 0
    with pytest.raises(ArgumentError, match="left padding"), torch.inference_mode():
        model(ids, attention_mask=mask, cache=SlicedCache(model.config, policy()), use_cache=True)


def test_masking_a_stored_token_is_refused(model):
    cache = SlicedCache(model.config, policy())
    with torch.inference_mode():
        model(prompt(1, 30), cache=cache, use_cache=True)
        mask = torch.ones(1, 31, dtype=torch.long)
        mask[0, 3] = 0
        with pytest.raises(ArgumentError, match="seen before"):
            model(prompt(1, 1), attention_mask=mask, cache=cache, use_cache=True)
        mask[0, 3] = 1
        model(prompt(1, 1), attention_mask=mask, cache=cache, use_cache=True)  # refusing changed nothing
    assert cache.get_seq_length() == 31


def test_a_sliced_cache_needs_the_attention_function(plain):
    with pytest.raises(AttributeError, match="enable"), torch.inference_mode():
        plain(prompt(1, 30), cache=SlicedCache(plain.config, policy()), use_cache=True)


def test_one_layer_cannot_be_cropped(model):
    with pytest.raises(SicError, match="on the cache"):
        SlicedCache(model.config, policy()).layers[0].crop(-1)


def test_smollm2_greedy_equals_the_plain_model():
    from sic_kernels import models

    try:
        lm = models.load()
        text = models.text("python-topics")
    except models.MissingExtra as error:
        pytest.skip(str(error))
    ids = lm.tokens(text, 300)
    want = generate(lm.model, ids, steps=16)
    enable(lm.model)
    cache = SlicedCache(lm.model.config, policy(**ALL))
    assert torch.equal(generate(lm.model, ids, cache, steps=16), want)
    sliced = SlicedCache(lm.model.config, policy(ratio=0.25), params=cache.params)
    generate(lm.model, ids, sliced, steps=16)
    assert sliced.stats().hit_ratio is not None
