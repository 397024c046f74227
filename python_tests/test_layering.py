"""The house keeps its shape: who may import whom, where pybind11 and torch may appear, file sizes, no machine paths."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "sic_kernels"
FAMILIES = ("slicing", "delta", "head", "replay", "references", "ragged")
MAX_LINES = 600

# part of the package -> parts it may import, besides itself
ALLOWED = {
    "runtime": set(),
    "testing": {"runtime"},
    "integrations": {"runtime", "models", *FAMILIES},
    "models": {"runtime"},
    "cli": {"runtime", "testing", "models", "integrations", *FAMILIES},
    "__main__": {"cli"},
    **{family: {"runtime", "testing"} for family in FAMILIES},
    "delta": {"runtime", "testing", "slicing"},  # its attention reads a selection, its cache keeps a sketch
}
# The table of public names resolves lazily; it is the one place that knows everything.
FACADE = {"__init__", "_version"}


def test_the_stub_of_the_native_module_is_complete():
    """_C.pyi names what _C has, all of it and no more."""
    from sic_kernels.runtime import native

    tree = ast.parse((PACKAGE / "_C.pyi").read_text())
    stub = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert stub == {name for name in dir(native.module()) if not name.startswith("_")}


def python_files():
    return sorted(p for p in PACKAGE.rglob("*.py") if "_native" not in p.parts)


def part(path):
    """The part of the package that a file belongs to: its folder, or its stem at the top."""
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports(path):
    """(line, absolute module name) of every import in a file, wherever it stands."""
    package = ["sic_kernels", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module.split(".") if node.module else [])])
            yield node.lineno, module
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def violations():
    for path in python_files():
        own = part(path)
        if own in FACADE:
            continue
        for line, module in imports(path):
            parts = module.split(".")
            if parts[0] != "sic_kernels" or len(parts) < 2:
                continue
            if parts[1] not in {own, *ALLOWED[own]} and parts[1] not in FACADE and (PACKAGE / parts[1]).exists():
                yield f"{path.relative_to(ROOT)}:{line}: {own} imports {module}"


def test_there_is_something_to_check():
    files = python_files()
    assert len(files) > 20
    assert {part(p) for p in files} >= {"runtime", "slicing", "cli", "integrations"}
    seen = [module for path in files for _, module in imports(path)]
    assert "sic_kernels.runtime.errors" in seen
    assert "torch" in seen


def test_every_part_has_a_rule():
    assert {part(p) for p in python_files()} <= set(ALLOWED) | FACADE


def test_direction_of_imports():
    assert list(violations()) == []


def test_a_wrong_import_would_be_found(monkeypatch):
    monkeypatch.setitem(ALLOWED, "cli", set())
    assert any("cli imports sic_kernels.runtime" in v for v in violations())


def test_only_native_imports_the_native_module():
    for path in python_files():
        if path != PACKAGE / "runtime" / "native.py":
            for line, module in imports(path):
                assert not module.startswith("sic_kernels._C"), f"{path.relative_to(ROOT)}:{line}"


def test_references_import_torch_only():
    """The definition of an op must be readable and runnable on its own."""
    found = 0
    for family in FAMILIES:
        for path in (PACKAGE / family).glob("reference*.py"):
            found += 1
            for line, module in imports(path):
                own, base = f"sic_kernels.{family}", "sic_kernels.slicing"
                plain = tuple(f"{own}.{name}" for name in ("reference", "types", "levels"))  # definitions, plain data
                ours = module == own or module.startswith((*plain, f"{base}.reference"))
                outside = module.split(".")[0]
                where = f"{path.relative_to(ROOT)}:{line}: {module}"
                assert ours or outside == "torch" or outside in sys.stdlib_module_names, where
    assert found


def test_import_is_free_of_heavy_modules():
    """Top-level imports of what doctor needs: the standard library and ourselves."""
    import sys

    light = ["__init__", "__main__", "cli/__init__", "cli/doctor", "cli/cmakedir"]
    light += [
        f"runtime/{name}" for name in ("config", "errors", "log", "metrics", "trace", "probe", "probe_gpu", "findings")
    ]
    for path in (PACKAGE / f"{name}.py" for name in light):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            for name in names:
                assert name.split(".")[0] in sys.stdlib_module_names, f"{path.relative_to(ROOT)}: {name}"


# --- C++ -------------------------------------------------------------------------------------------------------------

CXX = (".h", ".cc", ".cu", ".cuh", ".cpp", ".inc")
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)


def cxx_files():
    return sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in CXX)


def includes(path):
    return INCLUDE.findall(path.read_text(encoding="utf-8"))


def test_pybind11_and_python_only_in_bind():
    users = set()
    for path in cxx_files():
        if any(i.startswith("pybind11") or i == "Python.h" for i in includes(path)):
            users.add(path.relative_to(ROOT / "csrc").parts[0])
    assert users == {"bind"}


def test_nothing_includes_torch():
    for path in cxx_files():
        bad = [i for i in includes(path) if re.match(r"(torch|ATen|c10|caffe2)/", i)]
        assert not bad, f"{path.relative_to(ROOT)}: {bad}"


def test_direction_of_includes():
    """core knows no family, families know core, themselves and what others build on (slicing), only bind knows all.

    core/gpu.cuh is where CUDA's own headers or the emulator's come in.
    """
    folders = {p.name for p in (ROOT / "csrc").iterdir() if p.is_dir()}
    assert {"core", "bind", "slicing"} <= folders
    for path in cxx_files():
        own = path.relative_to(ROOT / "csrc").parts[0]
        allowed = folders if own in ("bind", "simt") else {own, "core"}
        if own == "delta":
            allowed = {*allowed, "slicing"}
        if path.name == "gpu.cuh":
            allowed = {*allowed, "simt"}
        for include in includes(path):
            target = include.split("/")[0]
            if target in folders:
                assert target in allowed, f"{path.relative_to(ROOT)} includes {include}"


# --- all files -------------------------------------------------------------------------------------------------------

SOURCES = (*CXX, ".py", ".pyi", ".md", ".toml", ".cmake", ".sh", ".txt", ".yaml", ".yml", ".in")
TOP = ("csrc", "csrc_tests", "sic_kernels", "python_tests", "bench", "examples", "docs", "cmake", "tools", ".ci")
SKIP = {"_native", "__pycache__", "build", "results"}
LONG_BY_NATURE = {"LICENSE", "CHANGELOG.md"}


def all_files():
    files = [p for p in ROOT.iterdir() if p.is_file() and (p.suffix in SOURCES or p.name == "Makefile")]
    for top in TOP:
        for p in (ROOT / top).rglob("*"):
            if p.is_file() and not SKIP & set(p.parts) and (p.suffix in SOURCES or top == ".ci"):
                files.append(p)
    return sorted(files)


@pytest.mark.parametrize("path", all_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_file(path):
    text = path.read_text(encoding="utf-8")
    lines = text.count("\n")
    assert lines <= MAX_LINES or path.name in LONG_BY_NATURE, f"{lines} lines: split the file"
    assert text == "" or text.endswith("\n"), "ends without a newline"
    # Spelt in pieces, so that this file passes its own test.
    for pattern in (
        "/wo" + "rk/",
        "/ro" + "ot/",
        r"/ho" + r"me/\w",
        "pypi" + r"\.org",
        "file" + r"pypi",
        "index" + r"-url",
    ):
        found = re.search(pattern, text)
        assert not found, f"machine path or registry: {found[0]}"
