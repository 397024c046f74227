"""The statistics of logits: of a whole vocabulary, of a shard of it, of shards merged; and probes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..runtime.arguments import described, instance, is_dense, outputs, real, tensor
from ..runtime.arrays import as_torch, like
from ..runtime.backends import call
from ..runtime.errors import ArgumentError
from .types import NO_PROBE, Array, Probe, StatsPart, TokenStats, softcap_of

_STATS = TokenStats._fields[:9]
_PART = StatsPart._fields[:9]

_PART_KINDS = (  # types and ranks
    (torch.float32, 1), *((torch.float64, 1),) * 3, (torch.int64, 2), (torch.float32, 2), (torch.float32, 2), (torch.float32, 1),
    (torch.uint8, 1),
)  # fmt: skip
_F32 = torch.finfo(torch.float32)


def _outputs(op: str, out: Any, names: tuple[str, ...]) -> tuple:
    """The arrays of `out=`; of earlier results those that the op writes."""
    return outputs(op, out[: len(names)] if isinstance(out, (TokenStats, StatsPart)) else out, names)


def logits_stats(
    logits: Array,
    *,
    temperature: Array | float | None = None,
    bias: Array | None = None,
    softcap: float | None = None,
    valid_vocab: int | None = None,
    mask_bits: Array | None = None,
    k: int = 0,
    watch_ids: Array | None = None,
    target_ids: Array | None = None,
    out: tuple[Array, ...] | None = None,
    workspace: Array | None = None,
    backend: str | None = None,
) -> TokenStats:
    """Entropy, log-sum-exp, the greatest k and chosen log-probabilities in one pass over the logits.

    logits: f32|f16|bf16 [B,V], rows of any stride.  What is counted is z = softcap * tanh(logits / softcap) + bias, divided by
    the temperature; nothing is written back.  -inf, NaN and +inf are those of z: a soft cap makes infinite logits finite.
    temperature: a number or f32 [B]; 0 means greedy: statistics at 1.  bias: f32 [V].
    valid_vocab: ids from it on (a padded tail) do not take part.
    mask_bits: i32 [B,ceil(V/32)], bit i of word j lets id 32 j + i take part (the layout of grammar libraries).
    k: 0 to 64 ids to list.  watch_ids: i32|i64 [W] or [B,W], W <= 64.  target_ids: i32|i64 [B], -1 for none.

    A logit of -inf has probability 0 and adds nothing. A row with a NaN or +inf, or where no id takes part, has its bits in
    `status` and NaN for statistics; other rows are not touched by it. lse and entropy are within 1e-5 of float64 at any offset
    (lse within one unit in the last place, if that is more).
    Raises ArgumentError for an id outside the vocabulary or a temperature below 0; on a CUDA device only with SIC_CHECK=1.
    out: the nine arrays of `TokenStats`. With `out` and `workspace` nothing is allocated, nothing synchronises, and the call
    can be captured. Bitwise equal from run to run, for any thread count and any batch a row is in: the order of the sums
    depends on V. Source: the online softmax (Milakov and Gimelshein 2018), with the first two moments of y carried along.
    """
    inputs = (
        logits, temperature, bias, softcap_of("logits_stats", softcap), valid_vocab, mask_bits, k, watch_ids, target_ids, 0,
    )  # fmt: skip
    return TokenStats(*call("head", "logits_stats", inputs, _outputs("logits_stats", out, _STATS), workspace, backend))


def lm_head_stats(
    hidden: Array,
    weight: Array,
    *,
    temperature: Array | float | None = None,
    bias: Array | None = None,
    softcap: float | None = None,
    valid_vocab: int | None = None,
    mask_bits: Array | None = None,
    k: int = 0,
    watch_ids: Array | None = None,
    target_ids: Array | None = None,
    vocab_start: int = 0,
    probe: Probe | None = None,
    out: tuple[Array, ...] | None = None,
    workspace: Array | None = None,
    backend: str | None = None,
) -> TokenStats:
    """`logits_stats` of hidden . weight, without ever writing the logits.

    hidden: f32|f16|bf16 [B,D], as it enters the LM head.  weight: f32|f16|bf16 [V,D].  Products are summed in f32, so the
    statistics are those of logits that were never rounded to a half type.
    vocab_start: the id of the first row of `weight`; ids given and returned count from it.  For shards of a vocabulary use
    `partial_stats`.  probe: a `Probe` on the same hidden states, whose scores come along.
    out: the nine arrays of `TokenStats` (ten with a probe).  All else as in `logits_stats`.
    """
    if probe is not None:
        instance("lm_head_stats", "probe", probe, Probe)
    names = _STATS if probe is None else TokenStats._fields
    outs = _outputs("lm_head_stats", out, names)
    inputs = (
        hidden, weight, temperature, bias, softcap_of("lm_head_stats", softcap), valid_vocab, mask_bits, k, watch_ids,
        target_ids, vocab_start, NO_PROBE if probe is None else probe.inputs(),
    )  # fmt: skip
    outs = outs if probe is not None else (*outs, None)
    results = call("head", "lm_head_stats", inputs, outs, workspace, backend)
    return TokenStats._make((*results[:9], None if probe is None else results[9]))


def partial_stats(
    logits: Array | None = None,
    *,
    hidden: Array | None = None,
    weight: Array | None = None,
    vocab_start: int = 0,
    temperature: Array | float | None = None,
    bias: Array | None = None,
    softcap: float | None = None,
    valid_vocab: int | None = None,
    mask_bits: Array | None = None,
    k: int = 1,
    watch_ids: Array | None = None,
    target_ids: Array | None = None,
    out: tuple[Array, ...] | None = None,
    workspace: Array | None = None,
    backend: str | None = None,
) -> StatsPart:
    """The statistics of one shard of the vocabulary (tensor parallel, or any split), to be merged by `merge_stats`.

    Either logits [B,V] of the shard, or hidden [B,D] and the shard's weight [V,D].  vocab_start: the shard's first id; all ids
    given and returned are those of the whole vocabulary, and so is valid_vocab.  bias, mask_bits: of the shard.  k: 1 to 64,
    the same in every part. out: the first nine arrays of `StatsPart`.  All else as in `logits_stats`.
    """
    if (logits is None) == (hidden is None) or (hidden is None) != (weight is None):
        given = ", ".join(
            name for name, x in (("logits", logits), ("hidden", hidden), ("weight", weight)) if x is not None
        )
        raise ArgumentError.of("partial_stats", "logits", given or "nothing", "logits, or hidden and weight")
    outs = _outputs("partial_stats", out, _PART)
    shape = (
        temperature, bias, softcap_of("partial_stats", softcap), valid_vocab, mask_bits, k, watch_ids, target_ids, vocab_start,
    )  # fmt: skip
    if logits is not None:
        results = call("head", "logits_part", (logits, *shape), outs, workspace, backend)
    else:
        results = call("head", "lm_head_part", (hidden, weight, *shape), outs, workspace, backend)
    return StatsPart._make((*results, temperature, vocab_start))


def merge_stats(
    parts: Sequence[StatsPart] | StatsPart,
    *,
    out: tuple[Array, ...] | None = None,
    workspace: Array | None = None,
    backend: str | None = None,
) -> TokenStats:
    """Parts of the same rows over disjoint shards become the statistics of the whole vocabulary.

    parts: of equal B, k, W and temperature; or one `StatsPart` whose arrays have a first dimension of n parts, as an all-gather
    leaves them (nothing is copied then).  The order of the parts is of no matter beyond rounding (4 units in the last place);
    the same parts in the same order give the same bits.  A part without an id is the identity.
    Raises ArgumentError where the parts do not fit together.  out: the nine arrays of `TokenStats`.
    """
    stacked = parts if isinstance(parts, StatsPart) else _stack(parts)
    inputs = (*stacked[:9], stacked.temperature)
    results = call("head", "merge_stats", inputs, _outputs("merge_stats", out, _STATS), workspace, backend)
    return TokenStats(*(results if isinstance(parts, StatsPart) else like(results, parts[0].m)))


def _stack(parts: Sequence[StatsPart]) -> StatsPart:
    if not isinstance(parts, Sequence) or not parts or not all(isinstance(p, StatsPart) for p in parts):
        raise ArgumentError.of("merge_stats", "parts", type(parts).__name__, "one or more StatsPart")
    first = parts[0]
    for p in parts[1:]:
        if not _same_temperature(p.temperature, first.temperature):
            raise ArgumentError.of("merge_stats", "parts", "parts of different temperatures", "parts of the same rows")
    columns = [_column(parts, name, dtype, rank) for name, (dtype, rank) in zip(_PART, _PART_KINDS)]
    return StatsPart._make((*columns, first.temperature, 0))


def _column(parts: Sequence[StatsPart], name: str, dtype: torch.dtype, rank: int) -> torch.Tensor:
    """One array of all parts, which must be of one shape."""
    arg = f"parts.{name}"
    first = tensor("merge_stats", arg, getattr(parts[0], name), (dtype,), (-1,) * rank)
    alike = (dtype,), tuple(first.shape), first.device
    return torch.stack([first, *(tensor("merge_stats", arg, getattr(p, name), *alike) for p in parts[1:])])


def _same_temperature(a: Any, b: Any) -> bool:
    """Without looking at a device's values: the same object, equal numbers, or equal tensors of the host."""
    if a is b:
        return True
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return a == b
    a, b = as_torch(a), as_torch(b)
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return a.shape == b.shape and (a.device.type != "cpu" or torch.equal(a, b))


