"""Prompt lookup gives what plain greedy decoding gives, whatever is proposed and however much of it is verified."""

import pytest
import torch

pytest.importorskip("transformers", reason="pip install 'sic_kernels[demo]'")

from tiny_llama import generate, policy, prompt, random_llama

from sic_kernels.integrations import lookup
from sic_kernels.integrations.transformers import SlicedCache, enable
from sic_kernels.runtime.errors import ArgumentError


@pytest.fixture(scope="module")
def model():
    return random_llama()


def looping(seed):
    """A prompt that repeats itself, so that there is something to propose."""
    return prompt(1, 12, seed).repeat(1, 4)


@pytest.mark.parametrize("cost", [None, 0.0, 0.1, 1.0])
@pytest.mark.parametrize("seed", range(2))
def test_output_is_that_of_plain_greedy(model, seed, cost):
    ids = looping(seed)
    wanted = generate(model, ids, steps=60)[0, ids.shape[1] :].tolist()
    found = lookup.generate(model, ids, 60, cost=cost)
    assert found.tokens == wanted
    assert len(found.entropy) == 60
    assert found.forwards + found.accepted == 59  # the prompt's own forward gives a token, too
    assert found.accepted <= found.verified


def test_entropies_are_those_of_plain_decoding(model):
    ids = looping(0)
    plain, found = (lookup.generate(model, ids, 40, most=most) for most in (0, 8))
    assert plain.verified == 0
    assert plain.forwards_per_token == 39 / 40
    assert found.verified > 0
    torch.testing.assert_close(torch.tensor(found.entropy), torch.tensor(plain.entropy), atol=1e-3, rtol=1e-3)


def test_an_accepting_model_saves_forwards(model):
    """Once greedy decoding is in a loop, whole proposals are accepted."""
    ids = looping(1)
    ids = torch.cat((ids, torch.tensor([lookup.generate(model, ids, 80).tokens])), 1)
    found = lookup.generate(model, ids, 50)
    if found.accepted:  # a random model need not loop
        assert found.forwards < 49


@pytest.mark.parametrize("most", [0, 6])
def test_a_stop_token_ends_it_and_is_the_last(model, most):
    ids = looping(2)
    tokens = lookup.generate(model, ids, 30, most=most).tokens
    stop = tokens[17]
    found = lookup.generate(model, ids, 30, most=most, eos_ids=[stop])
    assert found.tokens == tokens[: tokens.index(stop) + 1]
    assert len(found.entropy) == len(found.tokens)


def test_on_a_sliced_cache(model):
    ids = looping(3)
    wanted = lookup.generate(model, ids, 24, most=0).tokens
    try:
        enable(model)
        cache = SlicedCache(model.config, policy(ratio=1.0))  # all is read
        assert lookup.generate(model, ids, 24, cost=0.1, cache=cache).tokens == wanted
    finally:
        model.set_attn_implementation("sdpa")


def test_proposals_by_hand():
    drafter = lookup.Drafter(longest=2, most=3)
    drafter.extend([1, 2, 3, 4, 9, 2, 3])
    assert drafter.propose(0.0, 10) == [4, 9, 2]  # after 2 3
    assert drafter.matched == 2
    assert drafter.propose(0.0, 1) == [4]
    drafter.extend([7, 3])
    assert drafter.propose(0.0, 10) == [7, 3]  # the latest 3, at which only the 1-gram matches
    assert drafter.matched == 1
    drafter.extend([100])
    assert drafter.propose(0.0, 10) == []


def test_the_budget_learns_by_hand():
    """One of two is accepted before anything is known; then what was seen counts, per length of match and entropy."""
    drafter = lookup.Drafter(most=4, cost=0.1)
    drafter.extend([5, 6, 7, 8, 9, 5])
    assert len(drafter.propose(0.0, 9)) == 2  # 1, 1.5/1.1, 1.75/1.2, 1.875/1.3: the third is the best
    for _ in range(20):
        drafter.judged(4, 4)
    assert drafter.propose(0.0, 9) == [6, 7, 8, 9]
    assert len(drafter.propose(2.0, 9)) == 2  # another class of entropy knows nothing of it
    for _ in range(20):
        drafter.judged(0, 2)
    assert drafter.propose(2.0, 9) == []


def test_errors(model):
    with pytest.raises(ArgumentError, match=r"lookup\.generate: ids: got"):
        lookup.generate(model, prompt(2), 4)
    with pytest.raises(ArgumentError, match="max_new_tokens"):
        lookup.generate(model, prompt(), 0)
    with pytest.raises(ArgumentError, match="Drafter: longest"):
        lookup.Drafter(longest=0)
    with pytest.raises(ArgumentError, match="Drafter: cost"):
        lookup.generate(model, looping(0), 20, cost=-1.0)
