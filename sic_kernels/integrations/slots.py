"""Uses of hidden states that are kept at layer boundaries, for one row of tokens: the last token drawn again, and keys and
values restored. Self-speculative decoding is in early_exit.py.

    store = sic.replay.SlotStore(sic.replay.MemoryPool(64 << 20))
    row = SlotRow(model, store, capacity=4096, keep=[25])
    row.prefill(ids)
    resample(row, 25, temperature=0.8, seed=7).token      # layers 25 .. and the head
    evict_kv(row, 25)                                     # the memory is free
    restore_kv(row, 25)                                   # the same bits, from the states before layer 25

Boundary L lies before layer L: 0 is what the embedding gives, `layers` what the head reads.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..replay import Fingerprint, Slot, SlotStore, prefix_digest
from ..runtime import fallback, metrics
from ..runtime.arguments import FLOATS, code_of, flag, instance, integer, integers, real, tensor
from ..runtime.errors import ArgumentError, SicError
from ..runtime.log import get_logger
from .layers import LayeredModel
from .replay import CHUNK, fingerprint_of

Tensor = torch.Tensor

_log = get_logger("slots")
COLDEST = 1e-6  # a temperature by which logits can be divided in float32
MISSING = {"raise": 0, "recompute": 1}


@dataclasses.dataclass(frozen=True)
class Span:
    """Tokens begin .. end, which one forward computed. `digest` names all tokens up to its end, and their spans."""

    begin: int
    end: int
    digest: bytes


def digest_after(before: bytes, tokens: Sequence[int]) -> bytes:
    """16 bytes for a prefix and the span that follows it. Not `prefix_digest` of all tokens: a sum over a chunk is rounded in
    another order than over a row, so the bits of a state depend on the spans too."""
    return hashlib.blake2b(before + prefix_digest(tokens), digest_size=16).digest()


class SlotRow:
    """One row of up to `capacity` tokens: keys and values of every layer, and in `store` the states of the boundaries `keep`.

    A slot's key: `fingerprint`, a digest of the tokens and of the spans in which they were computed, the boundary; its
    tensor: states [T,D] of the last span. The prompt is computed `chunk` tokens at a time, its last token and all later ones
    alone. `layer_calls` and `head_calls` count what was run: a layer over a span is one call. Not thread-safe.
    """

    def __init__(
        self,
        model: Any,
        store: SlotStore,
        *,
        capacity: int,
        keep: Iterable[int] = (),
        chunk: int = CHUNK,
        fingerprint: Fingerprint | None = None,
    ) -> None:
        op = "SlotRow"
        self.model = LayeredModel(model)
        instance(op, "store", store, SlotStore)
        self.store, self.capacity = store, integer(op, "capacity", capacity, 1, "an integer, 1 or more")
        self.chunk = integer(op, "chunk", chunk, 1, "an integer, 1 or more")
        boundaries = integers(op, "keep", keep, "numbers of boundaries")
        self.keep = frozenset(numbered(op, "keep", boundary, 0, self.model.layers) for boundary in boundaries)
        fingerprint = fingerprint_of(model, capacity) if fingerprint is None else fingerprint
        instance(op, "fingerprint", fingerprint, Fingerprint)
        self.fingerprint = fingerprint
        self.kv = {i: self.room() for i in range(self.model.layers)}
        self.tokens: list[int] = []
        self.spans: list[Span] = []
        self.layer_calls = self.head_calls = 0
        self.evicted: dict[int, list[Slot]] = {}  # layers without keys and values, and the pinned states before them

    @property
    def digest(self) -> bytes:
        """Of the tokens so far."""
        return self.spans[-1].digest if self.spans else b""

    def prefill(self, ids: Any) -> Tensor:
        """The prompt, int64 [n], in an empty row; logits [V] of the token after it."""
        op = "SlotRow.prefill"
        ids = tensor(op, "ids", ids, (torch.int64,), (-1,))
        if self.tokens or not 1 <= len(ids) <= self.capacity:
            got = f"{len(ids)} tokens after {len(self.tokens)}"
            raise ArgumentError.of(op, "ids", got, f"1 to {self.capacity} tokens in an empty row")
        self.model.check_ids(op, "ids", ids)
        tokens = ids.tolist()
        for begin in range(0, len(tokens) - 1, self.chunk):
            self._forward(tokens[begin : min(begin + self.chunk, len(tokens) - 1)])
        return self.step(tokens[-1])

    def step(self, token: int) -> Tensor:
        """One more token; logits [V] of the one after it."""
        op = "SlotRow.step"
        if len(self.tokens) >= self.capacity:
            got = f"the {len(self.tokens) + 1}th"
            raise ArgumentError.of(op, "token", got, f"at most {self.capacity} tokens")
        token = integer(op, "token", token, 0, "the id of a token")
        self.model.check_ids(op, "token", torch.tensor([token]))
        return self.head(self._forward([token]))[0]

    def generate(self, logits: Tensor, count: int) -> list[int]:
        """`count` greedy tokens, of which the first follows from `logits`; the last is not run."""
        op = "SlotRow.generate"
        logits = tensor(op, "logits", logits, FLOATS, (self.model.vocab,))
        count = integer(op, "count", count, 1, "1 or more tokens")
        tokens = [int(logits.argmax())]
        while len(tokens) < count:
            tokens.append(int(self.step(tokens[-1]).argmax()))
        return tokens

    # --- for the functions below and early_exit ---------------------------------------------------------------------------

    def embed(self, tokens: Sequence[int]) -> Tensor:
        return self.model.embed(torch.tensor(tokens, device=self.model.device))

    def run(self, h: Tensor, layers: range, position: int, digest: bytes | None = None) -> Tensor:
        """These layers over states [T,D] of the tokens at `position` ..; with a digest, boundaries on the way are kept."""
        gone = sorted(self.evicted.keys() & set(layers))
        if gone:
            raise SicError(f"SlotRow: keys and values of layers {gone} were evicted: restore_kv brings them back")
        for i in layers:
            self._put(i, h, digest)
            h = self.model.layer(i, h, position, self.kv[i])
            self.layer_calls += 1
        return h

    def head(self, h: Tensor) -> Tensor:
        """States [T,D] after the last layer (or, for an early exit, any other) -> logits [T,V]."""
        self.head_calls += 1
        return self.model.logits(h)

    def append(self, tokens: list[int], digest: bytes) -> None:
        """These tokens have been computed, as a span of that digest."""
        begin = len(self.tokens)
        self.tokens += tokens
        self.spans.append(Span(begin, len(self.tokens), digest))

    def state(self, span: Span, boundary: int, allow_approximate: bool = False) -> Slot | None:
        """The kept states of a span, pinned, or None; counted."""
        slot = self.store.get(self.fingerprint, span.digest, boundary, allow_approximate=allow_approximate, pin=True)
        metrics.get("sic_slot_hit_ratio").add(int(slot is not None), 1)
        if slot is not None and slot.block.shape != (span.end - span.begin, self.model.hidden):
            self.store.unpin(slot)
            raise SicError(
                f"SlotRow: a slot of {slot.block.shape} for tokens {span.begin} to {span.end}: not put by a SlotRow"
            )
        return slot

    def _forward(self, tokens: list[int]) -> Tensor:
        digest, layers = digest_after(self.digest, tokens), self.model.layers
        h = self.run(self.embed(tokens), range(layers), len(self.tokens), digest)
        self._put(layers, h, digest)
        self.append(tokens, digest)
        return h

    def _put(self, boundary: int, h: Tensor, digest: bytes | None) -> None:
        if digest is not None and boundary in self.keep:
            self.store.put(self.fingerprint, digest, boundary, h)

    def room(self) -> Tensor:
        """For the keys and values of a layer."""
        m = self.model
        return torch.empty(m.kv_shape(self.capacity), dtype=m.dtype, device=m.device)


def numbered(op: str, arg: str, value: Any, low: int, high: int) -> int:
    """A layer or boundary from `low` to `high`."""
    number = integer(op, arg, value, low, f"{low} to {high}")
    if number > high:
        raise ArgumentError.of(op, arg, number, f"{low} to {high}")
    return number


# --- drawing again --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Resampled:
    """The token drawn, its logits [V], and how many layers were run for it. exact: whether the state was what the model
    computes. status: "active", or "fallback" with the reasons: the state was not there, and the whole step was run."""

    token: int
    logits: Tensor
    layers: int
    exact: bool = True
    status: str = "active"
    reasons: tuple[str, ...] = ()


def resample(
    row: SlotRow,
    layer: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    on_missing: str = "raise",
    allow_approximate: bool = False,
) -> Resampled:
    """Draws the token after the last again, from the last token's kept state before `layer`: layers `layer` .. and the head.

    The logits are bit for bit those of the full step: the last token alone, over keys and values of the tokens before it as
    they were when the state was kept (a SlotRow does not change them). Its own rows are written again, with the same bits.
    temperature: 0 is greedy, else 1e-6 to 1e9; seed: of torch's generator, one draw each.
    on_missing: where no such state is kept, "raise" a SicError, or "recompute" the step: status "fallback", logged, and an
    error under SIC_STRICT. allow_approximate: also a slot that was put with exact=False; the result then says so.
    """
    op = "resample"
    instance(op, "row", row, SlotRow)
    boundary = numbered(op, "layer", layer, 0, row.model.layers)
    warmth = real(op, "temperature", temperature, lambda t: t == 0 or COLDEST <= t < 1e9, f"0, or {COLDEST:g} to 1e9")
    seed = integer(op, "seed", seed, 0, "0 to 2^63 - 1", 63)
    anew = code_of(op, "on_missing", on_missing, MISSING) == 1
    if not row.spans:
        raise ArgumentError.of(op, "row", "an empty row", "a row with a token")
    span, layers = row.spans[-1], row.model.layers
    slot = row.state(span, boundary, flag(op, "allow_approximate", allow_approximate))
    if slot is None:
        reason = f"no state before layer {boundary} is kept for the last of {span.end} tokens"
        if not anew:
            raise SicError(f"{op}: {reason}")
        fallback.report(_log, "%s: %s: the whole step is run", op, reason, level=logging.WARNING)
        logits = row.head(row.run(row.embed(row.tokens[-1:]), range(layers), span.begin))[0]
        return Resampled(drawn(logits, warmth, seed), logits, layers, True, "fallback", (reason,))
    try:
        logits = row.head(row.run(slot.tensor, range(boundary, layers), span.begin))[0]
    finally:
        row.store.unpin(slot)
    return Resampled(drawn(logits, warmth, seed), logits, layers - boundary, slot.exact)


def drawn(logits: Tensor, temperature: float, seed: int) -> int:
    """A token from logits [V]; temperature 0: the greatest."""
    if temperature == 0:
        return int(logits.argmax())
    generator = torch.Generator(logits.device).manual_seed(seed)
    return int(torch.multinomial((logits.float() / temperature).softmax(-1), 1, generator=generator))


# --- keys and values from states ------------------------------------------------------------------------------------------


def evict_kv(row: SlotRow, layer: int) -> int:
    """Gives up the keys and values of a layer whose states before it are all kept; bytes freed. The states are pinned until
    `restore_kv`, before which the layer cannot run. `SicError`, and nothing is changed, where a state is missing."""
    op = "evict_kv"
    number = _layer_of(op, row, layer)
    if number in row.evicted:
        raise ArgumentError.of(op, "layer", number, "a layer whose keys and values are there")
    slots: list[Slot] = []
    for span in row.spans:
        slot = row.state(span, number)
        if slot is None:
            for held in slots:
                row.store.unpin(held)
            raise SicError(f"{op}: no state before layer {number} is kept for tokens {span.begin} to {span.end}")
        slots.append(slot)
    row.evicted[number] = slots
    return row.kv.pop(number).nbytes


def restore_kv(row: SlotRow, layer: int) -> None:
    """Keys and values of an evicted layer from the states before it, by its norm, two projections and rotary embeddings.

    The same bits, because each span is computed as it was. A state takes `LayeredModel.state_bytes` a token, keys and values
    `kv_bytes`: the state half as much for multi-head attention, more where few heads share their keys (docs/slots.md).
    """
    op = "restore_kv"
    number = _layer_of(op, row, layer)
    if number not in row.evicted:
        raise ArgumentError.of(op, "layer", number, f"an evicted layer, of {sorted(row.evicted)}")
    kv = row.room()
    for span, slot in zip(row.spans, row.evicted[number]):
        k, v = row.model.keys_values(number, slot.tensor, span.begin)
        kv[0, :, span.begin : span.end], kv[1, :, span.begin : span.end] = k, v
    row.kv[number] = kv
    for slot in row.evicted.pop(number):
        row.store.unpin(slot)


def _layer_of(op: str, row: Any, layer: Any) -> int:
    instance(op, "row", row, SlotRow)
    return numbered(op, "layer", layer, 0, row.model.layers - 1)
