"""The hardware gate against recorded answers of nvidia-smi and made-up file systems."""

import subprocess

import pytest

import sic_kernels as sic
from sic_kernels.runtime import probe

CPUINFO = "processor\t: 0\nmodel name\t: Test CPU\nflags\t\t: fpu avx2 fma f16c{more}\n\nprocessor\t: 1\n"
GPU = "{i}, NVIDIA H200, 9.0, 580.65.06, 143771, {ecc}, {errors}, {gen}, 5, {width}, 16, {pstate}\n"
LINKS = "GPU 0: NVIDIA H200 (UUID: GPU-1)\n\t Link 0: 26.562 GB/s\n\t Link 1: {second}\n"


def gpu(i=0, ecc="Enabled", errors="0", gen="5", width="16", pstate="P0"):
    return GPU.format(i=i, ecc=ecc, errors=errors, gen=gen, width=width, pstate=pstate)


HEALTHY_LINKS = LINKS.format(second="26.562 GB/s")


def answers(gpus, nvlink=HEALTHY_LINKS):
    """A stand-in for running commands: text to return, or an exception to raise."""

    def run(command):
        said = nvlink if command[1] == "nvlink" else gpus
        if isinstance(said, Exception):
            raise said
        return said

    return run


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


def look(root, gpus, **links):
    return probe.probe_hardware(root, answers(gpus, **links))


def test_healthy_gpu_passes(root):
    hardware = look(root, gpu() + gpu(1))
    for name in probe.GATED:
        assert hardware[name].status == "pass", hardware[name]
        assert hardware[name].detail == ""
    assert hardware["gpu"].value == ["NVIDIA H200 (sm_90, 143771 MiB)"] * 2
    assert hardware["nvlink"].value == {"links": 2, "active": 2, "gpus": 2}
    assert hardware["pcie"].value[0] == "gen 5/5 x16/16"
    report = sic.gate(hardware=hardware, strict=True)
    assert report
    assert report.refused == ()


@pytest.mark.parametrize(
    "name, status, changes, detail",
    [
        ("ecc", "fail", {"ecc": "Disabled"}, "ECC is off"),
        ("ecc", "fail", {"errors": "2"}, "uncorrected"),
        ("ecc", "unknown", {"ecc": "[N/A]", "errors": "[N/A]"}, "does not report"),
        ("pcie", "fail", {"width": "8"}, "x8 of x16"),
        ("pcie", "fail", {"gen": "3", "pstate": "P0"}, "generation 3 of 5 under load"),
        ("pcie", "unknown", {"gen": "1", "pstate": "P8"}, "idle"),
        ("pcie", "unknown", {"width": "[N/A]"}, "does not report"),
    ],
)
def test_degraded_gpu(root, name, status, changes, detail):
    for gpus in (gpu(**changes), gpu() + gpu(1, **changes)):  # also when only one of two is degraded
        hardware = look(root, gpus)
        assert hardware[name].status == status
        assert detail in hardware[name].detail
        assert not sic.gate([name], hardware=hardware, strict=False)


@pytest.mark.parametrize(
    "text, status",
    [
        (LINKS.format(second="<inactive>"), "fail"),
        ("", "unknown"),
        (subprocess.CalledProcessError(1, "nvidia-smi", stderr="no permission"), "unknown"),
    ],
)
def test_nvlink(root, text, status):
    assert look(root, gpu(), nvlink=text)["nvlink"].status == status


def test_two_gpus_without_nvlink_fail(root):
    assert look(root, gpu() + gpu(1), nvlink="")["nvlink"].status == "fail"


@pytest.mark.parametrize(
    "error, detail",
    [
        (FileNotFoundError("nvidia-smi"), "was not found"),
        (subprocess.TimeoutExpired("nvidia-smi", 10), "did not answer"),
        (subprocess.CalledProcessError(9, "nvidia-smi", stderr="driver mismatch\n"), "driver mismatch"),
        ("nonsense\n", "answered"),
        ("", "lists no GPU"),
    ],
)
def test_no_gpu_is_unknown_and_unknown_is_no_pass(root, error, detail, caplog):
    hardware = look(root, error)
    for name in probe.GATED:
        assert hardware[name].status == "unknown"
    assert detail in hardware["gpu"].detail
    report = sic.gate(hardware=hardware, strict=False)
    assert not report
    assert {f.name for f in report.refused} == set(probe.GATED)
    assert "gate: nvlink: unknown" in caplog.text  # never silent


def test_a_card_without_a_driver_fails(root):
    device = root / "sys/bus/pci/devices/0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    assert look(root, FileNotFoundError())["gpu"].status == "fail"


def test_strict_gate_raises_with_the_reasons(root):
    with pytest.raises(sic.BackendError, match="hardware gate refused: ecc: fail: ECC is off"):
        sic.gate(["ecc"], hardware=look(root, gpu(ecc="Disabled")), strict=True)


def test_gate_refuses_unknown_requirements(root):
    with pytest.raises(sic.ArgumentError, match="gate: require: got 'nvlnk', expected gpu"):
        sic.gate(["nvlnk"], hardware=look(root, gpu()))


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
    finding = look(root, "")["cpu_isa"]
    assert finding.status == "pass"
    assert finding.value["sets"] == sets
    assert finding.value["model"] == "Test CPU"
    assert ("avx512_vnni" in finding.value["extra"]) == ("vnni" in more)


def test_arm(root):
    (root / "proc/cpuinfo").write_text("processor\t: 0\nFeatures\t: fp asimd bf16\n")
    assert look(root, "")["cpu_isa"].value["sets"] == ["neon", "plain"]


def test_no_simd_fails_and_no_file_is_unknown(root):
    (root / "proc/cpuinfo").write_text("flags : fpu\n")
    assert look(root, "")["cpu_isa"].status == "fail"
    (root / "proc/cpuinfo").unlink()
    assert look(root, "")["cpu_isa"].status == "unknown"


@pytest.mark.parametrize("text, quota", [("max 100000\n", None), ("150000 100000\n", 1.5), ("", None), ("x y\n", None)])
def test_quota(root, text, quota):
    (root / "sys/fs/cgroup/cpu.max").write_text(text)
    assert look(root, "")["threads"].value["quota"] == quota


def test_memory(root):
    assert look(root, "")["memory"].value["total_bytes"] == 1000 * 1024
    (root / "proc/meminfo").unlink()
    assert look(root, "")["memory"].status == "unknown"


def test_this_machine_never_raises_and_is_json():
    import json

    data = json.loads(json.dumps(sic.probe_hardware().as_dict()))
    assert set(data) == {"gpu", "nvlink", "ecc", "pcie", "cpu_isa", "threads", "memory"}
    json.dumps(sic.gate(strict=False).as_dict())
