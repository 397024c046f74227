"""A transformers model as a `ReplayPlan`: prefill and decoding that stop anywhere and go on there, also after kill -9.

    pool = sic.replay.MemoryPool(256 << 20, backing="state.pool")
    runner = ReplayRunner(model, pool, capacity=4096, word=sic.replay.CursorWord("state.word"))
    outcome = runner.prefill(ids, deadline_ms=50)
    while not outcome.done:
        outcome = runner.resume(outcome.cursor)
    runner.generate(64)

A second process that opens the same two files finds `runner.cursor()` where the first one stopped.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from ..replay import (
    CursorWord,
    Fingerprint,
    Interrupted,
    MemoryPool,
    ReplayPlan,
    Result,
    Rows,
    Segment,
    Step,
    context_bucket,
)
from ..runtime.arguments import flag, instance, integer, tensor, text
from ..runtime.errors import ArgumentError
from .layers import LayeredModel

Tensor = torch.Tensor

CHUNK = 512  # tokens of a chunk of the prefill
SAMPLES = 64  # elements of a weight that a fingerprint looks at


def fingerprint_of(model: Any, capacity: int) -> Fingerprint:
    """Of a transformers model of so many tokens: its name, type, quantisation, bucket of the context, and as `revision` what
    else decides its bits: the commit, a digest of samples of all weights, one of the configuration, the attention, torch.

    A change of a whole matrix (an adapter merged, a layer exchanged) is seen, a change of single weights is not.
    """
    op, config = "fingerprint_of", getattr(model, "config", None)
    if not all(hasattr(model, name) for name in ("named_parameters", "get_input_embeddings")) or config is None:
        raise ArgumentError.of(op, "model", type(model).__name__, "a model of transformers")
    capacity = integer(op, "capacity", capacity, 1, "an integer, 1 or more")
    quantisation = getattr(getattr(config, "quantization_config", None), "quant_method", None)
    settings = hashlib.blake2b(config.to_json_string().encode(), digest_size=8).hexdigest()
    revision = {
        "commit": getattr(config, "_commit_hash", None), "weights": _weights_digest(model), "configuration": settings,
        "attention": getattr(config, "_attn_implementation", None), "torch": torch.__version__,
    }  # fmt: skip
    return Fingerprint(
        config.name_or_path or type(model).__name__, ", ".join(f"{name} {value}" for name, value in revision.items()),
        str(model.get_input_embeddings().weight.dtype).removeprefix("torch."), str(quantisation or "none"),
        context_bucket(capacity),
    )  # fmt: skip


def _weights_digest(model: Any) -> str:
    """Of names, shapes, types and up to `SAMPLES` evenly spaced elements of all parameters."""
    found, samples = [], dict[torch.device, list[Tensor]]()
    for name, x in model.named_parameters():
        x = x.detach()
        found.append((name, tuple(x.shape), str(x.dtype)))
        # as bytes: a device's samples travel in one copy
        sample = x.flatten()[:: max(1, -(-x.numel() // SAMPLES))].contiguous().view(torch.uint8)
        samples.setdefault(x.device, []).append(sample)
    digest = hashlib.blake2b(repr(found).encode(), digest_size=8)
    for parts in samples.values():
        digest.update(torch.cat(parts).cpu().numpy().data)
    return digest.hexdigest()


class ReplayRunner:
    """One sequence of up to `capacity` tokens. Segments: the embedding, each layer, the head; two boundary buffers in turn.

    Everything that a later segment reads lies in the pool under the names `name`.tokens, .h0, .h1, .kv.<layer>, .logits; blocks
    of these names that the pool holds already are taken over, so two rows in one pool need two names. Greedy tokens and logits
    are those of the model itself in the same chunks. check_model: whether a few tokens are compared with the model's own
    (`LayeredModel`), which takes two short forwards. Not thread-safe.
    """

    def __init__(
        self,
        model: Any,
        pool: Any,
        *,
        capacity: int,
        chunk: int = CHUNK,
        word: CursorWord | None = None,
        fingerprint: Fingerprint | None = None,
        timeout_ms: int | None = None,
        name: str = "run",
        check_model: bool = True,
    ) -> None:
        op = "ReplayRunner"
        instance(op, "pool", pool, MemoryPool)
        self.pool, self.name = pool, text(op, "name", name)
        self.capacity = integer(op, "capacity", capacity, 1, "an integer, 1 or more")
        self.chunk = integer(op, "chunk", chunk, 1, "an integer, 1 or more")
        self.model = LayeredModel(model, check=flag(op, "check_model", check_model))
        fingerprint = fingerprint_of(model, capacity) if fingerprint is None else fingerprint
        self.buffers = self._buffers()
        self.plan = ReplayPlan.capture(
            self._segments(), buffers=self.buffers, inputs=["tokens"], outputs=["logits"],
            fingerprint=fingerprint, word=word, timeout_ms=timeout_ms,
        )  # fmt: skip

    def _buffers(self) -> dict[str, Any]:
        m = self.model
        states = (min(self.chunk, self.capacity), m.hidden)
        wanted: dict[str, tuple[tuple[int, ...], torch.dtype, str]] = {
            "tokens": ((self.capacity,), torch.int64, "boundary"),
            "h0": (states, m.dtype, "boundary"),
            "h1": (states, m.dtype, "boundary"),
            "logits": ((m.vocab,), m.dtype, "boundary"),
            **{f"kv.{i}": (m.kv_shape(self.capacity), m.dtype, "kv") for i in range(m.layers)},
        }
        there = {block.name: block for block in self.pool.blocks()}
        with self.pool.all_or_nothing():
            return {name: self._block(there, f"{self.name}.{name}", *what) for name, what in wanted.items()}

    def _block(self, there: dict[str, Any], name: str, shape: tuple[int, ...], dtype: torch.dtype, part: str) -> Any:
        found = there.get(name)
        if found is None:
            return self.pool.alloc(shape, dtype=dtype, part=part, name=name)
        if (found.shape, found.dtype) != (shape, dtype):
            got = f"{found.dtype}{list(found.shape)}"
            raise ArgumentError.of("ReplayRunner", f"pool block {name!r}", got, f"{dtype}{list(shape)}")
        return found

    def _segments(self) -> list[Segment]:
        m = self.model

        def embed(step: Step) -> None:
            step["h0"][: step.count] = m.embed(step["tokens"][step.position : step.end])

        def layer(i: int) -> Segment:
            source, target, kv = f"h{i % 2}", f"h{(i + 1) % 2}", f"kv.{i}"

            def run(step: Step) -> None:
                step[target][: step.count] = m.layer(i, step[source][: step.count], step.position, step[kv])

            return Segment(f"layer.{i}", run, reads=[source], writes=[target], rows=[Rows(kv, 2)])

        last = f"h{m.layers % 2}"

        def head(step: Step) -> None:
            step["logits"].copy_(m.logits(step[last][step.count - 1 : step.count])[0])

        return [
            Segment("embed", embed, reads=["tokens"], writes=["h0"]),
            *(layer(i) for i in range(m.layers)),
            Segment("head", head, reads=[last], writes=["logits"]),
        ]

    # --- running ----------------------------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Tokens whose keys and values are there."""
        return self.plan.length

    def prefill(self, ids: Any, **options: Any) -> Result | Interrupted:
        """The prompt, int64 [n], from position 0 on, in chunks; options of `ReplayPlan.run`: `deadline_ms`,
        `stop`, `retries`, `seed`.

        What was there before is gone, an interrupted run too.
        """
        op = "ReplayRunner.prefill"
        ids = tensor(op, "ids", ids, (torch.int64,), (-1,))
        if not 1 <= len(ids) <= self.capacity:
            raise ArgumentError.of(op, "ids", f"{len(ids)} tokens", f"1 to {self.capacity}")
        self.model.check_ids(op, "ids", ids)
        return self._run(
            op, torch.arange(len(ids)), ids, {"end": len(ids), "chunk": min(self.chunk, len(ids))}, options
        )

    def step(self, token: int, **options: Any) -> Result | Interrupted:
        """One more token; the logits of the next are then in `logits`. options: as of `prefill`.

        Refused where there is no prompt, and while a run is interrupted: resume it first.
        """
        op, at = "ReplayRunner.step", self._ready("ReplayRunner.step")
        if at >= self.capacity:
            raise ArgumentError.of(op, "token", f"the {at + 1}th", f"at most {self.capacity} tokens")
        ids = torch.tensor([integer(op, "token", token, 0, "the id of a token")])
        self.model.check_ids(op, "token", ids)
        return self._run(op, torch.tensor([at]), ids, {"begin": at, "end": at + 1}, options)

    def _run(
        self, op: str, places: Tensor, ids: Tensor, span: dict[str, Any], options: dict[str, Any]
    ) -> Result | Interrupted:
        """Tokens go in with the run, so that one that was interrupted never finds others than its own."""
        for name in options:
            if name not in ("deadline_ms", "stop", "retries", "seed"):
                raise ArgumentError.of(op, "options", repr(name), "deadline_ms|stop|retries|seed")
        tokens = self.plan.tensors["tokens"].clone()
        tokens[places] = ids.to(tokens.device)
        return self.plan.run({"tokens": tokens}, **span, **options)

    def _ready(self, op: str) -> int:
        """The length; `ArgumentError` where another token cannot follow."""
        if self.plan.cursor() is not None:
            raise ArgumentError.of(op, "token", "one while a run is interrupted", "resume(cursor()) first, or prefill")
        if (length := self.length) == 0:
            raise ArgumentError.of(op, "token", "one without a prompt", "prefill first")
        return length

    def resume(self, cursor: Any, **options: Any) -> Result | Interrupted:
        """What is missing of the run that the cursor belongs to; options: those of `ReplayPlan.resume`."""
        return self.plan.resume(cursor, **options)

    def cursor(self) -> Any:
        """Where the last run goes on, also that of a process that died; None where it is done."""
        return self.plan.cursor()

    def generate(self, count: int, **options: Any) -> list[int]:
        """`count` greedy tokens. Raises what a segment raised.

        A deadline or a stop ends it early: the list is shorter, and the step of its last token is to be resumed.
        """
        count = integer("ReplayRunner.generate", "count", count, 0, "0 or more")
        tokens: list[int] = []
        for _ in range(count):
            self._ready("ReplayRunner.generate")
            tokens.append(int(self.logits.argmax()))
            outcome = self.step(tokens[-1], **options)
            if isinstance(outcome, Interrupted):
                if outcome.error is not None:
                    raise outcome.error
                break
        return tokens

    @property
    def logits(self) -> Tensor:
        """Of the token after the last, [V]; overwritten by the next step."""
        return self.plan.tensors["logits"]
