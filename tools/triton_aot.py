"""Compile every Triton kernel of the package for a GPU that need not be there, and say what came out.

    python tools/triton_aot.py [--arch 90] [--family slicing|delta|ragged|head|replay] [--json FILE] [--markdown FILE]

The launchers themselves run, on CPU tensors of the benchmarks' shape; each launch is caught and compiled with the very
arguments it would have: constants, divisibility hints, options.  Of the machine code it reports registers, shared memory,
local loads and stores (spills), 16-byte global loads, matrix instructions and fused multiply-adds.  Exits with 1 if a
kernel spills, or if one that was promised exact arithmetic holds a fused multiply-add.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
OPCODES = {
    "wide_loads": r"LDG\.E(\.\w+)*\.128|LDGSTS\.E(\.\w+)*\.128",
    "loads": r"LDG|LDGSTS",
    "local": r"LDL|STL",
    "matrix": r"HMMA|IMMA|HGMMA|IGMMA",
    "fused": r"FFMA",
}


# --- catching launches ----------------------------------------------------------------------------------------------


class Launch:
    """One launch of a kernel: the arguments as the compiler sees them."""

    def __init__(self, function: JITFunction, args: tuple, kwargs: dict[str, Any]) -> None:
        values = dict(zip(function.arg_names, args))
        values |= {name: value for name, value in kwargs.items() if name in function.arg_names}
        self.function = function
        self.options = {name: value for name, value in kwargs.items() if name not in function.arg_names}
        self.signature: dict[str, str] = {}
        self.constants: dict[tuple[int], Any] = {}
        self.attrs: dict[tuple[int], list] = {}
        for i, param in enumerate(function.params):
            value = values[param.name]
            specialise = not param.do_not_specialize
            if param.is_constexpr or value is None or (specialise and type(value) is int and value == 1):
                self.signature[param.name] = "constexpr"
                self.constants[(i,)] = value
                continue
            self.signature[param.name] = mangle_type(value)
            address = value.data_ptr() if isinstance(value, torch.Tensor) else value
            if specialise and isinstance(address, int) and address % 16 == 0:
                self.attrs[(i,)] = [["tt.divisibility", 16]]

    def key(self) -> str:
        """Equal where the machine code is."""
        return repr((self.function.__name__, self.signature, self.constants, self.attrs, self.options))

    @property
    def exact(self) -> bool:
        return self.options.get("enable_fp_fusion") is False

    def compile(self, arch: int) -> Any:
        source = ASTSource(self.function, signature=self.signature, constexprs=self.constants, attrs=self.attrs)
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=self.options)


def catch(calls: Iterable[tuple[str, Callable[[], Any]]]) -> dict[str, tuple[str, Launch]]:
    """Run launchers with launching replaced; each different launch, with the op that made it."""
    launches: list[Launch] = []
    caught: dict[str, tuple[str, Launch]] = {}

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append(Launch(self, args, kwargs))

    original, JITFunction.run = JITFunction.run, run
    try:
        for op, call in calls:
            call()
            for launch in launches:
                caught.setdefault(launch.key(), (op, launch))
            launches.clear()
    finally:
        JITFunction.run = original
    return caught


# --- what came out --------------------------------------------------------------------------------------------------


def _tool(name: str, *args: str) -> str:
    return subprocess.run([TOOLS / name, *args], capture_output=True, text=True, check=True).stdout


def report(op: str, launch: Launch, arch: int) -> dict[str, Any]:
    """Figures of one compiled kernel."""
    compiled = launch.compile(arch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, sass = _tool("cuobjdump", "-res-usage", file.name), _tool("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    opcodes = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", sass, re.MULTILINE)
    counts = {name: sum(bool(re.match(pattern, o)) for o in opcodes) for name, pattern in OPCODES.items()}
    if "div.rn.f32" in compiled.asm["ptx"]:  # its machine code holds fused operations of its own
        counts["fused"] = len(re.findall(r"\bfma\.", compiled.asm["ptx"]))
    return {
        "op": op,
        "kernel": launch.function.__name__,
        "arch": f"sm_{arch}",
        "registers": int(found[1]),
        "stack": int(found[2]),
        "shared": int(compiled.metadata.shared),
        "warps": int(compiled.metadata.num_warps),
        "instructions": len(opcodes),
        "exact": launch.exact,
        **counts,
    }


def faults(row: dict[str, Any]) -> list[str]:
    """What is wrong with a compiled kernel."""
    found = []
    if row["stack"] or row["local"]:
        found.append(f"{row['kernel']}: spills: {row['stack']} bytes of stack, {row['local']} local accesses")
    if row["exact"] and row["fused"]:
        found.append(f"{row['kernel']}: {row['fused']} fused multiply-adds where none may be")
    return found


def markdown(rows: list[dict[str, Any]]) -> str:
    """The figures as a table."""
    lines = [
        "| op | kernel | registers | shared bytes | spills | 16-byte loads / loads | matrix instructions | exact |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r['op']} | `{r['kernel']}` | {r['registers']} | {r['shared']} | {r['local']} "
            f"| {r['wide_loads']} / {r['loads']} | {r['matrix']} | {'yes' if r['exact'] else ''} |"
        )
    return "\n".join(lines) + "\n"


def compile_all(
    calls: Iterable[tuple[str, Callable[[], Any]]], arch: int, jobs: int, only: str = ""
) -> list[dict[str, Any]]:
    """One row for each different launch of the calls, of kernels whose name holds `only`."""
    launches = [item for item in catch(calls).values() if only in item[1].function.__name__]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda item: report(item[0], item[1], arch), launches))


def main(argv: list[str] | None = None) -> int:
    from triton_shapes import FAMILIES

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--family", choices=FAMILIES, action="append", help="default: all")
    parser.add_argument("--only", default="", help="kernels whose name holds this")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args(argv)
    calls = itertools.chain.from_iterable(FAMILIES[name]() for name in args.family or FAMILIES)
    rows = compile_all(calls, args.arch, args.jobs, args.only)
    table = markdown(rows)
    print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(table)
    wrong = [fault for row in rows for fault in faults(row)]
    print("\n".join(wrong) or f"{len(rows)} kernels, none spills", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
