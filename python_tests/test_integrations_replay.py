"""A transformers model in segments: the model's own bits, interrupted anywhere, also by kill -9."""

import signal
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers", reason="pip install 'sic_kernels[demo]'")
pytest.importorskip("tokenizers", reason="pip install 'sic_kernels[demo]'")

from transformers import DynamicCache, LlamaForCausalLM

from sic_kernels import replay
from sic_kernels.cli import _kill
from sic_kernels.cli._replay_process import Job
from sic_kernels.integrations.layers import LayeredModel
from sic_kernels.integrations.replay import ReplayRunner, fingerprint_of
from sic_kernels.replay import faults
from sic_kernels.runtime.errors import ArgumentError, SicError
from sic_kernels.testing import assert_same_bits

pytestmark = pytest.mark.usefixtures("keep_threads")

IDS = torch.tensor([(7 * i + 3) % 128 for i in range(40)])
CHUNK, CAPACITY = 16, 64


@pytest.fixture(scope="module")
def model(folder):
    torch.set_num_threads(1)
    return LlamaForCausalLM.from_pretrained(folder).eval()


def runner(model, pool=None, **options):
    pool = replay.MemoryPool(1 << 20) if pool is None else pool
    return ReplayRunner(model, pool, capacity=CAPACITY, chunk=CHUNK, **options)


@torch.inference_mode()
def plain(model, count):
    """Logits after the prompt, in the same chunks, and greedy tokens, by the model itself."""
    cache = DynamicCache(config=model.config)
    for at in range(0, len(IDS), CHUNK):
        logits = model(input_ids=IDS[None, at : at + CHUNK], cache=cache, use_cache=True, logits_to_keep=1).logits[
            0, -1
        ]
    first, tokens = logits, []
    for _ in range(count):
        tokens.append(int(logits.argmax()))
        logits = model(input_ids=torch.tensor([[tokens[-1]]]), cache=cache, use_cache=True, logits_to_keep=1).logits[
            0, -1
        ]
    return first, tokens


def test_the_models_own_bits(model):
    logits, tokens = plain(model, 8)
    r = runner(model)
    assert r.prefill(IDS).done
    assert_same_bits(r.logits, logits, "logits")
    assert r.generate(8) == tokens


def test_segments_can_be_repeated(model):
    r = runner(model)
    r.prefill(IDS)
    tokens = torch.zeros(CAPACITY, dtype=torch.int64)
    tokens[:40] = IDS
    assert r.plan.verify({"tokens": tokens}, begin=16, end=32) == []


@pytest.mark.parametrize("index", range(12))
def test_stopped_anywhere(model, index):
    logits, tokens = plain(model, 4)
    r = runner(model)
    with faults.stop_at(r.plan, index):
        stopped = r.prefill(IDS)
    assert not stopped.done
    result = r.resume(stopped.cursor)
    assert len(result.executed) == 12 - index
    assert_same_bits(r.logits, logits, "logits")
    with faults.stop_at(r.plan, index % 4):
        stopped = r.step(tokens[0])
    assert r.resume(stopped.cursor).done
    assert r.generate(3) == tokens[1:]


def test_a_deadline_in_generate(model):
    r = runner(model)
    r.prefill(IDS)
    assert r.generate(5, deadline_ms=0) != []
    assert r.cursor() is not None
    assert r.resume(r.cursor()).done
    with faults.stop_at(r.plan, 2), pytest.raises(faults.Injected):
        r.generate(2)


