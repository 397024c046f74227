"""The GPUs of this machine as NVML describes them (NVIDIA's management library, through nvidia-ml-py).

First everything is asked, then it is judged. What NVML does not answer (unsupported, no permission, an older driver)
stays `Unanswered` with the reason and makes a finding unknown: it never passes. No CUDA context is created.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from .errors import SicError
from .extras import extra
from .findings import FAIL, PASS, UNKNOWN, Finding

NAMES = ("gpu", "nvlink", "ecc", "pcie", "throttle", "remapped_rows")

# NVML's reasons for a lower clock, by name of the constant: those that mean a fault or a bad environment, and the others.
_FAULTS = {
    "HwSlowdown": "the board slowed it down: check power and cooling",
    "HwThermalSlowdown": "too hot, slowed down by the board: check the cooling",
    "HwPowerBrakeSlowdown": "the power supply asked for less: check the power",
    "SwThermalSlowdown": "too hot, slowed down by the driver: check the cooling",
}
_HARMLESS = ("GpuIdle", "ApplicationsClocksSetting", "SwPowerCap", "SyncBoost", "DisplayClockSetting")

# Exception of NVML -> what to do, where there is something to do.
_REMEDIES = {
    "NVMLError_LibraryNotFound": "install the NVIDIA driver (in a container: the NVIDIA container toolkit)",
    "NVMLError_DriverNotLoaded": "load the NVIDIA driver (modprobe nvidia)",
    "NVMLError_LibRmVersionMismatch": "the driver was updated under a running system: reboot",
    "NVMLError_NoPermission": "allow this user to open /dev/nvidiactl",
    "NVMLError_FunctionNotFound": "needs a newer driver",
    "NVMLError_GpuIsLost": "it fell off the bus: reset or reboot",
    "NVMLError_ResetRequired": "reset it",
}
_LOST = ("NVMLError_GpuIsLost", "NVMLError_ResetRequired")
_VGPU = 2  # NVML_GPU_VIRTUALIZATION_MODE_VGPU
_UNDER_LOAD = 2  # P0 to P2: the link runs at full speed


@dataclasses.dataclass(frozen=True)
class Unanswered:
    """What NVML did not say, and why."""

    kind: str  # class of NVML's exception
    why: str


@dataclasses.dataclass
class Gpu:
    """The answers for one GPU: values as NVML gives them, or `Unanswered`."""

    index: int
    name: Any
    compute: Any  # (major, minor)
    memory: Any  # has .total, bytes
    mig: Any  # 1: partitioned
    virtual: Any  # the virtualisation mode; `_VGPU` is a share of a card, given to this virtual machine
    links: list[Any]  # 1 up, 0 down, for each NVLink that it has
    ecc: Any  # 1: on
    uncorrected: Any  # since the driver was loaded
    pcie: list[Any]  # generation, generation at most, width, width at most
    pstate: Any  # 0: full speed
    slowed: Any  # bits
    power: list[Any]  # limit, default limit, in mW
    remapped: Any  # rows: (correctable, uncorrectable, waiting for a reset, one that failed)
    retired: Any  # cards older than row remapping: pages wait for a reset


def gpu_findings(root: Path, nvml: Any = None) -> list[Finding]:
    """Findings of all `NAMES`. root: of the file system; nvml: what stands in for the module pynvml."""
    try:
        nvml = extra("pynvml", "GPU findings", "nvml") if nvml is None else nvml
    except SicError as error:
        return _no_gpu(root, str(error))
    begun = _ask(nvml, "nvmlInit")
    if isinstance(begun, Unanswered):
        return _no_gpu(root, f"NVML: {begun.why}")
    try:
        count = _ask(nvml, "nvmlDeviceGetCount")
        if isinstance(count, Unanswered) or count == 0:
            return _no_gpu(root, f"NVML: {count.why}" if isinstance(count, Unanswered) else "NVML lists no GPU")
        gpus = [_read(nvml, index) for index in range(count)]
        return [_present(gpus), _nvlink(gpus), _ecc(gpus), _pcie(gpus), _throttle(nvml, gpus), _remapped(gpus)]
    finally:
        _ask(nvml, "nvmlShutdown")


def _no_gpu(root: Path, why: str) -> list[Finding]:
    """Without NVML the PCI bus still tells whether there is a card without a driver."""
    vendors = []
    for path in (root / "sys/bus/pci/devices").glob("*/vendor"):
        try:
            vendors.append(path.read_text().strip())
        except OSError:
            continue
    if "0x10de" in vendors:
        gpu = Finding("gpu", FAIL, None, "/sys/bus/pci", f"an NVIDIA device is on the bus, but cannot be asked: {why}")
    else:
        gpu = Finding("gpu", UNKNOWN, None, "NVML", f"{why}; no NVIDIA device seen on the PCI bus")
    return [gpu, *(Finding(name, UNKNOWN, None, "NVML", "no GPU could be asked") for name in NAMES[1:])]


# --- asking -------------------------------------------------------------------------------------------------------------


def _ask(nvml: Any, call: str, *args: Any) -> Any:
    """The answer of NVML, or why there is none."""
    function = getattr(nvml, call, None)
    if function is None:
        return Unanswered("AttributeError", f"{call} is not in this nvidia-ml-py: pip install -U nvidia-ml-py")
    try:
        return function(*args)
    except nvml.NVMLError as error:
        kind = type(error).__name__
        remedy = _REMEDIES.get(kind)
        return Unanswered(kind, f"{error}: {remedy}" if remedy else str(error))


def _read(nvml: Any, index: int) -> Gpu:
    handle = _ask(nvml, "nvmlDeviceGetHandleByIndex", index)

    def ask(call: str, *args: Any) -> Any:
        return handle if isinstance(handle, Unanswered) else _ask(nvml, f"nvmlDevice{call}", handle, *args)

    def current(call: str) -> Any:  # NVML answers [current, pending]
        answer = ask(call)
        return answer if isinstance(answer, Unanswered) else answer[0]

    volatile = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    pcie = ("GetCurrPcieLinkGeneration", "GetMaxPcieLinkGeneration", "GetCurrPcieLinkWidth", "GetMaxPcieLinkWidth")
    return Gpu(
        index=index,
        name=ask("GetName"),
        compute=ask("GetCudaComputeCapability"),
        memory=ask("GetMemoryInfo"),
        mig=current("GetMigMode"),
        virtual=ask("GetVirtualizationMode"),
        links=_links(nvml, ask),
        ecc=current("GetEccMode"),
        uncorrected=ask("GetTotalEccErrors", *volatile),
        pcie=[ask(call) for call in pcie],
        pstate=ask("GetPerformanceState"),
        slowed=ask("GetCurrentClocksEventReasons"),
        power=[ask("GetEnforcedPowerLimit"), ask("GetPowerManagementDefaultLimit")],
        remapped=ask("GetRemappedRows"),
        retired=ask("GetRetiredPagesPendingStatus"),
    )


def _links(nvml: Any, ask: Any) -> list[Any]:
    """The state of each NVLink. NVML refuses the numbers that a card does not have, as invalid or as not supported."""
    states = [ask("GetNvLinkState", link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)]
    none = ("NVMLError_InvalidArgument", "NVMLError_NotSupported")
    return [s for s in states if not (isinstance(s, Unanswered) and s.kind in none)]


# --- judging ------------------------------------------------------------------------------------------------------------

Verdict = tuple[str, str]  # status, detail
GOOD: Verdict = (PASS, "")


def _joined(name: str, source: str, values: list[Any], verdicts: list[Verdict]) -> Finding:
    """One finding for all GPUs: the worst verdict, every reason with the number of its GPU."""
    status = next((s for s in (FAIL, UNKNOWN) if any(s == verdict for verdict, _ in verdicts)), PASS)
    details = [f"GPU {i}: {detail}" for i, (_, detail) in enumerate(verdicts) if detail]
    return Finding(name, status, values, source, "; ".join(details))


def _first_gap(*answers: Any) -> Unanswered | None:
    return next((a for a in answers if isinstance(a, Unanswered)), None)


def _known(answer: Any) -> Any:
    """As a value of a finding: None where there is no answer."""
    return None if isinstance(answer, Unanswered) else answer


def _share_of_a_card(gpu: Gpu) -> str:
    """What kind of virtual GPU it is, or ""."""
    return "a vGPU" if gpu.virtual == _VGPU else "partitioned (MIG)" if gpu.mig == 1 else ""


def _present(gpus: list[Gpu]) -> Finding:
    values: list[Any] = []
    verdicts: list[Verdict] = []
    for gpu in gpus:
        gap = _first_gap(gpu.name, gpu.compute, gpu.memory)
        values.append(None if gap else {
            "name": gpu.name, "compute": "sm_{}{}".format(*gpu.compute), "memory_mib": gpu.memory.total >> 20,
            "virtual": _share_of_a_card(gpu) or None,
        })  # fmt: skip
        verdicts.append((FAIL if gap.kind in _LOST else UNKNOWN, gap.why) if gap else GOOD)
    return _joined("gpu", "NVML", values, verdicts)


def _nvlink(gpus: list[Gpu]) -> Finding:
    """Every link of every GPU is up. A share of a card without links has lost what the whole card has: degraded, not unknown."""
    values = [{"links": len(gpu.links), "active": sum(s == 1 for s in gpu.links)} for gpu in gpus]
    verdicts = [_links_verdict(gpu, alone=len(gpus) == 1) for gpu in gpus]
    return _joined("nvlink", "nvmlDeviceGetNvLinkState", values, verdicts)


def _links_verdict(gpu: Gpu, alone: bool) -> Verdict:
    share, gap = _share_of_a_card(gpu), _first_gap(*gpu.links)
    down = sum(s == 0 for s in gpu.links)
    if share and (gpu.mig == 1 or down or not gpu.links):
        return FAIL, f"degraded: it is {share} and NVLink is off for it: use whole GPUs, or count on PCIe between GPUs"
    if gap:
        return UNKNOWN, f"NVLink: {gap.why}"
    if down:
        return FAIL, f"{down} of {len(gpu.links)} links are down: check the fabric manager, then the bridges"
    if not gpu.links:
        return UNKNOWN if alone else FAIL, "reports no NVLink" + ("" if alone else ": traffic between GPUs takes PCIe")
    return GOOD


def _ecc(gpus: list[Gpu]) -> Finding:
    values = [{"on": _known(gpu.ecc), "uncorrected": _known(gpu.uncorrected)} for gpu in gpus]
    verdicts: list[Verdict] = []
    for gpu in gpus:
        gap = _first_gap(gpu.ecc, gpu.uncorrected)
        if gpu.ecc == 0:
            verdicts.append((FAIL, "ECC is off: nvidia-smi -e 1, then reboot"))
        elif not isinstance(gpu.uncorrected, Unanswered) and gpu.uncorrected > 0:
            verdicts.append(
                (FAIL, f"{gpu.uncorrected} uncorrected memory errors since the driver was loaded: drain it")
            )
        else:
            verdicts.append((UNKNOWN, f"does not report ECC: {gap.why}") if gap else GOOD)
    return _joined("ecc", "nvmlDeviceGetEccMode, nvmlDeviceGetTotalEccErrors", values, verdicts)


def _pcie(gpus: list[Gpu]) -> Finding:
    values = [dict(zip(("gen", "gen_max", "width", "width_max"), map(_known, gpu.pcie))) for gpu in gpus]
    return _joined("pcie", "nvmlDeviceGetCurrPcieLink*", values, [_pcie_verdict(gpu) for gpu in gpus])


def _pcie_verdict(gpu: Gpu) -> Verdict:
    """Full width and generation. An idle GPU lowers its generation, never its width."""
    gap = _first_gap(*gpu.pcie)
    if gap:
        return UNKNOWN, f"does not report its link: {gap.why}"
    gen, gen_max, width, width_max = gpu.pcie
    if width < width_max:
        return FAIL, f"runs at x{width} of x{width_max}: reseat it"
    if gen == gen_max:
        return GOOD
    if not isinstance(gpu.pstate, Unanswered) and gpu.pstate <= _UNDER_LOAD:
        return FAIL, f"runs at generation {gen} of {gen_max} under load"
    state = "in an unknown state" if isinstance(gpu.pstate, Unanswered) else f"idle (P{gpu.pstate})"
    return UNKNOWN, f"is {state} at generation {gen} of {gen_max}: probe under load"


def _throttle(nvml: Any, gpus: list[Gpu]) -> Finding:
    """Slowed down by heat, power or the board; or its power limit is below the card's default."""
    bits = {name: getattr(nvml, f"nvmlClocksEventReason{name}") for name in (*_FAULTS, *_HARMLESS)}
    values: list[Any] = []
    verdicts: list[Verdict] = []
    for gpu in gpus:
        limit, default = [None, None] if _first_gap(*gpu.power) else [mw / 1000 for mw in gpu.power]
        gap = _first_gap(gpu.slowed, *gpu.power)
        reasons = [] if isinstance(gpu.slowed, Unanswered) else [name for name, bit in bits.items() if gpu.slowed & bit]
        values.append({"reasons": reasons, "power_limit_watts": limit, "default_watts": default})
        wrong = [f"{name}: {_FAULTS[name]}" for name in reasons if name in _FAULTS]
        if limit is not None and default is not None and limit < default:
            wrong.append(f"limited to {limit:g} W of {default:g} W: nvidia-smi -pl {default:g}")
        verdicts.append((FAIL, ", ".join(wrong)) if wrong else (UNKNOWN, f"clocks: {gap.why}") if gap else GOOD)
    source = "nvmlDeviceGetCurrentClocksEventReasons, nvmlDeviceGetEnforcedPowerLimit"
    return _joined("throttle", source, values, verdicts)


def _remapped(gpus: list[Gpu]) -> Finding:
    """Memory rows (before Ampere: pages) that were taken out of use: fine once the reset that it takes has been made."""
    names = ("correctable", "uncorrectable", "pending", "failed")
    values: list[Any] = []
    verdicts: list[Verdict] = []
    for gpu in gpus:
        if isinstance(gpu.remapped, Unanswered):
            values.append(None if isinstance(gpu.retired, Unanswered) else {"pending": gpu.retired})
            pending, failed = values[-1] and gpu.retired, 0
        else:
            values.append(dict(zip(names, gpu.remapped)))
            pending, failed = gpu.remapped[2:]
        if failed:
            verdicts.append((FAIL, "a broken memory row could not be remapped: replace the card"))
        elif pending:
            verdicts.append((FAIL, "memory was taken out of use and waits for a reset: drain it and reset"))
        else:
            verdicts.append(GOOD if values[-1] else (UNKNOWN, f"does not report remapped rows: {gpu.remapped.why}"))
    source = "nvmlDeviceGetRemappedRows, nvmlDeviceGetRetiredPagesPendingStatus"
    return _joined("remapped_rows", source, values, verdicts)
