"""The native parser of references against the plain one (references_plain.py): equal on every text, for every grammar."""

import concurrent.futures
import itertools
import json
import re
import threading
import time

import pytest
import references_plain as plain
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st

from sic_kernels import ArgumentError
from sic_kernels.references import Reference, grammar, load_grammar, numerals, outline, parse, parsing
from sic_kernels.references.grammar import Tables
from sic_kernels.references.sentences import LISTS, answers, cases
from sic_kernels.runtime import native

TABLES = grammar.read_tables()
PLAIN = plain.PlainGrammar(TABLES)
TEXTS = [case.text for name in LISTS for case in cases(name)]


def differences(texts, ours=None, theirs=PLAIN, depths=(3,), langs=("auto",)):
    """Where both parsers are not of one mind."""
    found = []
    for text, depth, lang in itertools.product(texts, depths, langs):
        got, wanted = parse(text, depth=depth, lang=lang, grammar=ours), plain.parse(text, theirs, depth, lang)
        if got != wanted:
            found.append((text, depth, lang, got, wanted))
    return found


def grammars(path, data, extend=False):
    """A file's grammar, native and plain."""
    path.write_text(json.dumps(data))
    return load_grammar(path, extend=extend), plain.PlainGrammar(grammar.read_tables(path, extend=extend))


# --- the package's grammar -------------------------------------------------------------------------------------------


def test_every_case_with_all_depths_and_languages():
    texts = TEXTS + list(answers().values())
    assert differences(texts, depths=(1, 2, 3), langs=("auto", "en", "zh")) == []
    assert sum(len(parse(text)) for text in TEXTS) > 0.8 * len(TEXTS)


def test_every_beginning_and_end_of_every_case():
    assert differences({piece for t in TEXTS for i in range(len(t) + 1) for piece in (t[:i], t[i:])}) == []


def test_fields_have_the_types_that_they_had():
    (ref,) = parse('the section "A b" of the second point')
    assert [type(field) for field in ref] == [
        type(f) for f in plain.parse('the section "A b" of the second point', PLAIN)[0]
    ]
    assert hash(ref) == hash(tuple(ref))
    assert ref._replace(depth=1).depth == 1
    assert ref.within.kind == "ordinal"


WORDS = sorted(TABLES.words) + ["0", "1", "12", "3.4", "1.2.3.4.5", "１２", "九十九", "十百", "999999999", "1000000000"]
ODD = [
    *"\"“”「」《》'’.,:;!?()[]#-–—~、，。：\n\t \u3000\u00a0\u200b\u0301_%§é", "'s", "’s", "'sx",
    *"AB０٣²Ⅳ好呢İſẞǄǅK𝐀\ud800\udfff\U0001f600\U00020000", "No", "No.", "no 4", "of", "the", "s",
    "x" * 70, '"' + "t" * 60 + '"', '"' + "t" * 61 + '"', "“”", '"a b"', "《书》",
]  # fmt: skip
PIECE = st.one_of(st.sampled_from(WORDS), st.sampled_from(WORDS).map(str.title), st.sampled_from(ODD), st.characters())
# Of classes that forms are made of, so that more of the texts have references in them.
LIKELY_CLASSES = (
    "the", "of", "in", "and", "to", "last", "noun", "nouns", "ordinal", "tens", "dash", "comma", "hash", "no", "possessive",
    "zordinal", "zcounter", "zpoint", "znoun", "zof", "zin", "zlast", "zto", "zthis", "zabove", "zmeasure", "zand",
)  # fmt: skip
LIKELY = [word for word, (cls, _) in TABLES.words.items() if cls in LIKELY_CLASSES] + ["1", "2", "三", "十", "B", "4.2"]


@pytest.mark.parametrize("template", [
    "the third point{ just} of the second step", "the third point{ above} in the first option, the last example",
    "{the }third point", "the third point{ just}", "the third point{ just} below", "{the }first point to the third point",
    "{in }the third point, what {you }mean by the second example", "{twenty-}first point to the second point", "steps 1{, 2}",
    "上文{你}说的第三点", "第三点{里}", "第三点{说}的第二个例子", "第三点{～}第四点", "第{十}点", "第{一}百点", "section １{.2}",
    'the section "{t}"', "the section “{t }”", "section 1{.2}", "point {1}", "it is No. 4{ }No. 4", "is it?{ }No. 4",
    "x{\u205f}No. 4", "the third point's{x} second example", "{İ}the third point", "the point{’s} last example",
    "point 3{’s} second example", "points 1 and{ item} 2", "ah{?!}No. 4", "from point 3 to the{ last} one",
])  # fmt: skip
def test_where_limits_are(template):
    """What is in braces none to seventy times."""
    before, piece, after = re.fullmatch("(.*?){(.*?)}(.*)", template).groups()
    texts = [before + piece * n + after for n in (*range(14), *range(56, 70))]
    assert differences(texts, langs=("auto", "en")) == []


