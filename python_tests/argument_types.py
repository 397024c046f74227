"""Calls with a value of a wrong type in place of one argument after the other: each is an `ArgumentError` that names the
argument, or one of the values that the argument may well have; and what was refused has touched nothing."""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from sic_kernels import ArgumentError
from sic_kernels.testing import assert_same_bits

WRONG = {"none": None, "text": "x", "real": 1.5, "list": [], "object": object()}


@dataclasses.dataclass(frozen=True)
class Call:
    """A call that is right, by keywords. may: argument -> names of values of `WRONG` that it may have. watch: tensors, numbers
    and text that a refused call must leave alone."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    may: Mapping[str, str] = dataclasses.field(default_factory=dict)
    watch: Callable[[], tuple] = tuple

    def changed(self, argument: str, value: Any) -> None:
        self.function(**{**self.arguments, argument: value})


def call(function: Callable[..., Any], may: Mapping[str, str] | None = None, watch=tuple, **arguments: Any) -> Call:
    return Call(function, arguments, may or {}, watch)


def entered(manager: Callable[..., Any]) -> Callable[..., None]:
    """The call of a context manager: what it is for happens when it is entered."""

    @functools.wraps(manager)
    def enter(**arguments: Any) -> None:
        with manager(**arguments):
            pass

    return enter


def triples(cases: Mapping[str, tuple[Callable[[], Call], str]]) -> list[Any]:
    """(maker of a call, argument, name of a wrong value) of all calls; names of arguments stand in a text with spaces."""
    return [
        pytest.param(make, argument, wrong, id=f"{name}-{argument}-{wrong}")
        for name, (make, arguments) in cases.items() for argument in arguments.split() for wrong in WRONG
    ]  # fmt: skip


def check(make: Callable[[], Call], argument: str, wrong: str) -> None:
    made = make()
    assert argument in made.arguments
    before = [x.clone() if isinstance(x, torch.Tensor) else x for x in made.watch()]
    if wrong in made.may.get(argument, "").split():
        made.changed(argument, WRONG[wrong])
        return
    with pytest.raises(ArgumentError) as error:
        made.changed(argument, WRONG[wrong])
    assert re.search(rf"(^|: ){argument}\b.*: got .+, expected .+", str(error.value), re.S)
    for x, y in zip(made.watch(), before, strict=True):
        if isinstance(x, torch.Tensor):
            assert_same_bits(x, y, "what a refused call must not touch")
        else:
            assert x == y


def untried(cases: Mapping[str, tuple[Callable[[], Call], str]]) -> dict[str, set[str]]:
    """Function -> what can be given to it, and that no case has. "f by a" is another case of f."""
    left: dict[str, set[str]] = {}
    for name, (make, arguments) in cases.items():
        function = name.partition(" ")[0]
        left.setdefault(function, _parameters(make().function)).difference_update(arguments.split())
    return {name: names for name, names in left.items() if names}


def _parameters(function: Callable[..., Any]) -> set[str]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = inspect.signature(function).parameters.values()
    return {p.name for p in found if p.kind not in kinds and not p.name.startswith("_")}
