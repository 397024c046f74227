"""Termination in transformers: a small random Llama with a byte-level tokenizer; generate() stops where the rule says."""

import pytest
import torch

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'sic_kernels[demo]'"
)

from tiny_llama import padded, prompt  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from sic_kernels import ArgumentError  # noqa: E402
from sic_kernels.head import Reason, StopMatcher, TerminationRule, stop_rule  # noqa: E402
from sic_kernels.integrations.head import Termination, p_eos, token_bytes  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 12


def byte_level(size=160):
    """Two special tokens, then single letters of the byte-level alphabet, then pairs of them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:120]
    words = ["<pad>", "<eos>", *letters, *(a + b for a, b in zip(letters, letters[7:]))][:size]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level()


@pytest.fixture(scope="module")
def free(plain):
    """What the model says when nothing stops it: two rows."""
    return generate(plain, prompt(2))[:, 96:]


def generate(model, ids, ending=None, mask=None, **options):
    mask = torch.ones_like(ids) if mask is None else mask
    if ending is not None:
        options |= {"logits_processor": [ending.processor], "stopping_criteria": [ending.criteria]}
    with torch.inference_mode():
        return model.generate(ids, attention_mask=mask, max_new_tokens=STEPS, do_sample=False, **options)


def cut(free, lengths):
    """The rows of `free`, each up to its length and then padded, as wide as the longest."""
    width = max(lengths)
    rows = [torch.cat((row[:n], torch.zeros(width - n, dtype=row.dtype))) for row, n in zip(free, lengths)]
    return torch.stack(rows)


# --- where it stops -------------------------------------------------------------------------------------------------


def test_stop_tokens(plain, free):
    """Each row ends with its own eos token; the one that is done earlier is padded."""
    ids = [free[0, 3].item(), free[1, 6].item()]
    ending = Termination(TerminationRule(eos_ids=ids))
    lengths = [next(i for i, token in enumerate(row) if token in ids) + 1 for row in free.tolist()]
    assert torch.equal(generate(plain, prompt(2), ending)[:, 96:], cut(free, lengths))
    assert ending.reasons() == [Reason.EOS] * 2
    assert ending.state.generated.tolist() == lengths


def test_a_prompt_longer_than_another(plain):
    """Left padding: prompts count without it; each row is as it would be alone."""
    ids, mask, rows = padded([40, 25])
    ending = Termination(TerminationRule(max_tokens=4), input_lens=mask.sum(1))
    out = generate(plain, ids, ending, mask)
    assert ending.state.input_lens.tolist() == [40, 25]
    assert out.shape == (2, 44)
    for i, row in enumerate(rows):
        assert torch.equal(out[i, 40:], generate(plain, row)[0, row.shape[1] :][:4])
    assert ending.reasons() == [Reason.LENGTH] * 2


def test_stop_strings(plain, free, tokenizer):
    """A stop from the middle of what each row says: over token borders, and found by a search through the text."""
    table = token_bytes(tokenizer)
    pieces = [[table[token] for token in row] for row in free.tolist()]
    stops = [b"".join(row)[begin : begin + 3] for row, begin in zip(pieces, (5, 8))]
    matcher = StopMatcher(stops, batch=2)
    ending = Termination(TerminationRule(), matcher, tokenizer)
    out = generate(plain, prompt(2), ending)[:, 96:]
    lengths, texts = [], []
    for row in pieces:
        n = next(n for n in range(1, STEPS + 1) if any(stop in b"".join(row[:n]) for stop in stops))
        text = b"".join(row[:n])
        lengths.append(n)
        texts.append(text[: min(text.find(stop) for stop in stops if stop in text)])
    assert torch.equal(out, cut(free, lengths))
    assert ending.reasons() == [Reason.STRING] * 2
    assert ending.texts() == texts


def test_text_without_a_stop(plain, free, tokenizer):
    """All of it, what was held back to the end too; a row that ends otherwise has no text of its padding."""
    table = token_bytes(tokenizer)
    last = table[free[0, -1].item()]
    ending = Termination(TerminationRule(), StopMatcher([last + b"never"], batch=2), tokenizer)
    generate(plain, prompt(2), ending)
    assert ending.texts() == [b"".join(table[token] for token in row) for row in free.tolist()]
    assert ending.reasons() == [0, 0]


def test_scores(plain, free):
    """Stops where the score of the step's statistics is above: here the greatest probability, two steps in a row."""
    watched = Termination(TerminationRule(threshold=1.0, max_threshold=1.0), score=lambda s: -s.entropy)
    entropies = []
    look = watched.look
    watched.look = lambda *args: (look(*args), entropies.append(watched.stats.entropy))[0]
    generate(plain, prompt(2), watched)
    entropies = torch.stack(entropies, 1)
    rule = TerminationRule(threshold=0.5, slope_per_1k=0.0, patience=2)
    middle = entropies.median()
    ending = Termination(rule, score=lambda s: torch.where(s.entropy < middle, 0.6, 0.4))
    below = entropies < middle
    lengths = []
    for row in below.tolist():
        ends = [n + 1 for n in range(1, STEPS) if row[n] and row[n - 1]]
        lengths.append(ends[0] if ends else STEPS)
    assert torch.equal(generate(plain, prompt(2), ending)[:, 96:], cut(free, lengths))


