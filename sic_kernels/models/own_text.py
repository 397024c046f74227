"""Text that a model writes itself: a sample of what it says, where no other text is at hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Beginnings of texts of many kinds; none is a play, a manual or a program, so that those stay for measurements.
BEGINNINGS = (
    "Dear Ms Baker,\n\nThank you for your letter of 12 March. I am writing to",
    "Hi everyone,\n\njust a quick note about the meeting next week:",
    "The city council announced on Tuesday that",
    "Researchers have found that people who sleep less than six hours",
    "Ingredients\n\n2 cups of flour\n1 teaspoon of salt\n3 eggs\n\nInstructions\n\n1.",
    "Once upon a time, in a village between two mountains, there lived",
    "She closed the door behind her and listened. Nothing. Then, from the kitchen,",
    "The Danube is a river in Europe. It rises in",
    "Marie Curie was born in Warsaw in 1867. Her",
    "Photosynthesis is the process by which",
    "The causes of the First World War have been debated by historians ever since.",
    "Question: What is the capital of Australia?\nAnswer: Canberra.\n\nQuestion: Why is the sky blue?\nAnswer:",
    "A train leaves the station at 9:40 and travels at 80 km per hour. How far has it gone at 11:10?\n\nSolution:",
    "Let f be a continuous function on the interval [0, 1]. We want to show that",
    "I bought this vacuum cleaner three months ago and",
    "I stayed at this hotel for two nights with my family. The room",
    "name,age,city,score\nAnna,34,Lyon,7.5\nBob,28,Leeds,6.1\n",
    '{"orders": [{"id": 1041, "customer": "Lind", "items": [',
    "Interviewer: How did you begin with music?\n\nSinger:",
    "Autumn\n\nThe leaves that lie upon the lane\n",
    "Le petit chat dormait sur la chaise quand",
    "Im Jahr 1989 fiel die Berliner Mauer. Danach",
    "El mercado abre todos los domingos y",
    "This agreement is made between the landlord and the tenant. The parties agree as follows:",
    "Minutes of the annual general meeting\n\nPresent: the chair, the treasurer and 41 members.\n\n1.",
    "The patient is a 56-year-old woman who presented with",
    "Markets opened lower on Monday as investors",
    "After a goalless first half, the home side",
    "If you want to learn to swim as an adult, start with",
    "The old lighthouse keeper had not spoken to anybody since",
    "It is often said that money cannot buy happiness. In this essay I will argue that",
    "Summary: The paper studies how cities grow. Using data from 120 countries, the authors",
)

PASSAGE = 256  # tokens of a passage


class _Report:
    """A stopping criterion of transformers that never stops and reports every token of a batch."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        self.advance = advance

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.advance(len(input_ids))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def own_text(lm: Any, count: int, seed: int = 0, advance: Callable[[int], None] | None = None) -> Any:
    """int64 `[1,count]`: passages that the model continues from `BEGINNINGS`, sampled at temperature 1.

    The same for the same seed, versions and machine. `advance(n)` is called as tokens are written.
    """
    tokenizer = lm.tokenizer
    side, tokenizer.padding_side = tokenizer.padding_side, "left"
    try:
        given = tokenizer(list(BEGINNINGS), return_tensors="pt", padding=True)
    finally:
        tokenizer.padding_side = side
    parts: list[Any] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        while sum(map(len, parts)) < count:
            written = lm.model.generate(
                input_ids=given.input_ids, attention_mask=given.attention_mask, do_sample=True, temperature=1.0, top_k=0,
                max_new_tokens=PASSAGE, min_new_tokens=PASSAGE, pad_token_id=tokenizer.pad_token_id,
                stopping_criteria=None if advance is None else [_Report(advance)],
            )  # fmt: skip
            for row, mask in zip(written, given.attention_mask):
                parts.append(row[int((mask == 0).sum()) :])
    return torch.cat(parts)[None, :count]
