"""The gate on machine code: what it reads in a listing, what it refuses, and on real code a kernel that must not pass."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import sass_gate  # noqa: E402
import sass_rules  # noqa: E402
from sass_gate import Kernel  # noqa: E402
from sass_rules import Rule  # noqa: E402

LISTING = """
	.section	.text._Zone,"ax",@progbits
_Zone:
.text._Zone:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0020*/                   LDG.E.NA.128 R8, desc[UR4][R2.64] ;
        /*0030*/                   LDG.E.64 R8, desc[UR4][R2.64] ;
        /*0040*/                   LDGSTS.E.BYPASS.LTC128B.128 [R4], desc[UR4][R2.64] ;
        /*0050*/                   LDGSTS.E.LTC128B [R4], desc[UR4][R2.64] ;
        /*0060*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
.text._Ztwo:
        /*0000*/                   STL.64 [R1], R2 ;
        /*0010*/                   LDL R2, [R1] ;
        /*0020*/                   LDSM.16.M88.4 R4, [R2] ;
"""


def test_what_is_counted():
    ops = sass_gate.count_ops(LISTING)
    assert ops == {
        "_Zone": {"LDG.128": 2, "LDG": 1, "LDGSTS.128": 1, "LDGSTS": 1, "HMMA": 1},
        "_Ztwo": {"STL": 1, "LDL": 1},
    }


@pytest.mark.parametrize(
    "name, expected",
    [
        ("void sic::gpu::(anonymous namespace)::scan<128, (sic::gpu::(anonymous namespace)::Columns)2, true>(sic::gpu::P)",
         "scan<128, (Columns)2, true>"),
        ("sic::gpu::(anonymous namespace)::select_keep(sic::gpu::SelectTask, int)", "select_keep"),
        ("void sic::gpu::merge<sic::bf16_t, sic::gpu::(anonymous namespace)::Two>(sic::gpu::P<(int)3>)", "merge<bf16_t, Two>"),
    ],
)  # fmt: skip
def test_short_names(name, expected):
    assert sass_gate.short(name) == expected


@pytest.fixture
def rules(monkeypatch):
    monkeypatch.setattr(sass_gate, "RULES", (Rule("wide<.*>", 64, ("LDG.128", "HMMA")), Rule("plain", 32)))


def kernel(name="plain", registers=32, stack=0, local=0, **ops):
    return Kernel(name, "sm_90a", registers, stack, local, 0, {op.replace("_", "."): n for op, n in ops.items()})


def test_violations(rules):
    assert sass_gate.violations(kernel()) == []
    assert sass_gate.violations(kernel("wide<1>", 64, LDG_128=1, HMMA=4)) == []
    assert sass_gate.violations(kernel("wide<1>", 65, LDG=1, HMMA=4)) == ["65 registers, at most 64", "no LDG.128"]
    assert sass_gate.violations(kernel(stack=8, local=16, STL=2)) == [
        "8 bytes of stack",
        "16 bytes of local memory",
        "2 STL",
    ]
    assert sass_gate.violations(kernel("new")) == ["no rule in tools/sass_rules.py"]
    assert sass_gate.unused_rules([kernel()]) == ["rule 'wide<.*>' matches no kernel"]


def test_rows_join_variants(rules):
    (row,) = sass_gate.rows([kernel("wide<1>", 40, LDG_128=2), kernel("wide<2>", 60, LDG_128=5, HMMA=1, LDL=1)])
    assert row["variants"] == 2
    assert row["registers"] == [40, 60]
    assert row["ceiling"] == 64
    assert row["spills"] == 1
    assert row["ops"] == {"HMMA": [0, 1], "LDG.128": [2, 5], "LDL": [0, 1]}


def test_every_rule_can_be_read():
    assert len({rule.pattern for rule in sass_rules.RULES}) == len(sass_rules.RULES)
    for rule in sass_rules.RULES:
        assert 0 < rule.registers <= 255
        assert set(rule.needs) <= {"LDG.128", "LDGSTS.128", "STG.128", "HMMA", "IMMA"}


# --- the command --------------------------------------------------------------------------------------------------------

CODE = """
__global__ void copy(const uint4* from, uint4* to) { to[threadIdx.x] = from[threadIdx.x]; }
__global__ void local(const int* from, int* to) {
  int kept[64] = {};
  for (int i = 0; i < 999; ++i) kept[from[i] & 63] += i;
  for (int i = 0; i < 64; ++i) to[i] = kept[i];
}
"""


def have(*tools):
    def found(name):
        try:
            return bool(sass_gate.tool(name))
        except sass_gate.GateError:
            return False

    return all(shutil.which(t) if t in ("nvcc", "c++filt") else found(t) for t in tools)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    if not have("nvcc", "c++filt", "cuobjdump", "nvdisasm"):
        pytest.skip("needs nvcc, and cuobjdump and nvdisasm: pip install 'sic_kernels[sass]'")
    folder = tmp_path_factory.mktemp("sass")
    (folder / "code.cu").write_text(CODE)
    archs = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ("80", "90a")]
    subprocess.run(["nvcc", *archs, "-c", "code.cu", "-o", "code.o"], cwd=folder, check=True)
    return folder / "code.o"


def test_real_code(compiled, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sass_gate, "RULES", (Rule("copy", 32, ("LDG.128", "STG.128")), Rule("local", 255)))
    table = tmp_path / "sass.json"
    assert sass_gate.main([str(compiled), "--json", str(table), "--jobs", "2"]) == 1
    said = capsys.readouterr().out
    for arch in ("sm_80", "sm_90a"):
        assert f"local [{arch}]: 256 bytes of stack" in said
        assert f"copy [{arch}]" not in said
    assert "sass gate: 4 kernels (sm_80, sm_90a)" in said
    rows = {row["kernel"]: row for row in json.loads(table.read_text())["kernels"]}
    assert rows["copy"]["ops"]["LDG.128"] == [1, 1]
    assert rows["local"]["spills"] > 0


def test_without_nvcc_there_is_a_reason(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    assert sass_gate.main([]) == 0
    assert "skipped: nvcc was not found" in capsys.readouterr().out


def test_a_file_without_kernels_is_no_pass(monkeypatch):
    monkeypatch.setattr(sass_gate, "read", lambda files, jobs: [])
    assert sass_gate.main(["an.o"]) == 1


def test_every_source_is_compiled(monkeypatch, tmp_path):
    """The objects that the build names, for the architectures asked for."""
    said = []

    def run(*command):
        said.append(" ".join(map(str, command)))
        return "csrc/a_cuda.cu.o: CUDA_COMPILER\ncsrc/b.cc.o: CXX_COMPILER\nall: phony\n" if "-t" in command else ""

    monkeypatch.setattr(sass_gate, "run", run)
    monkeypatch.setattr(sass_gate, "beside", lambda name: name)
    assert sass_gate.compile_kernels("90a", 2) == [sass_gate.BUILD / "csrc/a_cuda.cu.o"]
    assert "-DSIC_CUDA=ON" in said[0]
    assert "-DSIC_CUDA_ARCHS=90a" in said[0]
    assert said[2].endswith("-j 2 csrc/a_cuda.cu.o")


def test_missing_disassemblers_name_the_extra(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sass_gate.os, "access", lambda path, mode: False)
    file = tmp_path / "x.o"
    file.write_bytes(b"")
    assert sass_gate.main([str(file)]) == 2
    assert "cuobjdump was not found: pip install 'sic_kernels[sass]'" in capsys.readouterr().err


# --- its table ----------------------------------------------------------------------------------------------------------

spec = importlib.util.spec_from_file_location("docs_tables", ROOT / "tools" / "docs_tables.py")
docs_tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(docs_tables)


def test_the_table_of_the_docs(rules):
    rows = sass_gate.rows(
        [kernel("wide<1>", 40, LDG_128=2, HMMA=8), kernel("wide<2>", 60, LDG_128=5, HMMA=8), kernel()]
    )
    text = docs_tables.gpu({"kernels": json.loads(json.dumps(rows))})
    assert "| `wide` | 2 | 40 to 60 of 64 | 0 | LDG.128 2 to 5, HMMA 8 |" in text
    assert "| `plain` | 1 | 32 of 32 | 0 |  |" in text
    assert "sm_90a" in text


def test_every_kernel_of_the_sources_has_a_rule():
    """So that a new kernel is known to need one where there is no nvcc."""
    sources = (file.read_text() for file in (ROOT / "csrc").rglob("*_cuda.cu*") if "simt" not in file.parts)
    kernels = {
        name for text in sources for name in re.findall(r"__global__ void __launch_bounds__\([^{;]*?\)\s+(\w+)\(", text)
    }
    assert {"merge_kernel", "lm_head_mma", "pack_rows_kernel", "termination_kernel"} <= kernels
    heads = [re.sub(r"<[^>]*>", "", rule.pattern) for rule in sass_rules.RULES]  # without template arguments
    assert [name for name in sorted(kernels) if not any(re.fullmatch(head, name) for head in heads)] == []
