"""Stop strings: what the acceptance grid says, a search through the whole text, rows, wrong arguments, threads."""

import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sic_kernels as sic
from sic_kernels.head import StopMatcher, stop_rule
from sic_kernels.head import reference_stops as reference


def fed(stops, *pieces, **options):
    """One row: the last matched and trim, and the safe bytes of each piece."""
    matcher = StopMatcher(stops, **options)
    steps = [matcher.feed([piece]) for piece in pieces]
    return steps[-1].matched.item(), [step.safe[0] for step in steps], steps[-1].trim.item()


# --- values worked by hand ------------------------------------------------------------------------------------------


def test_a_character_in_three_pieces():
    matcher = StopMatcher(["好"])
    for piece in (b"\xe5", b"\xa5"):
        matched, safe, trim = matcher.feed([piece])
        assert (matched.tolist(), safe, trim.tolist()) == ([False], [b""], [0])
    matched, safe, trim = matcher.feed([b"\xbd"])
    assert (matched.tolist(), safe, trim.tolist()) == ([True], [b""], [3])
    assert (matched.dtype, trim.dtype) == (torch.bool, torch.int64)


def test_a_stop_in_four_tokens():
    assert fed(["DEFGHIJ"], b"DEF", b"G", b"HI", b"J") == (True, [b""] * 4, 7)
    assert fed(["DEFGHIJ"], b"DEF", b"X") == (False, [b"", b"DEFX"], 0)
    assert fed(["DEFGHIJ"], b"ABCDEF", b"GHIJKL") == (True, [b"ABC", b""], 9)


def test_a_stop_inside_a_token():
    """The token's text before the stop is output; the stop and what follows it are not."""
    assert fed([b"stop"], b"a stop sign") == (True, [b"a "], 9)
    assert fed([b"stop"], b"a stop sign", include=True) == (True, [b"a stop"], 5)


def test_the_first_end_wins_then_the_longest():
    assert fed(["abcd", "bc"], b"xabcd") == (True, [b"xa"], 3)
    assert fed(["c", "bc", "abc"], b"xabc") == (True, [b"x"], 3)
    assert fed(["abcx", "bcy"], b"abc", b"y") == (True, [b"", b"a"], 3)
    assert fed(["aab"], b"aa", b"a", b"b") == (True, [b"", b"a", b""], 3)


def test_what_is_held_back_is_released():
    matcher = StopMatcher(["<end>", "\n\n"], batch=2)
    assert matcher.feed([b"a <en", b"b\n"]).safe == [b"a ", b"b"]
    assert matcher.feed([b"t", b"c"]).safe == [b"<ent", b"\nc"]
    assert matcher.feed([b" <", b"\n"]).safe == [b" ", b""]
    assert matcher.finish() == [b"<", b"\n"]
    assert matcher.finish() == [b"", b""]
    assert matcher.feed([b"end>", b"\n"]).matched.tolist() == [False, False]  # a new text has begun


def test_a_matched_row_emits_nothing_more():
    matcher = StopMatcher(["."])
    assert matcher.feed([b"Yes. No"]).safe == [b"Yes"]
    matched, safe, trim = matcher.feed([b", maybe."])
    assert (matched.item(), safe, trim.item()) == (True, [b""], 12)
    assert matcher.finish() == [b""]
    matcher.reset()
    assert matcher.feed([b"No"]).safe == [b"No"]


@pytest.mark.parametrize("stops", [None, [], ()])
def test_nothing_never_stops(stops):
    assert fed(stops, b"any", b"", b"thing") == (False, [b"any", b"", b"thing"], 0)


def test_included_stops_hold_nothing_back():
    assert fed(["<end>"], b"a<e", b"nd", b">b", include=True) == (True, [b"a<e", b"nd", b">"], 1)


def test_the_table_of_the_documentation():
    """docs/termination.md"""
    matcher = StopMatcher(["</a>", "<br>", "br/"])
    steps = [matcher.feed([piece]) for piece in (b"see <", b"b", b"old> <br", b">!")]
    assert [step.safe[0] for step in steps] == [b"see ", b"", b"<bold> ", b""]
    assert [step.trim.item() for step in steps] == [0, 0, 0, 5]
    assert fed(["</a>", "<br>", "br/"], b"<br", b"/") == (True, [b"", b"<"], 3)


# --- rows -----------------------------------------------------------------------------------------------------------


def test_rows_are_forked_and_reset_one_by_one():
    matcher = StopMatcher(["stop"], batch=3)
    matcher.feed([b"st", b"x", b"stop"])
    matcher.reorder(torch.tensor([0, 0, 2, 1]))
    assert matcher.batch == 4
    matched, safe, _ = matcher.feed([b"op", b"ay", b"", b"y"])
    assert matched.tolist() == [True, False, True, False]
    assert safe == [b"", b"stay", b"", b"y"]
    matcher.reset([2])
    assert matcher.feed([b"", b"", b"sto", b""]).matched.tolist() == [True, False, False, False]
    assert matcher.finish([2]) == [b"sto"]


def test_rows_do_not_share_anything():
    """A row alone is the row in any batch."""
    texts = [b"ab.cd", b"..", b"a", b"bcd.", b""]
    together = StopMatcher(["cd", ".."], batch=5)
    for i in range(5):
        step = together.feed([text[i : i + 1] for text in texts])
        for row, text in enumerate(texts):
            alone = fed(["cd", ".."], *(text[j : j + 1] for j in range(i + 1)))
            assert (step.matched[row].item(), step.safe[row], step.trim[row].item()) == (
                alone[0],
                alone[1][-1],
                alone[2],
            )


# --- against the definition -----------------------------------------------------------------------------------------

letters = st.binary(min_size=1, max_size=7).map(lambda b: bytes(b"ab\xff"[x % 3] for x in b))


