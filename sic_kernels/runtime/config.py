"""Settings from `SIC_*` environment variables: read once, validated, immutable.

The environment is read at the first use (`current()`, `sic.config`), never at import. From then on
the values cannot change: `Config` is frozen, and `verify()` raises when the environment no longer
says what was read. An unknown `SIC_` name is an error that suggests the nearest known one, because
a misspelt setting that is silently ignored is a setting that the user believes to be in force.

Only the standard library is imported.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from .errors import ConfigError

PREFIX = "SIC_"


@dataclasses.dataclass(frozen=True)
class Setting:
    """One environment variable: how it is called, read and described."""

    name: str  # environment variable
    field: str  # attribute of Config
    default: Any
    parse: Callable[[str], Any]  # raises ValueError
    expected: str  # completes "expected ..." in the error
    about: str
    affects_results: bool = True  # part of Config.digest


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        value = text.strip().lower()
        if value not in allowed:
            raise ValueError(text)
        return value

    return parse


def _integer(low: int, high: int, auto: bool = False) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if auto and text.strip().lower() == "auto":
            return 0
        value = int(text)
        if not low <= value <= high:
            raise ValueError(text)
        return value

    return parse


def _flag(text: str) -> bool:
    return _choice("0", "1")(text) == "1"


def _ratio(text: str) -> float:
    value = float(text)
    if not 0.0 < value <= 1.0:  # also refuses NaN
        raise ValueError(text)
    return value


BACKENDS = ("auto", "cpu", "cuda", "triton", "simt", "ref")
CPU_ISAS = ("auto", "avx512", "avx2", "neon", "plain")
LOG_LEVELS = ("debug", "info", "warning", "error")

SETTINGS: tuple[Setting, ...] = (
    Setting("SIC_BACKEND", "backend", "auto", _choice(*BACKENDS), "|".join(BACKENDS),
            "backend of every operation, unless the call says backend="),
    Setting("SIC_CPU_ISA", "cpu_isa", "auto", _choice(*CPU_ISAS), "|".join(CPU_ISAS),
            "instruction set of the CPU backend; auto is the best that the machine has"),
    Setting("SIC_NUM_THREADS", "num_threads", 0, _integer(1, 256, auto=True), "auto or an integer from 1 to 256",
            "threads of the CPU backend; 0 (auto) follows torch.get_num_threads()", affects_results=False),
    Setting("SIC_STRICT", "strict", False, _flag, "0 or 1",
            "a fallback or a failed hardware gate raises instead of being logged and counted"),
    Setting("SIC_CHECK", "check", False, _flag, "0 or 1",
            "on CUDA, lengths, page ids and lists are read back and checked too (waits for the device); memory pools on the CPU "
            "poison freed blocks", affects_results=False),
    Setting("SIC_LOG", "log_level", "warning", _choice(*LOG_LEVELS), "|".join(LOG_LEVELS),
            "log level; setting it also sends the log to stderr", affects_results=False),
    Setting("SIC_SLICE_RATIO", "slice_ratio", 0.12, _ratio, "a number in (0, 1]",
            "share of the KV cache that sliced attention reads by default"),
    Setting("SIC_HASH_DEPTH", "hash_depth", 3, _integer(1, 3), "an integer from 1 to 3",
            "nesting depth that references resolve by default"),
    Setting("SIC_CURSOR_TIMEOUT_MS", "cursor_timeout_ms", 8500, _integer(1, 86_400_000),
            "milliseconds, an integer from 1 to 86400000", "age after which an execution cursor has expired"),
)  # fmt: skip

# Read by setup.py and the tests, not by the library: known here so that they are not called unknown.
BUILD_NAMES = frozenset({"SIC_BUILD_DIR", "SIC_CMAKE_ARGS", "SIC_REQUIRE"})

_BY_NAME = {setting.name: setting for setting in SETTINGS}


@dataclasses.dataclass(frozen=True)
class Config:
    """The settings of this process. Fields and environment variables: `SETTINGS`.

    `Config()` has the defaults; `load` reads an environment; `current` is the process's own.
    """

    backend: str = "auto"
    cpu_isa: str = "auto"
    num_threads: int = 0
    strict: bool = False
    check: bool = False
    log_level: str = "warning"
    slice_ratio: float = 0.12
    hash_depth: int = 3
    cursor_timeout_ms: int = 8500
    given: tuple[tuple[str, str], ...] = ()  # the SIC_ variables as they were read, sorted

    @property
    def digest(self) -> str:
        """16 hex digits over the settings that can change a result: part of every fingerprint.

        Thread count and log level cannot (results are bitwise independent of them).
        """
        values = {s.field: getattr(self, s.field) for s in SETTINGS if s.affects_results}
        text = json.dumps(values, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def is_given(self, field: str) -> bool:
        """Whether the environment set the field (False: it has its default)."""
        name = next((s.name for s in SETTINGS if s.field == field), None)
        return any(given == name for given, _ in self.given)

    def as_dict(self) -> dict[str, Any]:
        """Field -> value, in the order of `SETTINGS`."""
        return {s.field: getattr(self, s.field) for s in SETTINGS}

    def verify(self, environ: Mapping[str, str] | None = None) -> None:
        """Raise `ConfigError` if a variable was set, changed or removed since it was read."""
        live = dict(_sic_variables(os.environ if environ is None else environ))
        saved = dict(self.given)
        for name in sorted(saved.keys() | live.keys()):
            if saved.get(name) != live.get(name):
                raise ConfigError(
                    f"{name}: changed to {_shown(live, name)} after it was read as {_shown(saved, name)}; "
                    "settings are frozen at first use, so restart the process to change them"
                )


def _shown(variables: Mapping[str, str], name: str) -> str:
    return repr(variables[name]) if name in variables else "unset"


def _sic_variables(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    return sorted((k, v) for k, v in environ.items() if k.startswith(PREFIX) and k not in BUILD_NAMES)


def _unknown(name: str) -> ConfigError:
    near = difflib.get_close_matches(name, _BY_NAME, n=1, cutoff=0.0)
    return ConfigError(f"{name}: unknown setting; did you mean {near[0]}? Known: {', '.join(_BY_NAME)}")


def load(environ: Mapping[str, str]) -> Config:
    """Read and validate all `SIC_*` variables of `environ`; raises `ConfigError`."""
    given = _sic_variables(environ)
    values: dict[str, Any] = {}
    for name, text in given:
        setting = _BY_NAME.get(name)
        if setting is None:
            raise _unknown(name)
        try:
            values[setting.field] = setting.parse(text)
        except ValueError:
            raise ConfigError(f"{name}: got {text!r}, expected {setting.expected}") from None
    return Config(**values, given=tuple(given))


_lock = threading.Lock()
_current: Config | None = None


def current() -> Config:
    """The frozen settings of this process; the first call reads the environment."""
    global _current
    if _current is None:
        with _lock:
            if _current is None:
                _current = load(os.environ)
    return _current


def verify() -> None:
    """`current().verify()`: has the environment changed since it was read?"""
    current().verify()