@settings(max_examples=600)
@given(
    pieces=st.lists(st.one_of(PIECE, st.sampled_from(LIKELY), st.sampled_from(LIKELY)), max_size=24),
    space=st.sampled_from(["", " ", "", " ", "\n"]),
    depth=st.integers(1, 3),
    lang=st.sampled_from(["auto", "en", "zh"]),
)
@example(pieces=["İİ", "the", "third", "point"], space=" ", depth=3, lang="auto")
@example(pieces=["option", "K"], space=" ", depth=3, lang="auto")
@example(pieces=["option", "𝐀"], space=" ", depth=3, lang="auto")
def test_mixtures_of_words(pieces, space, depth, lang):
    assert differences([space.join(pieces)], depths=(depth,), langs=(lang,)) == []


@given(text=st.text(max_size=60), other=st.sampled_from(TEXTS), at=st.integers(0, 60))
def test_any_text_in_a_sentence(text, other, at):
    assert differences([text, other[:at] + text + other[at:]]) == []


@given(text=st.text(alphabet=numerals.CHINESE, min_size=1, max_size=9))
def test_chinese_numerals(text):
    assert numerals.of_chinese(text) == plain.of_chinese(text)


def test_other_characters_are_no_chinese_numeral():
    assert set(numerals.CHINESE) == {*plain.CHINESE_DIGITS, *plain.CHINESE_UNITS}
    with pytest.raises(ArgumentError, match="chinese_number: text: got another character"):
        numerals.of_chinese("三x")
    with pytest.raises(ArgumentError, match="chinese_number: text: got nothing, expected a Chinese numeral"):
        numerals.of_chinese("")


@given(pieces=st.lists(st.sampled_from([*WORDS, *ODD, "three", "reasons", "三", "个", "points"]), max_size=12))
def test_nouns_before_lists(pieces):
    low = " ".join(pieces).lower()
    assert grammar.shipped().native.mentions(low) == plain.mentions(low, PLAIN)


# --- other grammars --------------------------------------------------------------------------------------------------

CLASSES = ("noun", "ordinal", "but", "x")
ATOMS = ["<noun>", "<x>", "<digits>", "<noun|x>", "<ordinal|dotted>", "$", "<but>", "<to>"]


def look(kind):
    return lambda body: f"({kind} {body})"


def patterns(bodies):
    repeated = st.builds(
        lambda body, low, more, lazy: f"({body}){{{low},{low + more}}}{lazy}",
        bodies, st.integers(0, 2), st.integers(0, 2), st.sampled_from(["", "", "?"]),
    )  # fmt: skip
    return st.one_of(
        st.builds(lambda a, b: f"{a} {b}", bodies, bodies),
        st.builds(lambda a, b: f"({a} | {b})", bodies, bodies),
        st.builds(lambda a: f"(|{a})", bodies),
        st.builds(lambda a, lazy: f"({a})?{lazy}", bodies, st.sampled_from(["", "", "?"])),
        repeated,
        bodies.map(look("?=")),
        bodies.map(look("?!")),
        st.sampled_from(["<noun>", "<x>", "<x><noun>", "<noun>{2,2}", "$", "(<x>|<noun>)(?!<x>)"]).flatmap(
            lambda body: st.sampled_from([f"(?<= {body})", f"(?<! {body})"])
        ),
    )


PATTERN = st.recursive(st.sampled_from(ATOMS), patterns, max_leaves=7)
TOKENS = st.lists(st.sampled_from(["noun", "x", "7", "first", "but", "4.2", "?", "to"]), max_size=10).map(" ".join)
MEANS = st.sampled_from([m for m in grammar.MEANINGS if m != "nothing"])