def probe(
    hidden: Array,
    projection: Array,
    vector: Array,
    bias: Array | float = 0.0,
    *,
    activation: str = "none",
    link: str = "sigmoid",
    out: Array | None = None,
    workspace: Array | None = None,
    backend: str | None = None,
) -> Array:
    """score = link(vector . activation(projection . hidden) + bias): a small network that reads the hidden state.

    hidden: f32|f16|bf16 [B,D].  projection: f32|f16|bf16 [R,D], R <= 64 (16 is what the probes here are trained with).
    vector: f32 [R] gives score f32 [B]; [n,R] gives [B,n], n <= 16.  bias: a number, or f32 [] or [n].
    activation: "none" or "relu".  link: "sigmoid" or "identity".
    With `out` nothing is allocated, nothing synchronises and the call can be captured (bias as a tensor). Bitwise
    deterministic and independent of the batch.
    """
    vector, bias = as_torch(vector), as_torch(bias)
    flat = is_dense(vector) and vector.ndim == 1
    vector = vector[None] if flat else vector
    if not isinstance(bias, torch.Tensor) and is_dense(vector) and vector.ndim == 2:
        number = real("probe", "bias", bias, lambda x: abs(x) <= _F32.max, "a float32, or an array of them")
        bias = torch.full((len(vector),), number, device=vector.device)
    elif isinstance(bias, torch.Tensor) and bias.ndim == 0:
        bias = bias[None]
    of_probe = Probe(projection, vector, bias, activation, link).inputs()
    if flat and out is not None:
        if getattr(out, "ndim", None) != 1:
            raise ArgumentError.of("probe", "out", described(out), "float32 of rank 1")
        out = out[:, None]
    score = call("head", "probe", (hidden, *of_probe), (out,), workspace, backend)[0]
    return score[:, 0] if flat else score
