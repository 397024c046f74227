"""What the ragged benchmarks run: pack and unpack of a batch of token rows, peers in torch, the bytes that must move."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from ..runtime.bench_report import Bench, Family, Target
from ..runtime.clocks import Function
from ..runtime.roofline import Launch, Work
from ..testing import assert_same_bits, generator, reference
from .cases import BENCH_SHAPES, RaggedShape, random_bits
from .lengths import cu_seqlens
from .packing import pack, unpack

Tensor = torch.Tensor

MAIN = RaggedShape(32, 2048, 1024)
SETS = 2  # the turns read more than any cache between two uses of one
BLOCK_BYTES = 16 * 2048  # that a block of the CUDA kernels moves
PEERS = {
    "mask": "torch: padded[mask], or out[mask] = packed after a fill",
    "torch.cat": "torch.cat of the slices of all sequences into a given tensor",
    "pad_sequence": "torch.nn.utils.rnn.pad_sequence of the slices",
    "nested": "to_padded_tensor of a torch.nested tensor with the jagged layout",
}


class Inputs:
    """Sets of the same lengths on any bits; each padded and packed."""

    def __init__(self, shape: RaggedShape, sets: int | None = None, device: str = "cpu") -> None:
        self.shape, self.device, gen = shape, torch.device(device), generator(shape.seed)
        self.sets = SETS if sets is None else sets
        self.lengths = shape.lengths
        self.bounds = cu_seqlens(self.lengths, device=device)
        size = (shape.B, shape.length, shape.width)
        self.padded = [random_bits(gen, *size, dtype=shape.dtype).to(device) for _ in range(self.sets)]
        self.mask = (torch.arange(shape.length)[None] < torch.tensor(self.lengths)[:, None]).to(device)
        self.packed = [x[self.mask] for x in self.padded]
        self.packed_out, self.padded_out = torch.empty_like(self.packed[0]), torch.empty_like(self.padded[0])


def _pack(inputs: Inputs) -> Bench:
    s, out = inputs.shape, inputs.packed_out

    def cat(i: int) -> Tensor:
        return torch.cat([row[:n] for row, n in zip(inputs.padded[i], inputs.lengths)], out=out)

    def verify() -> None:
        want = reference("pack", "ragged")(inputs.padded[0], inputs.bounds, None)[0]
        assert_same_bits(pack(inputs.padded[0], inputs.bounds), want, "pack")
        assert_same_bits(inputs.padded[0][inputs.mask], want, "pack: mask")

    peers: dict[str, Function] = {"mask": lambda i: inputs.padded[i][inputs.mask], "torch.cat": cat}
    return Bench(
        "pack", s, lambda i: pack(inputs.padded[i], inputs.bounds, out=out), (out,), peers, verify, s.pack_bytes,
        "ns per token", len(inputs.packed[0]),
    )  # fmt: skip


def _unpack(inputs: Inputs) -> Bench:
    s, out = inputs.shape, inputs.padded_out

    def masked(i: int) -> None:
        out.zero_()
        out[inputs.mask] = inputs.packed[i]

    def pad_sequence(i: int) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(inputs.packed[i].split(inputs.lengths)), batch_first=True)

    def nested(i: int) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(inputs.packed[i], inputs.bounds).to_padded_tensor(0.0)

    def verify() -> None:
        want = reference("unpack", "ragged")(inputs.packed[0], inputs.bounds, s.length, 0)[0]
        assert_same_bits(unpack(inputs.packed[0], inputs.bounds, s.length), want, "unpack")
        assert_same_bits(pad_sequence(0), want, "unpack: pad_sequence")

    peers: dict[str, Function] = {"pad_sequence": pad_sequence, "mask": masked, "nested": nested}
    return Bench(
        "unpack", s, lambda i: unpack(inputs.packed[i], inputs.bounds, s.length, out=out), (out,), peers, verify,
        s.unpack_bytes, "ns per token", s.B * s.length,
    )  # fmt: skip


_BUILDERS: dict[str, Callable[[Inputs], Bench]] = {"pack": _pack, "unpack": _unpack}
NAMES = tuple(_BUILDERS)
TARGETS = (Target("copy", 0.7),)


def work_of(name: str, s: RaggedShape) -> Work:
    """What a GPU has to do: one launch, with a block for every part of the padded tensor."""
    nbytes = {"pack": s.pack_bytes, "unpack": s.unpack_bytes}[name]
    return Work((Launch(f"{name}_rows", nbytes, blocks=s.B * -(-s.length * s.row_bytes // BLOCK_BYTES)),))


def build(name: str, inputs: Inputs) -> Bench:
    """The benchmark of that name (`NAMES`) on some inputs, with its target where the shape is the main one."""
    bench = _BUILDERS[name](inputs)
    aimed = inputs.shape == MAIN and inputs.device.type == "cpu"
    return dataclasses.replace(bench, targets=TARGETS if aimed else ())


FAMILY = Family(
    "ragged", NAMES, MAIN, BENCH_SHAPES, BENCH_SHAPES[:2], lambda shape, device: Inputs(shape, device=device), build,
    work_of, peers=PEERS,
)  # fmt: skip
