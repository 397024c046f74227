"""The replay family on Triton: its tests on Triton's interpreter, and what its compiler makes of the kernels."""

import pytest
from triton_process import check_interpreted, compiled, needs_triton


@needs_triton
@pytest.mark.slow
def test_interpreter():
    check_interpreted(["test_replay_uniform.py"], 25)


@needs_triton
@pytest.mark.slow
def test_compiled_kernels(tmp_path):
    rows = compiled("replay", tmp_path)
    assert {row["kernel"] for row in rows} == {"uniform_kernel"}
