"""Tests of backends that cannot be used are skipped with the reason, and fail where SIC_REQUIRE names them; fuzz tests
without hypothesis are skipped, not lost."""

import os
import subprocess
import sys
import types
from pathlib import Path

import conftest
import pytest

HERE = Path(__file__).parent

# `cuda` is replaced by a backend that is never there.
TESTS = """
import pytest

@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_parameter(backend):
    assert backend == "cpu"

@pytest.mark.backend("cuda")
def test_mark():
    raise AssertionError("ran")

@pytest.mark.parametrize("backend", [None, "something else"])
def test_other_meanings(backend):
    pass
"""

FUZZ = """
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

@st.composite
def problems(draw):
    return draw(st.lists(st.integers(0, 3).map(str), max_size=3))

@pytest.mark.parametrize("n", [1, 2])
@settings(max_examples=3)
@example(p=[])
@given(p=problems(), q=st.data())
def test_fuzz(n, p, q):
    raise AssertionError("ran")

def test_other():
    pass
"""

CONFTEST = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
{{first}}
exec(open({str(HERE / "conftest.py")!r}).read())
{{then}}
"""

NO_CUDA = """
import sic_kernels.runtime.backends as b
real = b.why_not
b.why_not = lambda name: "no device, says the test" if name == "cuda" else real(name)
"""


def outcomes(folder, tests, first="", then="", **env):
    """How a folder with these tests ends: pytest's last lines."""
    (folder / "conftest.py").write_text(CONFTEST.format(first=first, then=then))
    (folder / "test_it.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    backend(name): needs it\n")
    # Hypothesis's plug-in would look for the real one.
    plugins = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "--strict-markers", *plugins, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, cwd=folder)
    return done.stdout + done.stderr


def test_a_missing_backend_is_a_skip_with_its_reason(tmp_path):
    said = outcomes(tmp_path, TESTS, then=NO_CUDA)
    assert "3 passed, 2 skipped" in said
    assert "backend cuda: no device, says the test" in said


def test_a_required_backend_is_a_failure(tmp_path):
    said = outcomes(tmp_path, TESTS, then=NO_CUDA, SIC_REQUIRE="cuda,triton")
    assert "3 passed" in said
    assert "2 failed" in said or "2 errors" in said
    assert "backend cuda is required: no device, says the test" in said


def test_an_unknown_required_backend_is_an_error(tmp_path):
    assert "SIC_REQUIRE: no backend cudaa; there are cpu, cuda" in outcomes(tmp_path, TESTS, SIC_REQUIRE="cudaa")


@pytest.mark.parametrize("missing", [False, True])
def test_fuzz_tests_without_hypothesis(tmp_path, missing):
    said = outcomes(tmp_path, FUZZ, first="sys.modules['hypothesis'] = None" if missing else "")
    if missing:
        assert "1 passed, 2 skipped" in said
        assert "hypothesis is not installed: pip install" in said
    else:
        assert "2 failed, 1 passed" in said


def test_a_share_of_the_emulated_cases():
    class Item:
        def __init__(self, nodeid, backend):
            self.nodeid, self.callspec = nodeid, types.SimpleNamespace(params={"backend": backend})

        def iter_markers(self, name):
            return []

    items = [Item(f"{test}[{i}-{backend}]", backend) for test in "ab" for backend in ("cpu", "simt") for i in range(3)]
    assert [item.nodeid for item in conftest.left_out(items, 2)] == ["a[1-simt]", "b[1-simt]"]
    assert [item.nodeid for item in conftest.left_out(items, 3)] == ["a[1-simt]", "a[2-simt]", "b[1-simt]", "b[2-simt]"]
    assert conftest.left_out(items, 1) == []
