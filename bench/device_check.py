"""All that a machine with a GPU can prove, in one command of less than eight minutes; bench/device_check.sh starts it.

    bench/device_check.sh                      every step
    bench/device_check.sh --only build,bench   some (build always runs)
    bench/device_check.sh --dry-run            what would run, on any machine
    bench/device_check.sh --rehearse           the same with the backend cpu, on any machine

Steps: build into a temporary folder, for this device's architecture alone; a short list of cases on the backends cuda and
triton; graph capture and replay; the benchmarks; the tests of both backends; compute-sanitizer's memcheck and racecheck over
the short list; the machine code against its rules. A step that fails does not stop later ones. All goes into one JSON,
$OUT/device_check.json or ./device_check.json. Nothing is fetched and nothing is installed: it needs torch, pybind11, cmake,
ninja, pytest, nvcc.

Exit status: 0 when every step passed or had a reason to be skipped, 1 when one failed, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 450  # of everything
FAMILIES = ("slicing", "delta", "head", "ragged", "replay")
JOBS = 8  # processes at a time that share the GPU
PASSED, FAILED, SKIPPED, TIMED_OUT, PLANNED = "passed", "failed", "skipped", "timed out", "would run"
PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "cupy-cuda13x",
    "flashinfer-python",
    "pybind11",
    "cmake",
    "ninja",
    "pytest",
    "hypothesis",
)


@dataclasses.dataclass
class Outcome:
    """Of a step: status, the end of what it said, numbers."""

    status: str
    said: str = ""
    data: dict[str, Any] = dataclasses.field(default_factory=dict)


class Check:
    """What the steps share: the backends, the folder that they build in, the time that is left, how they start a process."""

    def __init__(self, folder: Path, limit: float, *, dry: bool = False, rehearsal: bool = False) -> None:
        self.folder, self.dry, self.rehearsal = folder, dry, rehearsal
        self.backends = ("cpu",) if rehearsal else ("cuda", "triton")
        self.end = self.step_end = time.monotonic() + limit
        self.site, self.build = folder / "site", folder / "build"

    def begin(self, limit: float) -> None:
        """A step, with at most so many seconds for all its commands."""
        self.step_end = min(self.end, time.monotonic() + limit)

    def run(self, *command: str | Path, env: dict[str, str] | None = None) -> Outcome:
        """A command; what it printed is in `said`."""
        words = [str(word) for word in command]
        if self.dry:
            print("    " + " ".join([*(f"{name}={value}" for name, value in (env or {}).items()), *words]))
            return Outcome(PASSED)
        left = self.step_end - time.monotonic()
        if left <= 1:
            return Outcome(TIMED_OUT, "no time was left")
        # Python must find the package that was built, not the tree: the tree is neither the folder nor on the path.
        path = os.pathsep.join(filter(None, (str(self.site), os.environ.get("PYTHONPATH"))))
        ours = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "TRITON_CACHE_DIR": str(self.folder / "triton")}
        env = {**os.environ, **ours, **(env or {})}
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=left, env=env, cwd=self.folder)
        except subprocess.TimeoutExpired as late:
            return Outcome(TIMED_OUT, f"after {left:.0f} s\n{_text(late.stdout)}{_text(late.stderr)}")
        except OSError as error:
            return Outcome(FAILED, str(error))
        data = {"stdout": done.stdout, "exit": done.returncode}
        return Outcome(PASSED if done.returncode == 0 else FAILED, done.stdout + done.stderr, data)

    def together(self, commands: dict[str, tuple], env: dict[str, str] | None = None) -> dict[str, Outcome]:
        """Several commands at a time."""
        with concurrent.futures.ThreadPoolExecutor(1 if self.dry else len(commands)) as pool:
            return dict(zip(commands, pool.map(lambda command: self.run(*command, env=env), commands.values())))

    def python(self, *arguments: str | Path, env: dict[str, str] | None = None) -> Outcome:
        return self.run(sys.executable, *arguments, env=env)


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


# --- steps --------------------------------------------------------------------------------------------------------------


def build(check: Check) -> Outcome:
    """The module with CUDA kernels for this device, and the Python files beside it."""
    if not pybind11_folder():
        return Outcome(FAILED, f"pybind11 is not installed ({sys.executable})")
    arch = "90a" if check.dry or check.rehearsal else device_architecture()
    configure = (
        "cmake", "-G", "Ninja", "-S", ROOT, "-B", check.build, "-DCMAKE_BUILD_TYPE=Release", "-DSIC_PYTHON=ON",
        f"-DSIC_CUDA={'OFF' if check.rehearsal else 'ON'}", f"-DSIC_CUDA_ARCHS={arch}", "-DSIC_INSTALL=ON",
        f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11_folder()}",
    )  # fmt: skip
    for command in (
        configure,
        ("cmake", "--build", check.build, "--parallel", str(os.cpu_count())),
        ("cmake", "--install", check.build, "--component", "python", "--prefix", check.site / "sic_kernels"),
    ):
        done = check.run(*command)
        if done.status != PASSED:
            return done
    if not check.dry:
        leave_out = shutil.ignore_patterns("_C.*", "_simt.*", "_native", "__pycache__")
        shutil.copytree(ROOT / "sic_kernels", check.site / "sic_kernels", ignore=leave_out, dirs_exist_ok=True)
    return Outcome(PASSED, data={"architecture": arch})


def doctor(check: Check) -> Outcome:
    """What the built package says of itself; its verdict on the machine fails nothing here."""
    done = check.python("-m", "sic_kernels", "doctor", "--json")
    found = json_in(done)
    return done if found is None else Outcome(PASSED, data={"doctor": found})


def cases(check: Check) -> Outcome:
    """A short list of cases on each backend, bits compared from run to run. Triton compiles for most of the time: in parts."""
    commands = {}
    for backend in check.backends:
        parts = JOBS if backend == "triton" else 1
        for n in range(1, parts + 1):
            command = (
                sys.executable,
                ROOT / "bench/device_cases.py",
                "cases",
                "--backend",
                backend,
                "--part",
                f"{n}/{parts}",
            )
            commands[f"{backend} {n}/{parts}"] = command
    return joined(check.together(commands))


def graphs(check: Check) -> Outcome:
    """Capture and replay."""
    if check.rehearsal:
        return Outcome(SKIPPED, "graphs need a GPU")
    return check.python(ROOT / "bench/device_cases.py", "graphs")


def bench(check: Check) -> Outcome:
    """The published table, and the Triton kernels at two lengths."""
    command = ("-m", "sic_kernels", "bench", "--builtin", "--json")
    if check.rehearsal:
        done = {"cpu": check.python(*command, "--quick")}
    else:
        done = {"cuda": check.python(*command, "--device", "cuda")}
        done["triton"] = check.python(*command, "--device", "cuda", "--quick", env={"SIC_BACKEND": "triton"})
    outcome = joined(done)
    outcome.data.update({name: json_in(result) for name, result in done.items()})
    return outcome


def tests(check: Check) -> Outcome:
    """Every test of the backends; one that cannot be used is a failure."""
    files = sorted(file for family in FAMILIES for file in (ROOT / "python_tests").glob(f"test_{family}_*.py"))
    jobs = [(backend, file) for file in files for backend in check.backends]
    with concurrent.futures.ThreadPoolExecutor(1 if check.dry else JOBS) as pool:
        done = dict(
            zip((f"{file.name} {backend}" for backend, file in jobs), pool.map(lambda j: run_tests(check, *j), jobs))
        )
    outcome = joined(done)
    counts = {key: sum(d.data.get(key, 0) for d in done.values()) for key in ("passed", "failed", "skipped")}
    if outcome.status == PASSED and not counts["passed"] and not check.dry:
        outcome = Outcome(FAILED, "no test of these backends was found")
    outcome.data.update(counts, files={name: d.data for name, d in done.items()})
    return outcome


def run_tests(check: Check, backend: str, file: Path) -> Outcome:
    """The tests of one file whose names have the backend in them."""
    report = check.folder / f"{file.stem}-{backend}.xml"
    done = check.python(
        "-m", "pytest", "-q", "--maxfail=20", "-p", "no:cacheprovider", f"--junitxml={report}", "-k", backend, file,
        env={"SIC_REQUIRE": ",".join(check.backends), "SIC_CHECK": "1", "OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    if done.data.get("exit") == 5:  # none in this file
        return Outcome(PASSED)
    return Outcome(done.status, done.said, counts_of(report) if report.exists() else {})


def counts_of(report: Path) -> dict[str, int]:
    """Of a JUnit report."""
    suite = next(iter(xml.etree.ElementTree.parse(report).getroot().iter("testsuite")))
    total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    return {"passed": total - failed - skipped, "failed": failed, "skipped": skipped}


def sanitizer(check: Check) -> Outcome:
    """memcheck and racecheck, our kernels only. Torch's cache of memory is off: it would hide what is out of bounds."""
    tool = cuda_tool("compute-sanitizer")
    if check.rehearsal or (tool is None and not check.dry):
        return Outcome(SKIPPED, "needs a GPU" if check.rehearsal else "compute-sanitizer is not on this machine")
    commands = {
        kind: (
            tool or "compute-sanitizer", "--tool", kind, "--error-exitcode", "9",
            "--kernel-name", "kernel_substring=N3sic3gpu", sys.executable, ROOT / "bench/device_cases.py", "cases",
            "--backend", "cuda",
        )
        for kind in ("memcheck", "racecheck")
    }  # fmt: skip
    return joined(check.together(commands, env={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}))


