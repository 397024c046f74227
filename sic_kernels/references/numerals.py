"""Numbers as people write them: words, Roman and Chinese numerals, digits of either width."""

from __future__ import annotations

from collections.abc import Iterator

from ..runtime import native

TOO_LARGE = 10**9  # what a number too long to be an ordinal counts as: in no list
CHINESE = "零一二三四五六七八九〇两十百"  # csrc/references/numbers.h
CIRCLED = "①②③④⑤⑥⑦⑧⑨⑩⑪⑫⑬⑭⑮⑯⑰⑱⑲⑳"
LARGEST_ROMAN = 39


def of_digits(text: str) -> int:
    """Decimal digits, full-width ones too."""
    return int(text) if len(text) < 10 else TOO_LARGE


def of_chinese(text: str) -> int:
    """三, 十二, 二十, 一百零三, 二〇; one that is no number, as 十百, is too large for any list."""
    return native.module().chinese_number(text)


def roman() -> Iterator[tuple[str, int]]:
    """("i", 1), ("ii", 2) ... up to 39."""
    units = ("", "i", "ii", "iii", "iv", "v", "vi", "vii", "viii", "ix")
    for n in range(1, LARGEST_ROMAN + 1):
        yield "x" * (n // 10) + units[n % 10], n
