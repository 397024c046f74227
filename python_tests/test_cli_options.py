"""Options of the commands that cannot be right are refused before any work is done, in one line."""

import pytest
from test_device_check import load

from sic_kernels.cli import main

WRONG = [
    ("demo", "--context", "0"), ("demo", "--context", "-5"), ("demo", "--threads", "-3"), ("demo", "--steps", "x"),
    ("demo", "--ratio", "7"), ("demo", "--ratio", "nan"), ("eval", "slicing", "--scored", "0"),
    ("eval", "slicing", "--needles", "13"), ("eval", "slicing", "--skip", "-1"), ("eval", "slicing", "--ratio", "0"),
    ("eval", "head", "--answers", "-1"), ("train-probe", "--prompts", "11"), ("train-probe", "--cap", "3"),
    ("train-probe", "--out", "/absent/probe.safetensors"), ("train-probe", "--seed", "-1"), ("train-probe", "--batch", "0"),
    ("verify-determinism", "--runs", "1"), ("verify-determinism", "--threads", "0"),
    ("bench", "--plot", "/absent/page.html"), ("bench", "--save", "/absent/bench.json"),
]  # fmt: skip


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_wrong_options(words, capsys):
    with pytest.raises(SystemExit) as error:
        main(list(words))
    assert error.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"error: argument {words[-2]}: " in last
    assert words[-1] in last


def test_more_scored_tokens_than_context(capsys):
    pytest.importorskip("transformers", reason="pip install 'sic_kernels[demo]'")
    pytest.importorskip("rich", reason="pip install 'sic_kernels[demo]'")
    assert main(["eval", "slicing", "--context", "50", "--scored", "50"]) == 1
    assert capsys.readouterr().err.startswith("eval: --scored: got 50, expected fewer than the 50 tokens")


def test_looking_whether_a_file_can_be_written_leaves_it_as_it_was(tmp_path):
    from sic_kernels.cli._options import output_file

    there, absent = tmp_path / "there", tmp_path / "absent"
    there.write_text("kept")
    assert output_file(str(there)) == there
    assert output_file(str(absent)) == absent
    assert there.read_text() == "kept"
    assert not absent.exists()


def test_the_device_check_needs_a_place_for_its_report(monkeypatch, capsys):
    """Found out before the build, not after."""
    module = load("device_check")
    monkeypatch.setattr(module, "run_steps", lambda *_: pytest.fail("a step ran"))
    monkeypatch.setenv("OUT", "/absent")
    assert module.main(["--rehearse"]) == 1
    assert "device check: cannot write /absent/device_check.json" in capsys.readouterr().err
