"""How long a decode server keeps pages that a failed transfer may still write: Mooncake's time limit, and a margin.

A transfer whose end nobody confirms is under way until the engine that writes gives up on it, so it is the prefill
server's limit that counts.  Plain functions over plain data.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

VARIABLE = "MC_TRANSFER_TIMEOUT"  # seconds; read by Mooncake, in the process that writes
DEFAULT_SECONDS = 30
LEAST_SECONDS = 5
MAX_SECONDS = 2**31 - 1

# Its TCP transport drops a connection after 30 s without progress, however soon a call has given up: rows land until then.
CONNECTION_SECONDS = 30

# What comes on top: the second that Mooncake adds to its limit for each GB of a call, the way of an abort to the prefill
# server, and the rows that sockets and queues still hold when the limit is over; Mooncake recalls none of them.
MARGIN_SECONDS = 10


def mooncake_timeout(text: str | None) -> int:
    """Seconds after which Mooncake gives up on a call, from the text of :data:`VARIABLE`; None where it is unset.

    Rule: Mooncake's own reading: the number that the text begins with, 0 for none, raised to 5.

    >>> [mooncake_timeout(text) for text in (None, "60", "60s", "1", "soon")]
    [30, 60, 60, 5, 5]
    """
    if text is None:
        return DEFAULT_SECONDS
    number = re.match(r"\s*([+-]?[0-9]+)", text)
    return min(max(int(number[1][:20]) if number else 0, LEAST_SECONDS), MAX_SECONDS)


def needed_seconds(timeout: int) -> int:
    """Seconds to keep pages for, where the writer gives up after ``timeout`` seconds.

    >>> needed_seconds(60), needed_seconds(5)
    (70, 40)
    """
    return max(timeout, CONNECTION_SECONDS) + MARGIN_SECONDS


@dataclass(frozen=True, slots=True)
class Hold:
    """What a decode server does with pages of a failed transfer whose end nobody confirms."""

    enabled: bool  # it keeps them at all
    seconds: float
    chosen: bool  # the operator set the seconds, so they are not changed

    def why_not(self, timeout: int, switch: str, variable: str) -> str | None:
        """Why this is not enough for a writer that gives up after ``timeout`` seconds, or None: it is, or can be raised.

        Args:
            switch, variable: the environment variables that the operator has set.

        >>> Hold(True, 30.0, chosen=False).why_not(30, "S", "V"), Hold(True, 40.0, chosen=True).why_not(30, "S", "V")
        (None, None)
        """
        needed = needed_seconds(timeout)
        because = (
            f"Mooncake may write for {needed - MARGIN_SECONDS} s where {VARIABLE} is {timeout} s, and {MARGIN_SECONDS} s "
            "are margin"
        )
        if not self.enabled:
            return (
                f"expected pages of a failed transfer to be kept for {needed} s or more, got {switch} off: {because}. "
                f"Unset {switch}."
            )
        if self.chosen and not self.seconds >= needed:  # nor is NaN
            return (
                f"expected pages of a failed transfer to be kept for {needed} s or more, got {variable}={self.seconds:g}: "
                f"{because}. Unset {variable}, or set it to {needed} or more."
            )
        return None
