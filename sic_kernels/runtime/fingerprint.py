"""What a saved state depends on besides its tokens: two states may be exchanged only if their fingerprints are equal."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from typing import Any

from . import config
from .arguments import instance, integer
from .errors import ArgumentError

BUCKETS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576)  # tokens


def context_bucket(tokens: int) -> int:
    """The smallest bucket that holds so many tokens: lengths in one bucket are homogeneous."""
    n = integer("context_bucket", "tokens", tokens, 0, f"0 to {BUCKETS[-1]}")
    for bucket in BUCKETS:
        if n <= bucket:
            return bucket
    raise ArgumentError.of("context_bucket", "tokens", tokens, f"0 to {BUCKETS[-1]}")


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Model, revision, dtype, quantisation, context bucket (tokens) and the digest of the settings; every field counts.

    `digest` (16 bytes) stands for all of them in cursors and keys. Equal on every machine and in every process.
    """

    model: str
    revision: str = ""
    dtype: str = "float32"
    quantisation: str = "none"
    context_bucket: int = 0
    config: str = dataclasses.field(default_factory=lambda: config.current().digest)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, expected = getattr(self, field.name), "int" if field.name == "context_bucket" else "str"
            if type(value).__name__ != expected:
                raise ArgumentError.of("Fingerprint", field.name, type(value).__name__, expected)

    @functools.cached_property
    def digest(self) -> bytes:
        text = json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def diff(self, other: Fingerprint) -> dict[str, tuple[Any, Any]]:
        """Field -> (this, other) where they differ, in the order of the fields; empty: interchangeable."""
        instance("Fingerprint.diff", "other", other, Fingerprint)
        mine, theirs = dataclasses.asdict(self), dataclasses.asdict(other)
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Fingerprint:
        """The fingerprint that `to_json` wrote; `ArgumentError` for anything else."""
        if not isinstance(text, str):
            raise ArgumentError.of("Fingerprint", "text", type(text).__name__, "what to_json wrote")
        names = {field.name for field in dataclasses.fields(cls)}
        try:
            saved = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ArgumentError.of("Fingerprint", "text", repr(text[:80]), f"what to_json wrote ({error})") from None
        if not isinstance(saved, dict) or saved.keys() != names:  # a missing field must not take this process's value
            raise ArgumentError.of("Fingerprint", "text", repr(text[:80]), f"an object with the fields {sorted(names)}")
        return cls(**saved)
