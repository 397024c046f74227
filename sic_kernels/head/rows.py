"""Rows that the caller names: numbers, or a mask."""

from __future__ import annotations

import numbers
from typing import Any

import torch

from ..runtime.arguments import described, integer, is_dense
from ..runtime.arrays import as_torch
from ..runtime.errors import ArgumentError

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def row_numbers(op: str, rows: Any, batch: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """i64[n] on the device, of a list or an array of them. `ArgumentError` unless all are from 0 to batch - 1,
    as far as the host can read them without waiting.
    """
    expected = f"rows from 0 to {batch - 1}"
    if isinstance(rows, (list, tuple, range)):
        given: Any = torch.tensor([integer(op, "rows", row, 0, expected) for row in rows], dtype=torch.int64)
    else:
        given = as_torch(rows)
    if not is_dense(given) or given.dtype not in _INTEGERS or given.ndim != 1:
        raise ArgumentError.of(op, "rows", described(given), expected)
    if given.device.type == "cpu":
        outside = given[(given < 0) | (given >= batch)]
        if len(outside):
            raise ArgumentError.of(op, "rows", int(outside[0]), expected)
    return given.to(device, torch.int64)


def chosen_rows(op: str, rows: Any, batch: int, device: torch.device | str) -> Any:
    """What selects the rows of a tensor: None is all of them, else `row_numbers`, or a mask bool[batch]."""
    if rows is None:
        return slice(None)
    if isinstance(rows, numbers.Integral):
        rows = [rows]
    mask = as_torch(rows)
    if isinstance(rows, (list, tuple)) and len(rows) == batch and all(isinstance(row, bool) for row in rows):
        mask = torch.tensor(rows)
    if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.shape == (batch,):
        return mask.to(device)
    return row_numbers(op, rows, batch, device)
