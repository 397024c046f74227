"""`references.parse`: what is found in sentences, by hand; nesting, numbers, what is refused, grammar files."""

import json
import pathlib
import re
import time

import pytest
import references_plain

import sic_kernels as sic
from sic_kernels import ArgumentError, references
from sic_kernels.references import grammar, numerals, parse
from sic_kernels.references.sentences import LISTS, cases
from sic_kernels.runtime import config


def only(text, **kwargs):
    (ref,) = parse(text, **kwargs)
    return ref


def said(text, **kwargs):
    """(words, kind, ranges, noun) of each reference."""
    return [(text[slice(*r.span)], r.kind, r.ranges, r.noun) for r in parse(text, **kwargs)]


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_golden_english():
    assert said("Is the third point above, which you made, true?") == [
        ("the third point above", "ordinal", ((3, 3),), "point")
    ]
    assert said("Compare your last two arguments.") == [("your last two arguments", "cardinal", ((-2, -1),), "reason")]
    assert said("Drop steps 2 to 4 and 7.") == [("steps 2 to 4 and 7", "cardinal", ((2, 4), (7, 7)), "step")]
    assert said("Is option B better?") == [("option B", "named", (), "option")]


def test_golden_chinese():
    assert said("请看上文第三点。") == [("上文第三点", "ordinal", ((3, 3),), "point")]
    assert said("倒数第二个理由呢") == [("倒数第二个理由", "ordinal", ((-2, -2),), "reason")]
    assert said("第１２条") == [("第１２条", "ordinal", ((12, 12),), "item")]
    assert said("第二至第四步") == [("第二至第四步", "cardinal", ((2, 4),), "step")]


def test_a_nested_reference_has_the_one_that_it_is_in():
    ref = only("Explain step 2 of the third option of section 4.")
    assert (ref.depth, ref.noun, ref.ordinal) == (3, "step", 2)
    assert (ref.within.depth, ref.within.noun, ref.within.ordinal) == (2, "option", 3)
    assert (ref.within.within.depth, ref.within.within.noun, ref.within.within.ordinal) == (1, "section", 4)
    assert ref.within.within.within is None


@pytest.mark.parametrize(
    "text",
    [
        "the second example in the third point",
        "point 3's second example",
        "in point 3, the second example",
        "第三点的第二个例子",
        "第三点第二个例子",
    ],
)
def test_both_orders_of_nesting(text):
    ref = only(text)
    assert (ref.ordinal, ref.noun, ref.within.ordinal, ref.within.noun) == (2, "example", 3, "point")
    assert ref.span == (0 if not text.startswith("in ") else 3, len(text))


def test_an_ordinal_without_a_noun_has_that_of_the_reference_before():
    said_of = [(r.ordinal, r.noun) for r in parse("The first problem is solved. How do I fix the second?")]
    assert said_of == [(1, "problem"), (2, "problem")]
    _, inner = parse("The second example in point 3 is fine, and the last one?", depth=3)
    assert (inner.ordinal, inner.noun, inner.depth, inner.within.ordinal) == (-1, "example", 2, 3)
    assert [r.noun for r in parse("第一个问题懂了，第二个呢")] == ["question", "question"]
    assert [r.noun for r in parse("The second one? And the third reason?")] == [None, "reason"]  # only from before
    assert [r.noun for r in parse("The other step is fine, the third one is not.")] == [
        "step",
        None,
    ]  # not of a vague one


def test_neighbours_are_not_nested():
    assert [(r.ordinal, r.depth) for r in parse("the second point and the first example")] == [(2, 1), (1, 1)]
    assert [(r.ordinal, r.depth) for r in parse("第一点第二点都对")] == [(1, 1), (2, 1)]


@pytest.mark.parametrize(
    "words,n",
    [
        ("first", 1),
        ("twelfth", 12),
        ("nineteenth", 19),
        ("twentieth", 20),
        ("twenty-first", 21),
        ("thirty second", 32),
        ("ninety-ninth", 99),
        ("1st", 1),
        ("22nd", 22),
        ("13th", 13),
        ("second-to-last", -2),
        ("next-to-last", -2),
        ("penultimate", -2),
        ("third last", -3),
        ("last", -1),
        ("last but one", -2),
    ],
)
def test_ordinal_words(words, n):
    assert only(f"the {words} point").ordinal == n


