"""`train-probe`, `eval head` and the head's part of the demo, on a tiny random model; what makes an answer complete, by hand."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers", reason="pip install 'sic_kernels[demo]'")
pytest.importorskip("rich", reason="pip install 'sic_kernels[demo]'")
pytest.importorskip("tokenizers", reason="pip install 'sic_kernels[demo]'")
pytest.importorskip("safetensors", reason="pip install 'sic_kernels[blobs]'")


from sic_kernels import head, models
from sic_kernels.cli import _answers, _demo_head, _speculation, main
from sic_kernels.cli import eval as eval_command
from sic_kernels.integrations import lookup
from sic_kernels.runtime.errors import ArgumentError

pytestmark = pytest.mark.usefixtures("keep_threads")


@pytest.fixture(scope="module")
def probes(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("probes") / "p.safetensors"
    argv = ["train-probe", "--model", folder, "--prompts", "15", "--quick", "--batch", "4", "--threads", "1"]
    assert main([*argv, "--out", str(path)]) == 0
    return path


def test_train_probe_writes_what_it_measured(probes):
    found, about = head.load_probes(probes)
    assert list(found) == ["complete", "next_entropy", "accepted"]
    assert [p.link for p in found.values()] == ["sigmoid", "identity", "sigmoid"]
    assert found["complete"].projection.shape == (16, 32)
    assert about["prompts"] == {"train": 6, "calibration": 4, "test": 5}
    assert about["positions"] == 15 * 24  # no answer ends by itself: there is no stop token
    assert len(about["weights"]) == 32
    names = {(row["task"], row["name"]) for row in about["rows"]}
    assert names > {("complete", "P(EOS)"), ("next_entropy", "entropy here"), ("accepted", "match length")}
    assert {row["name"] for row in about["stopping"]} >= {"probe", "P(EOS)"}
    assert all(row["threshold"] is None for row in about["stopping"])  # 4 prompts certify nothing
    assert about["speculation"][0]["plan"] == "plain"
    assert about["speculation"][0]["forwards"] == 15 * 23


def test_eval_head(folder, probes, capsys):
    argv = ["eval", "head", "--model", folder, "--text", "python:argparse", "--context", "260", "--scored", "32", "--skip", "10",
            "--answers", "1", "--probes", str(probes), "--threads", "1"]  # fmt: skip
    assert main([*argv, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = {row["policy"]: row for row in result["rows"]}
    assert list(rows) == [
        "dense",
        "dense, ring 0.25",
        "dense, ring 1",
        "sketch 12%",
        "sketch 12%, ring 0.25",
        "sketch 12%, ring 1",
    ]
    assert 0 < rows["dense, ring 0.25"]["kl"] < rows["dense, ring 1"]["kl"]
    assert {row["tokens"] for row in result["speculation"]} == {96}
    assert result["probes"]["prompts"]["test"] == 5
    eval_command._print_head(result)
    out = capsys.readouterr().out
    assert "dense, ring 0.25" in out
    assert "prompt lookup over 96 tokens" in out
    assert "P(EOS)" in out


def test_the_demo_shows_the_head(folder, capsys):
    argv = ["demo", "--no-replay", "--model", folder, "--text", "python:timeit", "--context", "300", "--steps", "64"]
    assert main([*argv, "--codec", "none", "--threads", "1", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)["written"]
    assert len(written["entropy"]) == 64
    assert 0 < written["stop_after"] <= 64
    assert written["per_token"]["budget"]["verified"] <= written["per_token"]["all"]["verified"]
    text = "\n".join(_demo_head.lines(written))
    assert written["stop_reason"] in text
    assert f"{_demo_head.sparkline(written['entropy'])}  (6 nats" in text


def test_sparkline_by_hand():
    assert _demo_head.sparkline([0.0, 0.5, 2.0, 3.99, 9.0]) == "▁▁▃▆█"


def test_why_a_rule_stops():
    def written(tokens, entropy):
        return lookup.Generated(tokens, entropy, 0, 0, 0)

    falling = [3.0 - 0.1 * i for i in range(20)]
    assert _demo_head.stopped(written(list(range(20)), falling), [99], 5) == (20, "length")
    assert _demo_head.stopped(written([1, 2, 99, 3], falling[:4]), [99], 5) == (3, "eos")
    assert _demo_head.stopped(written([1] * 20, [3.0, 2.0] + [0.01] * 18), [99], 5) == (10, "plateau")


# --- answers ------------------------------------------------------------------------------------------------------------


def prefixes(text):
    return [text[: i + 1] for i in range(len(text))]


def firsts(text, finished=True):
    """The text up to the first position where it is complete."""
    done = _answers.complete(prefixes(text), finished)
    return text[: done.index(True) + 1] if True in done else None


def test_complete_by_hand():
    assert firsts("Paris. It is big.") == "Paris. It is big."
    assert firsts("Paris.\n\n ") == "Paris."
    assert firsts("It is big. It is old. It is  BIG.") == "It is big. It is old."
    assert firsts("1. Red\n2. Blue\n3. red") == "1. Red\n2. Blue"
    assert firsts("f():\n  return c\nreturn c") == "f():\n  return c\nreturn c"  # indentation is part of code
    done = _answers.complete(prefixes("A b. A b. A b."), True)
    assert [i for i, x in enumerate(done) if x] == [3, 4, 8, 9, 13]  # never inside of a sentence


def test_an_answer_that_was_cut():
    assert firsts("A. B. C", False) is None  # who knows what would have come
    assert firsts("A b. C d. A b. C", False) == "A b. C d."  # in a loop
    assert firsts("A b. C d. A", False) is None  # perhaps not a loop
    assert firsts("A b. A b. Z", False) is None  # something new had begun


def test_a_batch_answers_like_one_alone(folder):
    lm = models.load(folder)
    prompts = models.instructions(5)
    alone, together = (_answers.answer(lm, prompts, 12, batch, lambda n: None) for batch in (1, 5))
    assert torch.equal(alone.token, together.token)
    assert torch.equal(alone.prompt, together.prompt)
    torch.testing.assert_close(alone.hidden, together.hidden, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(alone.entropy, together.entropy, atol=1e-3, rtol=1e-3)
    for prompt in range(5):
        ids = torch.tensor([alone.asked[prompt]])
        assert alone.tokens(prompt) == lookup.generate(lm.model, ids, 12, most=0).tokens


def test_answers_that_end_leave_the_batch(folder):
    lm = models.load(folder)
    prompts = models.instructions(6)
    free = _answers.answer(lm, prompts, 12, 6, lambda n: None)
    lm.model.generation_config.eos_token_id = stop = free.tokens(0)[4]
    found = _answers.answer(lm, prompts, 12, 6, lambda n: None)
    for prompt in range(6):
        tokens = free.tokens(prompt)
        assert bool(found.finished[prompt]) == (stop in tokens)
        assert found.tokens(prompt) == tokens[: tokens.index(stop)] if stop in tokens else tokens
    torch.testing.assert_close(found.eos_logprob.exp().max(), torch.tensor(1.0), atol=1.0, rtol=0)


def test_a_replay_counts_what_a_run_does(folder):
    lm = models.load(folder)
    ids = torch.tensor([[5, 6, 7, 8, 9] * 6])
    for options in _speculation.plans().values():
        run = lookup.generate(lm.model, ids, 50, **options)
        assert lookup.replay(ids[0].tolist(), run.tokens, run.entropy, **options) == run


# --- instructions -----------------------------------------------------------------------------------------------------------


def test_instructions_are_the_same_and_all_different():
    found = models.instructions(60)
    assert found == models.instructions(90)[:60]
    assert len(set(found)) == 60
    assert found != models.instructions(60, seed=1)
    assert any(x.startswith("What is ") for x in found)
    with pytest.raises(ArgumentError, match="instructions: count: got"):
        models.instructions(1_000_000)
