"""What the slicing tests share: backends to try, and running a case into guarded outputs."""

import pytest
import torch

from sic_kernels.slicing.cases import Case, attention_inputs
from sic_kernels.testing import PagedCache, run, run_guarded
from sic_kernels.testing import compare as compare

NATIVE = ["cpu", "simt"]  # compared with the reference
EVERY = ["ref", *NATIVE]  # compared with golden values and independent formulas

every_backend = pytest.mark.parametrize("backend", EVERY)
native_backend = pytest.mark.parametrize("backend", NATIVE)


def by_case(cases):
    """Parametrise over cases, with their names as test ids."""
    return pytest.mark.parametrize("case", cases, ids=str)


def thinned(items, backend, every):
    """All items; on the emulator every `every`-th (choose one that shares no factor with the grid's sides)."""
    return list(items)[:: every if backend == "simt" else 1]


def check_case(case: Case, backend: str, inputs=None) -> None:
    """The case's op against its definition, into guarded outputs."""
    inputs = case.inputs() if inputs is None else inputs
    want = case.expected(inputs)
    outs = run_guarded(case.op, inputs, backend, want)
    case.compare([g.tensor for g in outs], want)


def contiguous_cache(k, v, lens) -> PagedCache:
    """k [B,Hkv,S,Dk], v [B,Hkv,S,Dv] as a cache without a block table."""
    return PagedCache(k, v, None, torch.as_tensor(lens, dtype=torch.int32), k, v)


def attention(backend, q, cache, selection=None, unit=0, **extra):
    """out, lse of sliced_attention."""
    return run("sliced_attention", attention_inputs(q, cache, selection, unit, **extra), backend)


def listing(rows, B=1, T=1, H=1):
    """Selection (indices, counts) from one list of units per (b, t, h), in order."""
    K = max([1, *(len(r) for r in rows)])
    indices = torch.tensor([list(r) + [-1] * (K - len(r)) for r in rows], dtype=torch.int32).reshape(B, T, H, K)
    counts = torch.tensor([len(r) for r in rows], dtype=torch.int32).reshape(B, T, H)
    return indices, counts


def chosen_lists(result):
    """The chosen units of each row, from (indices, counts); checks ascending order and the -1 padding."""
    indices, counts = result
    rows = []
    for row, count in zip(indices.flatten(0, -2).tolist(), counts.flatten().tolist()):
        assert row[:count] == sorted(set(row[:count])), f"not ascending and unique: {row[:count]}"
        assert row[count:] == [-1] * (len(row) - count), f"not padded with -1 after {count}: {row}"
        assert all(i >= 0 for i in row[:count]), row[:count]
        rows.append(row[:count])
    return rows
