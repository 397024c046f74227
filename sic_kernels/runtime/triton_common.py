"""What Triton kernels of every family share: number formats, exact rounding, maxima, matrix products, launch arguments.

Three rules hold in all of them:

* bf16 and f8 travel as integers and are decoded by shifts.  Compiled code does the same shifts for bf16 anyway, and
  Triton's interpreter rounds and multiplies these types wrongly.
* Where the contract promises equal bits, a kernel is launched with `EXACT`: no multiplication is fused with an addition.
  Division is `tl.div_rn`; rounding to integers is `round_even`.
* Sums whose order matters are written out; `tl.sum` is for integers, and for results that have a tolerance.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)
EXACT = {"enable_fp_fusion": False}

# A function that kernels call.  The interpreter runs plain Python as well, ten times faster than its own nested calls.
device: Any = (lambda function: function) if INTERPRETED else triton.jit

# Storage kinds of numbers.
F32, F16, BF16, F8, I16 = (tl.constexpr(i) for i in range(5))
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float8_e4m3fn: 3, torch.int16: 4}

INF = tl.constexpr(float("inf"))
LOG2E = tl.constexpr(math.log2(math.e))
# Adding and taking away 1.5 * 2^23 leaves the nearest integer, ties to even, of anything below 2^22.
MAGIC = tl.constexpr(12582912.0)


# --- launch arguments -----------------------------------------------------------------------------------------------


def kind(x: torch.Tensor) -> int:
    """Storage kind of a tensor, as the kernels know it."""
    return _KINDS[x.dtype]


def raw(x: torch.Tensor) -> torch.Tensor:
    """The tensor as kernels take it: bf16 and f8 as integers over the same memory."""
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16)
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def power(n: int, least: int = 1) -> int:
    """The smallest power of two that is n or more, and `least` or more."""
    return max(least, 1 << max(0, n - 1).bit_length())


def product_kind(*tensors: torch.Tensor) -> int:
    """Kind of the operands of a matrix product: the common 16-bit type of the tensors (f8 adapts), else f32.

    Triton's interpreter multiplies 16-bit types wrongly or slowly, so there it is f32.
    """
    kinds = {kind(x) for x in tensors} - {3}
    return kinds.pop() if len(kinds) == 1 and not INTERPRETED else 0


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def f64_bits(x: float) -> int:
    """A float64 as the integer of the same bits: numbers given to a kernel would be rounded to f32."""
    return struct.unpack("q", struct.pack("d", x))[0]


def scale_args(scale: Any) -> tuple[Any, int, int]:
    """A scale as (value or tensor, stride, mode): mode 0 none, 1 a number, 2 a tensor."""
    if scale is None:
        return 1.0, 0, 0
    if not isinstance(scale, torch.Tensor):
        return float(scale), 0, 1
    flat = scale.reshape(-1)
    return flat, 0 if flat.numel() == 1 else flat.stride(0), 2


# --- maxima that keep a NaN -----------------------------------------------------------------------------------------


@device
def larger(a, b):
    """The larger of two; NaN if either is."""
    return tl.where((a > b) | (a != a), a, b)


@device
def largest(x, AXIS: tl.constexpr):
    """The maximum along an axis; NaN if any is."""
    nan = tl.max((x != x).to(tl.int32), axis=AXIS)
    return tl.where(nan > 0, float("nan"), tl.max(x, axis=AXIS))


# --- numbers --------------------------------------------------------------------------------------------------------


@device
def to_f32(x, KIND: tl.constexpr):
    """Stored numbers as f32, exactly."""
    if KIND == BF16:
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif KIND == F8:
        return f8_to_f16(x).to(tl.float32)
    else:
        return x.to(tl.float32)


@device
def f8_to_f16(x):
    """e4m3 bytes as f16, exactly: the fields moved to f16's places are the value / 256, subnormals included."""
    u = x.to(tl.int32)
    half = ((u & 0x7F) << 7 | (u & 0x80) << 8).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.where((u & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0).to(tl.float16)


@device
def round_bf16(x):
    """f32 rounded to bf16, ties to even, as int16."""
    u = x.to(tl.uint32, bitcast=True)
    near = (u + 0x7FFF + ((u >> 16) & 1)) >> 16
    return tl.where(x == x, near, 0x7FC0).to(tl.uint16).to(tl.int16, bitcast=True)


@device
def round_f8(x):
    """f32 rounded to e4m3, ties to even, as uint8; saturates at 448."""
    size = tl.minimum(tl.abs(x), 448.0)
    u = size.to(tl.uint32, bitcast=True)
    normal = ((u + 0x7FFFF + ((u >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    small = ((size * 512.0 + MAGIC) - MAGIC).to(tl.uint32)  # below 2^-6 the steps are 2^-9
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(x == x, code, 0x7F)
    return (code | ((x.to(tl.uint32, bitcast=True) >> 31) << 7)).to(tl.uint8)


@device
def from_f32(x, KIND: tl.constexpr):
    """f32 as stored: rounded to nearest, ties to even."""
    if KIND == BF16:
        return round_bf16(x)
    elif KIND == F16:
        return x.to(tl.float16)
    elif KIND == F8:
        return round_f8(x)
    else:
        return x


@device
def operand(x, KIND: tl.constexpr, INTO: tl.constexpr):
    """Stored numbers as an operand of a matrix product of kind INTO (F32, F16, BF16)."""
    if INTO == F32:
        return to_f32(x, KIND)
    elif INTO == F16:
        if KIND == F8:
            return f8_to_f16(x)
        else:
            return x
    else:
        if KIND == F8:
            return f8_to_f16(x).to(tl.bfloat16)
        else:
            return x.to(tl.bfloat16, bitcast=True)


@device
def weight_operand(p, INTO: tl.constexpr):
    """Softmax weights f32 as an operand of a matrix product of kind INTO."""
    if INTO == F16:
        return p.to(tl.float16)
    elif INTO == BF16:
        return p.to(tl.bfloat16)
    else:
        return p


if INTERPRETED:

    def product(a, b):
        """a [M,K] times b [K,N] in f32.  A matrix product of NumPy's gives a row other bits at another place."""
        return tl.sum(a[:, :, None] * b[None, :, :], axis=1)

else:

    @triton.jit
    def product(a, b):
        """a [M,K] times b [K,N], accumulated in f32."""
        return tl.dot(a, b, input_precision="ieee")


@device
def round_even(x):
    """The nearest integer of |x| < 2^22 as f32, ties to even."""
    return (x + MAGIC) - MAGIC


@device
def scale_at(scale, scale_step, i, MODE: tl.constexpr):
    """f32 scale i, given as a number (mode 1) or a tensor (mode 2)."""
    if MODE == 2:
        return tl.load(scale + i * scale_step).to(tl.float32)
    else:
        return scale
