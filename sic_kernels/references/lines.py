"""Lists and headings that begin a line: Markdown and what people write like it."""

from __future__ import annotations

import re
from typing import NamedTuple

from . import numerals
from .points import Draft, Mark

BULLETS = "-*+•‣●◦▪–"
FENCES = ("```", "~~~")
BOLD_HEADING = 7  # the level of a line in bold: below any heading with marks
DEEPEST_INDENT = 64

_MARKER = re.compile(
    rf"(?P<bullet>[{BULLETS}])(?=\s)"
    r"|(?:\*\*)?(?:(?P<digits>[0-9０-９]{1,4})[.)．）、](?=\s|\*\*|[^\x00-\x7f]|$)"
    r"|(?P<roman>[ivxIVX]{2,6})[.)](?=\s)|(?P<letter>[A-Za-z])[.)](?=\s)"
    r"|(?P<chinese>[一二三四五六七八九十]{1,3})[、．.])"
)
_HEADING = re.compile(r"(#{1,6})[ \t]+(?=\S)")
_NUMBERED_TITLE = re.compile(
    r"(?:(?P<dotted>\d{1,3}(?:\.\d{1,3}){1,3})\.?|(?P<digits>\d{1,3})[.):：、]|(?P<roman>[IVX]{1,6})[.):]"
    r"|(?P<letter>[A-Z])[.):]|(?P<chinese>[一二三四五六七八九十]{1,3})[、.：:])\s*"
)
_ROMAN = dict(numerals.roman())


class Line(NamedTuple):
    """One line that is not empty. indent: columns before it; begin, end: of what stands on it, in characters."""

    begin: int
    end: int
    indent: int
    after_blank: bool


class Marker(NamedTuple):
    """How a point begins. style: points of one list have the same; content: where its own words begin."""

    style: str
    ordinal: int | None
    label: str
    content: int


class Lines:
    """Finds the lists of a text that begin lines, and its headings and paragraphs. One pass, line by line.

    drafts: the lists.  headings: one draft for the headings under each heading.  blocks: (begin, end) of lines without an
    empty one between.  paragraphs: the blocks that are in no list and no heading.  breaks: where headings begin.
    marked: positions of markers, so that nothing else takes them for one.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.drafts: list[Draft] = []
        self.headings: list[Draft] = []
        self.blocks: list[tuple[int, int]] = []
        self.paragraphs: list[tuple[int, int]] = []
        self.breaks: list[int] = []
        self.marked: set[int] = set()
        self._open: list[Draft] = []
        self._sections: list[tuple[int, Draft]] = []  # open headings: level and the list that each is in
        self._read()

    def _read(self) -> None:
        fenced, blank, at = False, True, 0
        for raw in self.text.split("\n"):
            begin = at + len(raw) - len(raw.lstrip())
            line = Line(begin, at + len(raw.rstrip()), _columns(raw[: begin - at]), blank)
            at += len(raw) + 1
            if line.begin >= line.end:
                blank = True
                continue
            fence = self.text.startswith(FENCES, line.begin)
            self._extend_block(line)
            if fence or fenced:
                fenced ^= fence
                self._plain(line)
            else:
                self._take(line)
            blank = False
        while self._open:
            self._close()
        for _, draft in self._sections:
            draft.last.end = len(self.text.rstrip())

    def _take(self, line: Line) -> None:
        content = self.text[line.begin : line.end]
        if len(content) > 2 and set(content) <= set("-*_ "):  # a rule
            return
        heading = _HEADING.match(self.text, line.begin, line.end)
        marker = None if heading else _marker(self.text, line)
        if heading:
            self._heading(line, len(heading[1]), heading.end())
        elif line.indent == 0 and line.after_blank and _in_bold(content):
            self._heading(line, BOLD_HEADING, line.begin + 2)
        elif marker:
            self._item(line, marker)
        else:
            self._plain(line)

    def _extend_block(self, line: Line) -> None:
        if line.after_blank or not self.blocks:
            self.blocks.append((line.begin, line.end))
        else:
            self.blocks[-1] = (self.blocks[-1][0], line.end)

    # --- headings

    def _heading(self, line: Line, level: int, content: int) -> None:
        while self._open:
            self._close()
        siblings = None
        while self._sections and self._sections[-1][0] >= level:
            depth, draft = self._sections.pop()
            draft.last.end = trimmed(self.text, line.begin)
            siblings = draft if depth == level else None
        if siblings is None:
            siblings = Draft(f"heading{level}", also=("section",))
            self.headings.append(siblings)
        title = self.text[content : line.end].strip("#*:： ")
        siblings.marks.append(Mark(line.begin, content, line.end, None, title=title, line_end=line.end))
        self._sections.append((level, siblings))
        self.breaks.append(line.begin)
        self.marked.add(content)

    # --- items

    def _item(self, line: Line, marker: Marker) -> None:
        marker = self._roman_or_letter(marker)
        self.marked.add(line.begin)
        self.marked.add(marker.content)
        mark = Mark(line.begin, marker.content, line.end, marker.ordinal, marker.label)
        draft = self._continued(line, marker)
        if draft is not None:
            while self._open[-1] is not draft:
                self._close()
            draft.loose |= draft.follow is not None
            draft.last.end = max(draft.last.end, trimmed(self.text, line.begin))
            draft.interrupted, draft.follow = False, None
        else:
            self._leave(line, marker)
            draft = Draft(marker.style, line.indent, ("bullet",) if marker.style == "bullet" else ())
            draft.nested = bool(self._open) and self._belongs(line, self._open[-1])
            self._open.append(draft)
            self.drafts.append(draft)
        draft.marks.append(mark)

    def _roman_or_letter(self, marker: Marker) -> Marker:
        """Which of both "i.", "v." and "x." are: what goes on with an open list."""
        number = _ROMAN.get(marker.label.lower()) if marker.style == "letter" else None
        if number is None:
            return marker
        before = {(draft.style, draft.last.ordinal) for draft in self._open[-DEEPEST_INDENT:]}
        follows = ("roman", number - 1) in before or (number == 1 and ("letter", 8) not in before)
        return marker._replace(style="roman", ordinal=number) if follows else marker

    def _continued(self, line: Line, marker: Marker) -> Draft | None:
        """The open list that this item is the next point of."""
        for draft in reversed(self._open):
            if draft.indent < line.indent - 1:
                return None
            if abs(draft.indent - line.indent) <= 1 and draft.style == marker.style and _follows(draft, marker):
                return draft
        return None

    def _leave(self, line: Line, marker: Marker) -> None:
        """Close what cannot hold a list that begins here: deeper lists, and those that it stands beside."""
        while self._open:
            top = self._open[-1]
            beside = abs(top.indent - line.indent) <= 1 and (top.style in ("bullet", marker.style))
            if top.indent <= line.indent + 1 and not beside:
                return
            self._close()

    def _close(self) -> None:
        draft = self._open.pop()
        draft.close()
        if draft.nested and self._open:
            around = self._open[-1].last
            around.end = max(around.end, draft.last.end)

    # --- other lines

    def _belongs(self, line: Line, draft: Draft) -> bool:
        """Whether a line is surely a part of the list's last point: deeper, or right behind it."""
        return line.indent > draft.indent + 1 or (not line.after_blank and not draft.interrupted)

    def _plain(self, line: Line) -> None:
        while self._open:
            top = self._open[-1]
            if self._belongs(line, top):
                top.last.end = line.end
                return
            if top.style != "bullet" and line.indent >= top.indent - 1:
                break
            self._close()
        for draft in reversed(self._open):  # those at one indent, so there are no more of them than styles
            if self._belongs(line, draft):
                draft.last.end = line.end
                return
            if draft.follow is None:
                draft.follow_block = len(self.blocks)
            if draft.follow_block == len(self.blocks):
                draft.follow = line.end
            draft.interrupted = True
        if line.after_blank or not self.paragraphs:
            self.paragraphs.append((line.begin, line.end))
        else:
            self.paragraphs[-1] = (self.paragraphs[-1][0], line.end)


