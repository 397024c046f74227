"""llama.cpp's saved state beside a killed prefill, with a stand-in for llama-cpp-python."""

import ctypes
import functools
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from sic_kernels.cli import _kill, _llama_cpp
from sic_kernels.cli._coders import NotHere
from sic_kernels.cli._replay_process import Job
from sic_kernels.runtime.errors import SicError

IDS, VOCABULARY, CAPACITY = [3, 1, 4, 1, 5], 50, 8


class Context:
    """The next token is the sum of all that it has seen."""

    def __init__(self, seen=()):
        self.seen, self.freed = list(seen), False


class Llama:
    def __init__(self, path, n_ctx, n_batch, type_k, type_v, logits_all, **options):
        assert (Path(path).name, logits_all, type_v) == ("model.gguf", False, type_k)
        self.ctx, self.model, self.context_params = Context(), "model", "parameters"
        self.n_tokens, self.input_ids = 0, np.zeros(n_ctx, np.intc)

    def eval(self, tokens):
        self.ctx.seen += tokens
        self.n_tokens = len(tokens)
        self.input_ids[: self.n_tokens] = tokens

    def n_vocab(self):
        return VOCABULARY

    def close(self):
        pass


def init(contexts, model, parameters):
    assert (model, parameters) == ("model", "parameters")
    contexts.append(Context())
    return contexts[-1]


def save_file(ctx, path, tokens, count):
    assert list(tokens[:count]) == ctx.seen
    Path(os.fsdecode(path)).write_bytes(bytes(ctx.seen))
    return True


def load_file(ctx, path, tokens, capacity, count):
    assert capacity == CAPACITY
    ctx.seen = list(Path(os.fsdecode(path)).read_bytes())
    return True


def decode(ctx, token):
    ctx.seen.append(token)
    return 0


def logits(ctx, which):
    assert which == -1
    return [float(token == sum(ctx.seen)) for token in range(VOCABULARY)]


@pytest.fixture
def stand_in(monkeypatch):
    contexts = []
    module = types.SimpleNamespace(
        Llama=Llama, __spec__=True, contexts=contexts, llama_token=ctypes.c_int, llama_state_save_file=save_file,
        llama_init_from_model=functools.partial(init, contexts), llama_free=lambda ctx: setattr(ctx, "freed", True),
        llama_state_load_file=load_file, llama_decode=decode, llama_get_logits_ith=logits,
        llama_batch_get_one=lambda tokens, count: tokens[0],
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    return module


def state_file(file):
    return _llama_cpp.state_file(Path("model.gguf"), IDS, CAPACITY, 4, "llama.cpp f16", file, 2)


def test_a_state_is_saved_loaded_and_goes_on(stand_in, tmp_path):
    found = state_file(tmp_path / "state")
    assert min(found.opening, found.loading, found.saving) > 0
    assert found.nbytes == len(IDS) - 1
    assert list((tmp_path / "state").read_bytes()) == IDS[:-1]
    assert [context.seen for context in stand_in.contexts] == [IDS, IDS]
    assert all(context.freed for context in stand_in.contexts)


def test_a_state_that_goes_on_otherwise_is_an_error(stand_in, tmp_path, monkeypatch):
    def damaged(ctx, *rest):
        load_file(ctx, *rest)
        ctx.seen[0] += 1
        return True

    monkeypatch.setattr(stand_in, "llama_state_load_file", damaged)
    with pytest.raises(SicError, match=r"llama\.cpp f16: a loaded state goes on with token 15, expected 14"):
        state_file(tmp_path / "state")
    assert stand_in.contexts[0].freed


REFUSALS = {
    "llama_state_save_file": False,
    "llama_state_load_file": False,
    "llama_init_from_model": None,
    "llama_decode": 1,
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_llama_cpp_refuses_is_an_error(name, stand_in, tmp_path, monkeypatch):
    monkeypatch.setattr(stand_in, name, lambda *a: REFUSALS[name])
    with pytest.raises(SicError, match="could not"):
        state_file(tmp_path / "state")


def test_the_tokens_that_a_killed_prefill_had_finished(stand_in, monkeypatch):
    """Killed in the third of its chunks of 256, whose segments are two layers, embedding and head."""
    asked = []
    monkeypatch.setattr(_llama_cpp, "state_file", lambda *a: asked.append(a) or "found")
    lm = types.SimpleNamespace(gguf=Path("model.gguf"), tokens=lambda text, count: np.arange(count)[None])
    assert _kill._by_llama_cpp(Job("folder", 1024, 256, 2 * 4 + 3), "llama.cpp f16", lm, 4) == "found"
    gguf, ids, capacity, chunk, form, file, _ = asked[0]
    assert (gguf, ids, capacity) == (lm.gguf, list(range(2 * 256 + 1)), 1024 + 8)
    assert (chunk, form, file.parent) == (256, "llama.cpp f16", Path("folder"))


def test_it_says_what_is_missing(stand_in):
    with pytest.raises(NotHere, match=r"not a \.gguf file"):
        _kill._by_llama_cpp(Job("", 40, 8), "llama.cpp f16", None, 4)
