"""Reads the machine code of the CUDA kernels and holds it to tools/sass_rules.py. No GPU needed.

    python tools/sass_gate.py                        all kernels of this tree, compiled into build/gpu-check
    python tools/sass_gate.py --built                the module of this tree as it was built (`make gpu-check`)
    python tools/sass_gate.py FILE...                modules, object files or cubins
    python tools/sass_gate.py --json sass.json       also write what was read, for `tools/docs_tables.py gpu sass.json`

Of every kernel and architecture: registers, stack, local and shared memory, spills, loads of 16 bytes, tensor-core operations.
For all kernels: no stack, no local memory, no spill. Exit status: 0, 1 for a violation, 2 if nothing could be read. Without
nvcc there is nothing to check: the reason is printed, the status is 0.

The disassemblers are CUDA's own, from PATH or the toolkit, else from pip: pip install 'sic_kernels[sass]'.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from sass_rules import RULES, Rule

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "gpu-check"
LOCAL = ("LDL", "STL")


class GateError(Exception):
    """Nothing could be read."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel on one architecture. ops: instructions of interest by opcode, modifiers dropped but for the width."""

    name: str
    arch: str
    registers: int
    stack: int
    local: int
    shared: int
    ops: dict[str, int]

    @property
    def spills(self) -> int:
        """Instructions that load or store local memory."""
        return sum(self.ops.get(op, 0) for op in LOCAL)


# --- reading ------------------------------------------------------------------------------------------------------------


