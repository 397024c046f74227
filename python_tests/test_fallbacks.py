"""Every fallback has a status, a metric and a log line, and is an error under SIC_STRICT=1."""

import dataclasses
import logging

import fake_nvml
import pytest
import torch

import sic_kernels as sic
from sic_kernels import delta, slicing
from sic_kernels.runtime import backends, config, fallback, probe

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'sic_kernels[demo]'"
)

from tiny_llama import generate, policy, prompt  # noqa: E402
from transformers.cache_utils import DynamicCache  # noqa: E402

from sic_kernels.integrations.delta import DeltaCache  # noqa: E402
from sic_kernels.integrations.transformers import SlicedCache  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "from_zero")


@pytest.fixture
def strict(monkeypatch):
    chosen = dataclasses.replace(config.current(), strict=True)
    monkeypatch.setattr(config, "current", lambda: chosen)


def counted(name, **label):
    """numerator, denominator"""
    found = sic.metrics.snapshot()[name]
    for key, value in label.items():
        found = found[f"by_{key}"][value]
    return found["numerator"], found["denominator"]


def test_report(caplog, strict, monkeypatch):
    with pytest.raises(sic.SicError, match=r"^SIC_STRICT: 3 rows$"):
        fallback.report(logging.getLogger("sic_kernels.x"), "%d rows", 3)
    assert caplog.text == ""
    monkeypatch.undo()
    fallback.report(logging.getLogger("sic_kernels.x"), "%d rows", 3)
    assert [(r.levelname, r.message) for r in caplog.records] == [("INFO", "3 rows")]


# --- attend -------------------------------------------------------------------------------------------------------------


def attend(limit):
    """200 tokens of one head, of which a slice leaves more than 1e-6 of the mass unread."""
    gen = torch.Generator().manual_seed(0)
    k, q = torch.randn(1, 1, 208, 64, generator=gen), torch.randn(1, 2, 64, generator=gen)
    lens = torch.tensor([200], dtype=torch.int32)
    sketch = slicing.key_sketch(k, None, lens, slicing.calibrate(k[0, 0, :200, None]))
    chosen = slicing.SlicePolicy(ratio=0.12, sink=2, recent=4, min_len=0, max_omitted_mass=limit)
    return slicing.attend(q, k, k, sketch, None, lens, policy=chosen)


def test_attend_and_its_record(caplog):
    result = attend(1e-6)
    assert (result.count("sliced"), result.count("fallback_mass")) == (0, 2)
    assert caplog.text == ""  # the op by itself reads nothing back
    result.record()
    attend(1.0).record()
    assert counted("sic_slice_hit_ratio") == (2, 4)
    assert counted("sic_slice_fallback_ratio", reason="omitted_mass") == (2, 4)
    assert [r.message.partition(":")[2] for r in caplog.records] == [
        " 2 head-steps were recomputed dense (estimated omitted mass above the limit)"
    ]


def test_attend_when_strict(strict):
    attend(1.0).record()
    with pytest.raises(sic.SicError, match="SIC_STRICT: attend: 2 head-steps"):
        attend(1e-6)
    with fallback.looked_at_later():
        result = attend(1e-6)
    with pytest.raises(sic.SicError, match="SIC_STRICT: attend: 2 head-steps"):
        result.record()


def test_a_strict_error_leaves_the_cache_as_after_the_step(model, strict):
    """All layers have the token, so that the next step is right."""
    cache = SlicedCache(model.config, policy(ratio=0.12, sink=2, recent=4, max_omitted_mass=1e-4))
    with torch.inference_mode():
        model(prompt(1, 120), cache=cache, use_cache=True)
        for length in (121, 122):
            with pytest.raises(sic.SicError, match="SIC_STRICT"):
                model(prompt(1, 1), cache=cache, use_cache=True)
            assert cache.get_seq_length() == length
            assert cache.pages.lengths == (length,)


# --- another cache under sliced attention -------------------------------------------------------------------------------


def test_another_cache_is_counted_and_logged(model, caplog):
    """3 layers of 4 heads; the prompt's own attention and a call without a cache slice nothing."""
    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        model(prompt(1, 20), cache=cache, use_cache=True)
        model(prompt(1, 20), use_cache=False)
        assert caplog.text == ""
        model(prompt(1, 2), cache=cache, use_cache=True)
    assert counted("sic_slice_fallback_ratio", reason="no_sliced_cache") == (24, 24)
    assert counted("sic_slice_hit_ratio") == (0, 24)
    assert caplog.text.count("dense attention over 22 tokens: the cache is not a SlicedCache") == 3


def test_another_cache_when_strict(model, strict):
    with pytest.raises(sic.SicError, match="SIC_STRICT: dense attention over 21 tokens"):
        generate(model, prompt(1, 20), DynamicCache(config=model.config), steps=2)