@pytest.mark.parametrize(
    "words,n",
    [
        ("two", 2),
        ("nineteen", 19),
        ("twenty", 20),
        ("forty-two", 42),
        ("ninety nine", 99),
        ("#7", 7),
        ("no. 4", 4),
        ("number 12", 12),
        ("(3)", 3),
        ("iv", 4),
        ("XII", 12),
        ("007", 7),
    ],
)
def test_cardinal_words(words, n):
    assert only(f"explain point {words}").ordinal == n


@pytest.mark.parametrize(
    "words,n",
    [
        ("一", 1),
        ("十", 10),
        ("十二", 12),
        ("二十", 20),
        ("九十九", 99),
        ("一百零三", 103),
        ("两", 2),
        ("二〇", 20),
        ("１２", 12),
        ("7", 7),
    ],
)
def test_chinese_numerals(words, n):
    assert only(f"第{words}点").ordinal == n


def test_a_number_too_long_to_be_one_is_in_no_list():
    assert only("point " + "9" * 5000).ordinal == numerals.TOO_LARGE
    assert only("第" + "九" * 5000 + "点").ordinal == numerals.TOO_LARGE
    assert numerals.of_chinese("十百") == numerals.TOO_LARGE


def test_groups_with_a_total():
    assert only("all five reasons")[6] == 5
    assert only("both options").total == 2
    assert only("以上三点").total == 3
    assert only("all the reasons").total is None


def test_quoted_words_are_titles_not_references():
    assert said('You wrote "the third point".') == []
    assert only('the section "The third point"').labels == ("The third point",)


@pytest.mark.parametrize(
    "text",
    [
        "that passage above",
        "刚才那个",
        "some of the reasons",
        "the other point",
        "the third point below",
        "第三点后面那一点",
        "one of the first three points",
        "the reason above",
    ],
)
def test_vague_ones_say_so(text):
    assert [r.kind for r in parse(text)] in (["vague"], [])
    assert all(r.ordinal is None and r.ranges == () for r in parse(text))


@pytest.mark.parametrize("text,kinds", [
    ("from the third point to the last", [((3, -1),)]), ("from point 3 to the last point", [((3, -1),)]),
    ("from step 2 to step 4", [((2, 4),)]), ("第二点到第四点", [((2, 4),)]),
    ("steps 3 to the last one", ["vague"]), ("第3到最后一点", ["vague"]), ("第三点到最后一点", ["vague", "vague"]),
    ("from step 3 to the end", ["vague"]), ("the third point to the last one", ["vague", "vague"]),
    ("第一到倒数第二点", ["vague"]), ("from the second to the second to last point", ["vague"]),
    ("最后零点", ["vague"]), ("后零点", ["vague"]), ("最后一点", [((-1, -1),)]), ("回到第三点", [((3, 3),)]),
    ("go back to the third point", [((3, 3),)]),
])  # fmt: skip
def test_a_part_of_a_range_is_never_answered_by_itself(text, kinds):
    assert [r.kind if r.kind == "vague" else r.ranges for r in parse(text)] == kinds


def test_letters_need_a_capital():
    assert [r.kind for r in parse("give the reason a name")] == ["vague"]
    assert only("option b").kind == "vague"


# --- depth and language ----------------------------------------------------------------------------------------------


def test_deeper_than_depth_is_one_marker():
    text = "the second example in the third point"
    assert only(text, depth=2).kind == "ordinal"
    ref = only(text, depth=1)
    assert (ref.kind, ref.depth, ref.ordinal, ref.span) == ("too deep", 2, None, (0, len(text)))
    assert only("第三点的第二个例子的第一个词的第一个字母").kind == "too deep"


def test_depth_by_setting(monkeypatch):
    monkeypatch.setattr(config, "_current", config.load({"SIC_HASH_DEPTH": "1"}))
    assert only("the second example in the third point").kind == "too deep"
    assert only("the second example in the third point", depth=3).kind == "ordinal"


