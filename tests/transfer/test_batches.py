"""Bounded batches: no call hands over more than the transport takes, and the first error is the last call."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest

from sglang_dcp_block.patches import transfer_counts
from sglang_dcp_block.patches.mooncake_batches import (
    FAILED,
    TCP_SEGMENTS,
    goes_over_tcp,
    segment_limit,
    send_in_batches,
)

BLOCKS = [(i, 100 + i, 1 + i) for i in range(10)]


def manager(limit=0, threads=4, topology=None, **changes):
    made = SimpleNamespace(
        max_transfer_batch_indices=limit,
        enable_custom_mem_pool=False,
        transfer_queues=[None] * threads,
        executors=[],
        engine=engine({"cpu:0": [[], []]} if topology is None else topology),
    )
    vars(made).update(changes)
    return made


def engine(topology):
    text = topology if isinstance(topology, str) else json.dumps(topology)
    return SimpleNamespace(engine=SimpleNamespace(get_local_topology=lambda: text))


def sent(made, fail_at=None, path="direct"):
    """(status, calls) of a transfer of ten segments."""
    calls = []

    def original(self, session, blocks):
        assert (self, session) == (made, "session")
        calls.append(list(blocks))
        return -3 if len(calls) - 1 == fail_at else 0

    with transfer_counts.working_on(transfer_counts.Transfer("session", path)):
        return send_in_batches(original, made, "session", BLOCKS), calls


@pytest.fixture(autouse=True)
def rdma(monkeypatch):
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    monkeypatch.delenv("MOONCAKE_PROTOCOL", raising=False)


@pytest.mark.parametrize(("limit", "sizes"), [(1, [1] * 10), (4, [4, 4, 2]), (5, [5, 5]), (10, [10]), (11, [10])])
def test_no_call_is_larger_than_the_limit(limit, sizes):
    status, calls = sent(manager(limit))
    assert status == 0
    assert [len(call) for call in calls] == sizes
    assert [block for call in calls for block in call] == BLOCKS


def test_the_first_error_is_the_last_call():
    status, calls = sent(manager(4), fail_at=1)
    assert status == -3, "the engine's own status"
    assert calls == [BLOCKS[:4], BLOCKS[4:8]]


def test_a_failure_stops_the_other_threads_of_a_transfer():
    transfer = transfer_counts.Transfer("session", "direct")
    with transfer_counts.working_on(transfer):
        assert send_in_batches(lambda *args: -3, manager(4), "session", BLOCKS) == -3
        assert (transfer.failure, transfer.batches) == ("transport", 1)
        assert send_in_batches(lambda *args: 1 / 0, manager(4), "session", BLOCKS) == FAILED
    assert send_in_batches(lambda *args: 0, manager(4), "session", BLOCKS) == 0


def test_nothing_to_send():
    assert send_in_batches(lambda *args: 1 / 0, manager(4), "session", []) == 0


def test_calls_are_counted_for_the_transfer_of_the_thread():
    transfer = transfer_counts.Transfer("session", "direct")
    with transfer_counts.working_on(transfer):
        send_in_batches(lambda *args: 0, manager(4), "session", BLOCKS)
    send_in_batches(lambda *args: 0, manager(4), "session", BLOCKS)  # of nobody
    assert (transfer.segments, transfer.batches, transfer.num_bytes) == (10, 3, 55)


class TestLimit:
    def test_tcp_is_shared_by_all_threads(self, monkeypatch):
        monkeypatch.setenv("MC_FORCE_TCP", "1")
        assert [segment_limit(manager(threads=n)) * n for n in (1, 2, 4, 8)] == [TCP_SEGMENTS] * 4
        assert segment_limit(manager(threads=2000)) == 1
        pools = [SimpleNamespace(_max_workers=4)] * 2
        assert segment_limit(manager(enable_custom_mem_pool=True, executors=pools)) == TCP_SEGMENTS // 8

    def test_rdma_has_none(self):
        made = manager(topology={"cpu:0": [[], ["mlx5_0"]]})
        assert segment_limit(made) == 0
        assert [len(call) for call in sent(made)[1]] == [10]

    def test_upstreams_own_setting_wins_for_blocks(self, monkeypatch):
        monkeypatch.setenv("MC_FORCE_TCP", "1")
        assert segment_limit(manager(5000)) == 5000
        assert segment_limit(manager(3)) == 3

    def test_upstreams_own_setting_is_not_counted_twice(self, monkeypatch):
        """Upstream's page copy sends so many indices of every layer in one call; cut by segments it would crawl."""
        monkeypatch.setenv("MC_FORCE_TCP", "1")
        assert segment_limit(manager(3), ours=False) == TCP_SEGMENTS // 4
        assert [len(call) for call in sent(manager(3), path="tokens")[1]] == [10]
        assert [len(call) for call in sent(manager(3), path="packed")[1]] == [3, 3, 3, 1]

    def test_found_once_and_said(self, caplog):
        made = manager()
        with caplog.at_level(logging.INFO):
            assert segment_limit(made) == segment_limit(made) == TCP_SEGMENTS // 4
        assert [r.getMessage() for r in caplog.records] == ["KV transfers: 256 segments a call."]


class TestTransport:
    """Mooncake falls back to TCP, whatever it was told, on a machine without RDMA devices."""

    @pytest.mark.parametrize(
        ("environ", "topology", "tcp"),
        [
            ({}, {"cpu:0": [[], []]}, True),
            ({}, {}, True),
            ({}, {"cpu:0": [["mlx5_0"], []], "cuda:0": [[], []]}, False),
            ({}, {"cpu:0": [[], []], "cuda:0": [[], ["mlx5_1"]]}, False),
            ({"MC_FORCE_TCP": "1"}, {"cpu:0": [["mlx5_0"], []]}, True),
            ({"MOONCAKE_PROTOCOL": "tcp"}, {"cpu:0": [["mlx5_0"], []]}, True),
            ({"MOONCAKE_PROTOCOL": "efa"}, {"cpu:0": [[], []]}, False),
            ({}, "no JSON", True),
        ],
    )
    def test_which_one(self, environ, topology, tcp, monkeypatch):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        assert goes_over_tcp(engine(topology)) is tcp

    def test_an_engine_that_is_not_mooncakes(self):
        assert goes_over_tcp(SimpleNamespace(engine=object())) is False
        assert goes_over_tcp(object()) is False
