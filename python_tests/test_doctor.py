"""doctor works with nothing but the standard library, and says how to get what is missing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import fake_nvml
import pytest

import sic_kernels as sic
from sic_kernels.cli import COMMANDS, doctor, main
from sic_kernels.runtime import probe

PACKAGE = Path(sic.__file__).parent


def _copy_of_package(root):
    """A function that runs the command line with only the package's Python files and the standard library."""
    for source in PACKAGE.rglob("*.py"):
        target = root / "sic_kernels" / source.relative_to(PACKAGE)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())

    def run(*args, **environ):
        # -S: no site-packages, so the current folder and the standard library are all there is.
        return subprocess.run(
            [sys.executable, "-S", "-m", "sic_kernels", *args],
            env={"PATH": os.environ["PATH"], **environ},
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    return _copy_of_package(tmp_path_factory.mktemp("bare"))


def test_bare_interpreter_is_really_bare(tmp_path):
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import torch"], cwd=tmp_path, env={}, capture_output=True, check=False
    )
    assert done.returncode != 0
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import numpy"], cwd=tmp_path, env={}, capture_output=True, check=False
    )
    assert done.returncode != 0


def test_json_with_the_standard_library_only(bare):
    done = bare("doctor", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report["ok"] is False
    assert report["version"] == sic.__version__
    assert report["native"]["built"] is False
    assert "pip install" in report["native"]["remedy"]
    assert report["packages"]["torch"]["version"] is None
    assert "pip install" in report["packages"]["torch"]["remedy"]
    assert report["settings"]["slice_ratio"] == 0.12
    for name in ("gpu", "nvlink", "ecc", "pcie", "cpu_isa", "threads"):
        assert report["hardware"][name]["status"] in ("pass", "fail", "unknown")
        assert report["hardware"][name]["source"]


def test_a_module_that_does_not_load_says_why(tmp_path):
    """Built, but torch is missing: the remedy is to install torch, not to build again."""
    run = _copy_of_package(tmp_path)
    (tmp_path / "sic_kernels" / "_C.py").write_text("raise ImportError('never loaded')\n")
    native = json.loads(run("doctor", "--json").stdout)["native"]
    assert native["built"] is True
    assert native["loads"] is False
    assert "torch" in native["error"]
    assert "pip install 'torch" in native["remedy"]


def test_text_with_the_standard_library_only(bare):
    done = bare("doctor")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for word in ("Build", "Backends", "Hardware", "Packages", "Tools", "nvlink", "pip install"):
        assert word in done.stdout


def test_strict_exit_status(bare):
    assert bare("doctor", "--strict").returncode == 1


def test_a_broken_setting_is_reported_and_hides_nothing(bare):
    done = bare("doctor", "--json", SIC_LOGG="info")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert "did you mean SIC_LOG?" in report["settings"]["error"]
    assert report["packages"]["numpy"]["version"] is None


def test_other_commands_say_what_they_need(bare):
    done = bare("cmakedir")
    assert done.returncode == 1
    assert "pip install" in done.stderr
    assert bare().returncode == 2
    assert bare("dcotor").returncode == 2
    assert bare("--help").returncode == 0
    assert bare("--version").stdout.strip() == sic.__version__


def test_here_everything_needed_is_there(capsys):
    """In the development environment the module is built: a test run without it would prove nothing."""
    assert main(["doctor", "--json", "--strict"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["native"]["loads"] is True
    assert report["native"]["isa"] in report["native"]["supported_isas"]
    assert report["native"]["cmakedir"]
    assert Path(report["native"]["path"]).is_file()
    assert report["backends"]["cpu"] == "available"
    assert report["packages"]["torch"]["version"]


def test_text_keeps_square_brackets(capsys):
    doctor._show({**doctor.examine(), "packages": {"x": {"needed_for": "y", "remedy": "pip install 'a[demo]'"}}})
    assert "a[demo]" in capsys.readouterr().out


def test_each_gpu_is_shown_with_its_values_and_why_it_fails(tmp_path):
    nvml = fake_nvml.FakeNvml({}, {"GetEccMode": [0, 0], "GetVirtualizationMode": 2, "GetNvLinkState": [0]})
    hardware = probe.probe_hardware(tmp_path, nvml).as_dict()
    rows = {row[0]: row[1:] for row in doctor._hardware_rows({"hardware": hardware, "threads": {}})}
    one = "name NVIDIA H200, compute sm_90, memory_mib 143771"
    assert rows["gpu"] == ("pass", f"{one} | {one}, virtual a vGPU")
    assert rows["ecc"] == (
        "fail",
        "on 1, uncorrected 0 | on 0, uncorrected 0; GPU 1: ECC is off: nvidia-smi -e 1, then reboot",
    )
    assert rows["nvlink"][0] == "fail"
    assert "links 18, active 18 | links 1, active 0; GPU 1: degraded: it is a vGPU" in rows["nvlink"][1]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"python -m sic_kernels {command}" in capsys.readouterr().out
