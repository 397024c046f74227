"""Cases by hand: what people say about an earlier answer, and what it means. See sic_kernels/references/sentences.py."""

import collections

import pytest

from sic_kernels import ArgumentError
from sic_kernels.references.resolving import Resolved
from sic_kernels.references.sentences import LISTS, Case, answers, cases, judge, outline_of

EXACT = {
    "cases": 336, "heldout": 83, "fresh": 57, "fresh2": 120, "fresh3": 81, "fresh4": 62, "fresh5": 62, "fresh6": 61,
    "fresh7": 63, "fresh8": 59,
}  # fmt: skip


def verdicts(name):
    return [(case, judge(case)) for case in cases(name)]


def test_enough_cases_of_each_kind():
    counted = collections.Counter((case.language, case.kind) for case in cases())
    assert sum(counted.values()) >= 240
    assert min(n for (_, kind), n in counted.items() if kind in ("points", "vague", "none")) >= 10
    assert {kind for _, kind in counted} == {"points", "ambiguous", "range", "missing", "deep", "vague", "none"}
    assert len(cases("heldout")) >= 60
    texts = [(case.answer, case.text) for name in LISTS for case in cases(name)]
    assert len(texts) == len(set(texts))


@pytest.mark.parametrize("name", LISTS)
def test_cases_are_well_formed(name):
    for case in cases(name):
        assert case.answer in answers(), case
        if case.kind == "points":
            for words in case.expected[1:].split(";"):
                assert answers()[case.answer].count(words.strip()) == 1, f"{case}: {words}"
        else:
            assert case.kind in ("ambiguous", "range", "missing", "deep", "vague", "none"), case


@pytest.mark.parametrize("name", LISTS)
def test_most_are_exact_and_nothing_vague_is_resolved(name):
    found = verdicts(name)
    failed = [f"{case.answer} | {case.text} | {case.expected} -> {v.seen}" for case, v in found if not v.exact]
    print("\n".join(failed))
    assert len(found) - len(failed) >= EXACT[name], failed  # what docs/references.md says
    wrong = [
        case for case, v in found if v.wrong and case.kind in ("vague", "none", "deep", "missing", "range", "ambiguous")
    ]
    assert wrong == []
    assert sum(v.wrong for _, v in found) <= (name == "fresh5")  # "two questions in step 3 ... the second one"


def test_a_resolver_that_guesses_is_found_out():
    """The judge itself: one that always says the first point is wrong on what is vague, and on other points."""

    def first(text, outline):
        point = outline.points[0] if outline.points else outline.lists[0].points[0]
        return [Resolved(point, point.span, None)]

    found = [(case, judge(case, first)) for case in cases()]
    assert all(v.wrong and not v.exact for case, v in found if case.kind in ("vague", "none", "range"))
    assert 0 < sum(v.exact for _, v in found) < 0.1 * len(found)
    silent = [judge(case, lambda text, outline: []) for case in cases() if case.kind == "points"]
    assert not any(v.exact or v.wrong for v in silent)


def test_the_whole_group_must_be_named():
    case = Case("en-reasons", "the last two", "= Energy; Scaling")
    points = outline_of("en-reasons").points

    def of(*chosen):
        return judge(case, lambda text, outline: [[Resolved(points[i], points[i].span, None) for i in chosen]])

    assert of(3, 4).exact
    assert not of(4, 3).exact
    assert of(4).wrong
    assert of(2, 3, 4).wrong


def test_unknown_list():
    with pytest.raises(ArgumentError, match="cases: name: got 'more'"):
        cases("more")
