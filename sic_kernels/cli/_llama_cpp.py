"""llama.cpp itself, run by llama-cpp-python where it is installed, on the same file and tokens.

* Its own coded caches, for `eval delta`. Each is held against llama.cpp's half-precision cache, since its arithmetic is not
  ours. Unlike the other rows, tokens of a forward already see each other coded: llama.cpp writes a cache before it reads it.
* Its files of a state, beside a prefill that is killed and goes on (`_kill`).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..runtime.errors import SicError
from . import _run
from ._coders import GROUP, NotHere

Tensor = torch.Tensor

BASE = "llama.cpp f16"
# Row of the table -> type of ggml, bytes of a block of 32 channels.
TYPES = {BASE: (1, 2 * GROUP), "llama.cpp q8_0": (8, GROUP + 2), "llama.cpp q4_0": (2, GROUP // 2 + 2)}
# Form of a saved state -> type of ggml of its keys and values.
STATES = {BASE: 1, "llama.cpp f32": 0}


def require(gguf: Path | None) -> Path:
    """The model's file; `NotHere` says what is missing."""
    if importlib.util.find_spec("llama_cpp") is None:
        raise NotHere("the package llama-cpp-python is not installed")
    if gguf is None:
        raise NotHere("the model is not a .gguf file")
    return gguf


def opened(gguf: Path, capacity: int, chunk: int, cache_type: int, logits_all: bool) -> Any:
    """A `llama_cpp.Llama` with room for `capacity` tokens. logits_all: keep those of every token."""
    from llama_cpp import Llama

    return Llama(
        str(gguf), n_ctx=capacity, n_batch=chunk, logits_all=logits_all, type_k=cache_type, type_v=cache_type,
        flash_attn=True, n_threads=torch.get_num_threads(), n_threads_batch=torch.get_num_threads(), verbose=False,
    )  # fmt: skip


class Run:
    """One cache type over the tokens `ids [N]`, the last `scored` of them in chunks as the other rows have them."""

    def __init__(self, gguf: Path, ids: Tensor, cache_type: int) -> None:
        self.ids = ids
        self.llama = opened(gguf, len(ids), _run.PREFILL_CHUNK, cache_type, logits_all=True)

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


class StateFile(NamedTuple):
    """Seconds to make a context of a loaded model, to load a state into it, and to save one; bytes of the file."""

    opening: float
    loading: float
    saving: float
    nbytes: int


def state_file(gguf: Path, ids: list[int], capacity: int, chunk: int, form: str, file: Path, loads: int) -> StateFile:
    """llama.cpp's own file of its state after all of `ids` but the last, saved and loaded.

    form: of `STATES`. The median of `loads` counts, each into a new context. `SicError` where the last of `ids` is then
    followed by another token than without saving and loading.
    """
    with contextlib.closing(opened(gguf, capacity, chunk, STATES[form], logits_all=False)) as llama:
        llama.eval(ids[:-1])
        begin = time.perf_counter()
        _save_state(llama, file)
        saving = time.perf_counter() - begin
        wanted = _next_token(llama.ctx, ids[-1], llama.n_vocab())
        times = []
        for _ in range(loads):
            begin = time.perf_counter()
            with _context(llama) as ctx:
                middle = time.perf_counter()
                _load_state(ctx, file, capacity)
                times.append((middle - begin, time.perf_counter() - middle))
                if (found := _next_token(ctx, ids[-1], llama.n_vocab())) != wanted:
                    raise SicError(f"{form}: a loaded state goes on with token {found}, expected {wanted}")
    return StateFile(*sorted(times, key=sum)[loads // 2], saving, file.stat().st_size)


@contextlib.contextmanager
def _context(llama: Any) -> Iterator[Any]:
    """A new context of a model that is loaded, as it has one itself."""
    import llama_cpp as c

    ctx = c.llama_init_from_model(llama.model, llama.context_params)
    if not ctx:
        raise SicError("llama.cpp could not make a context")
    try:
        yield ctx
    finally:
        c.llama_free(ctx)


def _save_state(llama: Any, file: Path) -> None:
    import llama_cpp as c

    count = llama.n_tokens
    tokens = (c.llama_token * count)(*llama.input_ids[:count].tolist())
    if not c.llama_state_save_file(llama.ctx, os.fsencode(file), tokens, count):
        raise SicError(f"llama.cpp could not save its state as {file}")


def _load_state(ctx: Any, file: Path, capacity: int) -> None:
    import llama_cpp as c

    tokens, count = (c.llama_token * capacity)(), ctypes.c_size_t()
    if not c.llama_state_load_file(ctx, os.fsencode(file), tokens, capacity, ctypes.byref(count)):
        raise SicError(f"llama.cpp could not load its state from {file}")


def _next_token(ctx: Any, token: int, vocabulary: int) -> int:
    """The likeliest after this one, which goes behind those that the context has."""
    import llama_cpp as c

    if c.llama_decode(ctx, c.llama_batch_get_one((c.llama_token * 1)(token), 1)):
        raise SicError("llama.cpp could not run a token after its state")
    logits = c.llama_get_logits_ith(ctx, -1)
    return max(range(vocabulary), key=logits.__getitem__)
