"""What machine is this, and is it fit to serve?

Each finding says what was read, where, and whether it passes. "unknown" (no tool, no permission, no GPU) is not a
pass: silent degradation is the worst failure of a serving machine, so nothing is assumed. Only the standard
library is needed; no CUDA context is created.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from . import config, log
from .errors import ArgumentError, BackendError

PASS, FAIL, UNKNOWN = "pass", "fail", "unknown"

# GPU fields asked of nvidia-smi, in this order.
_GPU_FIELDS = (
    "index", "name", "compute_cap", "driver_version", "memory.total", "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total", "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current",
    "pcie.link.width.max", "pstate",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing looked at. `value` is None when it could not be read."""

    name: str  # "gpu", "nvlink", "ecc", "pcie", "cpu_isa", "threads", "memory"
    status: str  # pass | fail | unknown
    value: Any
    source: str  # command or file
    detail: str = ""  # why it fails or is unknown, and what to do

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Hardware:
    """All findings of this machine."""

    findings: tuple[Finding, ...]

    def __getitem__(self, name: str) -> Finding:
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(name)

    def as_dict(self) -> dict[str, Any]:
        return {f.name: {k: v for k, v in f.as_dict().items() if k != "name"} for f in self.findings}


@dataclasses.dataclass(frozen=True)
class GateReport:
    """The outcome of `gate`: true only when every required finding passes."""

    passed: bool
    required: tuple[str, ...]
    refused: tuple[Finding, ...]  # required, and failed or unknown
    hardware: Hardware = dataclasses.field(repr=False)

    def __bool__(self) -> bool:
        return self.passed

    def as_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "required": list(self.required),
            "refused": [f.name for f in self.refused],
            "hardware": self.hardware.as_dict(),
        }


def probe_hardware(root: str | os.PathLike[str] = "/", run: Callable[[list[str]], str] | None = None) -> Hardware:
    """Look at the machine; never raises for what it finds.

    `root` and `run` (command -> its output, raising OSError or SubprocessError) replace the file system and
    the commands in tests.
    """
    root, run = Path(root), run or _run
    return Hardware((*_gpu_findings(root, run), _cpu_isa(root), _threads(root), _memory(root)))


GATED = ("gpu", "nvlink", "ecc", "pcie")


def gate(require: Iterable[str] = GATED, *, hardware: Hardware | None = None, strict: bool | None = None) -> GateReport:
    """Does the machine pass every required finding ("gpu", "nvlink", "ecc", "pcie", "cpu_isa", "threads", "memory")?

    What does not pass is logged as a warning. With `strict` (default: SIC_STRICT) it raises BackendError.
    """
    required = tuple(require)
    hardware = probe_hardware() if hardware is None else hardware
    known = [f.name for f in hardware.findings]
    for name in required:
        if name not in known:
            raise ArgumentError.of("gate", "require", repr(name), "|".join(known))
    refused = tuple(hardware[name] for name in required if hardware[name].status != PASS)
    for finding in refused:
        log.get_logger("probe").warning("gate: %s: %s: %s", finding.name, finding.status, finding.detail)
    if refused and (config.current().strict if strict is None else strict):
        reasons = "; ".join(f"{f.name}: {f.status}: {f.detail}" for f in refused)
        raise BackendError(f"hardware gate refused: {reasons}")
    return GateReport(not refused, required, refused, hardware)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True, stdin=subprocess.DEVNULL)
    return done.stdout


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


# --- GPU -------------------------------------------------------------------------------------------------------


def _gpu_findings(root: Path, run: Callable[[list[str]], str]) -> list[Finding]:
    source = "nvidia-smi --query-gpu"
    try:
        text = run(["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits"])
        gpus = _parse_gpus(text)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return _no_gpu(root, _why(error))
    if not gpus:
        return _no_gpu(root, "nvidia-smi lists no GPU")
    names = [f"{g['name']} (sm_{g['compute_cap'].replace('.', '')}, {g['memory.total']} MiB)" for g in gpus]
    return [Finding("gpu", PASS, names, source), _nvlink(len(gpus), run), _ecc(gpus, source), _pcie(gpus, source)]


