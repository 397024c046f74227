"""The Triton backend: the slicing tests on Triton's interpreter, and what its compiler makes of the kernels.

triton_small.py says what the interpreter runs; two processes, side by side.
"""

import os

import pytest
import torch
from triton_process import check_passed, compiled, interpreter, needs_triton

import sic_kernels as sic

PARTS = {
    "attend": ["test_slicing_attend.py", "test_slicing_keep.py"],
    "ops": ["test_slicing_select.py", "test_slicing_pages.py", "test_slicing_gather_merge.py", "triton_only.py",
            "test_slicing_key_sketch.py", "test_slicing_score_tokens.py", "test_slicing_sliced_attention.py",
            "test_slicing_determinism.py", "test_slicing_nonfinite.py"],
}  # fmt: skip
LEAST = {"attend": 60, "ops": 250}  # tests that must have run


@pytest.fixture(scope="module")
def interpreters():
    """One pytest process for each part, all running."""
    running = {part: interpreter(files) for part, files in PARTS.items()}
    yield running
    for process in running.values():
        process.kill()


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_interpreter(part, interpreters):
    """The shared cases, golden values, edges and fuzz, through the public checks, on CPU tensors."""
    check_passed(interpreters[part], LEAST[part])


@needs_triton
@pytest.mark.slow
def test_compiled_kernels(tmp_path):
    """For sm_90: what reads a cache reads 16 bytes at once, scores come from the matrix units."""
    rows = compiled("slicing", tmp_path)
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
