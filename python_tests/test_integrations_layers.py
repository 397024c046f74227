"""A model taken apart gives the model's own bits, or is refused."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="pip install 'sic_kernels[demo]'")

from sic_kernels.integrations.layers import LayeredModel  # noqa: E402
from sic_kernels.runtime.errors import ArgumentError  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def tiny(name, **options):
    """A random model of two layers."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.5, "pad_token_id": 0}  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**{**sizes, **options})
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def rope(kind, **options):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **options}}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Llama", {}),
        ("Mistral", {"sliding_window": None}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 16}),
        ("Llama", rope("linear", factor=2.0)),
        ("Llama", rope("yarn", factor=2.0, original_max_position_embeddings=32)),
        (
            "Llama",
            rope(
                "llama3",
                factor=2.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            ),
        ),
    ],
)
def test_known_models_pass_the_check(name, options):
    LayeredModel(tiny(name, **options))


@pytest.mark.parametrize(
    ("name", "options", "got"),
    [
        ("Llama", {"attn_implementation": "eager"}, "'eager' attention, expected 'sdpa' attention"),
        ("Mistral", {"sliding_window": 8}, "attention over a window of 8 tokens"),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "'sliding_attention'"),
        ("Granite", {"embedding_multiplier": 12.0}, r"the model type 'granite', expected llama\|mistral\|qwen2\|qwen3"),
        ("Cohere", {}, "the model type 'cohere'"),
        ("Llama", rope("dynamic", factor=2.0), "rotary embeddings of type 'dynamic'"),
        (
            "Llama",
            rope(
                "longrope",
                factor=2.0,
                short_factor=[1.0] * 8,
                long_factor=[2.0] * 8,
                original_max_position_embeddings=32,
            ),
            "rotary embeddings of type 'longrope'",
        ),
    ],
)
def test_other_models_are_refused(name, options, got):
    with pytest.raises(ArgumentError, match=f"^LayeredModel: model: got .*{got}"):
        LayeredModel(tiny(name, **options), check=False)


def test_dropout_is_refused():
    model = tiny("Llama", attention_dropout=0.5)
    LayeredModel(model)
    with pytest.raises(ArgumentError, match=r"a model in training, with a dropout of 0.5"):
        LayeredModel(model.train())


class Scaled(transformers.LlamaForCausalLM):
    """Says that it is a Llama, and has other logits."""

    def forward(self, *args, **options):
        out = super().forward(*args, **options)
        out.logits = out.logits * 1.001
        return out


def test_a_model_that_computes_something_else_is_refused():
    model = Scaled(tiny("Llama").config).eval()
    with pytest.raises(
        ArgumentError, match=r"^LayeredModel: model: got Scaled, which computes something else, expected"
    ):
        LayeredModel(model)
    LayeredModel(model, check=False)


@pytest.mark.parametrize("position", [0, 3])
def test_every_chunk_of_the_check_counts(position, monkeypatch):
    """A part that is wrong from one position on only."""
    layer = LayeredModel.layer
    monkeypatch.setattr(
        LayeredModel, "layer", lambda self, i, h, at, kv: layer(self, i, h, at, kv) * (1.5 if at == position else 1)
    )
    with pytest.raises(ArgumentError, match="computes something else"):
        LayeredModel(tiny("Llama"))


def test_the_check_leaves_no_trace():
    model = tiny("Llama")
    weights, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    LayeredModel(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert not any(p.grad is not None for p in model.parameters())
    with pytest.raises(ArgumentError, match="check: got int, expected"):
        LayeredModel(model, check=1)
