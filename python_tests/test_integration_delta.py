"""DeltaCache in transformers: a small random Llama. What is kept raw answers as the plain model does."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'sic_kernels[demo]'"
)

from tiny_llama import generate, padded, policy, prompt  # noqa: E402
from transformers.cache_utils import DynamicCache  # noqa: E402

from sic_kernels import ArgumentError, metrics  # noqa: E402
from sic_kernels.delta import Codec, Rope, Templates  # noqa: E402
from sic_kernels.integrations.delta import DeltaCache  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def cache_of(model, preset="raw", dtype=torch.float32, policy=None, **options):
    head_dim = model.config.head_dim
    rope = Rope.from_config(model.config)
    made = [Templates.zero(2, head_dim) for _ in range(2)]
    codecs = [Codec.preset(preset, *made, rope) for _ in range(model.config.num_hidden_layers)]
    return DeltaCache(model.config, codecs, policy, dtype=dtype, **options)


def test_rows_kept_raw_answer_as_the_plain_model(plain, model):
    ids = prompt(1, 90)
    cache, reference = cache_of(model), DynamicCache(config=plain.config)
    with torch.inference_mode():
        for part in ids.split([50, 1, 20, 1, 5, 13], dim=1):
            got = model(part, cache=cache, use_cache=True).logits
            want = plain(part, cache=reference, use_cache=True).logits
            torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("chosen", [None, policy(ratio=1.0)], ids=["dense", "all selected"])
def test_generation_with_left_padding(plain, model, chosen):
    ids, mask, _ = padded([96, 70, 33])
    want = generate(plain, ids, attention_mask=mask)
    assert torch.equal(generate(model, ids, cache_of(model, policy=chosen), attention_mask=mask), want)


def test_beam_search_moves_codes_and_tail(plain, model):
    ids = prompt(1, 60)
    options = {"num_beams": 3, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(generate(model, ids, cache_of(model), **options), generate(plain, ids, **options))


def test_q8_is_close_and_k4v4_is_near(plain, model):
    ids = prompt(1, 120)
    with torch.inference_mode():
        want = plain(ids).logits[0, 90:].log_softmax(-1)
        kl = {}
        for preset in ("q8", "k4v4", "k2v2"):
            cache = cache_of(model, preset, torch.float16)
            model(ids[:, :90], cache=cache, use_cache=True)
            got = torch.cat([model(ids[:, i : i + 1], cache=cache, use_cache=True).logits[0] for i in range(90, 120)])
            kl[preset] = (want.exp() * (want - got.log_softmax(-1))).sum(-1).mean().item()
    assert 3 * kl["q8"] < kl["k4v4"] < kl["k2v2"] / 2  # the model is random: its logits magnify every error


def test_what_is_reported(model):
    ids = prompt(1, 200)
    cache = cache_of(model, "k4v4", torch.float16, policy(ratio=0.2, sink=4, recent=16))
    generate(model, ids, cache, attention_mask=torch.ones_like(ids))
    stats = cache.stats()
    assert stats.totals["sliced"] > 0
    assert 0 < stats.bytes_read < stats.bytes_dense
    size = metrics.get("sic_delta_size_ratio").read()[""]
    assert size.numerator == cache.pages.nbytes() - cache.pages.nbytes_by_part()["index"]
    cache.crop(-50)
    assert cache.get_seq_length() == 161
    cache.reset()
    assert cache.pages.lengths == (0,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": policy(unit="page")}, "policy.unit"),
        ({"policy": policy(max_omitted_mass=0.5)}, "max_omitted_mass"),
        ({"policy": policy(recent=8)}, "policy.recent"),
    ],
)
def test_what_it_cannot_do_is_refused(model, options, message):
    with pytest.raises(ArgumentError, match=message):
        cache_of(model, **options)


def test_one_codec_a_layer(model):
    with pytest.raises(ArgumentError, match="codecs: got 2"):
        DeltaCache(model.config, cache_of(model).codecs[:2])
