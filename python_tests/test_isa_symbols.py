"""Code compiled for an instruction set stays in that set's namespace.

A function that several instruction sets share would be merged by the linker: one copy, perhaps the AVX-512 one, would then
run on processors without it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import sic_kernels

LIBRARY = sorted(Path(sic_kernels.__file__).parent.glob("_native/**/libsic.a"))


def objects() -> dict[str, list[tuple[str, str]]]:
    """Object -> (kind, name) of what it defines; the objects of one source are numbered."""
    listing = subprocess.run(
        ["nm", "-C", "--defined-only", str(LIBRARY[0])], capture_output=True, text=True, check=True
    )
    found: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for line in listing.stdout.splitlines():
        if line.endswith(".o:"):
            current = found.setdefault(f"{line[:-1]}#{len(found)}", [])
        elif match := re.match(r"[0-9a-f]+ (\w) (.*)", line):
            current.append((match[1], match[2]))
    return found


@pytest.mark.skipif(not LIBRARY, reason="this installation carries no static library")
@pytest.mark.skipif(shutil.which("nm") is None, reason="nm (binutils) is not installed")
def test_no_shared_symbol_comes_from_an_instruction_set():
    checked = 0
    for name, symbols in objects().items():
        own = {m[1] for _, s in symbols if (m := re.match(r"sic::cpu::(\w+)::", s))}
        if not own:
            continue
        checked += 1
        assert len(own) == 1, f"{name} holds {own}"
        # W: functions that the linker merges with equal names of other objects.
        shared = [s for kind, s in symbols if kind == "W" and f"sic::cpu::{next(iter(own))}" not in s]
        assert not shared, f"{name} ({own}): {shared[:5]}"
    assert checked >= 20
