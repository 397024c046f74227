"""A small random Llama and what tests ask it; its fixtures are in conftest.py."""

import torch

from sic_kernels import slicing


def random_llama(kv_heads=2, layers=3, seed=0):
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=kv_heads, max_position_embeddings=1024, pad_token_id=0, bos_token_id=1, eos_token_id=None,
        initializer_range=0.5,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def policy(**options):
    return slicing.SlicePolicy(**{"min_len": 0, "max_omitted_mass": None, **options})


def prompt(batch=1, tokens=96, seed=1):
    return torch.randint(2, 160, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def padded(lengths, seed=1):
    """Left-padded ids and mask, and the rows alone."""
    width = max(lengths)
    ids, mask, rows = (
        torch.zeros(len(lengths), width, dtype=torch.long),
        torch.zeros(len(lengths), width, dtype=torch.long),
        [],
    )
    for i, n in enumerate(lengths):
        row = prompt(1, n, seed + i)
        ids[i, width - n :], mask[i, width - n :] = row, 1
        rows.append(row)
    return ids, mask, rows


def generate(model, ids, cache=None, steps=12, **options):
    with torch.inference_mode():
        return model.generate(ids, cache=cache, max_new_tokens=steps, do_sample=False, **options)
