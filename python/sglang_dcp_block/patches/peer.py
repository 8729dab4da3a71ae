"""Which decode server's registration this thread is reading.

SGLang judges a registration in several calls that do not all get it; they run one after another in one thread.
"""

from __future__ import annotations

import threading
from typing import Any

_here = threading.local()


def registering(info: Any) -> None:
    """From now on this thread reads ``info``, a ``KVArgsRegisterInfo``."""
    _here.info = info


def registered() -> None:
    """The registration is dealt with."""
    _here.info = None


def current_registration() -> Any | None:
    """The registration that this thread is reading, or None."""
    return getattr(_here, "info", None)


def block_size_of(registration: Any | None) -> int:
    """Tokens of a block on the decode server behind a registration; 1, token round-robin, where it names none."""
    return int(getattr(registration, "dcp_block_size", None) or 1)