def test_the_median_of_several_kills_counts(monkeypatch, tmp_path):
    """And of as many loads; states are saved once."""
    firsts, loads, saves = iter([5.0, 1.0, 3.0]), iter([9.0, 1.0, 2.0]), []

    def said(what, job):
        if what == "load":
            return {"first": next(loads)}
        if what == "save":
            saves.append(job.folder)
            return {"saving": {"torch": 7.0}, "nbytes": {"torch": 8}}
        return {"first": next(firsts), "executed": 6, "answer": [1], "loading": 0.5}

    monkeypatch.setattr(_kill, "_said", said)
    monkeypatch.setattr(_kill, "_killed", lambda job: {"work": 4.0, "segments": 4})
    found = _kill.kill(Job(str(tmp_path), 40, CHUNK, 2), ("torch",), times=3)
    assert (found.resumed, found.loaded, len(saves)) == (3.0, {"torch": 2.0}, 1)
    assert (found.recomputed, found.saving, found.nbytes) == (4.0, {"torch": 7.0}, {"torch": 8})


def test_a_process_that_cannot_start(folder, tmp_path):
    with pytest.raises(SicError, match="ended by itself"):
        _kill.kill(Job(str(tmp_path), 40, CHUNK, 1, model=folder, text=str(tmp_path / "none")))


def test_tokens_of_another_prompt_never_mix(model):
    """Neither a refused call nor a new prompt leaves a cursor that goes on over other tokens."""
    r = runner(model)
    with faults.stop_at(r.plan, 5):
        cursor = r.prefill(IDS).cursor
    with pytest.raises(ArgumentError):
        r.prefill(IDS + 1 - 1, deadline_ms=-1)
    with pytest.raises(ArgumentError, match="while a run is interrupted"):
        r.step(3)
    with pytest.raises(ArgumentError, match="while a run is interrupted"):
        r.generate(1)
    assert r.resume(cursor).done
    assert_same_bits(r.logits, plain(model, 0)[0], "logits")


def test_without_a_prompt(model):
    r = runner(model)
    with pytest.raises(ArgumentError, match="without a prompt"):
        r.generate(1)
    assert r.generate(0) == []


def test_files_of_another_model(model, folder, tmp_path):
    first = runner(
        model, replay.MemoryPool(1 << 20, backing=tmp_path / "pool"), word=replay.CursorWord(tmp_path / "word")
    )
    first.prefill(IDS)
    assert first.length == len(IDS)
    first.pool.close()
    first.plan.word.close()
    other = LlamaForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        other.model.embed_tokens.weight.add_(1)
    second = runner(other, replay.MemoryPool.attach(tmp_path / "pool"), word=replay.CursorWord(tmp_path / "word"))
    assert second.length == 0


def test_a_pool_that_was_replaced(model, tmp_path):
    first = runner(
        model, replay.MemoryPool(1 << 20, backing=tmp_path / "pool"), word=replay.CursorWord(tmp_path / "word")
    )
    with faults.stop_at(first.plan, 5):
        cursor = first.prefill(IDS).cursor
    first.pool.close()
    first.plan.word.close()
    (tmp_path / "pool").unlink()
    second = runner(
        model, replay.MemoryPool(1 << 20, backing=tmp_path / "pool"), word=replay.CursorWord(tmp_path / "word")
    )
    assert second.length == 0
    with pytest.raises(replay.StaleCursor, match="other segments or buffers"):
        second.resume(cursor)


def a_process(monkeypatch, code):
    """In place of the process of a kill."""
    start = subprocess.Popen
    monkeypatch.setattr(_kill.subprocess, "Popen", lambda command, **options: started.append(
        start([sys.executable, "-c", code], **options)) or started[-1])  # fmt: skip
    started = []
    return started


def test_what_libraries_print_is_no_answer(monkeypatch):
    """Also more of it than a pipe holds."""
    noise = "import sys, time; sys.stderr.write('x' * 200_000); print('a warning'); print(3)\n"
    said = "print('{\"segments\": 4}'); print('{\"work\": 1.5}', flush=True); time.sleep(3600)"
    started = a_process(monkeypatch, noise + said)
    assert _kill._killed(Job("", 40, CHUNK)) == {"segments": 4, "work": 1.5}
    assert started[0].returncode == -signal.SIGKILL


