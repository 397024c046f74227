"""The programs in examples/ do what they print, on the demo's model."""

import runpy
from pathlib import Path

import pytest

from sic_kernels import models

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture(scope="module")
def lm():
    pytest.importorskip("transformers")
    return models.load()


@pytest.fixture
def run(lm, monkeypatch, capsys):
    """Runs an example's `main` with these arguments; what it printed."""
    load = models.load
    monkeypatch.setattr(models, "load", lambda source=None: load(source) if source else lm)

    def call(name, **arguments):
        runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](**arguments)
        return capsys.readouterr().out

    before = lm.model.config._attn_implementation
    yield call
    lm.model.set_attn_implementation(before)


def test_custom_runner_continues_the_text(run, lm):
    ids = lm.tokens(models.text("hamlet"), 96, skip=1000)
    dense = lm.model.generate(ids, max_new_tokens=4, do_sample=False)[0, 96:]
    assert run("custom_runner", context=96, steps=4) == lm.tokenizer.decode(dense) + "\n"  # too short to be sliced


def test_resume_goes_on_after_kill_9(run, lm, tmp_path):
    lm.save(tmp_path)  # another process has it in a fraction of the time of a GGUF file
    printed = run("resume", tokens=192, segments=40, steps=4, model=str(tmp_path))
    assert "ended by signal 9; runs 24 segments, from 'layer.7' at token 128" in printed
    assert "the same text as without a stop" in printed


def test_slots_give_the_same_bits(run):
    printed = run("slots", tokens=48, steps=6)
    assert "5 of 30 layers each" in printed
    assert "layer 25: 0.1 MB given up" in printed
    assert "the same text" in printed


def test_follow_up_needs_its_point(run):
    without, kept = run("follow_up", between=384).splitlines()[1:]
    assert "Lisbon" not in without
    assert kept.endswith("is Lisbon")
