"""`references.outline` and `resolve`: the points of answers by hand, tokens, slots, what is refused."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_references_parse import seconds

import sic_kernels as sic
from sic_kernels import ArgumentError
from sic_kernels.references import Ambiguous, Outline, Resolved, Unresolved, outline, pages, parse, resolve
from sic_kernels.references.counted import counted_lists
from sic_kernels.references.grammar import shipped
from sic_kernels.references.lines import Lines
from sic_kernels.references.sentences import answers
from sic_kernels.runtime import trace


def shown(text):
    """For each list: its nouns, its level, and the words of each point."""
    return [
        (sorted(listed.nouns), listed.level, [text[slice(*p.span)] for p in listed.points])
        for listed in outline(text).lists if not listed.structural
    ]  # fmt: skip


def points(text):
    return [words for _, _, found in shown(text) for words in found]


def find(said, text, **kwargs):
    (ref,) = parse(said)
    return resolve(ref, outline(text, **kwargs))


# --- lists -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text,expected", [
    ("1. one\n2. two\n\nmore", ["1. one", "2. two"]),
    ("1) one\n2) two", ["1) one", "2) two"]),
    ("a. one\nb. two", ["a. one", "b. two"]),
    ("i. one\nii. two\niii. three", ["i. one", "ii. two", "iii. three"]),
    ("iv. one\nv. two\nvi. three", ["iv. one", "v. two", "vi. three"]),
    ("g. a\nh. b\ni. c\nj. d", ["g. a", "h. b", "i. c", "j. d"]),
    ("- one\n- two", ["- one", "- two"]),
    ("* one\n\n* two", ["* one", "* two"]),
    ("- one\n\ntext\n\n- two", ["- one", "- two"]),
    ("1. one\n\nits text\n\n2. two\n\nits text\n\nthe end", ["1. one\n\nits text", "2. two\n\nits text"]),
    ("1. one\n\n   its text\n\n2. two\n\nthe end", ["1. one\n\n   its text", "2. two"]),
    ("1. one\nand on\n2. two", ["1. one\nand on", "2. two"]),
    ("1. a\n1. b\n1. c", ["1. a", "1. b", "1. c"]),
    ("1、甲\n2、乙", ["1、甲", "2、乙"]),
    ("1.甲\n2.乙", ["1.甲", "2.乙"]),
    ("１．甲\n２．乙", ["１．甲", "２．乙"]),
    ("一、甲\n二、乙", ["一、甲", "二、乙"]),
    ("（一）甲\n（二）乙", ["（一）甲", "（二）乙"]),
    ("①甲②乙③丙", ["①甲", "②乙", "③丙"]),
    ("(1) one; (2) two; and (3) three.", ["(1) one;", "(2) two;", "(3) three."]),
    ("Use 1) one, 2) two", ["1) one,", "2) two"]),
    ("第一，甲；第二，乙。", ["第一，甲；", "第二，乙。"]),
    ("The first reason is a. The second reason is b.", ["The first reason is a.", "The second reason is b."]),
    ("The first step was a. The second is b.\nThe last step is c.",
     ["The first step was a.", "The second is b.", "The last step is c."]),
    ("第一个原因是甲，第二个原因是乙。", ["第一个原因是甲，", "第二个原因是乙。"]),
    ("第三，别忘了。The first reason is money. The second reason is time. ",
     ["The first reason is money.", "The second reason is time."]),
    ("第一个原因是钱。第二个原因是时间。The first reason is money. The second is time.",
     ["第一个原因是钱。", "第二个原因是时间。", "The first reason is money.", "The second is time."]),
    ("The first reason is a. 第一个原因是钱。The second reason is b. 第二个原因是时间。",
     ["第一个原因是钱。The second reason is b.", "第二个原因是时间。"]),
    ("The first reason is a. The second is b. The first step is c. The second is d.",
     ["The first reason is a.", "The second is b.", "The first step is c.", "The second is d."]),
    (f"The first reason is a.{' ' * 30}The second is b.", ["The first reason is a.", "The second is b."]),
    ("The first reason is a:\n```\nx = 1\n```\nThe second is b.",
     ["The first reason is a:\n```\nx = 1\n```", "The second is b."]),
    ("The second reason is a. The third reason is b.", []),
    ("The first reason is a. The second step is b.", []),
    ("The first time is a. The second time is b.", []),
    ("He saw the first step is a. He saw the second step is b.", []),
    ("1. a\n2. b\n\nThe first step is c. The second step is d.", ["1. a", "2. b"]),
    ("首先，甲。其次，乙。最后，丙。", ["首先，甲。", "其次，乙。", "最后，丙。"]),
    ("Firstly, a. Secondly, b. Finally, c.", ["Firstly, a.", "Secondly, b.", "Finally, c."]),
    ("First, a. Second, b. Third, c.", ["First, a.", "Second, b.", "Third, c."]),
    ("Step 1: a\n\nStep 2: b", ["Step 1: a", "Step 2: b"]),
    ("**Option A:** a\n\n**Option B:** b", ["**Option A:** a", "**Option B:** b"]),
    ("步骤一：甲\n步骤二：乙", ["步骤一：甲", "步骤二：乙"]),
    ("第一步：甲\n第二步：乙", ["第一步：甲", "第二步：乙"]),
])  # fmt: skip
def test_forms_of_lists(text, expected):
    assert points(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "It was 1. and 2.",
        "In (1999) and (2) we saw",
        "Version 3.12 is out",
        "2024. was a year",
        "*bold* text",
        "The first, of many",
        "最后我要说",
        "----",
        "```\n1. a\n2. b\n```",
        "(2) two (3) three",
        "A. Smith wrote",
    ],
)
def test_no_lists(text):
    assert points(text) == []


def test_nouns_that_are_only_mentioned_exclude_nothing():
    steps = "建议按下面的顺序排查：\n1. 甲\n2. 乙"
    assert find("第二步呢", steps).point.ordinal == 2
    assert find("第二条建议呢", steps).point.ordinal == 2
    assert find("第二步呢", "有两条建议：\n1. 甲\n2. 乙").kind == "missing"
    before = "There are many reasons. Do it like this:\n1. a\n2. b"
    assert find("Explain step 2.", before).point.ordinal == 2


def test_rare_nouns_are_found_only_where_the_answer_has_them():
    assert find("the second clause?", "Two clauses matter:\n1. a\n2. b").point.ordinal == 2
    assert find("the second option?", "Two clauses matter:\n1. a\n2. b").point.ordinal == 2
    assert find("the second clause?", "1. a\n2. b").kind == "missing"


def test_sections_with_numbers_are_no_steps_where_there_are_lists():
    assert find("step 2", "## 1. One\n\na\n\n## 2. Two\n\nb").point.ordinal == 2
    assert find("step 2", "## 1. One\n\nThree reasons:\n\n1. a\n2. b\n3. c\n\n## 2. Two\n\nb").kind == "missing"


def test_nested_lists_and_levels():
    text = answers()["en-nested"]
    found = outline(text)
    assert [(sorted(listed.nouns), listed.level, len(listed)) for listed in found.lists if not listed.structural] == [
        (["point"], 0, 4), (["example"], 1, 3), ([], 1, 2), (["example"], 1, 3),
    ]  # fmt: skip
    third = found.lists[[len(listed) for listed in found.lists].index(4)].points[2]
    assert text[slice(*third.span)].startswith("3. Quantisation")
    assert text[slice(*third.span)].endswith("four-bit caches")
    assert [sorted(listed.nouns) for listed in found.within(third)] == [["example"]]


def test_bullets_behind_a_number_without_indentation_are_its_own():
    assert shown("1. a\n- x\n- y\n2. b\n- z") == [
        ([], 0, ["1. a\n- x\n- y", "2. b\n- z"]), ([], 1, ["- x", "- y"]), ([], 1, ["- z"]),
    ]  # fmt: skip


def test_two_lists_one_after_the_other():
    assert shown("Steps:\n1. a\n2. b\n\nRisks:\n1. c\n2. d") == [
        (["step"], 0, ["1. a", "2. b"]),
        (["risk"], 0, ["1. c", "2. d"]),
    ]


def test_nouns_come_from_the_words_before_or_the_heading():
    assert shown("There are two main reasons for it:\n- a\n- b")[0][0] == ["reason"]
    assert shown("## Risks\n\nThese are known.\n\n- a\n- b")[0][0] == ["risk"]
    assert shown("有以下两种方法：\n1. 甲\n2. 乙")[0][0] == ["method"]
    assert shown("- **Option A**: a\n- **Option B**: b")[0][0] == ["option"]


def test_headings_and_sections():
    text = "# Title\n\n## Costs\n\na\n\n## 2. Risks ##\n\nb\n\n### Deep\n\nc"
    sections = [
        (listed.structural, [p.title for p in listed.points])
        for listed in outline(text).lists
        if "section" in listed.also
    ]
    assert sections == [(True, ["Costs", "Risks"]), (False, ["Risks"]), (True, ["Deep"])]
    for said in ("the second section", "section 2", 'the "Risks" section'):
        assert text[slice(*find(said, text).span)] == "## 2. Risks ##\n\nb\n\n### Deep\n\nc"
    assert text[slice(*find('the "Costs" section', text).span)] == "## Costs\n\na"


def test_the_outline_of_nothing():
    assert outline("").lists == ()
    assert outline("\n \n").points == ()
    assert isinstance(outline("x"), Outline)


# --- resolving -------------------------------------------------------------------------------------------------------

TEXT = "Reasons:\n1. a\n2. b\n3. c\n\nSteps:\n1. d\n2. e"


def test_outcomes():
    assert find("the third reason", TEXT).point.label == "3"
    assert [r.point.ordinal for r in find("the last two steps", TEXT)] == [1, 2]
    both = find("the second point", TEXT)
    assert isinstance(both, Ambiguous)
    assert [TEXT[slice(*r.span)] for r in both.candidates] == ["2. b", "2. e"]
    assert find("point 9", TEXT) == Unresolved("out of range: point 9, and the lists have 2 or 3")
    assert find("the ninth reason", TEXT) == Unresolved("out of range: reason 9, and the list has 3")
    assert find("the second risk", TEXT) == Unresolved("missing: no list of risks")
    assert find("that reason", TEXT).kind == "vague"
    assert find("a of b, option Z", TEXT).kind == "missing"


def test_a_group_is_all_or_nothing():
    assert find("reasons 2 and 7", TEXT).kind == "out of range"
    assert find("points 1 to 999999999", TEXT).kind == "out of range"
    assert isinstance(find("the first two points", TEXT), Ambiguous)
    assert [r.point.label for r in find("all three reasons", TEXT)] == ["1", "2", "3"]
    assert find("both reasons", TEXT).kind == "out of range"


def test_an_ordinal_is_the_number_as_written():
    text = "3. c\n4. d\n5. e"
    assert find("point 4", text).span == (5, 9)
    assert find("the last point", text).span == (10, 14)
    assert find("point 1", text).kind == "out of range"


def test_a_group_cannot_hold_a_reference():
    assert find("the second example in the last two points", answers()["en-nested"]).kind == "missing"


def test_slots_by_path():
    slots = {(1,): "a", (2,): "b", (3,): "c", (3, ("example", 1)): "x", (3, ("example", 2)): "y"}

    def slot(said):
        found = resolve(parse(said)[0], slots)
        return [r.slot for r in found] if isinstance(found, list) else getattr(found, "slot", found)

    assert slot("the third point") == "c"
    assert slot("the last two points") == ["b", "c"]
    assert slot("the second example in the third point") == "y"
    assert slot("the last example") == "y"
    assert slot("the fifth point").kind == "out of range"
    assert slot("the first example in point 2").kind == "missing"
    assert resolve(parse("point 1")[0], slots).span is None


def test_metric_by_outcome():
    sic.metrics.reset()
    for said in ("the third reason", "the second point", "point 9", "that reason"):
        find(said, TEXT)
    seen = sic.metrics.snapshot()["sic_reference_resolution_ratio"]["by_outcome"]
    assert {name: value["ratio"] for name, value in seen.items()} == {
        "resolved": 0.25, "ambiguous": 0.25, "out_of_range": 0.25, "vague": 0.25,
    }  # fmt: skip
    sic.metrics.reset()


# --- tokens ----------------------------------------------------------------------------------------------------------


def test_token_spans_by_hand():
    """Tokens of three characters: "1. a\\n" is 0 to 5, "2. b" 5 to 9."""
    text = "1. a\n2. b"
    offsets = [(0, 3), (3, 6), (6, 9)]
    assert [p.tokens for p in outline(text, offsets).points] == [(0, 2), (1, 3)]
    assert [p.tokens for p in outline(text, offsets, first_token=100).points] == [(100, 102), (101, 103)]
    special = [(0, 0), *offsets, (0, 0)]
    assert [p.tokens for p in outline(text, special).points] == [(1, 3), (2, 4)]
    assert outline(text).points[0].tokens is None


def test_token_spans_by_a_function_and_a_tokenizer():
    text = "1. a\n2. b"
    assert [p.tokens for p in outline(text, lambda begin, end: (begin * 2, end * 2)).points] == [(0, 8), (10, 18)]

    def tokenizer(text, **kwargs):
        assert kwargs == {"return_offsets_mapping": True, "add_special_tokens": False}
        return {"offset_mapping": [(i, i + 1) for i in range(len(text))]}

    assert [p.tokens for p in outline(text, tokenizer=tokenizer).points] == [(0, 4), (5, 9)]


def test_pages():
    assert pages((0, 16), 16) == range(1)
    assert pages((15, 17), 16) == range(2)
    assert pages((32, 33), 16) == range(2, 3)
    assert len(pages((16, 16), 16)) == 0
    found = find("the second reason", TEXT, offsets=[(i, i + 1) for i in range(len(TEXT))])
    assert found.tokens == found.span == (14, 18)
    assert pages(found.tokens, 8) == range(1, 3)


# --- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call,message", [
    (lambda: outline(b"x"), "outline: text: got bytes, expected str"),
    (lambda: outline("x", [(0, 1)], object()), "outline: tokenizer: got both offsets and tokenizer"),
    (lambda: outline("x", tokenizer=object()), "outline: tokenizer: got object"),
    (lambda: outline("x", 7), "outline: offsets: got int"),
    (lambda: outline("xy", [(1, 2), (0, 1)]), r"outline: offsets: got \(0, 1\) after 2"),
    (lambda: outline("xy", [(2, 1)]), "outline: offsets: got"),
    (lambda: outline("x", first_token=-1), "outline: first_token: got -1"),
    (lambda: outline("x", grammar="en"), "outline: grammar: got str"),
    (lambda: resolve("point 3", outline("x")), "resolve: ref: got str, expected Reference"),
    (lambda: resolve(parse("point 3")[0], [1]), "resolve: outline_or_slots: got list"),
    (lambda: resolve(parse("point 3")[0], {1: "a"}), "resolve: outline_or_slots: got key 1"),
    (lambda: resolve(parse("point 3")[0], {(0,): "a"}), "resolve: outline_or_slots: got 0"),
    (lambda: resolve(parse("point 3")[0], {((1, 1),): "a"}), r"got key \(\(1, 1\),\)"),
    (lambda: pages((3, 2), 16), "pages: span: got 2"),
    (lambda: pages((0, 2), 0), "pages: page_size: got 0"),
    (lambda: pages(None, 16), "pages: span: got None"),
])  # fmt: skip
def test_wrong_arguments(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


# --- any text --------------------------------------------------------------------------------------------------------

PIECES = [
    "1. a\n",
    "2. b\n",
    "- c\n",
    "   - d\n",
    "\n",
    "text\n",
    "# H\n",
    "**B**\n",
    "一、甲\n",
    "（一）",
    "①",
    "②",
    "(1) ",
    "(2) ",
    "第一，",
    "第二，",
    "首先，",
    "最后，",
    "Step 1: x\n",
    "Step 2: y\n",
    "First, ",
    "Second, ",
    "```\n",
    "i. x\n",
    "ii. y\n",
    "\t1) z\n",
    "Reasons:\n",
    "\r\n",
]


COUNTED = [
    "The first reason is ", "The second reason is ", "The second is ", "the third, ", "In the last case, ", "money. ",
    "第一个原因是", "第二个原因是", "第二是", "第三，", "钱。", " ", "    ", "The first step was ",
]  # fmt: skip


def check_spans(text):
    """Points of a list are not empty, disjoint and in their order."""
    found = outline(text, [(i, i + 1) for i in range(len(text))])
    assert found.length == len(text)
    for listed in found.lists:
        last = 0
        for point in listed.points:
            begin, end = point.span
            assert last <= begin < end <= len(text)
            assert point.tokens == point.span
            assert not text[begin].isspace()
            assert not text[end - 1].isspace()
            last = end
    return len(found.points)


def test_any_text_has_spans_in_order_and_inside():
    drawn = random.Random(5)
    assert sum(check_spans("".join(drawn.choices(PIECES, k=drawn.randrange(1, 30)))) for _ in range(400)) > 500


@given(pieces=st.lists(st.one_of(st.sampled_from(COUNTED), st.sampled_from(PIECES), st.text(max_size=3)), max_size=24))
def test_any_mixture_has_spans_in_order_and_inside(pieces):
    check_spans("".join(pieces))


@given(pieces=st.lists(st.sampled_from(COUNTED), max_size=16))
def test_lists_that_sentences_count_do_not_overlap(pieces):
    text = "".join(pieces)
    check_spans(text)
    lists = counted_lists(text, shipped(), Lines(text), [])
    bounds = [bound for draft in lists for mark in draft.marks for bound in (mark.begin, mark.end)]
    assert bounds == sorted(bounds)


HOSTILE = [
    "1. a\n",
    "  - a\n",
    "# a\n",
    "**a**\n",
    "a\n\n",
    "第一，",
    "首先，",
    "(1) ",
    "①",
    "step 1: x\n",
    "一、甲\n",
    "x",
    "```\n",
    "* ",
    "((",
    "\n",
    "  ",
    "- **",
    "First, ",
    "(1) a (2) b ",  # thousands of lists whose last points end together
    "The first reason is a. The second reason is b. ",
    "第一个原因是甲。第二个原因是乙。",
]


@pytest.mark.parametrize("piece", HOSTILE)
def test_time_is_linear_in_the_length(piece):
    short, long = (piece * (n // len(piece)) for n in (25_000, 100_000))
    assert seconds(outline, long) < 9 * max(seconds(outline, short), 2e-3)


@pytest.mark.parametrize(
    "piece", [*COUNTED[:3], "the ", "第", "第一一", f"The first {'a' * 1000} ", f"The {'a' * 9999} "]
)
def test_sentences_that_count_are_found_in_linear_time(piece):
    def search(text):
        return counted_lists(text, shipped(), Lines(text), [])

    short, long = (piece * (n // len(piece)) for n in (100_000, 1_000_000))
    assert seconds(search, long) < 25 * max(seconds(search, short), 2e-3)


def test_deep_indentation_is_linear():
    def stairs(steps):
        return "\n".join(" " * (2 * i) + f"{kind} a" for i in range(steps) for kind in ("-", "1."))

    short, long = stairs(150), stairs(300)  # four times the characters
    assert seconds(outline, long) < 9 * max(seconds(outline, short), 2e-3)
    mixed = stairs(100) + "\n\nx" * 20_000
    assert seconds(outline, mixed) < 3


def test_resolved_is_a_tuple_of_what_a_runner_needs():
    assert Resolved._fields == ("point", "span", "tokens", "slot")


def test_a_trace_has_what_was_resolved():
    with trace.trace() as step:
        find("the second point", "1. a\n2. b\n", offsets=[(0, 4), (5, 9)])
        find("the ninth point", "1. a\n2. b\n")
    assert [(r["op"], r["ordinal"], r["outcome"], r["tokens"]) for r in step.records] == [
        ("reference", 2, "resolved", [1, 2]),
        ("reference", 9, "out_of_range", None),
    ]


# --- what tries to break it ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["ſtep 1: a\nſtep 2: b", "ıtem 1: a", "reaſon 1: a", "# ſtep 1: x", "ſecondly, a"])
def test_letters_that_only_resemble_ascii_make_no_marker(text):
    assert shown(text) == []
    assert shown("STEP 1: a\nStep 2: b") == [(["step"], 0, ["STEP 1: a", "Step 2: b"])]


@pytest.mark.parametrize("text,nouns", [
    ("4.2点“ \n* x", ["point"]), ("one 2点“ \n* x", ["point"]), ("三个“ \n* x", []), ("两个重要原因\n* x", ["reason"]),
])  # fmt: skip
def test_a_lead_may_end_in_a_word_that_is_no_noun(text, nouns):
    assert shown(text) == [(nouns, 0, ["* x"])]


def test_to_resolve_is_linear_in_the_length_of_the_answer():
    (ref,) = parse("the second example in the third point")
    short, long = (outline("1. a\n2. b\n3. c\n   - x\n   - y\n\ntext\n\n" * n) for n in (500, 4000))
    assert len(resolve(ref, short).candidates) == 500
    assert seconds(resolve, ref, long) < 20 * max(seconds(resolve, ref, short), 2e-3)


def test_deep_slots_are_linear_in_the_length_of_the_paths():
    (ref,) = parse("the first point")
    assert resolve(ref, {(1,) * k: k for k in range(1, 4)}).slot == 1
    assert seconds(resolve, ref, {(1,) * k: k for k in range(1, 1000)}) < 4


@pytest.mark.parametrize("offsets,got", [
    ([(0, float("inf"))], "list"), ([(0, 1.5)], "list"), ([(-3, 1)], r"\(-3, 1\) after 0"),
    (lambda begin, end: None, "one that returned None"), (lambda begin, end: (1, 2, 3), r"one that returned \(1, 2, 3\)"),
    (lambda begin, end: (2, 1), r"one that returned \(2, 1\)"),
])  # fmt: skip
def test_offsets_that_are_none(offsets, got):
    with pytest.raises(ArgumentError, match=f"outline: offsets: got {got}, expected"):
        outline("1. a\n2. b", offsets)


def test_a_slot_whose_noun_is_empty_is_refused():
    with pytest.raises(ArgumentError, match=r"outline_or_slots: got key .*, expected tuples of ordinals"):
        resolve(parse("the first point")[0], {(1,): "a", (("", 1),): "b"})


def test_a_range_to_the_last_and_back():
    text = "1. a\n2. b\n3. c\n4. d"
    for said in ("from the third point to the last", "the last to the third point"):
        assert [found.point.ordinal for found in find(said, text)] == [3, 4]
    assert find("from the fifth point to the last", text).kind == "out of range"


@pytest.mark.parametrize("changed", [
    {"kind": "cardinal", "ranges": ((3, 1),)}, {"kind": "cardinal", "ranges": ((1, 2, 3),)}, {"ranges": ((1.0, 1.0),)},
    {"ranges": ()}, {"ranges": [(1, 1)]}, {"ranges": ((1, 2),)}, {"kind": "cardinal", "ranges": ()}, {"kind": "other"},
    {"kind": []}, {"noun": []}, {"noun": 5}, {"total": "2"}, {"labels": ("a",)}, {"within": 5},
    {"kind": "named", "ranges": (), "labels": (5,)}, {"kind": "named", "ranges": (), "labels": ()},
    {"kind": "named", "ranges": (), "labels": ("",)},
])  # fmt: skip
def test_references_that_parse_never_makes_are_refused(changed):
    ref = parse("the first point")[0]._replace(**changed)
    field = next(name for name in ("within", "labels", "total", "noun", "ranges", "kind") if name in changed)
    with pytest.raises(ArgumentError, match=rf"resolve: ref: got (kind|{field})="):
        resolve(ref, outline("1. a\n2. b\n3. c"))
    with pytest.raises(ArgumentError, match="resolve: ref: got"):
        resolve(parse("the second point")[0]._replace(within=ref), outline("1. a\n2. b\n3. c"))
