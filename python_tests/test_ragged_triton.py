"""The ragged family on Triton: its tests on Triton's interpreter, and what its compiler makes of the kernels."""

import pytest
from triton_process import check_interpreted, compiled, needs_triton


@needs_triton
@pytest.mark.slow
def test_interpreter():
    """A share of the cases, golden values, a fuzz test and wrong arguments, through the public checks, on CPU tensors."""
    check_interpreted(["test_ragged_pack.py"], 50)


@needs_triton
@pytest.mark.slow
def test_compiled_kernels(tmp_path):
    """For sm_90: rows of 16 bytes and more are read 16 bytes at once."""
    rows = compiled("ragged", tmp_path)
    assert {row["kernel"] for row in rows} == {"pack_rows_kernel", "unpack_rows_kernel"}
    for row in rows:
        if "wide" in row["op"]:
            assert row["wide_loads"], row
