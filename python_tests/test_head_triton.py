"""The head family on Triton: its definition on Triton's interpreter, and what its compiler makes of the kernels."""

import pytest
from triton_process import check_interpreted, compiled, needs_triton


@needs_triton
@pytest.mark.slow
def test_interpreter():
    """A share of the acceptance grids, edges, splits, batches."""
    check_interpreted(["triton_head.py"], 50)


@needs_triton
@pytest.mark.slow
def test_compiled_kernels(tmp_path):
    """For sm_90: logits and weights are read 16 bytes at once, 16-bit products are done by the matrix units."""
    rows = compiled("head", tmp_path)
    kernels = {row["kernel"] for row in rows}
    assert kernels == {
        "logits_kernel",
        "lm_head_kernel",
        "stats_kernel",
        "part_kernel",
        "merge_stats_kernel",
        "probe_kernel",
        "step_kernel",
    }
    for row in rows:
        if row["kernel"] in ("logits_kernel", "lm_head_kernel", "probe_kernel") and "odd" not in row["op"]:
            assert row["wide_loads"], row
        if row["kernel"] == "lm_head_kernel" and "bfloat16" in row["op"]:
            assert row["matrix"], row