@settings(max_examples=400)
@given(
    forms=st.lists(
        st.tuples(MEANS, PATTERN, st.sampled_from(["", "<x>", "<noun>|<digits>", "(?!<x>)"])), min_size=1, max_size=3
    ),
    rules=st.dictionaries(st.sampled_from(["inner first", "outer first", "fronted"]), PATTERN, max_size=2),
    around=st.dictionaries(st.sampled_from(["vague before", "vague after", "lead"]), PATTERN, max_size=2),
    texts=st.lists(TOKENS, min_size=1, max_size=6),
)
@example(forms=[("list", "(|<x>|<x><x><x>){0,2} (?<= <x><x>)", "")], rules={}, around={}, texts=["x x x", "x x"])
def test_made_grammars(tmp_path_factory, forms, rules, around, texts):
    data = {
        "language": "en", "nouns": {"noun": {"noun": ["noun"]}},
        "classes": {"x": ["x"], "but": ["but"], "to": ["to"], "ordinal": {"first": 1}},
        "anchors": ["noun", "x", "digits", "but", "unknown", "dotted", "ordinal", "to"], "before": ["x"], "after": ["but"],
        "nested": rules, **around,
        "forms": [{"means": means, "pattern": pattern, "starts": starts} for means, pattern, starts in forms],
    }  # fmt: skip
    try:
        ours, theirs = grammars(tmp_path_factory.getbasetemp() / "made.json", data)
    except ArgumentError:
        reject()  # more choices than a file may have
    assert differences(texts, ours, theirs) == []
    assert [ours.native.mentions(text) for text in texts] == [plain.mentions(text, theirs) for text in texts]


SYNTAX = ["<a>", "<a|b>", "(", ")", "|", "?", "{1,2}", "{2,1}", "{0,0}", "(?=", "(?!", "(?<=", "(?<!", "$", " "]


@settings(max_examples=400)
@given(parts=st.lists(st.sampled_from(SYNTAX), max_size=9))
def test_what_is_a_pattern(parts):
    """Accepted is what Python accepts."""
    text = "".join(parts)
    try:
        re.compile(plain.regex_of(text, {"a": "a", "b": "b"}))
        well_formed = True
    except re.error:
        well_formed = False
    assert (native.module().reference_pattern_problem(["a", "b"], text) == "") == well_formed


@pytest.mark.parametrize("text,problem", [
    ("<c>", "class c"), ("<a", "a < without its >"), ("(<a>", r"a \( without its \)"), ("<a>)", r"a \) without its \("),
    ("?", "nothing to repeat"), ("<a>{3,2}", "m above n"), ("<a>{x}", "a { without m,n}"), ("<a>{1", "a { without m,n}"),
    ("<a>?{1,2}", "a repeat of a repeat"), ("(?<=<a>?)", "fixed number"), ("*", "a character"), ("<a>{1,2", "a { without m,n}"),
    ("(" * 200 + "<a>" + ")" * 200, "more than 100 groups"), ("((((<a>{9,9}){9,9}){9,9}){9,9}){9,9}{9,9}", "repeat"),
    ("((((((<a>{9,9}){9,9}){9,9}){9,9}){9,9}){9,9}){9,9}", "too many repeats"), ("(?<= <a>{0,1})", "fixed number"),
])  # fmt: skip
def test_malformed_patterns(text, problem):
    assert re.search(problem, native.module().reference_pattern_problem(["a"], text))


def own(pattern, means="list", **more):
    return {"language": "en", "classes": {"para": ["§"]}, "anchors": ["para"],
            "forms": [{"means": means, "pattern": pattern}], **more}  # fmt: skip


def test_rules_see_only_what_is_between(tmp_path):
    """A look behind does not see the reference before, nor one ahead the one that follows."""
    data = own("<para> <digits>", nested={"inner first": "(?<! <digits>) <unknown> (?! <para>) $"})
    ours, theirs = grammars(tmp_path / "own.json", data)
    texts = ["§ 1 so § 2", "§ 1 so so § 2", "§ 1 3 so § 2", "§ 1 so"]
    assert differences(texts, ours, theirs) == []
    assert [len(parse(text, grammar=ours)) for text in texts] == [1, 2, 2, 1]


def test_what_no_word_begins_with(tmp_path):
    ours, theirs = grammars(tmp_path / "own.json", own("<unknown> <para>", "vague"))
    texts = [f"好{c}§" for c in "’”」》“‘「０٣²é\u3000\u2028好"]
    assert differences(texts, ours, theirs) == []
    assert parse("好’§ x", grammar=ours)[0].span == (1, 3)


