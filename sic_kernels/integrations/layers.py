"""A causal model of transformers taken apart: embedding, one layer at a time over keys and values in arrays of ours, head.

Llama and what is built like it (Mistral, Qwen 2 and 3, SmolLM2, ...): `model.model.layers[i]` takes hidden states, rotary
embeddings, a mask and a cache, and returns hidden states.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ..runtime.errors import ArgumentError

Tensor = torch.Tensor


class RowCache:
    """What a layer believes to be its cache: new keys and values go to their positions, the rows up to them come back."""

    def __init__(self, kv: Tensor, position: int) -> None:
        self.kv, self.position = kv, position

    def update(self, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        end = self.position + k.shape[2]
        self.kv[0, :, self.position : end] = k[0]
        self.kv[1, :, self.position : end] = v[0]
        return self.kv[0:1, :, :end], self.kv[1:2, :, :end]


class LayeredModel:
    """One row of tokens, float32 or what the model has. kv of a layer: [2,Hkv,capacity,head_dim].

    A layer's result depends on its hidden states, its position and the rows of kv before it, and on nothing else: calls with the
    same shapes give the same bits. Raises `ArgumentError` for a model that is not built so.
    """

    def __init__(self, model: Any) -> None:
        inner: Any = getattr(model, "model", None)
        parts = all(hasattr(inner, name) for name in ("embed_tokens", "layers", "norm", "rotary_emb"))
        if not parts or not hasattr(model, "lm_head"):
            expected = "a causal model with model.embed_tokens, layers, norm, rotary_emb and lm_head, as Llama has"
            raise ArgumentError.of("LayeredModel", "model", type(model).__name__, expected)
        config = model.config
        if any(kind not in ("full_attention", None) for kind in getattr(config, "layer_types", None) or ()):
            raise ArgumentError.of(
                "LayeredModel", "model", f"layers of {set(config.layer_types)}", "full attention in every layer"
            )
        self.model, self.inner, self.config = model, inner, config
        self.layers, self.hidden = config.num_hidden_layers, config.hidden_size
        self.kv_heads = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.vocab, self.dtype, self.device = (
            config.vocab_size,
            inner.embed_tokens.weight.dtype,
            inner.embed_tokens.weight.device,
        )
        self._rotary: tuple[Any, Any] = (None, None)

    @property
    def state_bytes(self) -> int:
        """Of a hidden state of one token."""
        return self.hidden * self.dtype.itemsize

    @property
    def kv_bytes(self) -> int:
        """Of the keys and values of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    def kv_shape(self, capacity: int) -> tuple[int, int, int, int]:
        return 2, self.kv_heads, capacity, self.head_dim

    @torch.inference_mode()
    def embed(self, ids: Tensor) -> Tensor:
        """int64 [T] -> hidden states [T,D]."""
        return self.inner.embed_tokens(ids)

    @torch.inference_mode()
    def layer(self, number: int, h: Tensor, position: int, kv: Tensor) -> Tensor:
        """Hidden states [T,D] of the tokens at `position` .. before and after the layer; their keys and values go into kv."""
        end = position + h.shape[0]
        cos_sin, mask = self._at(position, end, h)
        layer, cache = self.inner.layers[number], RowCache(kv, position)
        return layer(h[None], attention_mask=mask, position_embeddings=cos_sin, cache=cache, use_cache=True)[0]

    @torch.inference_mode()
    def keys_values(self, number: int, h: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Keys and values [Hkv,T,head_dim] that a layer writes for hidden states [T,D] of the tokens at `position` ..

        The bits of `layer` over the same chunk, at the price of its norm and two projections. Raises `ArgumentError` for
        attention that has more to it.
        """
        block = self.inner.layers[number]
        attention = self._plain_attention(block)
        x, per_head = block.input_layernorm(h[None]), (1, len(h), self.kv_heads, self.head_dim)
        k, v = attention.k_proj(x).view(per_head), attention.v_proj(x).view(per_head)
        if hasattr(attention, "k_norm"):
            k = attention.k_norm(k)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        (cos, sin), _ = self._at(position, position + len(h), h)
        # the model's own function, of queries and keys: there are no queries
        rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb
        return rotate(k[:, :0], k, cos, sin)[1][0], v[0]

    def _plain_attention(self, block: Any) -> Any:
        attention = block.self_attn
        found = {name for name, _ in attention.named_children()}
        norm = getattr(attention, "k_norm", None)
        by_head = norm is None or getattr(norm, "weight", torch.empty(0)).shape == (self.head_dim,)
        known = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
        if not {"k_proj", "v_proj"} <= found <= known or not by_head or not hasattr(block, "input_layernorm"):
            expected = "input_layernorm, k_proj, v_proj and at most a k_norm for each head, as Llama and Qwen 3 have"
            raise ArgumentError.of("LayeredModel.keys_values", "model", f"attention of {sorted(found)}", expected)
        return attention

    @torch.inference_mode()
    def logits(self, h: Tensor) -> Tensor:
        """Hidden states after the last layer [T,D] -> logits [T,V]."""
        return self.model.lm_head(self.inner.norm(h))

    def _at(self, position: int, end: int, h: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
        """Rotary embeddings and mask of a chunk, made by its first layer."""
        key = (position, end, h.dtype)
        if self._rotary[0] != key:
            ids = torch.arange(position, end, device=h.device)[None]
            mask = None
            if position and end - position > 1:
                mask = torch.ones(end - position, end, dtype=torch.bool, device=h.device).tril_(position)[None, None]
            self._rotary = key, (self.inner.rotary_emb(h[None], position_ids=ids), mask)
        return self._rotary[1]
