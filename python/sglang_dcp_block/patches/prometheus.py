"""The plugin's numbers in Prometheus, beside SGLang's own and where SGLang exports any (``--enable-metrics``).

SGLang runs prometheus_client in multiprocess mode: schedulers write files into a folder that the HTTP process reads. The
folder is named before schedulers start, and prometheus_client looks for it when it is imported, so it is imported late here.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any

logger = logging.getLogger(__name__)

Metrics = dict[str, Any]


def write(change: Callable[[Metrics], None]) -> None:
    """Apply ``change`` to the metrics, if there are any.  Numbers may not cost a request: never raises."""
    try:
        if _exported():
            change(_metrics())
    except Exception as error:
        _complain(f"{type(error).__name__}: {error}")


def show(metric: Any, labels: Iterable[tuple[str, ...]]) -> None:
    """Make a counter's series with these label values, at 0 where they are new."""
    for values in labels:
        metric.labels(*values)


def _exported() -> bool:
    """Whether this process belongs to a server that exports metrics."""
    from sglang.srt.runtime_context import get_observability

    try:
        return bool(get_observability().enable_metrics)
    except ValueError:  # no server: nothing was published
        return False


@functools.cache
def _metrics() -> Metrics:
    """All of them, made at the first use."""
    from prometheus_client import Counter, Histogram

    def counter(name: str, text: str, *labels: str) -> Counter:
        return Counter(f"sglang:dcp_block_{name}", text, labels)

    def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"sglang:dcp_block_{name}", text, ["path"], buckets=buckets)

    return {
        "transfers": counter("transfers", "Chunks of KV sent to decode ranks of another DCP size.", "path"),
        "segments": counter("segments", "Contiguous pieces of memory handed to the transfer engine.", "path"),
        "num_bytes": counter("bytes", "Bytes handed to the transfer engine.", "path"),
        "batches": counter("batches", "Calls of the transfer engine.", "path"),
        "fallbacks": counter("fallbacks", "Transfers that did not go the way their blocks ask for.", "reason"),
        "failures": counter("transfer_failures", "Transfers that failed.", "reason"),
        "refusals": counter("refusals", "Peers, messages and answers that were refused.", "side", "reason"),
        "seconds": histogram(
            "transfer_seconds", "Time of a transfer.", (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
        ),
        "segment_bytes": histogram(
            "segment_bytes", "Mean size of a transfer's segments.", tuple(4.0**power for power in range(4, 14))
        ),
    }


@functools.lru_cache(maxsize=16)  # once
def _complain(reason: str) -> None:
    logger.error("Transfers and refusals are not counted in Prometheus: %s", reason)