def test_how_far_words_around_are_looked_at(tmp_path):
    data = own("<para> <digits>", **{"vague before": "<z> <x>{1,8}", "before": ["y"], "after": ["y"]})
    data["classes"] |= {name: [name] for name in "xyz"}
    ours, theirs = grammars(tmp_path / "own.json", data)
    texts = [f"z {'x ' * i}{'y ' * j}§ 1{' y' * j}" for i in range(9) for j in range(12)]
    assert differences(texts, ours, theirs) == []
    kinds = [parse(f"z {'x ' * i}§ 1", grammar=ours)[0].kind for i in (0, 1, 5, 6)]
    assert kinds == ["ordinal", "vague", "vague", "ordinal"]
    data = own("<para> <digits>", nested={"inner first": "<x>{1,8} <x>{1,2}"})
    data["classes"] |= {"x": ["x"]}
    ours, theirs = grammars(tmp_path / "own.json", data)
    texts = [f"§ 1 {'x ' * i}§ 2" for i in range(12)]
    assert differences(texts, ours, theirs) == []
    assert [len(parse(text, grammar=ours)) for text in texts] == [2, 2, *[1] * 8, 2, 2]


def test_a_grammar_without_but_does_not_count_it(tmp_path):
    (ref,) = parse("§", grammar=grammars(tmp_path / "own.json", own("<para>", "from end"))[0])
    assert ref.ordinal == -2


def test_numbers_with_dots_are_anchors(tmp_path):
    for anchor in ("digits", "dotted"):
        ours, theirs = grammars(tmp_path / "own.json", own("<dotted>", "label", anchors=[anchor]))
        assert [ref.labels for ref in parse("4.2", grammar=ours)] == [("4.2",)]
        assert differences(["4.2", "4", "x 4.2 y"], ours, theirs) == []


@pytest.mark.parametrize("data,message", [
    ({"classes": {"digits": ["many"]}}, "classes.digits: got 'many', expected no words"),
    ({"classes": {"numeral": {"x": 3}}}, "classes.numeral: got 'x', expected no words"),
    ({"nouns": {"x": {"ordinal": ["x"]}}}, "nouns.x.ordinal: got a class of numbers"),
    ({"classes": {"ordinal": {"x": 10**30}}}, "classes.ordinal.x: got one of ten digits or more"),
    ({"classes": {"ordinal": {"x": 10**9}}}, "classes.ordinal.x: got one of ten digits or more"),
    ({"classes": {"ordinal": {"x": 0}}}, "classes.ordinal.x: got 0, expected 1 or more"),
    ({"classes": {"x": {"x": -1}}}, "classes.x.x: got -1, expected 1 or more"),
    ({"classes": {"back": {"x": 2}}}, "classes.back.x: got 2, expected -1 or less, from the end"),
    ({"anchors": [], "forms": [{"means": "from end", "pattern": "<digits>", "ordinal": -2}]},
     r"forms\[0\].ordinal: got -2, expected 1 or more"),
    ({"anchors": [], "forms": [{"means": "all", "pattern": "<digits>", "count": 0}]}, r"forms\[0\].count: got 0, expected 1"),
    ({"parts": {"x": "[y]", "y": "<digits> [x]"}, "nested": {"fronted": "[x]"}},
     "parts.y: got part 'x' inside of itself, expected parts that do not contain one another"),
    ({"parts": {"b" * n: f"[{'b' * (n + 1)}]" for n in range(1, 10)}, "nested": {"fronted": "[b]"}},
     "parts.bbbbbbbb: got part 'bbbbbbbbb' inside of b, bb, .*, expected parts at most 8 deep"),
    ({"nested": {"fronted": "+"}}, r"fronted: got '\+', expected <class>, .*\(\?<= \), \(\?<! \) or \$"),
    ({"classes": {"b" * n: [f"w{n}"] for n in range(1, 300)}}, "classes: got 4.. classes, expected at most 256"),
    ({"parts": {"a": "[b]" * 50, "b": "[c]" * 50, "c": "<x>" * 50}, "classes": {"x": ["x"]}, "nested": {"fronted": "[a]"}},
     "parts.a: got over 16384 characters with its parts, expected at most 16384"),
])  # fmt: skip
def test_files_that_no_parser_can_read(tmp_path, data, message):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({"language": "en", **data}))
    with pytest.raises(ArgumentError, match=f"load_grammar: bad.json: {message}"):
        load_grammar(path)