@pytest.mark.parametrize("ask", [_kill._killed, lambda job: _kill._said("load", job)])
def test_a_process_that_never_answers(monkeypatch, ask):
    monkeypatch.setattr(_kill, "TIMEOUT", 0.5)
    started = a_process(monkeypatch, "import time; time.sleep(3600)")
    with pytest.raises(SicError, match=r"the process took more than 0.5 s"):
        ask(Job("", 40, CHUNK))
    assert started[0].returncode == -signal.SIGKILL


def test_a_process_that_fails(monkeypatch):
    a_process(monkeypatch, "raise SystemExit('no such thing')")
    with pytest.raises(SicError, match=r"load: the process ended by itself, status 1: no such thing"):
        _kill._said("load", Job("", 40, CHUNK))


def test_blocks_of_another_model_are_refused(model):
    pool = replay.MemoryPool(1 << 20)
    runner(model, pool)
    with pytest.raises(ArgumentError, match=r"pool block 'run.tokens'"):
        ReplayRunner(model, pool, capacity=CAPACITY + 1, chunk=CHUNK)
    ReplayRunner(model, pool, capacity=CAPACITY, chunk=CHUNK, name="other")


def test_a_pool_that_is_too_small_keeps_nothing(model):
    pool = replay.MemoryPool(1 << 14)
    with pytest.raises(replay.PoolExhausted):
        runner(model, pool)
    assert pool.stats().blocks == 0


def test_bad_arguments(model):
    r = runner(model)
    for call, message in [
        (lambda: r.prefill(torch.zeros(65, dtype=torch.int64)), "ids: got 65 tokens"),
        (lambda: r.prefill(torch.zeros(3)), "ids: got float32"),
        (lambda: r.prefill(torch.tensor([129])), "ids from 0 to 128"),
        (lambda: r.prefill(IDS, end=5), "options: got 'end'"),
        (lambda: runner(torch.nn.Linear(2, 2)), "model: got Linear"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            call()
    r.prefill(torch.zeros(64, dtype=torch.int64))
    with pytest.raises(ArgumentError, match="the 65th"):
        r.step(1)


def test_fingerprints_differ(model, folder):
    one = fingerprint_of(model, 600)
    assert (one.dtype, one.quantisation, one.context_bucket) == ("float32", "none", 1024)
    assert one == fingerprint_of(LlamaForCausalLM.from_pretrained(folder), 600)
    other = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        other.model.embed_tokens.weight.add_(1)
    assert list(fingerprint_of(other, 600).diff(one)) == ["revision"]


def changed_block(model):
    """As many elements as two samples are apart, in one matrix of one layer."""
    weight = model.model.layers[1].mlp.up_proj.weight.detach()
    weight.flatten()[weight.numel() // 2 :][: weight.numel() // 32].add_(1e-3)


@pytest.mark.parametrize("commit", [None, "abc"])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (changed_block, "weights"),
        (lambda model: model.set_attn_implementation("eager"), "attention"),
        (lambda model: setattr(model.config, "rms_norm_eps", 0.5), "configuration"),
    ],
)
def test_fingerprints_see_what_decides_the_bits(folder, commit, change, named):
    """Also where the commit is known: weights can have been changed since."""
    model = LlamaForCausalLM.from_pretrained(folder)
    model.config._commit_hash = commit
    before = fingerprint_of(model, 600)
    change(model)
    (pair,) = before.diff(fingerprint_of(model, 600)).items()
    assert pair[0] == "revision"
    parts = [dict(part.split(" ", 1) for part in text.split(", ")) for text in pair[1]]
    assert [name for name in parts[0] if parts[0][name] != parts[1][name]] == [named]
    assert parts[0]["torch"] == torch.__version__
    assert parts[0]["commit"] == str(commit)


def test_layers_alone(model):
    m = LayeredModel(model)
    kv = [torch.zeros(m.kv_shape(16)) for _ in range(m.layers)]
    h = m.embed(IDS[:5])
    for i in range(m.layers):
        h = m.layer(i, h, 0, kv[i])
    with torch.inference_mode():
        assert_same_bits(m.logits(h), model(input_ids=IDS[None, :5]).logits[0], "logits")