def test_the_baseline_score(plain, free):
    """P(EOS) of the rule's ids comes from the same pass over the logits."""
    eos = free[0, 5].item()
    seen = []
    score = lambda s: seen.append(p_eos(s)) or seen[-1]
    generate(plain, prompt(2), Termination(TerminationRule(eos_ids=eos, min_tokens=STEPS), score=score))
    with torch.inference_mode():
        logits = plain(prompt(2)).logits[:, -1]
    torch.testing.assert_close(seen[0], logits.softmax(-1)[:, eos], atol=1e-5, rtol=1e-4)


# --- what it costs --------------------------------------------------------------------------------------------------


class Waits(TorchDispatchMode):
    """Counts reads of a value by the host."""

    reads = (torch.ops.aten.is_nonzero, torch.ops.aten.item, torch.ops.aten._local_scalar_dense)
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket in self.reads
        return function(*args, **(kwargs or {}))


def test_a_step_reads_no_value(plain):
    """Neither part waits; `generate` asks once a step whether all rows are done."""
    ending = Termination(TerminationRule(eos_ids=159, patience=3, plateau_window=2), score=p_eos)
    with Waits() as waits, torch.inference_mode():
        ids = prompt(2)
        for _ in range(3):
            ending.processor(ids, torch.randn(2, 160))
            ids = torch.cat((ids, torch.full((2, 1), 5)), 1)
            ending.criteria(ids, None)
    assert waits.count == 0
    with Waits() as plain_waits:
        generate(plain, prompt(2))
    with Waits() as waits:
        generate(
            plain, prompt(2), Termination(TerminationRule(max_tokens=STEPS), score=p_eos, watch_ids=torch.tensor([1]))
        )
    assert waits.count == plain_waits.count >= STEPS


# --- bytes of tokens ------------------------------------------------------------------------------------------------


def test_bytes_are_what_decode_says(tokenizer):
    table = token_bytes(tokenizer)
    assert len(table) == 160
    assert table[:2] == [b"", b""]
    ids = torch.randint(2, 160, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    joined = b"".join(table[i] for i in ids)
    assert joined.decode(errors="replace") == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def test_every_byte_has_a_letter():
    from tokenizers import pre_tokenizers

    from sic_kernels.integrations.head import _byte_of_letter

    letters = _byte_of_letter()
    assert set(letters) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(letters.values()) == list(range(256))
    assert [letters[c] for c in "AĠĊ¡"] == [ord("A"), ord(" "), ord("\n"), 0xA1]


def test_a_token_with_a_letter_that_is_no_byte():
    """Text as it is, as `decode` has it."""
    from tokenizers import Tokenizer, decoders, models

    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(["Ġa", "a b", "好"])}, []))
    backend.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    assert token_bytes(tokenizer) == [b" a", b"a b", "好".encode()]
    assert tokenizer.decode([1, 2]) == "a b好"


def test_ids_of_a_padded_vocabulary_have_no_text(tokenizer):
    ending = Termination(TerminationRule(), StopMatcher(["never"], 2), tokenizer)
    ids = prompt(2)
    for token in (len(tokenizer), 5):
        ending.processor(ids, torch.zeros(2, 200))
        ids = torch.cat((ids, torch.full((2, 1), token)), 1)
        ending.criteria(ids, None)
    assert ending.texts() == [token_bytes(tokenizer)[5]] * 2


def test_byte_fallback_and_other_kinds():
    from tokenizers import Tokenizer, decoders, models

    words = ["<pad>", "\u2581the", "n", "<0xE5>", "<0x0A>", "好", "<0xZZ>"]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    fallback = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")
    assert token_bytes(fallback) == [b"", b" the", b"n", b"\xe5", b"\n", "好".encode(), b"<0xZZ>"]
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ArgumentError, match=r"token_bytes: tokenizer: got .* decoder WordPiece, expected byte-level"):
        token_bytes(transformers.PreTrainedTokenizerFast(tokenizer_object=backend))


def test_stop_rule_with_a_tokenizer(tokenizer):
    rule, matcher = stop_rule(["<eos>", "!", "!!"], tokenizer)
    assert rule.eos_ids == (1,)
    assert matcher.stops == [b"!", b"!!"]


# --- wrong use ------------------------------------------------------------------------------------------------------


