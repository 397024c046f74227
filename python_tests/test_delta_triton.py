"""The delta family on Triton: its definition on Triton's interpreter, and what its compiler makes of the kernels."""

import pytest
from triton_process import check_interpreted, compiled, needs_triton


@needs_triton
@pytest.mark.slow
def test_interpreter():
    """A share of the acceptance grids, the raw table, batches; sequences of calls and wrong arguments through the checks."""
    check_interpreted(["triton_delta.py", "test_delta_ops.py"], 100)


@needs_triton
@pytest.mark.slow
def test_compiled_kernels(tmp_path):
    """For sm_90: codes are read 16 bytes at once, templates are searched and 16-bit queries served on the matrix units."""
    rows = compiled("delta", tmp_path)
    kernels = {row["kernel"] for row in rows}
    assert kernels >= {"fate_kernel", "encode_kernel", "sketch_kernel", "settle_kernel", "raw_kernel"}
    assert kernels >= {"decode_kernel", "coded_attention_kernel"}
    exact = {row["kernel"] for row in rows if row["exact"]}
    assert exact == {"encode_kernel", "sketch_kernel", "raw_kernel"}
    for row in rows:
        if row["kernel"] in ("decode_kernel", "coded_attention_kernel"):
            assert row["wide_loads"], row
        if row["kernel"] == "encode_kernel" or (row["kernel"] == "coded_attention_kernel" and "f32" not in row["op"]):
            assert row["matrix"], row
