"""The delta kernels of Triton against the definition, called as the backend calls them.  Run by triton_small.py."""

import pytest
import torch

from sic_kernels.delta import cases, reference_encode, triton_kernels
from sic_kernels.delta.triton_encode import ITEMS, settle_kernel
from sic_kernels.testing import assert_same_bits, generator, guarded_like, leaves, randn

SIZES = {"n": 64, "lens": 400}  # rows of a case at most


def some(name, step, first=0):
    """Every step-th case of a grid that the interpreter can manage, by name."""
    grid = [c for c in cases.grid(name) if rows_of(c) <= SIZES["n" if "n" in c.shape else "lens"]]
    return pytest.mark.parametrize("case", grid[first::step], ids=str)


def rows_of(case):
    return case.shape["n"] if "n" in case.shape else sum(map(int, case.shape["lens"].split("_")))


def check(case, inputs=None):
    """The case's op against its definition: in guarded outputs or in place, every other input untouched."""
    inputs = case.inputs() if inputs is None else inputs
    want = case.expected(inputs)
    before = [x.clone() for x in leaves(inputs)]
    changed = set()
    if case.op == "delta_encode":
        triton_kernels.delta_encode(*inputs, outs=())
        case.compare(cases.written(inputs), want)
        changed = {x.data_ptr() for x in cases.written(inputs)}
    else:
        outs = guarded_like(want)
        getattr(triton_kernels, case.op)(*inputs, outs=tuple(g.tensor for g in outs))
        for g in outs:
            g.assert_guards(str(case))
        case.compare([g.tensor for g in outs], want)
    for x, old in zip(leaves(inputs), before):
        if x.data_ptr() not in changed:
            assert_same_bits(x.contiguous(), old.contiguous(), f"{case}: an input")


@some("pack", 41)
def test_pack_grid(case):
    check(case)


@some("odd", 5)
def test_odd_grid(case):
    check(case)


@some("edge", 6)
def test_edge_grid(case):
    check(case)


@some("decode", 8)
def test_decode_grid(case):
    check(case)


@some("attention", 10)
def test_attention_grid(case):
    check(case)


# --- the raw table --------------------------------------------------------------------------------------------------


def settled(need, entries, slots, owner, heads):
    """What settle_kernel makes of rows: entries i32[N,H], owner, state."""
    owner, state, given = owner.clone(), torch.tensor([int((owner >= 0).sum()), 5], dtype=torch.int32), entries.clone()
    misfits = torch.stack((need, torch.zeros_like(need))).to(torch.uint8)
    free = torch.empty(ITEMS, dtype=torch.int32)
    settle_kernel[(1,)](slots, given, *misfits, owner, 1, state, 1, free, len(slots), heads, len(owner), ITEMS=ITEMS)
    return given, owner, state


@pytest.mark.parametrize("frees", [False, True])
@pytest.mark.parametrize("room", [0, 40, 900, 2000])
def test_entries_are_handed_out_in_order(room, frees):
    """1500 rows of 2 heads over several blocks: some have an entry and keep or free it, some need one."""
    gen, N, H = generator(room), 1500, 2
    slots = torch.randperm(4000, generator=gen)[:N]
    need = torch.rand(N, H, generator=gen) < 0.3
    owner = torch.full((room,), -1, dtype=torch.int64)
    items = torch.randperm(N * H, generator=gen)[: room // 2]
    owner[torch.randperm(room, generator=gen)[: len(items)]] = slots[items // H] * H + items % H
    place = {o: e for e, o in enumerate(owner.tolist()) if o >= 0}
    entries = torch.tensor(
        [[place.get(slot * H + h, -1) for h in range(H)] for slot in slots.tolist()], dtype=torch.int32
    )
    if not frees:
        need |= entries >= 0
    want_owner, want_state = owner.clone(), torch.tensor([0, 5], dtype=torch.int32)
    want = reference_encode.place_raw(need, slots, want_owner, want_state)
    got, got_owner, got_state = settled(need, entries, slots, owner, H)
    assert torch.equal(got.long(), want)
    assert torch.equal(got_owner, want_owner)
    assert torch.equal(got_state, want_state)


def test_a_copied_page_does_not_free_what_it_names():
    """A raw row whose entry belongs to another slot: the entry stays with its owner."""
    setting = cases.Setting(raw_rows=30, escape=-torch.inf)
    inputs = cases.encode_case(setting, 16, slots="ordered").inputs()
    triton_kernels.delta_encode(*inputs)
    k_codes, _, tags, *_, owner, _ = inputs[6]
    k_codes[1], tags[1] = k_codes[0], tags[0]
    before = owner.clone()
    fitting = (*inputs[:3], inputs[3] + 16, *inputs[4:])
    for templates in fitting[4][3:5]:
        templates[5].fill_(torch.inf)
    triton_kernels.delta_encode(*fitting[:5], 0, *fitting[6:])
    assert torch.equal(owner, before)


# --- determinism ----------------------------------------------------------------------------------------------------


def test_a_row_does_not_depend_on_its_batch():
    """A row alone equals the same row beside a longer one, and again."""
    gen = generator(5)
    setting = cases.Setting(rope="full")
    cache = cases.coded_cache(gen, setting, [300, 40])
    q = randn(gen, 2, 1, 4, 64, dtype=torch.bfloat16)
    inputs = cases.attention_inputs(q, cache)
    together = triton_kernels.delta_attention(*inputs)
    for row in (slice(0, 1), slice(1, 2)):
        alone = (q[row], *inputs[1:3], cache.block_table[row], cache.seq_lens[row], *inputs[5:])
        for a, b in zip(together, triton_kernels.delta_attention(*alone)):
            assert_same_bits(a[row].contiguous(), b)
    for a, b in zip(together, triton_kernels.delta_attention(*inputs)):
        assert_same_bits(a, b, "again")


def test_a_full_selection_is_dense():
    """Bit for bit, over tokens and over pages."""
    gen = generator(6)
    cache = cases.coded_cache(gen, cases.Setting(rope="full"), [70])
    q = randn(gen, 1, 1, 4, 64)
    dense = triton_kernels.delta_attention(*cases.attention_inputs(q, cache))
    for unit, number in ((cases.TOKEN, 70), (cases.PAGE, 5)):
        indices = torch.arange(number, dtype=torch.int32).expand(1, 1, 2, number)
        counts = torch.full((1, 1, 2), number, dtype=torch.int32)
        chosen = triton_kernels.delta_attention(*cases.attention_inputs(q, cache, (indices, counts), unit))
        for a, b in zip(dense, chosen):
            assert_same_bits(a, b)


def test_outputs_are_made_where_none_are_given():
    cache = cases.example()
    k, v = triton_kernels.delta_decode(*cases.decode_inputs(cache))
    assert k.shape == (*cache.k.shape[:2], 2, 32)
    assert v.shape == k.shape
