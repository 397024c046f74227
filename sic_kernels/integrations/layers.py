"""A causal model of transformers taken apart: embedding, one layer at a time over keys and values in arrays of ours, head.

Llama (SmolLM2, too), Mistral, Qwen 2 and Qwen 3: `model.model.layers[i]` takes hidden states, rotary embeddings, a mask and a
cache, and returns hidden states.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ..runtime.arguments import flag
from ..runtime.errors import ArgumentError

Tensor = torch.Tensor

TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
ROTARY = frozenset(
    {"default", "linear", "llama3", "yarn"}
)  # the others change with the longest row that the model has seen
PROBE = (3, 2)  # tokens of the chunks compared: a causal start and what a mask follows


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
    same shapes give the same bits. Raises `ArgumentError` for a model that is not built so: another `model_type` than in `TYPES`,
    attention other than "sdpa" or over a window, rotary embeddings with a memory, dropout.

    check: also run five tokens through the model and through its parts, which have to give equal bits; the price is some steps of
    the model. It changes neither the model nor torch's generators. False: for who did so before.
    """

    def __init__(self, model: Any, check: bool = True) -> None:
        inner: Any = getattr(model, "model", None)
        parts = all(hasattr(inner, name) for name in ("embed_tokens", "layers", "norm", "rotary_emb"))
        if not parts or not hasattr(model, "lm_head"):
            expected = "a causal model with model.embed_tokens, layers, norm, rotary_emb and lm_head, as Llama has"
            raise ArgumentError.of("LayeredModel", "model", type(model).__name__, expected)
        config = model.config
        _require_known(model)
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
        if flag("LayeredModel", "check", check) and not self._same_bits():
            expected = f"logits with the bits of its parts: embedding, {self.layers} layers, norm and head"
            raise ArgumentError.of(
                "LayeredModel", "model", f"{type(model).__name__}, which computes something else", expected
            )

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

    def check_ids(self, op: str, arg: str, ids: Tensor) -> None:
        """`ArgumentError` unless these ids of tokens [n], one or more, are in the vocabulary."""
        low, high = int(ids.min()), int(ids.max())
        if not 0 <= low <= high < self.vocab:
            got = low if low == high else f"{low} to {high}"
            raise ArgumentError.of(op, arg, got, f"ids from 0 to {self.vocab - 1}")

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

    @torch.inference_mode()
    def _same_bits(self) -> bool:
        """Whether the model's own forward gives what its parts give, in the same chunks."""
        from transformers.cache_utils import DynamicCache

        total = sum(PROBE)
        ids = torch.tensor([(7 * i + 3) % self.vocab for i in range(total)], device=self.device)
        kv = [torch.empty(self.kv_shape(total), dtype=self.dtype, device=self.device) for _ in range(self.layers)]
        cache, position = DynamicCache(config=self.config), 0
        for count in PROBE:
            chunk = ids[position : position + count]
            h = self.embed(chunk)
            for i in range(self.layers):
                h = self.layer(i, h, position, kv[i])
            # every row's logits: a matrix product over fewer rows may be rounded in another order
            whole = self.model(input_ids=chunk[None], cache=cache, use_cache=True, logits_to_keep=0).logits[0]
            if not torch.equal(whole, self.logits(h)):
                return False
            position += count
        return True

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


def _require_known(model: Any) -> None:
    """What the configuration already says: `ArgumentError` for what `LayeredModel` does not do."""
    config = model.config
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = {kind for kind in getattr(config, "layer_types", None) or () if kind is not None}
    rotary = getattr(model.model.rotary_emb, "rope_type", "default")
    dropout = getattr(config, "attention_dropout", 0.0) if model.training else 0.0
    for known, got, expected in (
        (config.model_type in TYPES, f"the model type {config.model_type!r}", "|".join(sorted(TYPES))),
        (config._attn_implementation == "sdpa", f"{config._attn_implementation!r} attention", "'sdpa' attention"),
        (kinds <= {"full_attention"}, f"layers of {sorted(kinds)}", "full attention in every layer"),
        (window is None, f"attention over a window of {window} tokens", "attention over all tokens"),
        (rotary in ROTARY, f"rotary embeddings of type {rotary!r}", "|".join(sorted(ROTARY))),
        (not dropout, f"a model in training, with a dropout of {dropout}", "model.eval()"),
    ):
        if not known:
            raise ArgumentError.of("LayeredModel", "model", got, expected)
