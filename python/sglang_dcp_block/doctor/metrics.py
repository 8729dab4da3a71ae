"""What a running server has refused and failed so far, by the plugin's counters at ``/metrics``."""

from __future__ import annotations

import re
from urllib.parse import SplitResult

from sglang_dcp_block.doctor.findings import Finding, note, ok
from sglang_dcp_block.doctor.http import Unanswered, get

_SAMPLE = re.compile(
    r"^sglang:dcp_block_(refusals|transfer_failures|fallbacks)_total\{([^}]*)\} ([0-9.e+]+)", re.MULTILINE
)
_LABEL = re.compile(r'\b(side|reason)="([^"]*)"')
_MISSED = "With the plugin they begin with 0. Look for an error in the server's log; alerts would not see any."
_NOT_EXPECTED = "Nothing is counted here: only prefill and decode servers with the plugin have them."
_SAID = {"refusals": "refused", "transfer_failures": "failed transfers", "fallbacks": "fallbacks"}


def check(
    name: str, url: SplitResult, timeout: float, api_key: str | None = None, *, is_counting: bool = False
) -> list[Finding]:
    """One finding about a server's counters.

    Args:
        name: heading of the finding.
        is_counting: the plugin is armed between prefill and decode servers there, so its counters begin with 0.
    """
    try:
        text = get(url, "/metrics", timeout, api_key).decode(errors="replace")
    except Unanswered as error:
        return [note(name, "counters", str(error), "The server says that it has metrics; alerts would not see any.")]
    if not _SAMPLE.search(text):
        return [note(name, "counters", "the plugin's are not there", _MISSED if is_counting else _NOT_EXPECTED)]
    counted = counts(text)
    if not counted:
        return [ok(name, "counters", "nothing refused, nothing failed")]
    shown = ", ".join(f"{what} ({why}): {number:g}" for (what, why), number in counted.items())
    return [note(name, "counters", shown, "See the tables of reasons in docs/operations.md, and the server's log.")]


def counts(text: str) -> dict[tuple[str, str], float]:
    """Map Prometheus' text to (what, why) -> number, summed over other labels; zeros left out.

    >>> counts('sglang:dcp_block_refusals_total{reason="layout",side="decode"} 2.0')
    {('refused', 'decode layout'): 2.0}
    """
    sums: dict[tuple[str, str], float] = {}
    for kind, labels, value in _SAMPLE.findall(text):
        found = dict(_LABEL.findall(labels))
        why = " ".join(found[label] for label in ("side", "reason") if label in found)
        try:
            number = float(value)
        except ValueError:
            continue
        if number:
            key = _SAID[kind], why
            sums[key] = sums.get(key, 0.0) + number
    return sums
