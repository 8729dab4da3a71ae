"""Values of any origin in error messages: short, and without a second error."""

from __future__ import annotations

LIMIT = 80  # characters


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