def _parse_gpus(text: str) -> list[dict[str, str]]:
    gpus = []
    for line in text.strip().splitlines():
        values = [v.strip() for v in line.split(",")]
        if len(values) != len(_GPU_FIELDS):
            raise ValueError(f"nvidia-smi answered {line!r}")
        gpus.append(dict(zip(_GPU_FIELDS, values)))
    return gpus


def _why(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "nvidia-smi was not found"
    if isinstance(error, subprocess.TimeoutExpired):
        return "nvidia-smi did not answer in 10 s"
    if isinstance(error, subprocess.CalledProcessError):
        said = (error.stderr or error.stdout or "").strip().splitlines()
        return f"nvidia-smi failed: {said[0] if said else error.returncode}"
    return str(error)


def _no_gpu(root: Path, why: str) -> list[Finding]:
    """Without nvidia-smi the PCI bus still tells whether there is a card without a driver."""
    vendors = [_read(path) for path in (root / "sys/bus/pci/devices").glob("*/vendor")]
    if any(v is not None and v.strip() == "0x10de" for v in vendors):
        gpu = Finding(
            "gpu", FAIL, None, "/sys/bus/pci", f"an NVIDIA device is on the bus, but {why}: install the driver"
        )
    else:
        gpu = Finding("gpu", UNKNOWN, None, "nvidia-smi", f"{why}; no NVIDIA device seen on the PCI bus")
    detail = "no GPU could be asked"
    return [gpu, *(Finding(name, UNKNOWN, None, "nvidia-smi", detail) for name in ("nvlink", "ecc", "pcie"))]


def _nvlink(count: int, run: Callable[[list[str]], str]) -> Finding:
    """Every link of every GPU active. Lines look like ``Link 0: 26.562 GB/s`` or ``Link 3: <inactive>``."""
    source = "nvidia-smi nvlink --status"
    try:
        lines = [line.strip() for line in run(["nvidia-smi", "nvlink", "--status"]).splitlines()]
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("nvlink", UNKNOWN, None, source, _why(error))
    links = [line for line in lines if line.startswith("Link ")]
    active = [line for line in links if "GB/s" in line]
    value = {"links": len(links), "active": len(active), "gpus": count}
    if not links:
        status = UNKNOWN if count == 1 else FAIL
        return Finding("nvlink", status, value, source, f"{count} GPU(s) and no NVLink reported")
    if len(active) < len(links):
        down = [line for line in links if line not in active]
        return Finding("nvlink", FAIL, value, source, f"{len(down)} of {len(links)} links are down, first: {down[0]}")
    return Finding("nvlink", PASS, value, source)


def _ecc(gpus: list[dict[str, str]], source: str) -> Finding:
    modes = [g["ecc.mode.current"] for g in gpus]
    errors = [g["ecc.errors.uncorrected.volatile.total"] for g in gpus]
    value = {"mode": modes, "uncorrected": errors}
    if any(mode == "Disabled" for mode in modes):
        return Finding("ecc", FAIL, value, source, "ECC is off: nvidia-smi -e 1, then reboot")
    if any(count.isdigit() and int(count) > 0 for count in errors):
        return Finding(
            "ecc", FAIL, value, source, "uncorrected memory errors since the driver was loaded: drain the machine"
        )
    if not all(mode == "Enabled" for mode in modes) or not all(count.isdigit() for count in errors):
        return Finding("ecc", UNKNOWN, value, source, "the driver does not report ECC for every GPU")
    return Finding("ecc", PASS, value, source)


def _pcie(gpus: list[dict[str, str]], source: str) -> Finding:
    """Full width and generation. An idle GPU lowers its generation, never its width."""
    links = [(g["pcie.link.gen.current"], g["pcie.link.gen.max"], g["pcie.link.width.current"],
              g["pcie.link.width.max"], g["pstate"]) for g in gpus]  # fmt: skip
    value = [f"gen {gen}/{gen_max} x{width}/{width_max}" for gen, gen_max, width, width_max, _ in links]
    status, detail = PASS, ""
    for index, (gen, gen_max, width, width_max, pstate) in enumerate(links):
        if not all(text.isdigit() for text in (gen, gen_max, width, width_max)):
            status, detail = UNKNOWN, f"GPU {index} does not report its link"
        elif int(width) < int(width_max):
            return Finding("pcie", FAIL, value, source, f"GPU {index} runs at x{width} of x{width_max}: reseat it")
        elif int(gen) < int(gen_max):
            if pstate in ("P0", "P1", "P2"):
                return Finding(
                    "pcie", FAIL, value, source, f"GPU {index} runs at generation {gen} of {gen_max} under load"
                )
            status = UNKNOWN
            detail = f"GPU {index} is idle ({pstate}) at generation {gen} of {gen_max}: probe under load"
    return Finding("pcie", status, value, source, detail)


# --- CPU -------------------------------------------------------------------------------------------------------

# instruction set of the CPU backend -> the flags it needs
_ISA_FLAGS = {
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq"),
    "avx2": ("avx2", "fma", "f16c"),
    "neon": ("asimd",),
}
_EXTRA_FLAGS = ("avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "sve", "asimddp", "bf16")


def _cpu_isa(root: Path) -> Finding:
    """Pass: one of the fast instruction sets. Fail: only plain C++ remains, or SIC_CPU_ISA asks for a missing one."""
    text = _read(root / "proc/cpuinfo")
    if text is None:
        return Finding("cpu_isa", UNKNOWN, {"machine": platform.machine()}, "/proc/cpuinfo", "cannot be read here")
    flags: set[str] = set()
    model = ""
    for line in text.splitlines():
        key, _, content = line.partition(":")
        if key.strip() in ("flags", "Features"):
            flags.update(content.split())
        elif key.strip() == "model name" and not model:
            model = content.strip()
    sets = [name for name, needed in _ISA_FLAGS.items() if flags.issuperset(needed)]
    value = {"machine": platform.machine(), "model": model, "sets": [*sets, "plain"],
             "extra": [f for f in _EXTRA_FLAGS if f in flags]}  # fmt: skip
    wanted = config.current().cpu_isa
    if wanted not in ("auto", *value["sets"]):
        detail = f"SIC_CPU_ISA={wanted}, which this CPU does not have"
        return Finding("cpu_isa", FAIL, value, "/proc/cpuinfo", detail)
    if not sets:
        return Finding("cpu_isa", FAIL, value, "/proc/cpuinfo", "no SIMD that the CPU backend knows: it runs plain C++")
    return Finding("cpu_isa", PASS, value, "/proc/cpuinfo")


def _threads(root: Path) -> Finding:
    """Cores this process may use, by affinity and by the container's quota."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = _quota(root)
    setting = config.current().num_threads
    value = {"online": os.cpu_count(), "affinity": affinity, "quota": quota,
             "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"), "SIC_NUM_THREADS": setting or "auto"}  # fmt: skip
    source = "sched_getaffinity, cgroup cpu.max"
    if affinity is None:
        return Finding("threads", UNKNOWN, value, source, "the number of cores cannot be read")
    usable = affinity if quota is None else min(affinity, quota)
    if setting > affinity or (quota is not None and setting > quota + 1):
        detail = f"SIC_NUM_THREADS={setting} on {usable:g} usable cores: threads would wait for each other"
        return Finding("threads", FAIL, value, source, detail)
    return Finding("threads", PASS, value, source)


def _quota(root: Path) -> float | None:
    """Cores allowed by the control group (version 2, then 1), or None for no limit."""
    text = _read(root / "sys/fs/cgroup/cpu.max")
    if text is None:
        quota = _read(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us")
        period = _read(root / "sys/fs/cgroup/cpu/cpu.cfs_period_us")
        text = f"{quota} {period}" if quota and period else "max"
    parts = text.split()
    try:
        return float(parts[0]) / float(parts[1]) if len(parts) == 2 and float(parts[0]) > 0 else None
    except ValueError:
        return None


def _memory(root: Path) -> Finding:
    text = _read(root / "proc/meminfo")
    sizes = {}
    for line in (text or "").splitlines():
        key, _, content = line.partition(":")
        parts = content.split()
        if parts and parts[0].isdigit():
            sizes[key] = int(parts[0]) * 1024 if parts[-1] == "kB" else int(parts[0])
    if "MemTotal" not in sizes:
        return Finding("memory", UNKNOWN, None, "/proc/meminfo", "cannot be read here")
    huge = (_read(root / "sys/kernel/mm/transparent_hugepage/enabled") or "").strip()
    value = {"total_bytes": sizes["MemTotal"], "available_bytes": sizes.get("MemAvailable"), "huge_pages": huge or None}
    return Finding("memory", PASS, value, "/proc/meminfo")
