"""`demo` and `eval slicing` from end to end, on a tiny random model with a tokenizer of its own."""

from __future__ import annotations

import json

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="pip install 'sic_kernels[demo]'")
pytest.importorskip("rich", reason="pip install 'sic_kernels[demo]'")
tokenizers = pytest.importorskip("tokenizers", reason="pip install 'sic_kernels[demo]'")

from sic_kernels.cli import main  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of 2 layers and a tokenizer that knows letters."""
    path = tmp_path_factory.mktemp("model")
    vocab = {chr(i): i for i in range(128)} | {"<unk>": 128}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", pad_token="<unk>")
    fast.save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=129, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, pad_token_id=128, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def keep_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run_json(capsys, *argv):
    assert main([*argv, "--json", "--threads", "1"]) == 0
    return json.loads(capsys.readouterr().out)


def test_demo(folder, capsys):
    argv = ("demo", "--model", folder, "--text", "python:timeit", "--context", "600", "--steps", "6", "--ratio", "0.2")
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
    argv = ("demo", "--model", folder, "--text", "python:timeit", "--context", "300", "--steps", "6", "--ratio", "1.0")
    result = run_json(capsys, *argv)
    assert result["greedy_agreement"] == 1.0
    assert result["sliced"]["perplexity"] == pytest.approx(result["dense"]["perplexity"], rel=1e-4)


def test_demo_names_fallbacks_and_prints_a_table(folder, capsys):
    argv = ["demo", "--model", folder, "--text", "python:timeit", "--context", "600", "--steps", "4", "--threads", "1"]
    assert main([*argv, "--max-omitted-mass", "0.001"]) == 0
    out = capsys.readouterr().out
    assert "attention, ms per token" in out
    assert "recomputed dense: layer 0: head 0 (4x)" in out


def test_demo_shadow(folder, capsys):
    argv = ("demo", "--model", folder, "--text", "python:timeit", "--context", "600", "--steps", "4", "--shadow")
    result = run_json(capsys, *argv)
    assert result["greedy_agreement"] == 1.0  # a shadow run answers dense
    assert len(result["sliced"]["attention_error"]) == 2
    assert max(result["sliced"]["attention_error"]) > 0


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


def test_a_text_that_is_too_short_is_an_error(folder, capsys):
    assert main(["demo", "--model", folder, "--text", "python:this", "--context", "6000"]) == 1
    assert "tokens: text" in capsys.readouterr().err
