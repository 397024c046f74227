"""`python -m sic_kernels inspect FILE`: what a blob or a file of templates holds, and whether it is sound."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..models.language_model import require
from ..runtime.errors import ArgumentError
from ..runtime.extras import extra


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="a blob, or templates in a safetensors file")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    require("rich", "the table")
    found = inspect(args.file)
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        _print(args.file, found)
    return 0


def inspect(path: Path) -> dict[str, Any]:
    """The contents of a file; what is stored in it is held against its checksums."""
    from ..delta import blob

    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArgumentError.of("inspect", "file", f"{path} ({error.strerror})", "a readable file") from None
    if data.startswith(blob.MAGIC) or path.suffix != ".safetensors":
        return {"kind": "blob", **blob.inspect_blob(data)}
    return {"kind": "templates", **_templates(path)}


def _templates(path: Path) -> dict[str, Any]:
    from ..delta import model_templates, templates

    safetensors = extra("safetensors", "files of templates", "blobs")

    try:
        with safetensors.safe_open(str(path), "pt") as file:
            shapes = {name: list(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
            about = file.metadata() or {}
    except (safetensors.SafetensorError, OSError) as error:
        raise ArgumentError.of("inspect", "file", f"{path} ({error})", "a safetensors file") from None
    kinds: dict[str, Callable[[Path], Any]] = {
        templates.KIND: templates.Templates.load, model_templates.KIND: model_templates.ModelTemplates.load,
    }  # fmt: skip
    load = kinds.get(about.get("kind", ""))
    if load is None:
        raise ArgumentError.of("inspect", "file", f"{path} of kind {about.get('kind')!r}", "|".join(kinds))
    load(path)  # whole, and as its digest says
    return {"bytes": path.stat().st_size, "meta": about, "tensors": shapes}


def _print(path: Path, found: dict[str, Any]) -> None:
    from rich.table import Table

    from ._run import wide_console

    console = wide_console()
    table = Table(title=f"{path.name}: {found['kind']}, {found['bytes']:,} bytes", show_header=False)
    for name, value in {**{k: found[k] for k in ("version", "codec") if found.get(k)}, **found["meta"]}.items():
        table.add_row(str(name), value if isinstance(value, str) else json.dumps(value))
    console.print(table)
    rows = Table()
    if found["kind"] == "blob":
        for name in ("section", "encoding", "stored", "bytes"):
            rows.add_column(name, justify="left" if name in ("section", "encoding") else "right")
        for s in found["sections"]:
            rows.add_row(s["kind"], s["encoding"], f"{s['stored']:,}", f"{s['bytes']:,}")
    else:
        rows.add_column("tensor")
        rows.add_column("shape")
        for name, shape in found["tensors"].items():
            rows.add_row(name, str(shape))
    console.print(rows)
