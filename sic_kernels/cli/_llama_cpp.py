"""llama.cpp's own coded caches, for `eval delta`: the same file and tokens, run by llama-cpp-python where it is installed.

Each is held against llama.cpp's half-precision cache, since its arithmetic is not ours. Unlike the other rows, tokens of a
forward already see each other coded: llama.cpp writes a cache before it reads it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from . import _run
from ._coders import GROUP, NotHere

Tensor = torch.Tensor

BASE = "llama.cpp f16"
# Row of the table -> type of ggml, bytes of a block of 32 channels.
TYPES = {BASE: (1, 2 * GROUP), "llama.cpp q8_0": (8, GROUP + 2), "llama.cpp q4_0": (2, GROUP // 2 + 2)}


def require(gguf: Path | None) -> Path:
    """The model's file; `NotHere` says what is missing."""
    if importlib.util.find_spec("llama_cpp") is None:
        raise NotHere("the package llama-cpp-python is not installed")
    if gguf is None:
        raise NotHere("the model is not a .gguf file")
    return gguf


class Run:
    """One cache type over the tokens `ids [N]`, the last `scored` of them in chunks as the other rows have them."""

    def __init__(self, gguf: Path, ids: Tensor, cache_type: int) -> None:
        from llama_cpp import Llama

        self.ids = ids
        self.llama = Llama(
            str(gguf), n_ctx=len(ids), n_batch=_run.PREFILL_CHUNK, logits_all=True, type_k=cache_type, type_v=cache_type,
            flash_attn=True, n_threads=torch.get_num_threads(), n_threads_batch=torch.get_num_threads(), verbose=False,
        )  # fmt: skip

    def prefill(self, tokens: int) -> None:
        self.llama.eval(self.ids[:tokens].tolist())

    def step(self, begin: int, end: int) -> Tensor:
        """Log-probabilities `[n,V]` after each of the tokens [begin, end)."""
        self.llama.eval(self.ids[begin:end].tolist())
        return torch.log_softmax(torch.from_numpy(self.llama.scores[begin:end].copy()), dim=-1)

    def close(self) -> None:
        self.llama.close()


def log_probabilities(run: Run, scored: int, chunk: int, advance: Any) -> list[Tensor]:
    """Of each chunk of the scored tokens."""
    total = len(run.ids)
    run.prefill(total - scored)
    parts = []
    for begin in range(total - scored, total, chunk):
        end = min(begin + chunk, total)
        parts.append(run.step(begin, end))
        advance(end - begin)
    return parts


def size(label: str) -> float:
    """Bytes over those of a half-precision cache."""
    return TYPES[label][1] / TYPES[BASE][1]
