"""Says on standard error what is being looked at: with a spinner on a terminal; elsewhere in one line, if it takes long."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

PATIENCE_SECONDS = 2.0  # a script that asks a server that answers gets no line

Say = Callable[[str], None]


def silent(what: str) -> None:
    """Says nothing."""


@contextmanager
def looking(on: Console, patience: float = PATIENCE_SECONDS) -> Iterator[Say]:
    """Inside, ``say(what)`` names what is looked at from now on."""
    if on.is_terminal and not on.is_dumb_terminal:
        with on.status("Looking") as status:
            yield lambda what: status.update(f"Looking at {escape(what)}")
        return
    now = ["this machine"]

    def line() -> None:
        with contextlib.suppress(OSError):  # progress that nobody can see is no reason to fail
            on.print(f"Looking at {now[0]} ...", markup=False, highlight=False, soft_wrap=True)

    timer = threading.Timer(patience, line)
    timer.daemon = True
    timer.start()
    try:
        yield lambda what: now.__setitem__(0, what)
    finally:
        timer.cancel()
