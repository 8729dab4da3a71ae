"""Values and texts of any origin, for people: short, without a second error, and without orders to a terminal."""

from __future__ import annotations

import re

LIMIT = 80  # characters
_STYLE = re.compile(r"\x1b\[[0-9;]*m")


def shown(value: object) -> str:
    """``repr(value)``, cut to 80 characters; for what has none, its type.

    >>> shown("64 "), shown("9" * 100)[-22:], shown(10**5000)
    ("'64 '", '... of 102 characters)', 'of type int, which cannot be shown')
    """
    try:
        text = repr(value)
    except Exception:  # an int of more digits than Python prints; an object with a faulty __repr__
        return f"of type {type(value).__name__}, which cannot be shown"
    return text if len(text) <= LIMIT else f"{text[:LIMIT]} (... of {len(text)} characters)"


def line_of(text: str) -> str:
    """A text of any origin as one short line without orders to a terminal, such as a name.

    >>> line_of("a\\nb"), len(line_of("x" * 1000))
    ('a b', 80)
    """
    return " ".join(plain(text[: 10 * LIMIT]).split())[:LIMIT]


def plain(text: str) -> str:
    """A text without colours; other control characters are spelled out, and lines stay lines.

    >>> plain("\\x1b[31mred\\x1b[0m, a bell \\x07, a\\ttab")
    'red, a bell \\\\x07, a tab'
    """
    text = _STYLE.sub("", text).replace("\t", " ")
    return "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)
