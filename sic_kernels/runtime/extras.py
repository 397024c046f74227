"""Packages that only some parts need."""

from __future__ import annotations

import importlib
from typing import Any

from .errors import SicError


def extra(module: str, purpose: str, name: str) -> Any:
    """The module; a `SicError` with the remedy where it is missing. purpose: what needs it, in the plural; name: the extra."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        root = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != root:  # it is there, and something that it needs is not
            raise
        package = root.replace("_", "-")
        raise SicError(f"{purpose} need the package {package}: pip install 'sic_kernels[{name}]'") from None
