"""Stands in for hypothesis where it is not installed: modules that use it import, and their fuzz tests are skipped."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

REASON = "hypothesis is not installed: pip install 'sic_kernels[test]'"


class Strategy:
    """Any strategy, and whatever is called on one or decorated with one."""

    def __getattr__(self, name: str) -> Strategy:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Strategy:
        return self


def given(**drawn: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The test without the arguments that would be drawn: pytest fills in the others, and skips it."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def skipped(**kwargs: Any) -> None:
            pytest.skip(REASON)

        skipped.__name__, skipped.__doc__ = test.__name__, test.__doc__
        kept = [p for name, p in inspect.signature(test).parameters.items() if name not in drawn]
        skipped.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
        return skipped

    return decorate


def unchanged(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    """`settings`, `example`: nothing to do for a test that does not run."""
    return lambda test: test


def any_strategy(name: str) -> Strategy:
    if name.startswith("__"):  # of modules: pytest looks for __file__ and the like
        raise AttributeError(name)
    return Strategy()


def install() -> None:
    module, strategies = types.ModuleType("hypothesis"), types.ModuleType("hypothesis.strategies")
    for name, value in {"given": given, "settings": unchanged, "example": unchanged, "strategies": strategies}.items():
        setattr(module, name, value)
    strategies.__getattr__ = any_strategy  # type: ignore[method-assign]
    sys.modules |= {"hypothesis": module, "hypothesis.strategies": strategies}
