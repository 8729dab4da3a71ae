"""The prefill server's counters, as its Prometheus endpoint prints them."""

from __future__ import annotations

import pytest

from sglang_dcp_block.demo.pd.counters import Sent, parse, sent_between

BEFORE = """\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="prefill",pid="7"} 3.0
# HELP sglang:dcp_block_transfers_total Chunks of KV.
# TYPE sglang:dcp_block_transfers_total counter
sglang:dcp_block_transfers_total{path="tokens"} 8.0
# TYPE sglang:dcp_block_segments_total counter
sglang:dcp_block_segments_total{path="tokens"} 600.0
# TYPE sglang:dcp_block_bytes_total counter
sglang:dcp_block_bytes_total{path="tokens"} 6.912e+05
# TYPE sglang:dcp_block_transfer_seconds histogram
sglang:dcp_block_transfer_seconds_sum{path="tokens"} 1.5
sglang:dcp_block_transfer_seconds_bucket{le="0.1",path="tokens"} 2.0
sglang:dcp_block_transfer_seconds_bucket{le="+Inf",path="tokens"} 8.0
sglang:dcp_block_transfer_seconds_count{path="tokens"} 8.0
"""

DIRECT = """\
sglang:dcp_block_transfers_total{path="direct"} 4.0
sglang:dcp_block_segments_total{path="direct"} 20.0
sglang:dcp_block_bytes_total{path="direct"} 368640.0
sglang:dcp_block_transfer_seconds_sum{path="direct"} 0.25
"""


def test_what_was_sent_between_two_readings():
    assert sent_between({}, parse(BEFORE)) == Sent(("tokens",), 8, 600, 691200, 1.5)
    sent = sent_between(parse(BEFORE), parse(BEFORE + DIRECT))
    assert sent == Sent(("direct",), 4, 20, 368640, 0.25)
    assert sent.bytes_per_segment == 18432


def test_reasons_are_told():
    reasons = 'sglang:dcp_block_fallbacks_total{reason="no pack buffer"} 4.0\n'
    reasons += 'sglang:dcp_block_transfer_failures_total{reason="transport"} 1.0\n'
    sent = sent_between(parse(BEFORE), parse(BEFORE + DIRECT + reasons))
    assert (sent.fallbacks, sent.failures) == (("no pack buffer",), ("transport",))
    again = sent_between(parse(reasons), parse(reasons + DIRECT))
    assert (again.fallbacks, again.failures) == ((), ())


def test_other_metrics_and_buckets_are_left_out():
    assert parse(BEFORE)["transfer_seconds_sum", "tokens"] == 1.5
    assert all(name.startswith(("transfer", "segments", "bytes")) for name, _ in parse(BEFORE))
    assert not any("bucket" in name for name, _ in parse(BEFORE))


@pytest.mark.parametrize("text", ["", BEFORE])
def test_nothing_counted_is_an_error(text):
    with pytest.raises(ValueError, match="expected sglang:dcp_block_transfers_total to grow"):
        sent_between(parse(text), parse(text))


def test_a_server_that_began_anew_is_an_error():
    with pytest.raises(ValueError, match="but these fell: bytes_total"):
        sent_between(parse(BEFORE), parse(BEFORE.replace("6.912e+05", "5")))
