"""A decode loop of one's own: a language model's layers by hand, the KV cache and attention from sic_kernels.

    python examples/custom_runner.py

The model is SmolLM2-135M-Instruct (`make demo` sets it up). Nothing of transformers' caches or attention is used: each
layer projects, rotates, appends to a `SlicedKVCache` and calls `attend`, which reads 12 % of the tokens.
"""

import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import sic_kernels as sic
from sic_kernels.models import load, text


def layer_step(layer, i, x, rope, cache, policy):
    """One decoder layer for the new tokens x [1,T,hidden]."""
    att = layer.self_attn
    h = layer.input_layernorm(x)
    q, k, v = (p(h).unflatten(-1, (-1, att.head_dim)).transpose(1, 2) for p in (att.q_proj, att.k_proj, att.v_proj))
    q, k = apply_rotary_pos_emb(q, k, *rope)
    cache.append(i, k, v)
    k_cache, v_cache, index, block_table, seq_lens = cache.tensors(i)
    q = q.transpose(1, 2)
    if index is None:
        out, _ = sic.slicing.sliced_attention(q, k_cache, v_cache, block_table, seq_lens)
    else:
        out = sic.slicing.attend(q, k_cache, v_cache, index, block_table, seq_lens, policy=policy, layer=i).out
    x = x + att.o_proj(out.flatten(2))
    return x + layer.mlp(layer.post_attention_layernorm(x))


@torch.no_grad()
def main(context=1024, steps=48):
    lm = load()
    body, config = lm.model.model, lm.model.config
    cache = sic.slicing.SlicedKVCache(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    policy = sic.slicing.SlicePolicy(ratio=0.12)
    ids, written = lm.tokens(text("hamlet"), context, skip=1000), []
    for _ in range(steps):
        x, seen = body.embed_tokens(ids), cache.lengths[0]
        rope = body.rotary_emb(x, torch.arange(seen, seen + ids.shape[1])[None])
        for i, layer in enumerate(body.layers):
            x = layer_step(layer, i, x, rope, cache, policy)
        ids = lm.model.lm_head(body.norm(x[:, -1:])).argmax(-1)
        written.append(int(ids))
    print(lm.tokenizer.decode(written))


if __name__ == "__main__":
    main()
