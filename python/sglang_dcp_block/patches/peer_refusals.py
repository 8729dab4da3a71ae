"""Why a peer was refused: the whole text for people and logs, and one of a few words for counting."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sglang_dcp_block.patches import prometheus


class RefusedBy(StrEnum):
    """The server that refuses."""

    PREFILL = "prefill"
    DECODE = "decode"


class Reason(StrEnum):
    """All values of the ``reason`` label; the text of a refusal is never one, since it names addresses and sizes."""

    # Both sides.
    LAYOUT = "layout"  # page, block and dcp sizes of the two do not fit
    UPSTREAM = "upstream"  # SGLang itself refuses the peer
    UNREADABLE = "unreadable"  # capability (decode) or registration (prefill)
    # A decode server, of a prefill server.
    NO_BLOCKS = "no_blocks"  # it does not know blocks
    WITHHELD = "withheld"  # not all of its ranks have reported, or they differ
    EARLY_RELEASE = "early_release"  # its writes may outlast our hold on pages
    NO_ECHO = "no_echo"  # it reported success without our block size
    # A prefill server, of a decode rank.
    TOPOLOGY = "topology"  # DCP sizes or ranks that SGLang does not send to
    ROW_SIZES = "row_sizes"
    MESSAGE = "message"  # neither registration nor transfer request; dropped


_OF_BOTH = (Reason.LAYOUT, Reason.UPSTREAM, Reason.UNREADABLE)
REASONS = {
    RefusedBy.DECODE: (*_OF_BOTH, Reason.NO_BLOCKS, Reason.WITHHELD, Reason.EARLY_RELEASE, Reason.NO_ECHO),
    RefusedBy.PREFILL: (*_OF_BOTH, Reason.TOPOLOGY, Reason.ROW_SIZES, Reason.MESSAGE),
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """One refusal."""

    reason: Reason
    text: str  # expected, got, what to do

    def __str__(self) -> str:
        return self.text


def begin(side: RefusedBy) -> None:
    """Show each reason at 0 from the start on: Prometheus sees growth only from a value that it has seen."""
    prometheus.write(
        lambda metrics: prometheus.show(metrics["refusals"], [(side.value, r.value) for r in REASONS[side]])
    )


def count(side: RefusedBy, reason: Reason) -> None:
    """Count one refusal.

    Rule: once for each time that a rank is asked to judge and refuses, which is per prefill server and round of waiting
    requests (decode; not those told the same without asking), per registration or message (prefill), and per success
    that is turned down (``NO_ECHO``).
    """
    prometheus.write(lambda metrics: metrics["refusals"].labels(side.value, reason.value).inc())
