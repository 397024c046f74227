"""A follow-up question on a point of an earlier answer: the slice of the cache that is read always holds that point.

    python examples/follow_up.py

The model is SmolLM2-135M-Instruct (`make demo` sets it up). `references` finds the tokens of "the third point", and
`SlicedCache.keep` makes every layer read them, however little else its budget allows.
"""

import torch

from sic_kernels import references
from sic_kernels.integrations.transformers import SlicedCache, enable
from sic_kernels.models import load, text
from sic_kernels.slicing import SlicePolicy

ANSWER = """Here are some points to remember:

1. The password of the library door is emerald.
2. The favourite fruit of Captain Miller is mango.
3. The city where the violin was found is Lisbon.
4. The metal inside the old clock is copper.

"""
QUESTION = """

Question: In the third point above, what is the city where the violin was found?
Answer: As point 3 says, the city where the violin was found is"""


@torch.no_grad()
def main(between=768):
    lm = load()
    enable(lm.model)
    encoded = lm.tokenizer(ANSWER, return_tensors="pt", return_offsets_mapping=True)
    outline = references.outline(ANSWER, offsets=[tuple(pair) for pair in encoded.offset_mapping[0].tolist()])
    point = references.resolve(references.parse(QUESTION)[0], outline)
    print(f'"the third point above": tokens {point.tokens}, {ANSWER[slice(*point.span)]!r}')

    question = lm.tokenizer(QUESTION, return_tensors="pt").input_ids
    ids = torch.cat([encoded.input_ids, lm.tokens(text("hamlet"), between)], dim=1)
    policy = SlicePolicy(ratio=0.04, min_len=0, dense_layers=(), max_sliced_T=question.shape[1])
    for name, spans in (("4 % of the cache", None), ("4 % and that point", [[point.tokens]])):
        cache = SlicedCache(lm.model.config, policy, keep=spans)
        lm.model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
        logits = lm.model(input_ids=question, cache=cache, use_cache=True, logits_to_keep=1).logits
        print(f"{name}: ... was found is{lm.tokenizer.decode(logits[0, -1].argmax())}")


if __name__ == "__main__":
    main()