# --- coded caches -------------------------------------------------------------------------------------------------------


def encode(raw_rows):
    """Three rows of which one is not finite."""
    codec = delta.Codec.preset("k4v4", *(delta.Templates.zero(1, 64) for _ in "kv"), None, sinks=0)
    pages = delta.DeltaPages.allocate(codec, 1, 16, 1, 64, 64, raw_rows=raw_rows)
    rows = torch.randn(3, 1, 64, generator=torch.Generator().manual_seed(0))
    rows[1, 0, 0] = torch.inf
    delta.encode(codec, rows, rows, torch.arange(3), torch.arange(3), pages)
    return pages


def test_rows_without_room(strict, monkeypatch):
    assert encode(1).raw_state.tolist() == [1, 0]
    with pytest.raises(sic.SicError, match="SIC_STRICT: 1 rows were to be kept raw"):
        encode(0)
    monkeypatch.undo()
    assert encode(0).raw_state.tolist() == [0, 1]


def coded_cache(model):
    rope = delta.Rope.from_config(model.config)
    templates = [delta.Templates.zero(2, model.config.head_dim) for _ in "kv"]
    return DeltaCache(model.config, [delta.Codec.preset("q8", *templates, rope)] * model.config.num_hidden_layers)


def test_a_coded_cache_on_the_cpu_makes_room_instead(model, strict):
    cache = coded_cache(model)
    generate(model, prompt(1, 60), cache, steps=3)
    cache.stats()
    assert cache.pages.rows_without_room() == 0


def test_a_coded_cache_that_lost_rows(model, caplog, monkeypatch):
    cache = coded_cache(model)
    generate(model, prompt(1, 60), cache, steps=3)
    monkeypatch.setattr(cache.pages, "rows_without_room", lambda: 5)
    cache.stats()
    assert counted("sic_delta_lost_raw_ratio")[0] == 5
    assert [r.levelname for r in caplog.records if "5 rows were to be kept raw" in r.message] == ["WARNING"]
    chosen = dataclasses.replace(config.current(), strict=True)
    monkeypatch.setattr(config, "current", lambda: chosen)
    with pytest.raises(sic.SicError, match="SIC_STRICT: 5 rows"), torch.inference_mode():
        model(prompt(1, 1), cache=cache, use_cache=True)


def test_templates_of_other_weights(model, caplog, monkeypatch):
    gen = torch.Generator().manual_seed(0)
    head_dim, layers = model.config.head_dim, model.config.num_hidden_layers
    templates = delta.fit_templates(torch.randn(64, 2, head_dim, generator=gen), count=2)
    shape = delta.model_shape.ModelShape.of(model)
    weights = delta.model_shape.weights_digest(model)
    params = slicing.calibrate(torch.randn(64, 2, head_dim, generator=gen))
    same = delta.ModelTemplates(shape, *((part,) * layers for part in (templates, templates, params)), weights=weights)
    other = dataclasses.replace(same, weights="0" * 16)
    same.check_model(model)
    assert caplog.text == ""
    other.check_model(model)
    assert "were fitted on other weights" in caplog.text
    assert counted("sic_delta_other_weights_ratio") == (1, 2)
    chosen = dataclasses.replace(config.current(), strict=True)
    monkeypatch.setattr(config, "current", lambda: chosen)
    same.check_model(model)
    with pytest.raises(sic.SicError, match="SIC_STRICT: templates of"):
        other.check_model(model)


# --- machine ------------------------------------------------------------------------------------------------------------


def test_the_gate(caplog, strict, monkeypatch, tmp_path):
    good = probe.probe_hardware(tmp_path, fake_nvml.FakeNvml({}))
    bad = probe.probe_hardware(tmp_path, fake_nvml.FakeNvml({"GetEccMode": [0, 0]}))
    assert sic.gate(["gpu", "ecc"], hardware=good)
    with pytest.raises(sic.BackendError, match="hardware gate refused: ecc: fail"):
        sic.gate(["gpu", "ecc"], hardware=bad)
    monkeypatch.undo()
    assert [f.name for f in sic.gate(["gpu", "ecc"], hardware=bad).refused] == ["ecc"]
    assert counted("sic_gate_refusal_ratio", finding="ecc") == (2, 6)
    assert counted("sic_gate_refusal_ratio", finding="gpu") == (0, 6)
    assert "gate: ecc: fail: GPU 0: ECC is off" in caplog.text


def test_a_second_choice_of_backend_is_logged(caplog, monkeypatch):
    for name, why in (("cuda", "built without CUDA"), ("triton", None)):
        usable = dataclasses.replace(backends.TABLE[name], why_not=lambda why=why: why)
        monkeypatch.setitem(backends.TABLE, name, usable)
    assert backends._automatic.__wrapped__("select", "cuda").name == "triton"
    assert "select: backend triton, for want of cuda: built without CUDA" in caplog.text