@pytest.mark.parametrize("look,found", [("?=", True), ("?!", False)])
def test_a_look_that_is_asked_at_two_places_after_many_steps(tmp_path, look, found):
    """Both ask whether the § follows; the second one must not take what the first one tried for a failure."""
    pattern = f"<digits> (<x>|<x><x>){{0,8}}? ({look} (<x>|<x><x>) <para>) <x> <para>"
    data = own(pattern, classes={"para": ["§"], "x": ["x"]})
    ours, theirs = grammars(tmp_path / "own.json", data)
    text = "7 " + "x " * 14 + "§"
    assert bool(parse(text, grammar=ours)) == found
    assert differences([text], ours, theirs) == []


def test_parts_of_parts_of_parts_are_refused_at_once(tmp_path):
    data = {
        "language": "en",
        "nested": {"fronted": "[a]"},
        "parts": {"a": "[b]" * 9000, "b": "[c]" * 9000, "c": "<digits>"},
    }
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(data))
    begin = time.process_time()
    with pytest.raises(ArgumentError, match=r"parts\.b: got over 16384 characters with its parts"):
        load_grammar(path)
    assert time.process_time() - begin < 3


@pytest.mark.parametrize("number", ["0", "9" * 10, "9" * 5000, "x", ""])
def test_words_of_a_sequence_have_ordinals(tmp_path, number):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({"language": "en", "sequence": {number: ["uno"]}}))
    with pytest.raises(ArgumentError, match=r"sequence: got '.{0,20}', expected a number from 1 on"):
        load_grammar(path)


def test_words_of_a_sequence_may_have_capitals_in_the_file(tmp_path):
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"language": "en", "sequence": {"1": ["Uno"], "2": ["Dos"]}}))
    (found,) = [
        listed for listed in outline("Uno, a. Dos, b.", grammar=load_grammar(path)).lists if not listed.structural
    ]
    assert len(found) == 2


@pytest.mark.parametrize("path", ["a\0b", b"a", 3])
def test_a_grammar_needs_paths(path):
    with pytest.raises(ArgumentError, match="load_grammar: paths: got"):
        load_grammar(path)


def test_a_text_may_have_a_lower_of_its_own():
    class Odd(str):
        def lower(self):
            return 5

    assert parse(Odd("the third point")) == parse("the third point")


def test_words_of_lone_surrogates_and_of_many_characters(tmp_path):
    words = ["\ud800", "\udfffx", "条款", "条", "第\u0301", " 级", "a级", "👍🏽", "’sx", "1.2", '"x"', "“题”"]
    data = own("<para> <digits>?", classes={"para": ["§", *words]})
    ours, theirs = grammars(tmp_path / "own.json", data)
    texts = ["".join(pair) for pair in itertools.product([*words, "§", "x", " "], repeat=2)]
    assert differences(texts, ours, theirs, langs=("auto", "en", "zh")) == []
    assert len(parse("\ud800 条款 x", grammar=ours)) == 2


# --- time, memory, threads -------------------------------------------------------------------------------------------


def seconds(text, ours=None):
    begin = time.process_time()
    parse(text, grammar=ours)
    return time.process_time() - begin


@pytest.mark.parametrize("pattern", [
    "(" + "<digits>?" * 16 + "){1,8} <para>", "((<digits>|<digits>){1,4} | <digits>{0,3}){0,2} <para>",
    "(<digits> | <digits>)" * 400 + "<para>", "<digits>{0,1}" * 400 + "<para>",
    "(?! (" + "<digits>?" * 16 + "){1,8} <para>) <para>",
    "(?= (<digits>{0,4}){0,7} <para>) <digits>",
])  # fmt: skip
def test_no_pattern_takes_long(tmp_path, pattern):
    path = tmp_path / "slow.json"
    path.write_text(json.dumps(own(pattern)))
    assert seconds("1 " * 60 + "x §", load_grammar(path, extend=False)) < 2


