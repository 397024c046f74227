"""The Triton backend: the slicing tests on Triton's interpreter, and what its compiler makes of the kernels.

The interpreter is chosen when Triton is imported, so it runs in processes of its own (triton_small.py says what they
run); two of them, side by side.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sic_kernels as sic

ROOT = Path(__file__).parents[1]
PARTS = {
    "attend": ["test_slicing_attend.py"],
    "ops": ["test_slicing_select.py", "test_slicing_pages.py", "test_slicing_gather_merge.py", "triton_only.py",
            "test_slicing_key_sketch.py", "test_slicing_score_tokens.py", "test_slicing_sliced_attention.py",
            "test_slicing_determinism.py"],
}  # fmt: skip
LEAST = {"attend": 20, "ops": 250}  # tests that must have run, so that none is lost in silence

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def interpreters():
    """One pytest process for each part, all running."""
    path = os.pathsep.join(filter(None, (str(ROOT / "python_tests"), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    env.pop("PYTEST_ADDOPTS", None)
    running = {}
    for part, files in PARTS.items():
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "triton_small", "-p", "no:cacheprovider"]
        files = [str(ROOT / "python_tests" / name) for name in files]
        running[part] = subprocess.Popen(
            [*command, *files], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    yield running
    for process in running.values():
        process.kill()


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_interpreter(part, interpreters):
    """The shared cases, golden values, edges and fuzz, through the public checks, on CPU tensors."""
    output, _ = interpreters[part].communicate()
    assert interpreters[part].returncode == 0, output
    passed = int(re.search(r"(\d+) passed", output)[1])
    assert passed >= LEAST[part], output


@needs_triton
@pytest.mark.slow
def test_compiled_kernels(tmp_path):
    """For sm_90: no kernel spills, exact ones hold no fused multiply-add, and what reads a cache reads 16 bytes at once."""
    report = tmp_path / "triton.json"
    command = [sys.executable, str(ROOT / "tools" / "triton_aot.py"), "--json", str(report)]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(report.read_text())
    assert len(rows) > 40
    exact = {row["kernel"] for row in rows if row["exact"]}
    assert exact >= {
        "key_sketch_kernel",
        "quantise_kernel",
        "score_kernel",
        "refine_kernel",
        "weight_kernel",
        "join_kernel",
    }
    for kernel in ("key_sketch_kernel", "score_kernel", "attention_kernel", "page_score_kernel", "gather_kernel"):
        assert all(row["wide_loads"] for row in rows if row["kernel"] == kernel), kernel
    for kernel in ("score_kernel", "refine_kernel"):
        assert all(row["matrix"] for row in rows if row["kernel"] == kernel), kernel


@needs_triton
def test_never_chosen_for_cpu_tensors(monkeypatch):
    """Only asked for by name; without a GPU and without the interpreter the reason says so."""
    assert sic.slicing.merge_states(*[torch.zeros(1, 1, 1), torch.zeros(1, 1)] * 2)[0].shape == (1, 1, 1)
    reason = sic.backends()["triton"]
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        assert "no CUDA device" in reason
