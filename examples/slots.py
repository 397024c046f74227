"""What a kept hidden state is good for: the last token drawn again, self-speculative decoding, keys and values restored.

    python examples/slots.py

The model is SmolLM2-135M-Instruct (`make demo` sets it up). docs/slots.md has the conditions, and what it saves.
"""

import torch

import sic_kernels as sic
from sic_kernels.integrations.early_exit import generate_early_exit
from sic_kernels.integrations.slots import SlotRow, evict_kv, resample, restore_kv
from sic_kernels.models import load, text


@torch.no_grad()
def main(tokens=250, steps=24, layer=25):
    lm = load()
    ids = lm.tokens(text("hamlet"), tokens)[0]
    store = sic.replay.SlotStore(sic.replay.MemoryPool(64 << 20))
    row = SlotRow(lm.model, store, capacity=tokens + steps, keep=[layer])
    logits = row.prefill(ids)

    again = resample(row, layer)
    assert torch.equal(again.logits, logits)
    drawn = [lm.tokenizer.decode(resample(row, layer, temperature=1.0, seed=seed).token) for seed in range(5)]
    print(f"the last token drawn five times, {again.layers} of {row.model.layers} layers each: {drawn}")

    before = row.kv[layer].clone()
    freed = evict_kv(row, layer)
    restore_kv(row, layer)
    assert torch.equal(row.kv[layer][:, :, :tokens], before[:, :, :tokens])
    print(
        f"keys and values of layer {layer}: {freed / 1e6:.1f} MB given up and computed again from the states, the same bits"
    )

    plain = row.generate(logits, steps)
    found = generate_early_exit(lm.model, ids, steps, exit_layer=layer, draft=4, min_confidence=0.9)
    assert found.tokens == plain
    print(
        f"drafted by {layer} layers, the same text: {found.layers_per_token:.1f} layers a token in place of {found.layers}, "
        f"{found.accepted} of {found.drafted} drafts right"
    )


if __name__ == "__main__":
    main()