@pytest.mark.parametrize(
    "piece", ["the third point of the first step, ", "第三点的第二个例子", "of ", '"', "\ud800", "1.", "好"]
)
def test_four_million_characters(piece):
    """Four times the text takes about four times as long; quadratic would be sixteen."""
    short, long = (piece * (n // len(piece)) for n in (1_000_000, 4_000_000))
    assert any(seconds(long) < 6 * max(seconds(short), 0.01) for _ in range(5))


def test_nothing_and_endless_nesting():
    assert parse("") == []
    (ref,) = parse("the first point of " * 50_000 + "the first point")
    assert (ref.kind, ref.depth) == ("too deep", 50_001)


def test_long_texts_leave_other_threads_running():
    """Whether `parse` and what counts points give the GIL up: else the other thread would stand still."""
    text = "the third point of two reasons, " * 30_000
    for call in (lambda: parse(text), lambda: grammar.shipped().native.mentions(text)):
        ticks, done = [], threading.Event()

        def tick(ticks=ticks, done=done):
            while not done.is_set():
                ticks.append(time.perf_counter())
                time.sleep(0.001)

        thread = threading.Thread(target=tick)
        thread.start()
        begin = time.perf_counter()
        call()
        end = time.perf_counter()
        done.set()
        thread.join()
        assert sum(begin < t < end for t in ticks) > 3


def test_threads_get_what_one_gets():
    texts = [*TEXTS, "the third point, " * 2000]  # the last is read without the GIL
    wanted = [parse(text) for text in texts]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: [parse(text) for text in texts], range(16)):
            assert found == wanted


def test_the_native_layer_refuses_what_is_no_text():
    ours = grammar.shipped().native
    with pytest.raises(ArgumentError, match="parse: text: got bytes, expected str"):
        ours.parse(b"x", "x", -1, 3)
    with pytest.raises(ArgumentError, match="parse: low: got 2 characters, expected those of text"):
        ours.parse("x", "xx", -1, 3)
    with pytest.raises(ArgumentError, match="parse: lang: got 2, expected -1, or one of the languages"):
        ours.parse("x", "x", 2, 3)
    with pytest.raises(ArgumentError, match="parse: depth: got 0, expected 1 or more"):
        ours.parse("x", "x", -1, 0)


def made(pattern="<digits>", reference=Reference, **more):
    """A grammar made of tables by hand."""
    classes = ["unknown", "digits", "dotted", "numeral", "title", "x"]
    forms = [("en", "list", pattern, None, None, False, False)]
    return native.module().ReferenceGrammar(
        **{"classes": classes, "words": [], "nouns": [], "forms": forms, "rules": {}, "sets": {}, **more},
        reference=reference,
    )


def test_the_native_layer_refuses_tables_that_do_not_fit():
    assert made(sets={("en", "anchors"): ["digits"]}).parse("7", "7", -1, 1) == [
        Reference((0, 1), "ordinal", 7, None, 1, ((7, 7),))
    ]
    with pytest.raises(ArgumentError, match=r"Grammar: pattern: got <y>, expected a pattern \(class y\)"):
        made("<y>")
    with pytest.raises(ArgumentError, match="Grammar: classes: got x twice, expected names that differ"):
        made(classes=["unknown", "digits", "dotted", "numeral", "title", "x", "x"])
    with pytest.raises(
        ArgumentError, match=r"Grammar: words: got number -9223372036854775808, expected -10\^9 to 10\^9"
    ):
        made(words=[("x", "x", -(2**63), -1)])
    for other in (tuple, list, Tables, Reference((0, 1), "ordinal", 7, None, 1), None):
        with pytest.raises(
            ArgumentError, match=r"reference: got .*, expected a class of tuples with _fields = \('span', 'kind'"
        ):
            made(reference=other)


def test_names_are_those_of_the_native_layer():
    """They are told apart by their order there."""
    names = native.module().reference_names()
    assert set(names) == {"languages", "meanings", "rules", "sets", "kinds"}
    assert (names["languages"], names["meanings"], names["sets"]) == (grammar.LANGUAGES, grammar.MEANINGS, grammar.SETS)
    assert names["rules"] == (*grammar.NESTED, *grammar.SINGLE)
    assert ("auto", *names["languages"]) == parsing.LANGS  # by its place less one
    texts = {"ordinal": "point 3", "cardinal": "points 2 and 3", "named": "option B", "vague": "the other point"}
    texts["too deep"] = "point 1 of step 2"
    assert names["kinds"] == tuple(texts)
    assert [parse(text, depth=1)[0].kind for text in texts.values()] == list(texts)


def test_a_quotation_mark_by_itself_is_no_title(tmp_path):
    ours, theirs = grammars(tmp_path / "own.json", own("<title>", "title", anchors=["title", "unknown"]))
    for mark in '"“「《':
        assert parse(f"x {mark}", grammar=ours) == parse(f"{mark}第", grammar=ours) == []
    assert differences(['"', '"a"', "“", "“a”", "「」", "《", '""'], ours, theirs, langs=("auto", "en", "zh")) == []
