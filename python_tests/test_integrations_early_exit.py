"""Self-speculative decoding: the tokens of the ordinary loop, and exactly the layers that the method needs."""

import math

import pytest
import torch

pytest.importorskip("transformers", reason="pip install 'sic_kernels[demo]'")

from tiny_llama import random_llama

from sic_kernels import replay
from sic_kernels.integrations.early_exit import generate_early_exit
from sic_kernels.integrations.slots import SlotRow
from sic_kernels.runtime.errors import ArgumentError

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = torch.tensor([(7 * i + 3) % 160 for i in range(40)])
LAYERS = 3


def ordinary(model, count, ids=IDS):
    row = SlotRow(model, replay.SlotStore(replay.MemoryPool(1 << 20)), capacity=len(ids) + count)
    return row.generate(row.prefill(ids), count)


@pytest.mark.parametrize("exit_layer", [1, 2])
@pytest.mark.parametrize("draft", [0, 1, 4])
def test_the_ordinary_tokens(plain, exit_layer, draft):
    found = generate_early_exit(plain, IDS, 48, exit_layer=exit_layer, draft=draft)
    assert found.tokens == ordinary(plain, 48)
    assert found.least_margin > 1e-4  # else the tokens might differ with good reason
    late = LAYERS - exit_layer
    assert found.layer_calls == exit_layer * (found.rounds + found.drafted) + late * found.rounds
    assert found.head_calls == found.drafted + found.rounds
    assert found.rounds + found.accepted == 47


def agreeable(layers=3):
    """The layers after the first add nothing: an early exit after it is always right."""
    model = random_llama(layers=layers)
    with torch.no_grad():
        for block in model.model.layers[1:]:
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
    return model


def test_a_draft_that_is_always_right():
    """By hand: 1 token from the prompt, then rounds of 4: 20 tokens in 5 rounds of 4 x 1 + 2 layers."""
    model = agreeable()
    found = generate_early_exit(model, IDS, 21, exit_layer=1, draft=3)
    assert found.tokens == ordinary(model, 21)
    assert (found.rounds, found.drafted, found.accepted, found.acceptance) == (5, 15, 15, 1.0)
    assert found.layers_per_token == 5 * (4 + 2) / 20
    assert found.heads_per_token == 5 * (3 + 1) / 20


def test_states_of_rejected_tokens_leave_the_store(plain):
    store = replay.SlotStore(replay.MemoryPool(1 << 20))
    found = generate_early_exit(plain, IDS, 48, exit_layer=1, draft=4, store=store)
    assert 0 < found.accepted < found.drafted
    assert len(store) == 47  # of all tokens that were run and stayed
    assert store.stats().pinned == 0


def test_drafting_ends_where_the_exit_is_unsure(plain):
    never = generate_early_exit(plain, IDS, 12, exit_layer=2, min_confidence=1.0)
    assert (never.drafted, never.rounds, never.layers_per_token) == (0, 11, LAYERS)
    assert math.isnan(never.acceptance)
    some = generate_early_exit(plain, IDS, 12, exit_layer=2, min_confidence=0.3)
    every = generate_early_exit(plain, IDS, 12, exit_layer=2)
    assert some.tokens == every.tokens == never.tokens
    assert 0 <= some.drafted < every.drafted


def test_an_end_of_text(plain):
    whole = generate_early_exit(plain, IDS, 20, exit_layer=1).tokens
    end = whole[7]
    found = generate_early_exit(plain, IDS, 20, exit_layer=1, eos_ids=[end])
    assert found.tokens == whole[: whole.index(end) + 1]
    first = generate_early_exit(plain, IDS, 20, exit_layer=1, eos_ids=[whole[0]])
    assert first.tokens == whole[:1]
    assert math.isnan(first.layers_per_token)
    assert math.isnan(first.heads_per_token)


def test_equal_calls_give_equal_results(plain):
    assert generate_early_exit(plain, IDS, 16, exit_layer=2) == generate_early_exit(plain, IDS, 16, exit_layer=2)


def test_states_of_accepted_tokens_are_those_of_the_ordinary_loop(plain):
    """Layers before the exit see each token alone, as a step does: their states are the same bits, under the same key."""
    store = replay.SlotStore(replay.MemoryPool(1 << 20))
    generate_early_exit(plain, IDS, 10, exit_layer=2, store=store)
    row = SlotRow(plain, replay.SlotStore(replay.MemoryPool(1 << 20)), capacity=50, keep=[2])
    row.generate(row.prefill(IDS), 10)
    for span in row.spans[-9:]:
        ours, theirs = (s.get(row.fingerprint, span.digest, 2) for s in (store, row.store))
        assert ours.exact
        assert torch.equal(ours.tensor, theirs.tensor)


def test_a_store_that_is_too_small_keeps_nothing_pinned(plain):
    pool = replay.MemoryPool(512, parts=("boundary",), weights=(1,))
    store = replay.SlotStore(pool)
    with pytest.raises(replay.PoolExhausted):
        generate_early_exit(plain, IDS, 10, exit_layer=1, draft=4, store=store)
    assert store.stats().pinned == 0
    assert generate_early_exit(plain, IDS, 10, exit_layer=1, draft=1, store=store).tokens == ordinary(plain, 10)


def test_bad_arguments(plain):
    for options, message in [
        ({"exit_layer": 0}, "exit_layer: got 0, expected 1 to 2"),
        ({"exit_layer": 3}, "exit_layer: got 3, expected 1 to 2"),
        ({"exit_layer": 1, "draft": -1}, "draft: got -1"),
        ({"exit_layer": 1, "min_confidence": 1.5}, "min_confidence: got 1.5"),
        ({"exit_layer": 1, "store": 7}, "store: got int"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            generate_early_exit(plain, IDS, 4, **options)
    with pytest.raises(ArgumentError, match="count: got 0"):
        generate_early_exit(plain, IDS, 0, exit_layer=1)
    with pytest.raises(ArgumentError, match="ids: got int64"):
        generate_early_exit(plain, IDS[None], 4, exit_layer=1)
    with pytest.raises(ArgumentError, match="model: got Linear"):
        generate_early_exit(torch.nn.Linear(2, 2), IDS, 4, exit_layer=1)
