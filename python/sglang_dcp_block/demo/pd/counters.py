"""What a prefill server sent to decode servers: the plugin's counters, read from the server's Prometheus endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PREFIX = "sglang:dcp_block_"

Counters = Mapping[tuple[str, str], float]  # (sample without the prefix, value of its path or reason) -> value


@dataclass(frozen=True, slots=True)
class Sent:
    """What was sent between two readings."""

    paths: tuple[str, ...]  # the ways it was sent
    transfers: int  # a chunk of a request to a decode rank each
    segments: int
    num_bytes: int
    seconds: float  # of all transfers together
    fallbacks: tuple[str, ...] = ()  # reasons
    failures: tuple[str, ...] = ()  # reasons

    @property
    def bytes_per_segment(self) -> float:
        """On average."""
        return self.num_bytes / max(self.segments, 1)


def parse(text: str) -> dict[tuple[str, str], float]:
    """Map Prometheus' text format to the plugin's counters, sums and counts."""
    from prometheus_client.parser import text_string_to_metric_families

    result = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = sample.labels
            if sample.name.startswith(PREFIX) and "le" not in labels:  # without the buckets of histograms
                name = sample.name.removeprefix(PREFIX)
                result[name, labels.get("path") or labels.get("reason") or ""] = sample.value
    return result


def sent_between(before: Counters, after: Counters) -> Sent:
    """What the counters grew by, over all paths.

    Raises:
        ValueError: nothing was counted, or a counter has fallen: the server's counters are not to be trusted.
    """
    grown = {key: value - before.get(key, 0.0) for key, value in after.items()}
    fallen = sorted(name for (name, _), value in grown.items() if value < 0)
    if fallen:
        raise ValueError(f"counters of transfers: expected them to grow, but these fell: {', '.join(fallen)}")

    def total(name: str) -> float:
        return sum(value for (sample, _), value in grown.items() if sample == name)

    def labels(name: str) -> tuple[str, ...]:
        return tuple(sorted(label for (sample, label), value in grown.items() if sample == name and value > 0))

    if not total("transfers_total"):
        raise ValueError(
            f"counters of transfers: expected {PREFIX}transfers_total to grow, but nothing was counted: "
            "is the server's log free of errors about Prometheus?"
        )
    return Sent(
        labels("transfers_total"),
        int(total("transfers_total")),
        int(total("segments_total")),
        int(total("bytes_total")),
        total("transfer_seconds_sum"),
        labels("fallbacks_total"),
        labels("transfer_failures_total"),
    )
