"""What machine is this, and is it fit to serve?

Each finding says what was read, where, and whether it passes. "unknown" (no tool, no permission, no GPU) is not a
pass: silent degradation is the worst failure of a serving machine, so nothing is assumed. GPUs are asked through NVML
(extra `nvml`), everything else with the standard library; no CUDA context is created.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import config, log, metrics
from .errors import ArgumentError, BackendError
from .findings import FAIL, PASS, UNKNOWN, Finding, Hardware
from .probe_gpu import NAMES as GATED
from .probe_gpu import gpu_findings
from .values import file_path, flag, instance


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


def probe_hardware(root: str | os.PathLike[str] = "/", nvml: Any = None) -> Hardware:
    """Look at the machine; never raises for what it finds. Thread-safe; creates no CUDA context.

    Findings "gpu", "nvlink", "ecc", "pcie", "throttle" and "remapped_rows" come from NVML (extra `nvml`), one value for
    each GPU; "cpu_isa", "threads" and "memory" from the operating system. What cannot be read is "unknown", with the
    reason and the remedy. `root` and `nvml` (what stands in for the module pynvml) replace the file system and the GPUs
    in tests.
    """
    root = Path(file_path("probe_hardware", "root", root))
    if nvml is not None and not hasattr(nvml, "nvmlInit"):
        raise ArgumentError.of(
            "probe_hardware", "nvml", type(nvml).__name__, "what has the functions of pynvml, or None"
        )
    return Hardware((*gpu_findings(root, nvml), _cpu_isa(root), _threads(root), _memory(root)))


def gate(require: Iterable[str] = GATED, *, hardware: Hardware | None = None, strict: bool | None = None) -> GateReport:
    """Does the machine pass every required finding? By default all of its GPUs' (`GATED`); also "cpu_isa", "threads", "memory".

    What does not pass is logged as a warning. With `strict` (default: SIC_STRICT) it raises BackendError.
    """
    if isinstance(require, str) or not isinstance(require, Iterable):
        raise ArgumentError.of("gate", "require", repr(require), "a sequence of names of findings")
    required = tuple(require)
    if hardware is not None:
        instance("gate", "hardware", hardware, Hardware)
    if strict is not None:
        flag("gate", "strict", strict)
    hardware = probe_hardware() if hardware is None else hardware
    known = [f.name for f in hardware.findings]
    for name in required:
        if name not in known:
            raise ArgumentError.of("gate", "require", repr(name), "|".join(known))
    refused = tuple(hardware[name] for name in required if hardware[name].status != PASS)
    refusals = metrics.get("sic_gate_refusal_ratio")
    for name in required:
        refusals.add(hardware[name].status != PASS, 1, finding=name)
    for finding in refused:
        log.get_logger("probe").warning("gate: %s: %s: %s", finding.name, finding.status, finding.detail)
    if refused and (config.current().strict if strict is None else strict):
        reasons = "; ".join(f"{f.name}: {f.status}: {f.detail}" for f in refused)
        raise BackendError(f"hardware gate refused: {reasons}")
    return GateReport(not refused, required, refused, hardware)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


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
