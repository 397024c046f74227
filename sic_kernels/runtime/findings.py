"""What a look at the machine yields: a value, where it was read, and whether it passes."""

from __future__ import annotations

import dataclasses
from typing import Any

PASS, FAIL, UNKNOWN = "pass", "fail", "unknown"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing looked at. `value` is None when it could not be read; of GPUs it is a list, one entry for each."""

    name: str  # "gpu", "nvlink", "ecc", "pcie", "throttle", "remapped_rows", "cpu_isa", "threads", "memory"
    status: str  # pass | fail | unknown
    value: Any
    source: str  # library call, command or file
    detail: str = ""  # why it fails or is unknown, and what to do

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Hardware:
    """All findings of this machine."""

    findings: tuple[Finding, ...]

    def __getitem__(self, name: str) -> Finding:
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(name)

    def as_dict(self) -> dict[str, Any]:
        return {f.name: {k: v for k, v in f.as_dict().items() if k != "name"} for f in self.findings}
