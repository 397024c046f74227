"""sic_kernels: kernels that take redundant state and redundant work out of model serving.

    import sic_kernels as sic

Nothing heavy is imported until it is used: this file needs only the standard library, so that
`python -m sic_kernels doctor` can explain an incomplete installation.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:  # what the table below resolves to, for type checkers and editors
    import sic_kernels.delta
    import sic_kernels.head
    import sic_kernels.integrations
    import sic_kernels.ragged
    import sic_kernels.references
    import sic_kernels.replay
    import sic_kernels.slicing

    from .runtime import metrics as metrics
    from .runtime import rollout as rollout
    from .runtime.backends import backends as backends
    from .runtime.config import Config
    from .runtime.determinism import verify_determinism as verify_determinism
    from .runtime.errors import ArgumentError as ArgumentError
    from .runtime.errors import BackendError as BackendError
    from .runtime.errors import ConfigError as ConfigError
    from .runtime.errors import SicError as SicError
    from .runtime.probe import gate as gate
    from .runtime.probe import probe_hardware as probe_hardware
    from .runtime.trace import trace as trace

    config: Config

# public name -> (module, attribute; "" is the module itself)
_PUBLIC = {
    "slicing": (".slicing", ""),
    "delta": (".delta", ""),
    "head": (".head", ""),
    "ragged": (".ragged", ""),
    "references": (".references", ""),
    "replay": (".replay", ""),
    "integrations": (".integrations", ""),
    "backends": (".runtime.backends", "backends"),
    "metrics": (".runtime.metrics", ""),
    "rollout": (".runtime.rollout", ""),
    "trace": (".runtime.trace", "trace"),
    "probe_hardware": (".runtime.probe", "probe_hardware"),
    "gate": (".runtime.probe", "gate"),
    "verify_determinism": (".runtime.determinism", "verify_determinism"),
    "SicError": (".runtime.errors", "SicError"),
    "ArgumentError": (".runtime.errors", "ArgumentError"),
    "BackendError": (".runtime.errors", "BackendError"),
    "ConfigError": (".runtime.errors", "ConfigError"),
}

__all__ = [
    "ArgumentError",
    "BackendError",
    "ConfigError",
    "SicError",
    "__version__",
    "backends",
    "config",
    "delta",
    "gate",
    "head",
    "integrations",
    "metrics",
    "probe_hardware",
    "ragged",
    "references",
    "replay",
    "rollout",
    "slicing",
    "trace",
    "verify_determinism",
]


def __getattr__(name: str) -> Any:
    if name == "config":  # read at first use, not at import; not kept here, so there is one owner
        return importlib.import_module(".runtime.config", __name__).current()
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _PUBLIC[name]
    value = importlib.import_module(module, __name__)
    if attribute:
        value = getattr(value, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