@settings(max_examples=250)
@given(
    stops=st.lists(letters, max_size=6),
    pieces=st.lists(letters | st.just(b""), max_size=12),
    include=st.booleans(),
)
def test_fuzz(stops, pieces, include):
    matcher, naive = StopMatcher(stops, include=include), reference.StopMatcher(stops, include)
    for piece in pieces:
        matched, safe, trim = matcher.feed([piece])
        assert (matched.item(), safe[0], trim.item()) == naive.feed(piece)
    assert matcher.finish() == [naive.finish()]


def test_the_definition_on_its_own():
    """That the search itself finds what it should: golden values again."""
    naive = reference.StopMatcher([b"DEFGHIJ"])
    assert [naive.feed(p) for p in (b"DEF", b"X")] == [(False, b"", 0), (False, b"DEFX", 0)]
    naive = reference.StopMatcher([b"stop"])
    assert naive.feed(b"a stop sign") == (True, b"a ", 9)


def test_thousand_stops_of_all_bytes():
    gen = torch.Generator().manual_seed(0)
    stops = [bytes(torch.randint(0, 256, (3 + i % 18,), generator=gen).tolist()) for i in range(1000)]
    matcher = StopMatcher(stops, batch=len(stops))
    assert matcher.nbytes() < 320 << 10
    assert not matcher.feed([stop[:-1] for stop in stops]).matched.any()
    matched, _, trim = matcher.feed([stop[-1:] for stop in stops])
    assert matched.all()
    assert trim.tolist() == [len(stop) for stop in stops]


# --- wrong arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stops", [[""], [b""], ["a", ""], "stop", b"stop", [1], 3, ["\ud800"]])
def test_bad_stops(stops):
    with pytest.raises(sic.ArgumentError, match=r"^StopMatcher: stops: got .*, expected "):
        StopMatcher(stops)


@pytest.mark.parametrize("batch", [0, -1, 1.5, None, 1 << 30])
def test_bad_batch(batch):
    with pytest.raises(sic.ArgumentError, match=r"^StopMatcher: batch: got .*, expected 1 to 2\^24"):
        StopMatcher(["a"], batch)


@pytest.mark.parametrize("chunks", [[b"x"], [b"x"] * 3, b"xy", None, ["x", b"y"], [b"x", None]])
def test_bad_chunks_change_nothing(chunks):
    matcher = StopMatcher(["ab"], batch=2)
    matcher.feed([b"a", b""])
    with pytest.raises(sic.ArgumentError, match=r"^StopMatcher.feed: chunks: got .*, expected "):
        matcher.feed(chunks)
    matched, safe, _ = matcher.feed([b"b", b"y"])
    assert (matched.tolist(), safe) == ([True, False], [b"", b"y"])


@pytest.mark.parametrize("rows", [[2], [-1], "0", 0, [0.5]])
@pytest.mark.parametrize("method", ["reset", "finish", "reorder"])
def test_bad_rows(method, rows):
    matcher = StopMatcher(["ab"], batch=2)
    with pytest.raises(sic.ArgumentError, match=rf"^StopMatcher.{method}: rows: got .*, expected rows from 0 to 1"):
        getattr(matcher, method)(rows)


def test_a_batch_without_rows_is_no_batch():
    for rows in (None, []):
        with pytest.raises(sic.ArgumentError, match="reorder: rows"):
            StopMatcher(["ab"]).reorder(rows)


def test_threads_may_share_a_matcher():
    """Each step is one thread's; how they mix is chance, that nothing is lost is not."""
    matcher = StopMatcher(["xyz"], batch=2)
    counts = []

    def work(row):
        chunks = [b"", b""]
        chunks[row] = b"ab"
        counts.append(sum(len(matcher.feed(chunks).safe[row]) for _ in range(3000)))

    threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [6000] * 4


# --- from stop sequences to a rule ----------------------------------------------------------------------------------


class Tokenizer:
    """Two special tokens, one that was only added, and the line break as an ordinary token of its own."""

    all_special_ids = (7,)

    @property
    def added_tokens_decoder(self):
        return {8: SimpleNamespace(special=True), 9: SimpleNamespace(special=False)}

    def encode(self, text, add_special_tokens=True):
        assert not add_special_tokens
        known = {"<eos>": [7], "<turn>": [8], "<tool>": [9], "\n": [5]}
        return known.get(text, [ord(c) for c in text])


def test_special_tokens_become_eos_ids():
    rule, matcher = stop_rule(
        ["<eos>", "<turn>", "<tool>", "\n", "END", b"<eos>"], Tokenizer(), batch=3, max_tokens=9, eos_ids=[2, 7]
    )
    assert rule.eos_ids == (2, 7, 8)
    assert rule.max_tokens == 9
    assert matcher.stops == [b"<tool>", b"\n", b"END", b"<eos>"]
    assert matcher.batch == 3


def test_a_function_knows_no_special_tokens():
    rule, matcher = stop_rule(["<eos>", "END"], lambda text: Tokenizer().encode(text, False))
    assert rule.eos_ids == (7,)
    assert matcher.stops == [b"<eos>", b"END"]


def test_no_stops_and_wrong_ones():
    rule, matcher = stop_rule(None, Tokenizer())
    assert (rule.eos_ids, matcher.stops) == ((), [])
    with pytest.raises(sic.ArgumentError, match="StopMatcher: stops: got an empty one"):
        stop_rule([""], Tokenizer())
    with pytest.raises(sic.ArgumentError, match="stop_rule: stops: got str"):
        stop_rule("END", Tokenizer())
    with pytest.raises(sic.ArgumentError, match="stop_rule: tokenizer: got int"):
        stop_rule(["END"], 3)
