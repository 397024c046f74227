"""What the emulator counts while each benchmark of a family runs once."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json
from sic_kernels.runtime import native
from sic_kernels.{family} import benches
from sic_kernels.slicing.cases import BenchShape
{before}
counters = native.simt_module().counters
def found(shape):
    inputs, counts = benches.{inputs}(shape, sets=1), {{}}
    for name in benches.NAMES:
        function = benches.build(name, inputs).function
        before = counters()
        function(0)
        after = counters()
        counts[name] = [after[key] - before[key] for key in ("launches", "fills")]
    return counts
print(json.dumps([found(BenchShape(length, heads=heads, group=group, D=D)) for length, heads, group, D in {sizes}]))
"""


@functools.cache
def counted(family, inputs, shapes, before):
    """Shape -> benchmark -> [launches, fills], in a process of its own. inputs: class of `benches`; before: statements."""
    sizes = [(s.length, s.heads, s.group, s.D) for s in shapes]
    code = SCRIPT.format(family=family, inputs=inputs, sizes=sizes, before=before)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600,
        env={**os.environ, "SIC_BACKEND": "simt"}, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(shapes, json.loads(done.stdout), strict=True))
