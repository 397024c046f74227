"""What the emulator counts while each benchmark of a family runs once."""

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
counters, found = native.simt_module().counters, {{}}
inputs = benches.{inputs}(BenchShape({shape.length}, heads={shape.heads}, group={shape.group}, D={shape.D}), sets=1)
for name in benches.NAMES:
    function = benches.build(name, inputs).function
    before = counters()
    function(0)
    after = counters()
    found[name] = [after[key] - before[key] for key in ("launches", "fills")]
print(json.dumps(found))
"""


def counted(family, inputs, shape, before):
    """Benchmark -> [launches, fills], in a process of its own. inputs: class of `benches`; before: statements."""
    code = SCRIPT.format(family=family, inputs=inputs, shape=shape, before=before)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600,
        env={**os.environ, "SIC_BACKEND": "simt"}, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
