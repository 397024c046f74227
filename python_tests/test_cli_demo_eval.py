"""`demo`, `eval` and `fit-templates` from end to end, on a tiny random model with a tokenizer of its own."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="pip install 'sic_kernels[demo]'")
pytest.importorskip("rich", reason="pip install 'sic_kernels[demo]'")
pytest.importorskip("tokenizers", reason="pip install 'sic_kernels[demo]'")


import sic_kernels.models
from sic_kernels.cli import _delta_eval, _demo_replay, _llama_cpp, _ragged_eval, main
from sic_kernels.delta import ModelTemplates

pytestmark = pytest.mark.usefixtures("keep_threads")

DEMO = ("demo", "--no-replay", "--text", "python:timeit")


@pytest.fixture(scope="module")
def templates(folder, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("templates") / "t.safetensors")
    argv = ["fit-templates", folder, "--tokens", "640", "--window", "320", "--count", "8", "--iterations", "4"]
    assert main([*argv, "--text", "python:argparse", "--out", path, "--threads", "1"]) == 0
    return path


def run_json(capsys, *argv):
    assert main([*argv, "--json", "--threads", "1"]) == 0
    return json.loads(capsys.readouterr().out)


def test_demo(folder, capsys):
    argv = (*DEMO, "--model", folder, "--context", "600", "--steps", "6", "--ratio", "0.2")
    result = run_json(capsys, *argv)
    assert result["steps"] == 6
    assert result["head_steps"]["sliced"] == 6 * 2 * 4
    dense_bytes = 603.5 * 2 * (8 + 8) * 4 * 2  # tokens, KV heads, channels of k and v, bytes, layers
    assert result["dense"]["kv_bytes"] == pytest.approx(dense_bytes)
    assert 0.2 * dense_bytes < result["sliced"]["kv_bytes"] < 0.35 * dense_bytes
    assert 0 <= result["greedy_agreement"] <= 1
    assert result["sliced"]["perplexity"] == pytest.approx(result["dense"]["perplexity"], rel=0.05)
    assert result["fallbacks"] == {}


def test_demo_reading_everything_agrees(folder, capsys):
    argv = (*DEMO, "--model", folder, "--context", "300", "--steps", "6", "--ratio", "1.0")
    result = run_json(capsys, *argv)
    assert result["greedy_agreement"] == 1.0
    assert result["sliced"]["perplexity"] == pytest.approx(result["dense"]["perplexity"], rel=1e-4)


def test_demo_names_fallbacks_and_prints_a_table(folder, capsys):
    argv = [*DEMO, "--model", folder, "--context", "600", "--steps", "4", "--threads", "1"]
    assert main([*argv, "--max-omitted-mass", "0.001"]) == 0
    out = capsys.readouterr().out
    assert "attention, ms per token" in out
    assert "recomputed dense: layer 0: head 0 (4x)" in out


def test_demo_shadow(folder, capsys):
    argv = (*DEMO, "--model", folder, "--context", "600", "--steps", "4", "--shadow")
    result = run_json(capsys, *argv)
    assert result["greedy_agreement"] == 1.0  # a shadow run answers dense
    assert len(result["sliced"]["attention_error"]) == 2
    assert max(result["sliced"]["attention_error"]) > 0


def test_demo_kills_resumes_and_draws_again(folder, capsys):
    argv = ["demo", "--model", folder, "--text", "python:timeit", "--context", "300", "--steps", "2"]
    result = run_json(capsys, *argv)
    found = result["replay"]
    assert [row["policy"] for row in result["followups"]] == ["dense", "sliced 4%", "sliced 4%, point kept"]
    kill, early, again = found["kill"], found["early_exit"], found["resample"]
    assert (kill["tokens"], kill["killed_after"], kill["executed"]) == (300, 4, 4)  # of 2 chunks of 4 segments
    assert kill["same_tokens"]
    assert set(kill["loaded"]) == set(kill["saving"]) == set(kill["nbytes"]) == {"torch", "safetensors"}
    assert min(kill["nbytes"].values()) > 2 * 300 * 2 * 2 * 8 * 4  # keys and values of all layers, float32
    assert set(kill["absent"]) == {"llama.cpp f16"}
    assert early["same_tokens"]
    assert (early["exit_layer"], early["layers"], early["tokens"]) == (1, 2, 24)
    assert early["layers_per_token"] == (23 - early["accepted"] + early["drafted"] + 23 - early["accepted"]) / 23
    assert again["same_bits"]
    assert (again["layers_run"], again["layers"], len(again["tokens"])) == (1, 2, 5)
    shorter = run_json(capsys, *argv, "--no-replay")
    assert (shorter["replay"], shorter["followups"]) == (None, None)


def test_demo_says_what_replay_did():
    found = {
        "kill": {"tokens": 300, "resumed": 0.002, "same_tokens": True, "recomputed": 1.5,
                 "nbytes": {"torch": 46e6, "safetensors": 45e6}, "loaded": {"torch": 0.02, "safetensors": 0.03},
                 "absent": {"llama.cpp f16": "no such package"}},
        "early_exit": {"exit_layer": 25, "layers": 30, "layers_per_token": 31.25, "accepted": 5, "drafted": 7,
                       "same_tokens": False},
        "resample": {"layer": 25, "layers_run": 5, "layers": 30, "seconds": 0.01, "step_seconds": 0.04, "same_bits": True},
    }  # fmt: skip
    text = "\n".join(_demo_replay.lines(found))
    for part in ("300 tokens", "2.0 ms after the model is there, the same tokens", "1500 ms to compute what was done",
                 "20 ms (torch, 46 MB), 30 ms (safetensors, 45 MB) to load",
                 "not measured: loading the state by llama.cpp f16: no such package",
                 "exit at layer 25 of 30 where it is 90% sure",
                 "OTHER TEXT", "5 of 30 layers, 10.0 ms in place of 40.0, the same bits"):  # fmt: skip
        assert part in text


def test_eval_slicing(folder, capsys):
    result = run_json(
        capsys, "eval", "slicing", "--model", folder, "--text", "python:argparse", "--context", "700", "--scored", "128",
        "--skip", "10", "--ratio", "0.2", "--needles", "1",
    )  # fmt: skip
    rows = {row["policy"]: row for row in result["rows"]}
    assert list(rows) == ["dense", "oracle 20%", "sketch 20%", "Quest pages 20%", "Quest pages 25%"]
    assert rows["sketch 20%"]["kl"] >= 0
    assert rows["sketch 20%"]["kl_ratio_low"] <= rows["sketch 20%"]["kl_ratio"] <= rows["sketch 20%"]["kl_ratio_high"]
    assert 0.2 <= rows["sketch 20%"]["read_ratio"] < 0.35
    assert 0 <= rows["sketch 20%"]["omitted_coverage"] <= 1
    assert {row["questions"] for row in result["needles"]} == {1}


def test_demo_shows_the_coded_cache(folder, templates, capsys):
    argv = [*DEMO, "--model", folder, "--context", "600", "--steps", "6", "--ratio", "0.2"]
    result = run_json(capsys, *argv, "--codec", "q8", "--templates", templates)
    for side in ("coded", "coded_sliced"):
        assert result[side]["perplexity"] == pytest.approx(result["dense"]["perplexity"], rel=0.05)
        assert 0 < result[side]["cache_bytes"] < result["dense"]["cache_bytes"]
    assert result["coded"]["sketch_bytes"] == 0  # nothing is selected
    assert result["coded_sliced"]["sketch_bytes"] > 0
    assert result["coded"]["greedy_agreement"] == 1.0
    assert result["coded_sliced"]["kv_bytes"] < result["coded"]["kv_bytes"] < result["dense"]["kv_bytes"]
    assert main([*argv, "--templates", templates, "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert "coded k4v4" in out
    assert "share of half precision" in out


def test_demo_says_why_there_is_no_coded_cache(folder, capsys):
    argv = [*DEMO, "--model", folder, "--context", "300", "--steps", "2", "--threads", "1"]
    assert main(argv) == 0
    assert "no coded cache: no templates come with the package for this model" in capsys.readouterr().out
    assert main([*argv, "--codec", "none"]) == 0
    assert "coded" not in capsys.readouterr().out
    assert main([*argv, "--codec", "k9v9"]) == 1
    assert "--codec" in capsys.readouterr().err


def test_fit_templates(folder, tmp_path, capsys):
    argv = ("fit-templates", folder, "--tokens", "320", "--window", "200", "--count", "8", "--iterations", "3")
    first, second = (run_json(capsys, *argv, "--out", str(tmp_path / name)) for name in ("a", "b"))
    a, b = (ModelTemplates.load(tmp_path / name) for name in ("a", "b"))  # the model's own text too is seeded
    assert (a.keys, a.values, a.params) == (b.keys, b.values, b.params)
    assert first["texts"] == ["own"]
    assert first["tokens"] == 320 - 2 * 4
    assert first["bytes"] == (tmp_path / "a").stat().st_size
    assert all(0 < norm < 1 for norm in first["residual_norm_keys"] + first["residual_norm_values"])
    assert "--seed 0" in second["command"]
    with pytest.raises(SystemExit):
        main([*argv, "--out", str(tmp_path / "no" / "folder"), "--threads", "1"])
    assert "--out" in capsys.readouterr().err


def test_eval_delta(folder, templates, capsys):
    argv = ["eval", "delta", "--model", folder, "--text", "python:argparse", "--text", "python:timeit", "--context", "352",
            "--scored", "96", "--skip", "10", "--ratio", "0.2", "--templates", templates, "--fast"]  # fmt: skip
    result = run_json(capsys, *argv)
    rows = {(row["text"], row["policy"]): row for row in result["rows"]}
    labels = [label for text, label in rows if text == "python:argparse"]
    assert labels[:7] == ["dense", "fp8 e4m3", "q8_0", "q4_0", "KIVI-4", "KIVI-2", "KIVI-2, 128 raw"]
    assert labels[-5:] == ["oracle 20%, raw", "delta k4v4, sliced 20%", *_llama_cpp.TYPES]
    for text in ("python:argparse", "python:timeit", "all"):
        sizes = {label: rows[text, label]["size"] for label in ("fp8 e4m3", "KIVI-2, 128 raw")}
        assert sizes["fp8 e4m3"] == 0.5
        assert 0.1875 < sizes["KIVI-2, 128 raw"] < 0.6
        assert rows[text, "delta k4v4"]["against"] == "fp8 e4m3"
        assert rows[text, "delta q8"]["kl_low"] <= rows[text, "delta q8"]["kl"] <= rows[text, "delta q8"]["kl_high"]
        assert rows[text, "delta k4v4"]["sketch"] > 0
        sliced = rows[text, "delta k4v4, sliced 20%"]
        assert sliced["kl_ratio_low"] <= sliced["kl_ratio"] <= sliced["kl_ratio_high"]
    assert result["templates"]["count"] == 8
    assert main([*argv, "--threads", "1"]) == 0
    assert "KL / peer's" in capsys.readouterr().out


def test_padding_of_documents_by_hand(monkeypatch):
    """Two kinds: 100 words each, or 1000. All rows of a kind are alike, so only the mixed batches pad."""
    monkeypatch.setattr(_ragged_eval, "BATCHES", 20)
    kinds = {"short": ["a " * 100] * 3, "long": ["a " * 1000] * 3}
    result = _ragged_eval.measure(lambda found: [len(text.split()) for text in found], kinds)
    rows = {(row["kind"], row["batch"]): row for row in result["rows"]}
    assert len(rows) == 3 * len(_ragged_eval.SIZES)
    for size in _ragged_eval.SIZES:
        alike, mixed = rows["long", size], rows[_ragged_eval.MIXED, size]
        assert alike["tokens"] == alike["computed"]["padded"] == 20 * size * 1000
        assert alike["less_waste"]["bucketed"] is None  # nothing is wasted that could be less
        assert (alike["segments"]["bucketed"], mixed["segments"]["bucketed"]) == pytest.approx((1, 2))
        assert mixed["computed"]["padded"] == 20 * size * 1000
        assert mixed["wasted"] == {
            "padded": 20 * size * 1000 - mixed["tokens"],
            "bucketed": 0,
            "doubling": 0,
            "ragged": 0,
        }
        assert mixed["less_waste"] == {"padded": 0, "bucketed": 1, "doubling": 1, "ragged": 1}
    assert "6 documents in tokens of t" in _ragged_eval.title({"tokenizer": "t", **result})
    assert [line[0] for line in _ragged_eval.lines(result)] == [kind for kind, _ in rows]


def test_padding_of_real_documents(monkeypatch, capsys):
    """The command itself, with a tokenizer of words."""
    monkeypatch.setattr(_ragged_eval, "BATCHES", 5)
    words = lambda texts: types.SimpleNamespace(input_ids=[text.split() for text in texts])
    monkeypatch.setattr(sic_kernels.models, "load_tokenizer", lambda source: words)
    assert main(["eval", "ragged", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {"help texts", "functions", _ragged_eval.MIXED} <= {row["kind"] for row in result["rows"]}
    for row in result["rows"]:
        assert row["wasted"]["ragged"] == 0 <= row["wasted"]["bucketed"] <= row["wasted"]["padded"]
    assert main(["eval", "ragged"]) == 0
    assert "waste: bucketed" in capsys.readouterr().out
    assert main(["eval", "ragged", "--fast", "--scored", "5"]) == 1
    assert "eval ragged: options: got fast, scored, expected --model and --json only" in capsys.readouterr().err


class Llama:
    """In place of llama-cpp-python's: logits that grow with the token, those of coded caches a little off."""

    def __init__(self, path, n_ctx, type_k, type_v, logits_all, **options):
        assert (Path(path).name, logits_all, type_v) == ("model.gguf", True, type_k)
        self.scores, self.at, self.type = np.zeros((n_ctx, 50), np.float32), 0, type_k

    def eval(self, tokens):
        for token in tokens:
            self.scores[self.at] = np.sin(np.arange(50) * (token + 1)) + 0.01 * (self.type != 1) * np.arange(50)
            self.at += 1

    def close(self):
        pass


def test_rows_of_llama_cpp(monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", types.SimpleNamespace(Llama=Llama, __spec__=True))
    lm = types.SimpleNamespace(gguf=Path("model.gguf"))
    ids, scores = torch.arange(112)[None] % 50, {}
    base, *coded = _delta_eval._llama_rows(lm, "text", ids, 96, scores, types.SimpleNamespace(
        add_task=lambda *a, **k: 0, advance=lambda *a: None))  # fmt: skip
    assert (base["policy"], base["size"]) == ("llama.cpp f16", 1.0)
    assert "kl" not in base
    assert [row["size"] for row in coded] == [0.53125, 0.28125]
    assert all(row["kl"] > 0 and row["perplexity_change"] != 0 for row in coded)
    assert set(scores) == set(_llama_cpp.TYPES)
    absent = _delta_eval._llama_rows(types.SimpleNamespace(gguf=None), "text", ids, 96, {}, None)
    assert {row["absent"] for row in absent} == {"the model is not a .gguf file"}


def test_a_text_that_is_too_short_is_an_error(folder, capsys):
    assert main(["demo", "--model", folder, "--text", "python:this", "--context", "6000"]) == 1
    assert "tokens: text" in capsys.readouterr().err
