"""bench/device_check.sh without a GPU: it says so, it says what it would run, and its steps end as they should."""

import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from sic_kernels import testing
from sic_kernels.cli import bench
from sic_kernels.slicing import benches

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "bench" / "device_check.sh"


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "bench" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


device_check, device_cases = load("device_check"), load("device_cases")
Check, Outcome = device_check.Check, device_check.Outcome
PASSED, FAILED, SKIPPED, TIMED_OUT = "passed", "failed", "skipped", "timed out"


def started(*arguments, **env):
    env = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", **env}
    return subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, env=env, timeout=120)


def test_the_script_is_well_formed():
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    assert os.access(SCRIPT, os.X_OK)


def test_without_a_gpu_one_line_and_status_2(tmp_path):
    done = started(OUT=str(tmp_path))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("device check: no GPU: torch.cuda.is_available() is False (")
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_names_every_step_and_runs_nothing(tmp_path):
    done = started("--dry-run", OUT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert [line[3:] for line in done.stdout.splitlines() if line.startswith("-- ")] == list(device_check.STEPS)
    for expected in (
        "-DSIC_CUDA=ON -DSIC_CUDA_ARCHS=", "device_cases.py graphs", "--tool memcheck", "--tool racecheck",
        "sic_kernels bench --builtin --json --device cuda", "SIC_REQUIRE=cuda,triton", "sass_gate.py",
    ):  # fmt: skip
        assert expected in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_some_steps(capsys):
    assert device_check.selected("bench,cases") == ["build", "cases", "bench"]
    with pytest.raises(SystemExit, match="no step nothing; there are build, doctor"):
        device_check.selected("nothing")


# --- steps --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def check(tmp_path):
    return Check(tmp_path, 60)


def test_a_command_that_ends_badly(check):
    done = check.python("-c", "print('so far'); raise SystemExit(3)")
    assert (done.status, done.said, done.data["exit"]) == (FAILED, "so far\n", 3)
    assert check.run("no-such-command-anywhere").status == FAILED


def test_a_command_that_takes_too_long(check):
    check.begin(2)
    begin = time.monotonic()
    done = check.python("-c", "import time; print('so far', flush=True); time.sleep(60)")
    assert time.monotonic() - begin < 20
    assert done.status == TIMED_OUT
    assert "so far" in done.said
    assert check.python("-c", "print(1)").said == "no time was left"


def test_the_built_package_comes_first(check):
    (check.site / "sic_kernels").mkdir(parents=True)
    (check.site / "sic_kernels" / "__init__.py").write_text("built = True\n")
    assert check.python("-c", "import sic_kernels; print(sic_kernels.built)").said == "True\n"


def test_later_steps_run_after_a_failure(check, monkeypatch):
    def broken(check):
        raise KeyError("a mistake")

    steps = {
        "one": broken,
        "two": lambda c: Outcome(SKIPPED, "no tool"),
        "three": lambda c: Outcome(PASSED, data={"n": 1}),
    }
    monkeypatch.setattr(device_check, "STEPS", {name: (step, 5) for name, step in steps.items()})
    saved = []
    done = device_check.run_steps(check, list(steps), lambda s: saved.append(json.dumps(s)))
    assert [(s["name"], s["status"]) for s in done] == [("one", FAILED), ("two", SKIPPED), ("three", PASSED)]
    assert "KeyError" in done[0]["said"]
    assert done[2]["data"] == {"n": 1}
    assert len(saved) == 3  # after each


def test_nothing_runs_on_a_failed_build(check, monkeypatch):
    steps = {"build": lambda c: Outcome(FAILED, "no compiler"), "cases": lambda c: Outcome(PASSED)}
    monkeypatch.setattr(device_check, "STEPS", {name: (step, 5) for name, step in steps.items()})
    done = device_check.run_steps(check, list(steps), lambda s: None)
    assert [s["status"] for s in done] == [FAILED, SKIPPED]


@pytest.mark.parametrize("bad, status, passed", [(FAILED, 1, False), (TIMED_OUT, 1, False), (SKIPPED, 0, True)])
def test_the_report_and_the_status(monkeypatch, tmp_path, bad, status, passed):
    steps = {"build": lambda c: Outcome(PASSED), "cases": lambda c: Outcome(bad, "why")}
    monkeypatch.setattr(device_check, "STEPS", {name: (step, 5) for name, step in steps.items()})
    monkeypatch.setattr(device_check, "why_no_device", lambda: None)
    monkeypatch.setenv("OUT", str(tmp_path))
    assert device_check.main([]) == status
    report = json.loads((tmp_path / "device_check.json").read_text())
    assert report["passed"] is passed
    assert report["machine"]["packages"]["torch"] == torch.__version__
    assert [s["name"] for s in report["steps"]] == ["build", "cases"]
    assert {"name", "status", "seconds", "said", "data"} == set(report["steps"][0])


JUNIT = '<testsuites><testsuite tests="{}" failures="{}" errors="{}" skipped="{}"/></testsuites>'


@pytest.mark.parametrize(
    "exit_status, counts, expected",
    [
        (0, (5, 0, 0, 1), (PASSED, 4, 0, 1)),
        (1, (5, 1, 1, 0), (FAILED, 3, 2, 0)),
        (5, (0, 0, 0, 0), (FAILED, 0, 0, 0)),  # nothing has the backends' names: that is no proof
    ],
)
def test_tests_are_counted(check, monkeypatch, exit_status, counts, expected):
    def run(*words, env):
        assert env["SIC_REQUIRE"] == "cuda,triton"
        report = next(w.partition("=")[2] for w in map(str, words) if "junitxml" in str(w))
        Path(report).write_text(JUNIT.format(*(counts if "select-cuda" in report else (0, 0, 0, 0))))
        status = exit_status if "select-cuda" in report else 5
        return Outcome(PASSED if status == 0 else FAILED, "said", {"exit": status})

    monkeypatch.setattr(check, "python", run)
    done = device_check.tests(check)
    assert (done.status, done.data["passed"], done.data["failed"], done.data["skipped"]) == expected
    assert "test_slicing_select.py cuda" in done.data["files"]


def test_rehearsal_is_on_the_cpu(tmp_path):
    check = Check(tmp_path, 60, dry=True, rehearsal=True)
    assert device_check.graphs(check).status == SKIPPED
    assert device_check.sanitizer(check).status == SKIPPED
    assert device_check.build(check).status == PASSED
    assert check.backends == ("cpu",)


# --- what runs inside the package ---------------------------------------------------------------------------------------


LISTS = [(family, name) for family in device_cases.LISTS for name in family.grids()]
SHORT = [case for family, name in LISTS for case in device_cases.chosen(family.grid(name))]


def test_every_family_and_every_op_is_checked():
    families = sorted(path.parent.name for path in (ROOT / "sic_kernels").glob("*/cases.py"))
    assert sorted(family.__name__.split(".")[1] for family in device_cases.LISTS) == families
    assert sorted(device_check.FAMILIES) == families
    assert {case.op for case in SHORT} == set(testing.RESULTS)


def test_the_short_list_has_every_op_of_a_list():
    for family, name in LISTS:
        ops = {case.op for case in family.grid(name)}
        assert {case.op for case in device_cases.chosen(family.grid(name))} == ops, name
    names = [name for name, _ in device_cases.all_cases("cpu", "cpu")]
    assert set(benches.NAMES) <= set(names)
    assert len(names) < 110


def spoiled(monkeypatch, result, calls):
    """Ops give another value of that result in these calls on a backend."""
    real, seen = testing.Case.run, itertools.count()

    def run(case, inputs, backend):
        results = list(real(case, inputs, backend))
        if backend != "ref" and next(seen) in calls:
            results[result] = ~results[result] if results[result].dtype == torch.bool else results[result] + 1
        return tuple(results)

    monkeypatch.setattr(testing.Case, "run", run)


@pytest.mark.parametrize("op", sorted({case.op for case in SHORT}))
def test_a_wrong_result_is_found(op, monkeypatch):
    """Whichever it is, and also if it is wrong in the second call only."""
    case = next(case for case in SHORT if case.op == op)
    device_cases.check_case(case, "cpu")
    for result, x in enumerate(case.run(case.inputs(), "cpu")):
        if not x.double().isfinite().any():  # one more is the same
            continue
        for calls, said in (((0, 1), str(case)), ((1,), f"result {result}, a second time")):
            with monkeypatch.context() as patch:
                spoiled(patch, result, calls)
                with pytest.raises(AssertionError, match=re.escape(said)):
                    device_cases.check_case(case, "cpu")


def test_parts_are_all_of_it(monkeypatch):
    seen = []
    names = ["a", "b", "c", "d", "e"]
    monkeypatch.setattr(device_cases, "all_cases", lambda b, d: ((n, lambda n=n: seen.append(n)) for n in names))
    monkeypatch.setenv("SIC_BACKEND", "cpu")
    for n in (1, 2, 3):
        assert device_cases.main(["cases", "--backend", "cpu", "--part", f"{n}/3"]) == 0
    assert sorted(seen) == names
    with pytest.raises(SystemExit):
        device_cases.main(["cases", "--part", "4/3"])


def test_commands_at_the_same_time(check):
    code = "import sys; raise SystemExit(sys.argv[1] == 'b')"
    done = check.together({name: (sys.executable, "-c", code, name) for name in "ab"})
    assert [done[name].status for name in "ab"] == [PASSED, FAILED]
    assert device_check.joined(done).data["parts"] == {"a": PASSED, "b": FAILED}


def test_failures_are_counted_and_the_rest_runs(capsys):
    def fail():
        raise RuntimeError("a launch failed")

    seen = []
    assert device_cases.run_all(iter([("one", fail), ("two", lambda: seen.append(2))])) == 1
    assert seen == [2]
    assert capsys.readouterr().out == "FAILED one: RuntimeError: a launch failed\n1 passed, 1 failed\n"
    assert device_cases.run_all(iter([])) == 1


class Replays:
    """A graph that calls the function again, or does nothing."""

    def __init__(self, function, i, works):
        self.replay = (lambda: function(i)) if works else lambda: None


@pytest.mark.parametrize("works", [True, False])
@pytest.mark.parametrize(
    ("name", "family", "make", "shape"),
    [(name, family, make, shapes[0]) for family, make, shapes in device_cases.BENCHES for name in family.NAMES],
)
def test_graphs_are_held_to_calls(name, family, make, shape, works):
    inputs = make(shape, sets=2)
    lengths = inputs.seq_lens.clone() if hasattr(inputs, "seq_lens") else None
    bench = family.build(name, inputs)
    if works:
        device_cases.check_graph(bench, inputs, lambda f, i: Replays(f, i, True))
    else:
        with pytest.raises(AssertionError, match="of a replay"):
            device_cases.check_graph(bench, inputs, lambda f, i: Replays(f, i, False))
    assert lengths is None or torch.equal(inputs.seq_lens, lengths)


def test_every_benchmark_is_captured():
    assert {module.FAMILY.name for module, _, _ in device_cases.BENCHES} == set(bench.FAMILIES)