def tool(name: str) -> str:
    """cuobjdump or nvdisasm: on PATH, in the toolkit, or from pip."""
    homes = [os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin"]
    homes += [
        f"{sysconfig.get_path(kind)}/nvidia/{cuda}/bin" for kind in ("purelib", "platlib") for cuda in ("cu13", "cu12")
    ]
    found = shutil.which(name) or next((p for p in map(f"{{}}/{name}".format, homes) if os.access(p, os.X_OK)), None)
    if found is None:
        raise GateError(f"{name} was not found: pip install 'sic_kernels[sass]', or put CUDA's tools on PATH")
    return found


def run(*command: str | Path, cwd: Path | None = None, stdin: str | None = None) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=cwd, input=stdin, check=False)
    if done.returncode:
        raise GateError(f"{Path(command[0]).name} failed: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout


def cubins(file: Path, folder: Path) -> list[Path]:
    """The device code in a module or object, one file each; none if there is none."""
    if file.suffix == ".cubin":
        return [file.resolve()]
    into = folder / file.name
    into.mkdir()
    try:
        run(tool("cuobjdump"), "-xelf", "all", file.resolve(), cwd=into)
    except GateError as error:
        if "does not contain device code" not in str(error):
            raise
    return sorted(into.glob("*.cubin"))


USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
# A line that begins a function, or an instruction of interest.
CODE = re.compile(r"^\.text\.(\S+):$|\b(LDG|LDGSTS|STG|LDL|STL|HMMA|IMMA)\b([.\w]*)", re.MULTILINE)


def opcode(name: str, modifiers: str) -> str:
    return name + ".128" if name in ("LDG", "LDGSTS", "STG") and "128" in modifiers.split(".") else name


def count_ops(listing: str) -> dict[str, collections.Counter[str]]:
    """Instructions of interest of each function of a disassembly."""
    functions: dict[str, collections.Counter[str]] = {}
    counter: collections.Counter[str] = collections.Counter()
    for function, name, modifiers in CODE.findall(listing):
        if function:
            counter = functions.setdefault(function, collections.Counter())
        else:
            counter[opcode(name, modifiers)] += 1
    return functions


def read_cubin(cubin: Path) -> list[Kernel]:
    """Its kernels, by their mangled names."""
    usage, listing = run(tool("cuobjdump"), "-res-usage", cubin), run(tool("nvdisasm"), "-c", "-ndf", cubin)
    target = re.search(r"\.target\s+(sm_\w+)", listing)
    arch, ops = target[1] if target else "unknown", count_ops(listing)
    return [
        Kernel(name, arch, int(registers), int(stack), int(local), int(shared), dict(ops.get(name, {})))
        for name, registers, stack, shared, local in USAGE.findall(usage)
    ]


def readable(mangled: Sequence[str]) -> list[str]:
    """Names as the source has them: no namespaces, no parameters."""
    plain = run("c++filt", stdin="\n".join(mangled)).splitlines() if mangled else []
    return [short(name) for name in plain]


def short(name: str) -> str:
    name = re.sub(r"\(anonymous namespace\)::|\b_GLOBAL__N_\w*::|\bsic::|\bgpu::", "", name).removeprefix("void ")
    depth = 0
    for i, c in enumerate(name):
        depth += {"<": 1, ">": -1}.get(c, 0)
        if c == "(" and depth == 0:
            return name[:i]
    return name


def read(files: Iterable[Path], jobs: int) -> list[Kernel]:
    """All kernels of the files, by readable name and architecture."""
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ProcessPoolExecutor(jobs) as pool:
        parts = [cubin for n, file in enumerate(files) for cubin in cubins(file, _folder(folder, n))]
        parts.sort(key=lambda p: -p.stat().st_size)  # the largest first: the end is then even
        kernels = [kernel for found in pool.map(read_cubin, parts) for kernel in found]
    names = readable([k.name for k in kernels])
    return sorted((dataclasses.replace(k, name=n) for k, n in zip(kernels, names)), key=lambda k: (k.name, k.arch))


def _folder(parent: str, n: int) -> Path:
    path = Path(parent) / str(n)
    path.mkdir()
    return path


# --- judging ------------------------------------------------------------------------------------------------------------


def rule_of(kernel: str) -> Rule | None:
    return next((rule for rule in RULES if re.fullmatch(rule.pattern, kernel)), None)


def violations(kernel: Kernel) -> list[str]:
    """What is wrong with a kernel, in words."""
    wrong = [f"{kernel.stack} bytes of stack"] if kernel.stack else []
    wrong += [f"{kernel.local} bytes of local memory"] if kernel.local else []
    wrong += [f"{kernel.ops[op]} {op}" for op in LOCAL if kernel.ops.get(op)]
    rule = rule_of(kernel.name)
    if rule is None:
        return [*wrong, "no rule in tools/sass_rules.py"]
    if kernel.registers > rule.registers:
        wrong.append(f"{kernel.registers} registers, at most {rule.registers}")
    return wrong + [f"no {op}" for op in rule.needs if not kernel.ops.get(op)]


def unused_rules(kernels: Sequence[Kernel]) -> list[str]:
    used = {rule_of(k.name) for k in kernels}
    return [f"rule {rule.pattern!r} matches no kernel" for rule in RULES if rule not in used]


def rows(kernels: Sequence[Kernel]) -> list[dict[str, object]]:
    """A line for each kernel and ceiling of registers, its variants and architectures together, JSON-ready."""
    groups: dict[tuple[str, int], list[Kernel]] = {}
    for k in kernels:
        rule = rule_of(k.name)
        groups.setdefault((k.name.split("<")[0], rule.registers if rule else 0), []).append(k)
    return [
        {
            "kernel": name,
            "variants": len({k.name for k in group}),
            "architectures": sorted({k.arch for k in group}),
            "registers": [min(k.registers for k in group), max(k.registers for k in group)],
            "ceiling": ceiling or None,
            "stack": max(k.stack for k in group),
            "spills": max(k.spills for k in group),
            "shared": [min(k.shared for k in group), max(k.shared for k in group)],
            "needs": sorted({op for k in group if (rule := rule_of(k.name)) for op in rule.needs}),
            "ops": {op: [min(counts), max(counts)] for op, counts in _counts(group).items()},
        }
        for (name, ceiling), group in sorted(groups.items())
    ]


def _counts(group: Sequence[Kernel]) -> dict[str, list[int]]:
    ops = sorted({op for k in group for op in k.ops})
    return {op: [k.ops.get(op, 0) for k in group] for op in ops}


# --- the command --------------------------------------------------------------------------------------------------------


def compile_kernels(archs: str | None, jobs: int) -> list[Path]:
    """Object files of all CUDA kernels, as the library's build makes them, in a folder that is kept."""
    configure = [
        "cmake",
        "-G",
        "Ninja",
        "-S",
        str(ROOT),
        "-B",
        str(BUILD),
        "-DCMAKE_BUILD_TYPE=Release",
        "-DSIC_CUDA=ON",
    ]
    configure += [f"-DCMAKE_MAKE_PROGRAM={beside('ninja')}", *([f"-DSIC_CUDA_ARCHS={archs}"] if archs else [])]
    run(beside(configure[0]), *configure[1:])
    targets = run(beside("ninja"), "-C", BUILD, "-t", "targets", "all").splitlines()
    objects = [name for name, _, _ in (line.partition(":") for line in targets) if name.endswith("_cuda.cu.o")]
    print(f"sass gate: compiling {len(objects)} files where they changed", flush=True)
    run(beside("ninja"), "-C", BUILD, "-j", str(jobs), *objects)
    return [BUILD / name for name in objects]


def built_module() -> list[Path]:
    files = sorted((ROOT / "sic_kernels").glob("_C.*.so"))
    if not files:
        raise GateError("sic_kernels/_C is not built: make build")
    return files


def beside(name: str) -> str:
    """A program beside the interpreter, or on PATH."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        raise GateError(f"{name} was not found")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument(
        "--built", action="store_true", help="the module of this tree as it was built, compiling nothing"
    )
    parser.add_argument("--json", type=Path, help="write what was read")
    parser.add_argument("--archs", help="architectures to compile for, as SIC_CUDA_ARCHS (default: all)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args(arguments)
    if not args.files and shutil.which("nvcc") is None:
        print("sass gate: skipped: nvcc was not found, so there are no kernels to check")
        return 0
    try:
        files = built_module() if args.built else args.files or compile_kernels(args.archs, args.jobs)
        kernels = read(files, args.jobs)
    except GateError as error:
        print(f"sass gate: {error}", file=sys.stderr)
        return 2
    bad = [f"{k.name} [{k.arch}]: {text}" for k in kernels for text in violations(k)]
    bad += [] if args.files else unused_rules(kernels)
    for line in bad:
        print(line)
    if args.json:
        args.json.write_text(json.dumps({"kernels": rows(kernels)}, indent=1) + "\n")
    archs = sorted({k.arch for k in kernels})
    print(f"sass gate: {len(kernels)} kernels ({', '.join(archs)}), {len(bad)} violations")
    return 1 if bad or not kernels else 0


if __name__ == "__main__":
    sys.exit(main())