def title_number(title: str) -> Marker | None:
    """The number before a title: "4.2 Costs", "IV. Costs", 二、成本. content: within the title."""
    return _as_marker(_NUMBERED_TITLE.match(title))


def _marker(text: str, line: Line) -> Marker | None:
    return _as_marker(_MARKER.match(text, line.begin, line.end))


def _as_marker(found: re.Match[str] | None) -> Marker | None:
    if found is None:
        return None
    style = found.lastgroup or ""
    label = found[style]
    if style == "bullet":
        return Marker("bullet", None, "", found.end())
    return Marker(style, ordinal_of(style, label), label, found.end())


def ordinal_of(style: str, label: str) -> int:
    """The place that a label says."""
    if style == "digits":
        return numerals.of_digits(label)
    if style == "dotted":
        return int(label.rpartition(".")[2])
    if style == "roman":
        return _ROMAN.get(label.lower(), numerals.TOO_LARGE)
    if style == "chinese":
        return numerals.of_chinese(label)
    return ord(label.lower()) - ord("a") + 1


def _follows(draft: Draft, marker: Marker) -> bool:
    if marker.ordinal is None:
        return not draft.interrupted
    last = draft.last.ordinal or 0
    if marker.ordinal == last + 1:
        return True
    if marker.ordinal == last == 1:  # Markdown that leaves the counting to the reader's program
        return not draft.interrupted
    return marker.ordinal > last and not draft.interrupted


def _in_bold(content: str) -> bool:
    bare = content.rstrip(":： ")
    return bare.startswith("**") and bare.endswith("**") and len(bare) > 4 and "**" not in bare[2:-2]


def _columns(space: str) -> int:
    return min(len(space.expandtabs(4)), DEEPEST_INDENT)


def trimmed(text: str, end: int) -> int:
    """The end of the last word before `end`."""
    while end > 0 and text[end - 1].isspace():
        end -= 1
    return end
