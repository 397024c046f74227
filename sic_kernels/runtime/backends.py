"""Backends: which there are, why one is not, and the one call through which every op runs.

| name   | what it is                                                        |
|--------|-------------------------------------------------------------------|
| cpu    | C++ with SIMD chosen at run time; the default for CPU tensors       |
| cuda   | CUDA kernels built ahead of time; the default for CUDA tensors      |
| triton | kernels compiled at run time, where there is no nvcc               |
| simt   | the CUDA kernels on the emulator; for tests, never chosen by itself |
| ref    | the definition in float64; never chosen by itself                  |

Adding an op needs nothing here: a native op is `_C.<op>`, a Python one is a function of that name in the family's
`reference` or `triton_kernels` module, with the same inputs in the same order.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import numbers
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import arrays, config
from .errors import ArgumentError, BackendError, WorkspaceSize
from .log import get_logger
from .native import CHECK, CPU, CUDA, SIZE, module, simt_module


@dataclasses.dataclass(frozen=True)
class Backend:
    """One row of the table. code, module: of a native backend; file: the family's module of a Python one.

    in_place: the functions of `file` take `outs=` and write there; else what they return is copied.
    """

    name: str
    devices: tuple[str, ...]
    why_not: Callable[[], str | None]
    code: int = CHECK
    module: Callable[[], Any] = module
    file: str = ""
    in_place: bool = False
    automatic: bool = True


@functools.cache
def _why_not_native(load: Callable[[], Any] = module) -> str | None:
    try:
        load()
    except BackendError as error:
        return str(error)
    return None


def _why_not_simt() -> str | None:
    return _why_not_native(simt_module)


@functools.cache
def _why_not_cuda() -> str | None:
    missing = _why_not_native()
    if missing is not None:
        return missing
    if not module().has_cuda():
        return "built without CUDA kernels: build again with nvcc on the PATH and without -DSIC_CUDA=OFF"
    if not torch.cuda.is_available():
        return "no CUDA device: torch.cuda.is_available() is False"
    return module().device_problem() or None


@functools.cache
def _why_not_triton() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'sic_kernels[triton]'"
    if os.environ.get("TRITON_INTERPRET") == "1":  # tests: Triton's interpreter, on CPU tensors; never chosen by itself
        return None
    return None if torch.cuda.is_available() else "no CUDA device: torch.cuda.is_available() is False"


TABLE: dict[str, Backend] = {
    b.name: b
    for b in (
        Backend("cpu", ("cpu",), _why_not_native, code=CPU),
        Backend("cuda", ("cuda",), _why_not_cuda, code=CUDA),
        Backend("triton", ("cuda",), _why_not_triton, file="triton_kernels", in_place=True),
        Backend("simt", ("cpu",), _why_not_simt, code=CUDA, module=simt_module, automatic=False),
        Backend("ref", ("cpu", "cuda"), _why_not_native, file="reference", automatic=False),
    )
}


def backends() -> dict[str, str | None]:
    """Backend -> None if it can be used, else the reason why not and how to get it."""
    return {name: b.why_not() for name, b in TABLE.items()}


def why_not(name: str) -> str | None:
    """Why backend `name` cannot be used; None if it can. `ArgumentError` for an unknown name."""
    return _named("why_not", name).why_not()


def pick(op: str, tensor: Any, wanted: str | None = None) -> Backend:
    """The backend for an op on `tensor`: `wanted`, else SIC_BACKEND, else the best for the tensor's device.

    `BackendError` with the reason and the remedy if it cannot be used.
    """
    wanted = config.current().backend if wanted is None else wanted
    if isinstance(wanted, str) and wanted == "auto":
        return _automatic(op, arrays.device_type(tensor))
    chosen = _named(op, wanted)
    reason = chosen.why_not()
    if reason is not None:
        raise BackendError(f"{op}: backend {wanted!r} cannot be used: {reason}")
    return chosen


@functools.cache
def _automatic(op: str, device: str) -> Backend:
    reasons: list[str] = []
    for b in TABLE.values():
        if not b.automatic or device not in b.devices:
            continue
        reason = b.why_not()
        if reason is None:
            if reasons:  # once for each op: the answer is kept
                get_logger("backends").info("%s: backend %s, for want of %s", op, b.name, "; ".join(reasons))
            return b
        reasons.append(f"{b.name}: {reason}")
    raise BackendError(f"{op}: no backend for {device} tensors; " + ("; ".join(reasons) or "known are cpu and cuda"))


def _named(op: str, name: str) -> Backend:
    if not isinstance(name, str) or name not in TABLE:
        raise ArgumentError.of(op, "backend", repr(name), "auto|" + "|".join(TABLE))
    return TABLE[name]


def call(
    family: str, op: str, inputs: tuple, outs: tuple = (), workspace: Any = None, backend: str | None = None
) -> tuple:
    """Run one op and return its outputs, in the kind of the first input.

    The native layer checks every argument and allocates missing outputs for all backends, so there is one set of checks
    and nothing is touched before they pass.
    """
    chosen = pick(op, inputs[0], backend)
    if torch.is_grad_enabled() and any(x.requires_grad for x in _tensors((*inputs, *outs))):
        raise ArgumentError.of(
            op,
            "inputs",
            "a tensor that requires grad",
            "tensors without (torch.no_grad(), or .detach()): the ops have no backward pass",
        )
    native = getattr(chosen.module(), op)
    code = chosen.code | SIZE if _SIZING.get() else chosen.code
    try:
        results = native(*inputs, *outs, workspace, code)
    except TypeError as error:
        if "incompatible function arguments" not in str(error):
            raise
        raise _wrong_kinds(family, op, inputs, native) from None
    results = results if type(results) is tuple else (results,)
    if not chosen.code:
        _run_python(family, op, chosen, inputs, results)
    if isinstance(inputs[0], torch.Tensor):
        return results
    return arrays.like(results, inputs[0])


def _tensors(arguments: tuple) -> Iterator[torch.Tensor]:
    """Those among the arguments, and in tuples among them."""
    for x in arguments:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, tuple):
            yield from _tensors(x)


_SIZING: contextvars.ContextVar[bool] = contextvars.ContextVar("sizing", default=False)


def workspace_bytes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """The bytes of `workspace` that `function(*args, **kwargs)`, a public op, needs. Checks its inputs, runs nothing."""
    token = _SIZING.set(True)
    try:
        function(*args, **kwargs)
    except WorkspaceSize as answer:
        return int(answer.args[0])
    finally:
        _SIZING.reset(token)
    return 0


def named_op(op: str, name: str, ops: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    """ops[name]; `ArgumentError` with the names that there are."""
    if not isinstance(name, str) or name not in ops:
        raise ArgumentError.of(op, "op", repr(name), "|".join(ops))
    return ops[name]


def _wrong_kinds(family: str, op: str, inputs: tuple, native: Any) -> ArgumentError:
    """Names the inputs of a kind that the native function does not take; its own message says only that nothing fits.

    Names come from the definition, which takes the same inputs.
    """
    definition = getattr(importlib.import_module(f"sic_kernels.{family}.reference"), op, None)
    names = list(inspect.signature(definition).parameters) if definition else []
    wrong = []
    for i, (value, kinds) in enumerate(zip(inputs, _number_kinds(native))):
        optional, real = "None" in kinds, "Float" in kinds
        if kinds and not (
            isinstance(value, numbers.Real if real else numbers.Integral) or (optional and value is None)
        ):
            want = ("a number" if real else "an integer") + (" or None" if optional else "")
            wrong.append((names[i] if i < len(names) else f"input {i}", type(value).__name__, want))
    if not wrong:  # of the right kind, but out of range for it
        return ArgumentError.of(op, "arguments", "a number out of range", "integers below 2^31, finite numbers")
    got = ", ".join(f"{name} {kind}" for name, kind, _ in wrong)
    return ArgumentError.of(op, "arguments", got, ", ".join(f"{name} {want}" for name, _, want in wrong))


def _number_kinds(native: Any) -> list[str]:
    """Of each argument of a native function: its type as the binding writes it if that is a number, else ""."""
    signature = (native.__doc__ or "").partition("(")[2].partition(")")[0]
    kinds = (part.partition(":")[2].strip() for part in signature.split(", "))
    return [kind if re.search("int|float|Int|Float", kind) else "" for kind in kinds]


def _run_python(family: str, op: str, backend: Backend, inputs: tuple, results: tuple) -> None:
    function = getattr(importlib.import_module(f"sic_kernels.{family}.{backend.file}"), op)
    for result in results:
        if arrays.has_negative_strides(result):
            raise ArgumentError.of(op, "out", "an array with negative strides", f"one that {backend.name} can write to")
    with arrays.stream_of(inputs[0]):
        into = tuple(arrays.as_torch(r) for r in results)
        args = tuple(arrays.as_torch(x) for x in inputs)
        if backend.in_place:
            function(*args, outs=into)
            return
        for target, value in zip(into, function(*args), strict=True):
            # Packed results may have room for more rows than there are.
            (target if target.shape == value.shape else target[: len(value)]).copy_(value)