def test_lang():
    both = "point 3 和第二点"
    assert [r.ordinal for r in parse(both)] == [3, 2]
    assert [r.ordinal for r in parse(both, lang="en")] == [3]
    assert [r.ordinal for r in parse(both, lang="zh")] == [2]


def test_spans_survive_letters_that_are_longer_in_lower_case():
    text = "İİİ: the third point"
    assert text[slice(*only(text).span)] == "the third point"


@pytest.mark.parametrize("arguments,message", [
    ({"text": 7}, "parse: text: got int, expected str"),
    ({"depth": 4}, "parse: depth: got 4, expected an integer from 1 to 3"),
    ({"depth": 0}, "parse: depth: got 0, expected an integer from 1 to 3"),
    ({"depth": "2"}, "parse: depth: got '2', expected an integer"),
    ({"lang": "de"}, r"parse: lang: got 'de', expected auto\|en\|zh"),
    ({"grammar": {}}, "parse: grammar: got dict, expected Grammar"),
])  # fmt: skip
def test_wrong_arguments(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        parse(**{"text": "point 3", **arguments})


# --- time ------------------------------------------------------------------------------------------------------------

HOSTILE = [
    "第",
    "the ",
    "(",
    "1",
    "1 ",
    "the first of ",
    "第一点的",
    "point 1, ",
    "first and ",
    '"',
    "“",
    "last ",
    "A ",
    "1.1.",
    "twenty-",
    "最后",
    "步骤一和",
    "one of the ",
    "# ",
]


def seconds(function, *arguments):
    best = float("inf")
    for _ in range(3):
        begin = time.process_time()
        function(*arguments)
        best = min(best, time.process_time() - begin)
    return best


@pytest.mark.parametrize("piece", HOSTILE)
def test_time_is_linear_in_the_length(piece):
    """Four times the text takes about four times as long; quadratic would be sixteen."""
    short, long = (piece * (n // len(piece)) for n in (25_000, 100_000))
    assert seconds(parse, long) < 9 * max(seconds(parse, short), 1e-3)


# --- grammar files ---------------------------------------------------------------------------------------------------


def test_size_of_the_grammar():
    files = list((grammar.SHIPPED[0].parent).iterdir())
    assert {path.name for path in files} == {"en.json", "zh.json"}
    assert sum(path.stat().st_size for path in files) < 50_000


def test_a_file_adds_nouns_and_forms(tmp_path):
    file = tmp_path / "more.json"
    file.write_text(json.dumps({
        "language": "en", "nouns": {"amendment": {"noun": ["amendment"], "nouns": ["amendments"]}}, "classes": {"paren": ["§"]},
        "anchors": ["paren"], "forms": [{"means": "list", "pattern": "<paren> <digits>"}],
    }))  # fmt: skip
    more = references.load_grammar(file)
    assert parse("§ 7 and amendment 3") == []
    assert said("§ 7 and the third amendment", grammar=more) == [
        ("§ 7", "ordinal", ((7, 7),), None), ("the third amendment", "ordinal", ((3, 3),), "amendment"),
    ]  # fmt: skip
    text = "Three amendments:\n1. a\n2. b\n3. c"
    found = references.outline(text, grammar=more)
    assert references.resolve(only("the third amendment", grammar=more), found, grammar=more).point.ordinal == 3


def test_a_file_adds_words_of_sentences_that_count(tmp_path):
    file = tmp_path / "more.json"
    file.write_text(json.dumps({"language": "en", "counted": {"verbs": ["remains"], "between": ["sad"]}}))
    text = "The first sad reason remains a. The second remains b."
    assert not references.outline(text).points
    found = references.outline(text, grammar=references.load_grammar(file))
    assert [point.ordinal for point in found.points] == [1, 2]
    only_own = references.load_grammar(file, extend=False)
    assert not references.outline("The first reason is a. The second is b.", grammar=only_own).points


def test_a_grammar_of_its_own(tmp_path):
    file = tmp_path / "own.json"
    file.write_text(json.dumps({
        "language": "en", "nouns": {"verse": {"noun": ["verse"]}}, "anchors": ["noun"],
        "forms": [{"means": "list", "pattern": "<noun> <digits>"}],
    }))  # fmt: skip
    own = references.load_grammar(file, extend=False)
    assert said("verse 4, point 3", grammar=own) == [("verse 4", "ordinal", ((4, 4),), "verse")]
    assert references.outline("1. a\n2. b", grammar=own).points[1].ordinal == 2


@pytest.mark.parametrize(
    "data,message",
    [
        ("{", "bad.json: file: got .*, expected a readable JSON file"),
        ([], "bad.json: file: got list, expected an object"),
        ({"language": "de"}, "bad.json: language: got 'de', expected en"),
        ({"language": "en", "noun": {}}, "bad.json: file: got key 'noun', expected after"),
        ({"language": "en", "nouns": {"x": ["x"]}}, "bad.json: nouns.x: got list, expected an object"),
        (
            {"language": "en", "nouns": {"x": {"noun": "x"}}},
            "bad.json: nouns.x.noun: got 'x', expected a list of words",
        ),
        (
            {"language": "en", "nouns": {"x": {"generic": 1}}},
            "bad.json: nouns.x.generic: got 1, expected true or false",
        ),
        (
            {"language": "en", "classes": {"X": ["x"]}},
            "bad.json: classes: got 'X', expected a name of lower-case letters",
        ),
        ({"language": "en", "classes": {"x": {"y": "1"}}}, "bad.json: classes.x.y: got '1', expected an integer"),
        ({"language": "en", "forms": [{"means": "guess"}], "anchors": []}, r"bad.json: forms\[0\].means: got 'guess'"),
        ({"language": "en", "forms": [{"means": "list", "pattern": "<noun>"}]}, "bad.json: anchors: got none"),
        (
            {"language": "en", "forms": [{"means": "list", "pattern": "<nuon>"}], "anchors": []},
            r"bad.json: forms\[0\].pattern: got class 'nuon'",
        ),
        (
            {"language": "en", "forms": [{"means": "list", "pattern": "[x]"}], "anchors": []},
            r"forms\[0\].pattern: got part 'x'",
        ),
        (
            {"language": "en", "forms": [{"means": "list", "pattern": "<noun>*"}], "anchors": []},
            r"forms\[0\].pattern: got '\*'",
        ),
        (
            {"language": "en", "forms": [{"means": "list", "pattern": "<noun>{1,9}"}], "anchors": []},
            "at most 8 repeats",
        ),
        (
            {"language": "en", "forms": [{"means": "list", "pattern": "(<noun>"}], "anchors": []},
            r"forms\[0\].pattern: got '\(<noun>'",
        ),
        (
            {"language": "en", "parts": {"x": "[x]"}, "forms": [{"means": "list", "pattern": "[x]"}], "anchors": []},
            "parts.x: got",
        ),
        (
            {"language": "en", "anchors": [], "forms": [{"means": "list", "pattern": "((<digits>{1,8}){1,8}) <noun>"}]},
            r"forms\[0\].pattern: got repeats of 64 in all, expected repeats whose product is at most 28",
        ),
        (
            {"language": "en", "parts": {"x": "<digits>{1,8}"}, "nested": {"inner first": "[x]{1,8}"}},
            "inner first: got repeats of 64",
        ),
        (
            {"language": "en", "anchors": [], "forms": [{"means": "list", "pattern": "<digits>?" * 17}]},
            r"forms\[0\].pattern: got 17 optional parts, expected at most 16",
        ),
        ("[" * 100_000, "bad.json: file: got .*, expected a readable JSON file"),
        ({"language": "en", "classes": {"ordinal": ["zeroth"]}}, "classes.ordinal: got 'zeroth' without a number"),
        ({"language": "en", "anchors": ["nuon"]}, "anchors: got class 'nuon'"),
        ({"language": "en", "sequence": {"second": ["x"]}}, "sequence: got 'second', expected a number from 1 on"),
        ({"language": "en", "nested": {"inside": "<noun>"}}, "nested: got key 'inside'"),
        ({"language": "en", "counted": {"verb": ["is"]}}, "counted: got key 'verb', expected before|between|verbs"),
    ],
)
def test_malformed_files_are_named_with_their_key(tmp_path, data, message):
    file = tmp_path / "bad.json"
    file.write_text(data if isinstance(data, str) else json.dumps(data))
    with pytest.raises(ArgumentError, match=f"load_grammar: .*{message}"):
        references.load_grammar(file)


def test_missing_file_and_no_file(tmp_path):
    with pytest.raises(ArgumentError, match=r"load_grammar: none.json: file: got .*No such file"):
        references.load_grammar(tmp_path / "none.json")
    with pytest.raises(ArgumentError, match="load_grammar: paths: got none"):
        references.load_grammar(extend=False)
    for path in (None, 5, b"x"):
        with pytest.raises(ArgumentError, match=r"load_grammar: paths: got .*, expected paths of JSON files"):
            references.load_grammar(path)


def test_the_most_choices_that_a_file_may_have_are_quick(tmp_path):
    file = tmp_path / "choices.json"
    patterns = ("(<digits>{1,4}){1,7} <para>", "<digits>?" * 16 + "<para>")
    for pattern in patterns:
        file.write_text(json.dumps({
            "language": "en", "classes": {"para": ["§"]}, "anchors": ["para"],
            "forms": [{"means": "list", "pattern": pattern}],
        }))  # fmt: skip
        own = references.load_grammar(file, extend=False)
        assert seconds(lambda text, own=own: parse(text, grammar=own), "1 " * 60 + "x §") < 4


def test_words_may_have_any_characters(tmp_path):
    file = tmp_path / "words.json"
    words = {"noun": ["a(b", "[", "c++"], "znoun": ["条(", "["], "nouns": ["x|"]}
    file.write_text(json.dumps({
        "language": "en", "nouns": {"odd": words}, "classes": {"noun": ["bare"], "zpoint": ["光"]},
        "sequence": {"1": ["one) "], "2": ["*"]},
    }))  # fmt: skip
    own = references.load_grammar(file)
    found = references.outline("a(b 1: x\na(b 2: y\n\nbare 1: x\n\n3光\n* z", grammar=own)
    assert found.points[0].label == "1"
    assert any("odd" in listed.nouns for listed in found.lists)


@pytest.mark.parametrize("means", ["list", "first", "last", "from end", "all", "label", "letter", "title"])
def test_a_form_may_match_without_what_it_is_read_for(tmp_path, means):
    file = tmp_path / "form.json"
    file.write_text(json.dumps({
        "language": "en", "classes": {"para": ["§"]}, "anchors": ["para"],
        "forms": [{"means": means, "pattern": "<para>"}, {"means": means, "pattern": "<digits>?"}],
    }))  # fmt: skip
    ref = only("x §", grammar=references.load_grammar(file, extend=False))
    assert ref.kind == {"last": "ordinal", "from end": "ordinal", "all": "cardinal"}.get(means, "vague")


def test_a_title_of_quotation_marks_is_vague():
    assert only('the "“”" section').kind == "vague"


def test_anchors_leave_nothing_out():
    """A sentence without an anchor is not looked at further: no form may match in one."""
    shipped = references_plain.PlainGrammar(grammar.read_tables())
    for case in (case for name in LISTS for case in cases(name)):
        tags = shipped.tag(shipped.tokens(case.text.lower(), "auto"))
        if not shipped.anchors["auto"].search(tags):
            matches = [shipped.forms["auto"][m.lastindex - 1].means for m in shipped.patterns["auto"].finditer(tags)]
            assert set(matches) <= {"nothing"}, case.text


def test_public_names():
    assert sic.references is references
    assert all(hasattr(references, name) for name in references.__all__)


def test_the_example_of_the_page_runs_and_its_file_loads(tmp_path):
    page = (pathlib.Path(__file__).parents[1] / "docs" / "references.md").read_text(encoding="utf-8")
    names = {}
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], names)
    assert (names["text"], names["pages"]) == ("- less power", range(6, 7))
    assert names["refused"].kind == "vague"
    file = tmp_path / "page.json"
    file.write_text(re.search(r"```json\n(.*?)```", page, re.DOTALL)[1], encoding="utf-8")
    assert only("§ 7", grammar=references.load_grammar(file)).ordinal == 7
    assert [
        name for name in references.__all__ if name.islower() and f"`{name}" not in page and f".{name}(" not in page
    ] == []
