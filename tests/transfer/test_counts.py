"""What operators see: totals by path and peer, log lines, Prometheus."""

from __future__ import annotations

import logging

import pytest
from prometheus_client import REGISTRY

from sglang_dcp_block.patches import prometheus, transfer_counts
from sglang_dcp_block.patches.transfer_counts import SUMMARY_EVERY, Counts, Totals, Transfer, counted, current


def sample(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"sglang:dcp_block_{name}", labels) or 0.0


def test_a_transfer_is_counted_by_path_and_peer(counts):
    with counted("peer", "direct") as transfer:
        assert current() is transfer
        transfer.add_batch(3, 300)
        transfer.add_batch(1, 100)
    with counted("other", "direct") as transfer:
        transfer.fallback = "no pack buffer"
    assert current() is None
    total = counts.by_path["direct"]
    assert (total.transfers, total.segments, total.batches, total.num_bytes) == (2, 4, 2, 400)
    assert (total.fallbacks, total.failures) == (1, 0)
    assert total.seconds > 0
    assert counts.by_peer["peer"].segments == 4
    assert counts.by_peer["other"].transfers == 1


def test_what_raises_is_counted_as_failed(counts):
    with pytest.raises(KeyError), counted("peer", "direct"):
        raise KeyError
    assert counts.by_path["direct"].failures == 1
    assert current() is None


@pytest.fixture
def exported(monkeypatch):
    """As in a server with --enable-metrics."""
    monkeypatch.setattr(prometheus, "_exported", lambda: True)


def test_prometheus(counts, exported, caplog):
    names = ("transfers_total", "segments_total", "bytes_total", "batches_total", "transfer_seconds_count",
             "segment_bytes_count", "segment_bytes_sum")  # fmt: skip
    before = {name: sample(name, path="packed") for name in names}
    failures, fallbacks = (
        sample("transfer_failures_total", reason="transport"), sample("fallbacks_total", reason="draft heads")
    )  # fmt: skip
    with counted("peer", "packed") as transfer:
        transfer.add_batch(4, 400)
        transfer.failure, transfer.fallback = "transport", "draft heads"
    with counted("peer", "packed"):
        pass  # nothing for this rank
    grown = [sample(name, path="packed") - before[name] for name in names]
    assert grown == [2, 4, 400, 1, 2, 1, 100]
    assert caplog.records == []
    assert sample("transfer_failures_total", reason="transport") == failures + 1
    assert sample("fallbacks_total", reason="draft heads") == fallbacks + 1


def test_prometheus_may_fail(counts, exported, monkeypatch, caplog):
    prometheus._complain.cache_clear()
    monkeypatch.setattr(prometheus, "_metrics", lambda: 1 / 0)
    for _ in range(2):
        with counted("peer", "direct"):
            pass
    assert [r.getMessage() for r in caplog.records] == [
        "Transfers and refusals are not counted in Prometheus: ZeroDivisionError: division by zero"
    ]


def test_log_lines(caplog):
    counts, transfer = Counts(), Transfer("peer", "direct", 4, 2, 2**20, 0.5)
    failed = Transfer("peer", "tokens", failure="transport", fallback="x")
    with caplog.at_level(logging.DEBUG):
        counts.add(failed)
        for _ in range(SUMMARY_EVERY - 1):
            counts.add(transfer)
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.DEBUG] * SUMMARY_EVERY + [logging.INFO]
    assert caplog.records[0].getMessage().endswith("0.0 ms, failed (transport)")
    assert caplog.records[1].getMessage() == "KV to peer (direct): 4 segments, 1048576 bytes, 2 batches, 500.0 ms"
    n = SUMMARY_EVERY - 1
    assert caplog.records[-1].getMessage() == (
        f"KV sent to decode ranks so far: direct: {n} transfers, {4 * n} segments of 262144 bytes on average, {n:.1f} MiB, "
        f"{2 * n} batches, {n / 2:.2f} s, 0 fallbacks, 0 failures; "
        "tokens: 1 transfers, 0 segments of 0 bytes on average, 0.0 MiB, 0 batches, 0.00 s, 1 fallbacks, 1 failures"
    )
    assert counts.summary() in caplog.records[-1].getMessage()


def test_old_peers_are_forgotten(monkeypatch):
    monkeypatch.setattr(transfer_counts, "_MAX_PEERS", 2)
    counts = Counts()
    for peer in "abac":
        counts.add(Transfer(peer, "direct"))
    assert counts.by_peer == {"a": Totals(transfers=2), "c": Totals(transfers=1)}
    assert counts.by_path["direct"].transfers == 4
