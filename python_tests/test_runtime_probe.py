"""The hardware gate against made-up GPUs and file systems."""

import sys

import fake_nvml as fake
import pytest
from fake_nvml import FakeNvml

import sic_kernels as sic
from sic_kernels.runtime import probe, probe_gpu

CPUINFO = "processor\t: 0\nmodel name\t: Test CPU\nflags\t\t: fpu avx2 fma f16c{more}\n\nprocessor\t: 1\n"
UNSUPPORTED = fake.NVMLError_NotSupported("Not Supported")
DENIED = fake.NVMLError_NoPermission("Insufficient Permissions")
LINK_DOWN = [1] * 17 + [0]


@pytest.fixture
def root(tmp_path):
    """A file system of a healthy machine without a GPU."""
    for path, text in {
        "proc/cpuinfo": CPUINFO.format(more=""),
        "proc/meminfo": "MemTotal:  1000 kB\nMemAvailable: 500 kB\n",
        "sys/fs/cgroup/cpu.max": "max 100000\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def look(root, *gpus, **how):
    """Findings of a machine with these GPUs, each named by what differs from a healthy one."""
    return probe.probe_hardware(root, FakeNvml(*gpus, **how))


def test_healthy_gpus_pass(root):
    nvml = FakeNvml({}, {})
    hardware = probe.probe_hardware(root, nvml)
    assert nvml.open == 0  # NVML is left as it was found
    for name in probe.GATED:
        assert hardware[name].status == "pass", hardware[name]
        assert hardware[name].detail == ""
        assert len(hardware[name].value) == 2
    one = {"name": "NVIDIA H200", "compute": "sm_90", "memory_mib": 143771, "virtual": None}
    assert hardware["gpu"].value == [one, one]
    assert hardware["nvlink"].value[0] == {"links": 18, "active": 18}
    assert hardware["ecc"].value[0] == {"on": 1, "uncorrected": 0}
    assert hardware["pcie"].value[0] == {"gen": 5, "gen_max": 5, "width": 16, "width_max": 16}
    assert hardware["throttle"].value[0] == {"reasons": [], "power_limit_watts": 700.0, "default_watts": 700.0}
    assert hardware["remapped_rows"].value[0] == {"correctable": 0, "uncorrectable": 0, "pending": 0, "failed": 0}
    report = sic.gate(hardware=hardware, strict=True)
    assert report
    assert report.refused == ()


OLD_ROWS = {"GetRemappedRows": UNSUPPORTED, "GetRetiredPagesPendingStatus": 0}
LOST = {"GetHandleByIndex": fake.NVMLError_GpuIsLost("GPU is lost")}


@pytest.mark.parametrize(
    "name, status, changes, detail",
    [
        ("gpu", "unknown", {"GetName": UNSUPPORTED}, "Not Supported"),
        ("gpu", "unknown", {"GetHandleByIndex": DENIED}, "Insufficient Permissions: allow this user"),
        ("gpu", "fail", LOST, "GPU is lost: it fell off the bus"),
        ("nvlink", "fail", {"GetNvLinkState": LINK_DOWN}, "1 of 18 links are down"),
        ("nvlink", "unknown", {"GetNvLinkState": [1, DENIED]}, "NVLink: Insufficient Permissions"),
        ("nvlink", "unknown", LOST, "GPU is lost"),
        ("nvlink", "fail", {"GetVirtualizationMode": 2, "GetNvLinkState": UNSUPPORTED}, "degraded: it is a vGPU"),
        ("nvlink", "fail", {"GetVirtualizationMode": 2, "GetNvLinkState": [0, 0]}, "degraded: it is a vGPU"),
        ("nvlink", "fail", {"GetMigMode": [1, 1]}, "degraded: it is partitioned (MIG)"),
        ("nvlink", "pass", {"GetVirtualizationMode": 2}, ""),
        ("nvlink", "pass", {"GetVirtualizationMode": 1}, ""),  # passed through whole
        ("ecc", "fail", {"GetEccMode": [0, 1]}, "ECC is off"),
        ("ecc", "fail", {"GetTotalEccErrors": 2}, "2 uncorrected"),
        ("ecc", "unknown", {"GetEccMode": UNSUPPORTED}, "does not report ECC: Not Supported"),
        ("ecc", "unknown", {"GetTotalEccErrors": UNSUPPORTED}, "does not report ECC: Not Supported"),
        ("pcie", "fail", {"GetCurrPcieLinkWidth": 8}, "x8 of x16"),
        ("pcie", "fail", {"GetCurrPcieLinkGeneration": 3}, "generation 3 of 5 under load"),
        ("pcie", "unknown", {"GetCurrPcieLinkGeneration": 1, "GetPerformanceState": 8}, "idle (P8)"),
        ("pcie", "unknown", {"GetCurrPcieLinkGeneration": 1, "GetPerformanceState": DENIED}, "in an unknown state"),
        ("pcie", "unknown", {"GetMaxPcieLinkWidth": UNSUPPORTED}, "does not report its link"),
        ("throttle", "fail", {"GetCurrentClocksEventReasons": 64 + 4}, "HwThermalSlowdown: too hot"),
        ("throttle", "fail", {"GetCurrentClocksEventReasons": 128}, "HwPowerBrakeSlowdown"),
        ("throttle", "pass", {"GetCurrentClocksEventReasons": 4 + 1}, ""),
        ("throttle", "fail", {"GetEnforcedPowerLimit": 500_000}, "limited to 500 W of 700 W"),
        ("throttle", "unknown", {"GetCurrentClocksEventReasons": UNSUPPORTED}, "clocks: Not Supported"),
        ("throttle", "unknown", {"GetCurrentClocksEventReasons": AttributeError}, "pip install -U nvidia-ml-py"),
        ("throttle", "unknown", {"GetEnforcedPowerLimit": UNSUPPORTED}, "clocks: Not Supported"),
        ("remapped_rows", "fail", {"GetRemappedRows": (0, 1, 1, 0)}, "waits for a reset"),
        ("remapped_rows", "fail", {"GetRemappedRows": (0, 1, 0, 1)}, "replace the card"),
        ("remapped_rows", "pass", {"GetRemappedRows": (3, 1, 0, 0)}, ""),
        ("remapped_rows", "pass", OLD_ROWS, ""),
        ("remapped_rows", "fail", OLD_ROWS | {"GetRetiredPagesPendingStatus": 1}, "waits for a reset"),
        ("remapped_rows", "unknown", {"GetRemappedRows": UNSUPPORTED}, "does not report remapped rows: Not Supported"),
    ],
)
def test_one_thing_differs(root, name, status, changes, detail):
    for gpus, at in (([changes], 0), ([{}, changes], 1)):  # also when only one of two is degraded
        finding = look(root, *gpus)[name]
        assert finding.status == status
        assert finding.detail == "" if not detail else f"GPU {at}: " in finding.detail
        assert detail in finding.detail
        assert bool(sic.gate([name], hardware=look(root, *gpus), strict=False)) == (status == "pass")


def test_the_worst_gpu_decides_and_every_reason_is_named(root):
    finding = look(root, {"GetEccMode": UNSUPPORTED}, {"GetTotalEccErrors": 1}, {"GetEccMode": [0, 0]})["ecc"]
    assert finding.status == "fail"
    assert finding.value == [
        {"on": None, "uncorrected": 0},
        {"on": 1, "uncorrected": 1},
        {"on": 0, "uncorrected": 0},
    ]
    assert [part[:6] for part in finding.detail.split("; ")] == ["GPU 0:", "GPU 1:", "GPU 2:"]


def test_no_nvlink_is_unknown_for_one_gpu_and_a_failure_between_two(root):
    without = {"GetNvLinkState": UNSUPPORTED}
    assert look(root, without)["nvlink"].status == "unknown"
    assert look(root, without, without)["nvlink"].status == "fail"


@pytest.mark.parametrize(
    "gpus, init, detail",
    [
        ([{}], fake.NVMLError_LibraryNotFound("NVML Shared Library Not Found"), "install the NVIDIA driver"),
        ([{}], fake.NVMLError_DriverNotLoaded("Driver Not Loaded"), "modprobe nvidia"),
        ([{}], DENIED, "Insufficient Permissions: allow this user to open"),
        ([], None, "NVML lists no GPU"),
    ],
)
def test_no_answer_is_unknown_and_unknown_is_no_pass(root, gpus, init, detail, caplog):
    hardware = look(root, *gpus, init=init)
    for name in probe.GATED:
        assert hardware[name].status == "unknown"
    assert detail in hardware["gpu"].detail
    report = sic.gate(hardware=hardware, strict=False)
    assert not report
    assert {f.name for f in report.refused} == set(probe.GATED)
    assert "gate: nvlink: unknown" in caplog.text  # never silent


def test_without_the_package_the_remedy_is_named(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    finding = probe.probe_hardware(root)["gpu"]
    assert finding.status == "unknown"
    assert "GPU findings need the package pynvml: pip install 'sic_kernels[nvml]'" in finding.detail


def test_a_card_without_a_driver_fails(root):
    device = root / "sys/bus/pci/devices/0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    finding = look(root, init=fake.NVMLError_LibraryNotFound("NVML Shared Library Not Found"))["gpu"]
    assert finding.status == "fail"
    assert "install the NVIDIA driver" in finding.detail


def test_the_binding_has_all_that_is_asked():
    """The stand-in answers by name: each name must be one of the real pynvml's, with the same number."""
    import pynvml

    for call in (*fake.HEALTHY, "GetHandleByIndex", "GetCount", "GetNvLinkState"):
        assert callable(getattr(pynvml, f"nvmlDevice{call}"))
    numbers = {n: v for n, v in vars(FakeNvml).items() if n.startswith(("NVML_", "nvmlClocks"))}
    assert numbers == {n: getattr(pynvml, n) for n in numbers}
    assert probe_gpu._VGPU == pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU
    for kind in probe_gpu._REMEDIES:
        assert issubclass(getattr(pynvml, kind), pynvml.NVMLError)


def test_strict_gate_raises_with_the_reasons(root):
    hardware = look(root, {"GetEccMode": [0, 0]})
    with pytest.raises(sic.BackendError, match="hardware gate refused: ecc: fail: GPU 0: ECC is off"):
        sic.gate(["ecc"], hardware=hardware, strict=True)


def test_gate_refuses_unknown_requirements(root):
    with pytest.raises(sic.ArgumentError, match="gate: require: got 'nvlnk', expected gpu"):
        sic.gate(["nvlnk"], hardware=look(root, {}))


@pytest.mark.parametrize(
    "more, sets",
    [
        ("", ["avx2", "plain"]),
        (" avx512f avx512bw avx512vl avx512dq avx512_vnni", ["avx512", "avx2", "plain"]),
        (" avx512f", ["avx2", "plain"]),
    ],
)
def test_cpu_instruction_sets(root, more, sets):
    (root / "proc/cpuinfo").write_text(CPUINFO.format(more=more))
    finding = look(root)["cpu_isa"]
    assert finding.status == "pass"
    assert finding.value["sets"] == sets
    assert finding.value["model"] == "Test CPU"
    assert ("avx512_vnni" in finding.value["extra"]) == ("vnni" in more)


def test_arm(root):
    (root / "proc/cpuinfo").write_text("processor\t: 0\nFeatures\t: fp asimd bf16\n")
    assert look(root)["cpu_isa"].value["sets"] == ["neon", "plain"]


def test_no_simd_fails_and_no_file_is_unknown(root):
    (root / "proc/cpuinfo").write_text("flags : fpu\n")
    assert look(root)["cpu_isa"].status == "fail"
    (root / "proc/cpuinfo").unlink()
    assert look(root)["cpu_isa"].status == "unknown"


@pytest.mark.parametrize("text, quota", [("max 100000\n", None), ("150000 100000\n", 1.5), ("", None), ("x y\n", None)])
def test_quota(root, text, quota):
    (root / "sys/fs/cgroup/cpu.max").write_text(text)
    assert look(root)["threads"].value["quota"] == quota


def test_memory(root):
    assert look(root)["memory"].value["total_bytes"] == 1000 * 1024
    (root / "proc/meminfo").unlink()
    assert look(root)["memory"].status == "unknown"


def test_this_machine_never_raises_and_is_json():
    import json

    data = json.loads(json.dumps(sic.probe_hardware().as_dict()))
    assert set(data) == {*probe.GATED, "cpu_isa", "threads", "memory"}
    json.dumps(sic.gate(strict=False).as_dict())