def test_wrong_use_is_refused(plain, tokenizer):
    with pytest.raises(ArgumentError, match="Termination: rule: got float"):
        Termination(0.92)
    with pytest.raises(ArgumentError, match="Termination: tokenizer: got None"):
        Termination(TerminationRule(), StopMatcher(["x"]))
    with pytest.raises(ArgumentError, match=r"Termination: matcher: got StopMatcher.*batch of 2"):
        generate(plain, prompt(2), Termination(TerminationRule(), StopMatcher(["x"]), tokenizer))
    alone = Termination(TerminationRule())
    with pytest.raises(ArgumentError, match="Termination: logits_processor: got none"):
        plain.generate(prompt(), max_new_tokens=2, stopping_criteria=[alone.criteria])


def test_half_of_it_is_refused(plain):
    """Criteria without a look at the step's scores, also after a call that had both; looks without steps."""
    ending = Termination(TerminationRule(max_tokens=3))
    generate(plain, prompt(2), ending)
    with pytest.raises(ArgumentError, match="Termination: logits_processor: got none"):
        plain.generate(prompt(2), max_new_tokens=2, stopping_criteria=[ending.criteria])
    with pytest.raises(ArgumentError, match="Termination: stopping_criteria: got none"):
        plain.generate(prompt(2), max_new_tokens=2, do_sample=False, logits_processor=[ending.processor])


# --- one call after the other ---------------------------------------------------------------------------------------


def test_the_next_call_begins_anew(plain, free, tokenizer):
    """A shorter input, a longer one, another batch, others ids of the same size: nothing of the last text is left."""
    ending = Termination(TerminationRule(eos_ids=free[0, 2].item()))
    first = generate(plain, prompt(2), ending)
    assert ending.state.done.any()
    other = (first + 1) % 150  # what the criteria saw last had this size
    for ids in (prompt(2), torch.cat((first, first), 1), prompt(1), prompt(2), other):
        want = generate(plain, ids, Termination(ending.rule))
        assert torch.equal(generate(plain, ids, ending), want)
        assert ending.state.input_lens.tolist() == [ids.shape[1]] * len(ids)


def test_texts_are_of_the_last_call(plain, free, tokenizer):
    stop = b"".join(token_bytes(tokenizer)[token] for token in free[0, 2:4].tolist())
    ending = Termination(TerminationRule(), StopMatcher([stop], batch=2), tokenizer)
    generate(plain, prompt(2), ending)
    once, reasons = ending.texts(), ending.reasons()
    assert reasons[0] == Reason.STRING
    generate(plain, prompt(2), ending)
    assert (ending.texts(), ending.reasons()) == (once, reasons)


@pytest.mark.parametrize("where", ["score", "processor"])
def test_a_call_that_failed_is_forgotten(where, plain, free):
    """In the step of its first token, or between the look and the step; the next call has the same ids."""
    failing = {where}

    def fails(name):
        if name in failing:
            failing.remove(name)
            raise RuntimeError("once")

    ids = prompt(2)
    ending = Termination(TerminationRule(max_tokens=2), score=lambda s: (fails("score"), s.entropy * 0)[1])
    later = lambda ids, scores: (fails("processor"), scores)[1]
    options = {"logits_processor": [ending.processor, later], "stopping_criteria": [ending.criteria]}
    with pytest.raises(RuntimeError, match="once"):
        plain.generate(ids, max_new_tokens=STEPS, do_sample=False, **options)
    text = plain.generate(ids, max_new_tokens=STEPS, do_sample=False, **options)
    assert torch.equal(text[:, 96:], free[:, :2])
    assert ending.state.generated.tolist() == [2, 2]


def test_ids_that_a_processor_has_copied_go_on(plain):
    """The same ids in another tensor are the next step, not a new text."""
    copied = lambda ending: lambda ids, scores: ending.processor(ids.clone(), scores)
    ending = Termination(TerminationRule(max_tokens=5))
    with torch.inference_mode():
        options = {"logits_processor": [copied(ending)], "stopping_criteria": [ending.criteria]}
        plain.generate(prompt(2), max_new_tokens=STEPS, do_sample=False, **options)
    assert ending.state.generated.tolist() == [5, 5]


def test_a_text_that_goes_on_needs_a_reset(plain, free):
    """Its ids are those that were seen last: it is as done as it was, and one token follows."""
    ending = Termination(TerminationRule(max_tokens=3))
    text = generate(plain, prompt(2), ending)
    assert generate(plain, text, ending).shape[1] == text.shape[1] + 1
    ending.reset()
    assert torch.equal(generate(plain, text, ending)[:, 96:], free[:, :6])


def test_given_lengths_are_of_one_call(plain):
    ending = Termination(TerminationRule(max_tokens=2), input_lens=[96, 90])
    generate(plain, prompt(2), ending)
    with pytest.raises(ArgumentError, match=r"Termination: input_ids: got \[2, 96\], expected the \[2, 98\].*reset"):
        generate(plain, prompt(2), ending)
    ending.reset(input_lens=[95, 94])
    generate(plain, prompt(2), ending)
    assert ending.state.input_lens.tolist() == [95, 94]
