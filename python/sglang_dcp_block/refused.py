"""Refused starts: one type of error for all of them, and a command line that ends with its text alone.

The text says what was expected, what was got and what to do.  Twenty lines of SGLang's start above it would tell an
operator nothing, so a command shows none; programs get an exception like any other.
"""

from __future__ import annotations

import sys
from types import TracebackType


class StartRefused(Exception):
    """SGLang may not start, or not serve, like this.  The text says why and what to change."""


_before = sys.excepthook


def end_with_the_text() -> None:
    """From now on, a refusal that nobody catches ends this process with its text alone; all else ends as it did."""
    global _before
    if sys.excepthook is not _show:
        _before, sys.excepthook = sys.excepthook, _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    # One that came of another error is shown whole: that one may be what is wrong.
    if isinstance(error, StartRefused) and error.__cause__ is None and error.__context__ is None:
        print(f"{kind.__name__}: {error}", file=sys.stderr)
    else:
        _before(kind, error, trace)
