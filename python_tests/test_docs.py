"""The pages of docs/ say what the code says."""

import importlib.util
import re
from pathlib import Path

import pytest

import sic_kernels as sic
from sic_kernels.cli import COMMANDS
from sic_kernels.runtime.config import BUILD_NAMES, SETTINGS
from sic_kernels.slicing import benches

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"

spec = importlib.util.spec_from_file_location("docs_tables", ROOT / "tools" / "docs_tables.py")
docs_tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(docs_tables)


def page(name):
    return (DOCS / name).read_text()


@pytest.mark.parametrize("name", ["settings", "metrics", "targets", "predict"])
def test_generated_tables_are_up_to_date(name):
    text = page(docs_tables.PAGES[name])
    wanted = docs_tables.replaced(text, name, getattr(docs_tables, name)())
    assert text == wanted, f"run: python tools/docs_tables.py {name}"


def test_every_setting_is_named():
    names = {s.name for s in SETTINGS} | BUILD_NAMES
    assert names <= set(re.findall(r"SIC_\w+", page("configuration.md")))


def test_every_operation_and_status_is_explained():
    text = page("slicing.md")
    ops = [name for name in sic.slicing.__all__ if name.islower()]
    assert len(ops) > 10
    assert [name for name in ops if f"`{name}" not in text and f".{name}(" not in text] == []
    for code, name in enumerate(sic.slicing.STATUS):
        assert f"| {code} | `{name}` |" in text


def test_every_function_of_ragged_is_explained_and_its_example_runs():
    text = page("ragged.md")
    assert [
        name for name in sic.ragged.__all__ if name.islower() and f"`{name}" not in text and f".{name}(" not in text
    ] == []
    names = {}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], names)
    assert names["again"].shape == names["padded"].shape
    assert names["packed"].shape == (2370, 576)
    assert names["cu_seqlens"].tolist() == [0, 700, 730, 1830, 2370]


def test_every_command_is_listed():
    assert {f"python -m sic_kernels {name}" for name in COMMANDS} <= set(
        re.findall(r"python -m sic_kernels [\w-]+", page("index.md"))
    )


def test_defaults_named_in_the_text():
    policy = sic.slicing.SlicePolicy()
    text = page("slicing.md")
    assert f"the `candidates` ({policy.candidates * 100:.0f} %)" in text
    assert sic.slicing.SlicePolicy.__dataclass_fields__["pool"].default == "softmax"


def test_constants_named_in_the_text():
    from sic_kernels.slicing import reference_sketch as r

    text = page("slicing.md")
    assert f"|z| >= {r.THRESHOLD} mean|z|" in text
    assert f"[* {r.ONE_BIT_GAIN}]" in text
    assert f"in -{r.QUERY_LEVELS} .. {r.QUERY_LEVELS}" in text
    assert f"exp({round(r.UNREAD_SHRINK, 6):g} * s / {r.STEPS_PER_NAT})" in text


def test_the_picture_of_the_sketch_is_right():
    """Byte 16 of a page is token 0, channels 8 to 15; plane 1 begins at byte 256; page 40 has blocks of 16, 16 and 8."""
    from sic_kernels.slicing.reference_sketch import byte_offsets

    at = byte_offsets(16, 128, 2)
    assert (at[0, 0, 1], at[15, 0, 0], at[0, 0, 15], at[0, 1, 0], at[15, 1, 15]) == (16, 15, 240, 256, 511)
    assert (byte_offsets(40, 128, 1)[32, 0, 1] - byte_offsets(40, 128, 1)[32, 0, 0]) == 8


def test_sizes_of_the_sketch():
    text = page("slicing.md")
    for D, item in ((64, 2), (128, 2), (128, 1)):
        kv, one, two = 2 * D * item, D // 8 + 2, 2 * (D // 8) + 2
        assert f"| {kv} B | {one} B ({one / kv:.1%}) | {two} B ({two / kv:.1%}) |".replace("%", " %") in text


def test_the_speed_table_can_be_made():
    machine = {"cpu": "c", "threads": 2, "isa": "plain", "torch": "t", "sic_kernels": "s", "bandwidth": {"read": 1.0}}
    fact = {"fact": "a call", "measured": "2 us", "target": "<= 3 us", "reached": True}
    text = docs_tables.speed({"machine": machine, "rows": [fact]})
    assert "| a call | 2 us | <= 3 us | yes |" in text
    assert benches.NAMES


def test_marks_must_be_there():
    with pytest.raises(SystemExit):
        docs_tables.replaced("no marks", "speed", "x")
    assert (
        docs_tables.replaced("<!-- a: begin (x) -->\nold\n<!-- a: end -->\n", "a", "new")
        == "<!-- a: begin (x) -->\nnew\n<!-- a: end -->\n"
    )