def sass(check: Check) -> Outcome:
    """The machine code against its rules."""
    if not check.dry and not all(map(cuda_tool, ("cuobjdump", "nvdisasm"))):
        return Outcome(SKIPPED, "cuobjdump and nvdisasm are not on this machine")
    table = check.folder / "sass.json"
    module = next(iter((check.site / "sic_kernels").glob("_C.*")), check.site / "sic_kernels/_C.so")
    done = check.python(ROOT / "tools/sass_gate.py", module, "--json", table)
    return Outcome(done.status, done.said, json.loads(table.read_text()) if table.exists() else {})


def cuda_tool(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")


# In this order, each with the seconds that it may take at most. What is worth most comes first.
STEPS: dict[str, tuple[Callable[[Check], Outcome], float]] = {
    "build": (build, 240),
    "doctor": (doctor, 30),
    "cases": (cases, 120),
    "graphs": (graphs, 60),
    "bench": (bench, 150),
    "tests": (tests, 150),
    "sanitizer": (sanitizer, 120),
    "sass": (sass, 60),
}


def joined(parts: dict[str, Outcome]) -> Outcome:
    """Failed if one failed; what the failed ones said."""
    bad = {name: part for name, part in parts.items() if part.status != PASSED}
    status = FAILED if any(part.status == FAILED for part in bad.values()) else TIMED_OUT if bad else PASSED
    said = "\n".join(f"== {name}\n{part.said}" for name, part in (bad or parts).items())
    return Outcome(status, said, {"parts": {name: part.status for name, part in parts.items()}})


def json_in(done: Outcome) -> Any:
    """What a command printed as JSON; None if it did not."""
    try:
        return json.loads(done.data.get("stdout", ""))
    except ValueError:
        return None


# --- the machine --------------------------------------------------------------------------------------------------------


def why_no_device() -> str | None:
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return None if torch.cuda.is_available() else "no GPU: torch.cuda.is_available() is False"


def device_architecture() -> str:
    """As nvcc calls it; 9.0 and later have instructions of their own under "a"."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}" + ("a" if major >= 9 else "")


def pybind11_folder() -> str:
    done = subprocess.run([sys.executable, "-m", "pybind11", "--cmakedir"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def machine() -> dict[str, Any]:
    """Device, driver, versions, commit."""
    query = [
        "nvidia-smi",
        "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit",
        "--format=csv,noheader",
    ]
    return {
        "python": sys.version.split()[0],
        "gpu": _first_line(query),
        "nvcc": _first_line(["nvcc", "--version"], r"release [\d.]+.*"),
        "gcc": _first_line(["g++", "--version"]),
        "cores": os.cpu_count(),
        "commit": _first_line(["git", "-C", str(ROOT), "rev-parse", "HEAD"]),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(command: list[str], pattern: str = ".+") -> str | None:
    try:
        found = re.search(
            pattern, subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found[0] if found else None


# --- the command --------------------------------------------------------------------------------------------------------


def run_steps(check: Check, names: list[str], save: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """Every step in turn; what is known is saved after each, so that nothing is lost if the machine goes away."""
    steps: list[dict[str, Any]] = []
    for name in names:
        begin = time.monotonic()
        print(f"-- {name}", flush=True)
        if name != "build" and steps and steps[0]["name"] == "build" and steps[0]["status"] != PASSED:
            outcome = Outcome(SKIPPED, "there is no build")
        else:
            try:
                function, limit = STEPS[name]
                check.begin(limit)
                outcome = function(check)
            except Exception as error:  # of the check itself: the other steps still run
                outcome = Outcome(FAILED, f"{type(error).__name__}: {error}")
        seconds = time.monotonic() - begin
        said = outcome.said[-300 if outcome.status == PASSED else -6000 :]
        steps.append({"name": name, "status": outcome.status, "seconds": round(seconds, 1), "said": said,
                      "data": {k: v for k, v in outcome.data.items() if k not in ("stdout", "exit")}})  # fmt: skip
        if outcome.status in (FAILED, TIMED_OUT):
            print(outcome.said[-2000:], flush=True)
        if check.dry:
            print(
                f"   {name}: {PLANNED if outcome.status == PASSED else f'{outcome.status}: {outcome.said}'}", flush=True
            )
            continue
        print(f"   {name}: {outcome.status}, {seconds:.1f} s", flush=True)
        save(steps)
    return steps


def selected(only: str | None) -> list[str]:
    if only is None:
        return list(STEPS)
    wanted = [name.strip() for name in only.split(",")]
    unknown = [name for name in wanted if name not in STEPS]
    if unknown:
        raise SystemExit(f"device check: no step {', '.join(unknown)}; there are {', '.join(STEPS)}")
    return [name for name in STEPS if name in {"build", *wanted}]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="STEPS", help="some of: " + ", ".join(STEPS))
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run none")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, without a GPU")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help=f"seconds for everything (default: {LIMIT_S})")
    args = parser.parse_args(arguments)
    names, why = selected(args.only), why_no_device()
    if why is not None and not args.dry_run and not args.rehearse:
        print(f"device check: {why} ({sys.executable}; PYTHON chooses another)", file=sys.stderr)
        return 2
    begin, file = time.monotonic(), Path(os.environ.get("OUT", ".")) / "device_check.json"
    if not args.dry_run:
        try:
            file.open("a").close()
        except OSError as error:
            print(f"device check: cannot write {file}: {error.strerror}", file=sys.stderr)
            return 1
    facts = {} if args.dry_run else machine()

    def save(steps: list[dict[str, Any]]) -> None:
        passed = all(s["status"] in (PASSED, SKIPPED) for s in steps) and len(steps) == len(names)
        report = {
            "passed": passed,
            "rehearsal": args.rehearse,
            "elapsed_s": round(time.monotonic() - begin, 1),
            "machine": facts,
            "steps": steps,
        }
        if not args.dry_run:
            file.write_text(json.dumps(report, indent=1) + "\n")

    with tempfile.TemporaryDirectory(prefix="sic-device-check-") as folder:
        check = Check(Path(folder), args.limit, dry=args.dry_run, rehearsal=args.rehearse)
        steps = run_steps(check, names, save)
    failed = [s["name"] for s in steps if s["status"] not in (PASSED, SKIPPED)]
    if args.dry_run:
        return 0
    print(f"device check: {'failed: ' + ', '.join(failed) if failed else 'passed'}, "
          f"{time.monotonic() - begin:.0f} s, {file}")  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
