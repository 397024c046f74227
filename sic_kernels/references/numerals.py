"""Numbers as people write them: words, Roman and Chinese numerals, digits of either width."""

from __future__ import annotations

from collections.abc import Iterator

TOO_LARGE = 10**9  # what a number too long to be an ordinal counts as: in no list
CHINESE_DIGITS = {c: i for i, c in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2}
CHINESE_UNITS = {"十": 10, "百": 100}
CHINESE = "".join([*CHINESE_DIGITS, *CHINESE_UNITS])
CIRCLED = "①②③④⑤⑥⑦⑧⑨⑩⑪⑫⑬⑭⑮⑯⑰⑱⑲⑳"
LARGEST_ROMAN = 39


def of_digits(text: str) -> int:
    """Decimal digits, full-width ones too."""
    return int(text) if len(text) < 10 else TOO_LARGE


def of_chinese(text: str) -> int:
    """三, 十二, 二十, 一百零三, 二〇; one that is no number, as 十百, is too large for any list."""
    if len(text) > 6:
        return TOO_LARGE
    if not any(c in CHINESE_UNITS for c in text):
        return int("".join(str(CHINESE_DIGITS[c]) for c in text))
    total, digit, last_unit = 0, None, 1000
    for c in text:
        if c in CHINESE_UNITS:
            unit = CHINESE_UNITS[c]
            if unit >= last_unit:
                return TOO_LARGE
            total, digit, last_unit = total + (1 if digit is None else digit) * unit, None, unit
        elif digit:
            return TOO_LARGE
        else:
            digit = CHINESE_DIGITS[c]
    return total + (digit or 0)


def roman() -> Iterator[tuple[str, int]]:
    """("i", 1), ("ii", 2) ... up to 39."""
    units = ("", "i", "ii", "iii", "iv", "v", "vi", "vii", "viii", "ix")
    for n in range(1, LARGEST_ROMAN + 1):
        yield "x" * (n // 10) + units[n % 10], n
