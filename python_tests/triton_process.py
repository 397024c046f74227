"""Processes that the Triton tests start: pytest on Triton's interpreter, and the compiler."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def interpreter(files):
    """pytest over some of these tests, running. The interpreter is chosen when Triton is imported, so it has its own process."""
    path = os.pathsep.join(filter(None, (str(ROOT / "python_tests"), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    env.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "triton_small", "-p", "no:cacheprovider"]
    command += [str(ROOT / "python_tests" / name) for name in files]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def check_interpreted(files, least):
    """These tests pass on Triton's interpreter, and at least so many ran."""
    process = interpreter(files)
    try:
        check_passed(process, least)
    finally:
        process.kill()


def check_passed(process, least):
    """It ends well, and at least so many tests ran, so that none is lost in silence."""
    output, _ = process.communicate()
    assert process.returncode == 0, output
    share = int(os.environ.get("TRITON_SHARE", "1"))
    assert int(re.search(r"(\d+) passed", output)[1]) >= least // share, output


def compiled(family, tmp_path):
    """Figures of a family's kernels for sm_90; none spills, exact ones hold no fused multiply-add."""
    report = tmp_path / "triton.json"
    command = [sys.executable, str(ROOT / "tools" / "triton_aot.py"), "--family", family, "--json", str(report)]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(report.read_text())
