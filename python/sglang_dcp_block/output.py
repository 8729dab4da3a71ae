"""What a command prints on standard output: all of it, or in a line why not; never a traceback."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable

from rich.console import Console

UNWRITABLE = 2  # exit status: as of wrong use, since a full disk is no finding about a server
BROKEN_PIPE = 128 + signal.SIGPIPE  # as a shell shows it of other commands


def console(stderr: bool = False, width: int | None = None) -> Console:
    """A console without any escape codes where nobody sees colours, or NO_COLOR asks for none (rich keeps bold and dim)."""
    plain = bool(os.environ.get("NO_COLOR"))
    return Console(stderr=stderr, width=width, color_system=None if plain else "auto")


def rendered(on: Console, show: Callable[[Console], None]) -> str:
    """What ``show(on)`` would print there; a question mark where its encoding lacks a letter."""
    encoding = on.encoding
    bytes_ = io.BytesIO()
    on.file = io.TextIOWrapper(bytes_, encoding=encoding, errors="replace", newline="", write_through=True)
    show(on)
    return bytes_.getvalue().decode(encoding)


def put(program: str, text: str, status: int) -> int:
    """Print; returns ``status``, or another one where it could not be written."""
    try:
        if sys.stdout is None:  # closed before Python started
            raise OSError(0, "it is closed")
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # whoever read it has seen enough
            return BROKEN_PIPE
        with contextlib.suppress(OSError):  # the same disk
            print(f"{program}: error: expected to write to standard output, got: {error.strerror}", file=sys.stderr)
        return UNWRITABLE
    return status
