"""Logging: the standard `logging` module under the name ``sic_kernels``, shapes formatted only when shown.

A library must not print: without SIC_LOG nothing is configured and the application decides. With SIC_LOG the
records of that level and above also go to stderr.

    log = get_logger("slicing")
    log.debug("attend layer=%s %s", layer, shapes(q=q, k_cache=k_cache))
"""

from __future__ import annotations

import logging
from typing import Any

from . import config

ROOT = "sic_kernels"
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_root = logging.getLogger(ROOT)
_root.addHandler(logging.NullHandler())
_configured = False


def get_logger(name: str = "") -> logging.Logger:
    """The logger ``sic_kernels.<name>``. The first call applies SIC_LOG; raises `ConfigError` if it is malformed."""
    _configure_once()
    return _root.getChild(name) if name else _root


def _configure_once() -> None:
    global _configured
    if _configured:
        return
    settings = config.current()
    _configured = True
    if not settings.is_given("log_level"):
        return
    _root.setLevel(settings.log_level.upper())
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(FORMAT))
    _root.addHandler(handler)


class shapes:
    """Names, dtypes, shapes and devices of tensors, formatted only if the record is shown.

    ``str(shapes(q=q, out=None))`` is ``q=bfloat16[1,1,32,128]@cpu out=None``. Values are never read.
    """

    __slots__ = ("_tensors",)

    def __init__(self, **tensors: Any) -> None:
        self._tensors = tensors

    def __str__(self) -> str:
        return " ".join(f"{name}={describe(value)}" for name, value in self._tensors.items())


def describe(value: Any) -> str:
    """``float32[2,3]@cpu`` for anything with a dtype and a shape (torch, NumPy, CuPy, JAX), else its repr, cut."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        text = repr(value)
        return text if len(text) <= 40 else text[:37] + "..."
    kind = str(dtype).removeprefix("torch.")
    device = getattr(value, "device", None)
    where = "" if device is None or callable(device) else f"@{device}"
    return f"{kind}[{','.join(str(n) for n in shape)}]{where}"
