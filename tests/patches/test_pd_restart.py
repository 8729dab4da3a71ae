"""A prefill server that is back before it is missed, against SGLang's real bootstrap server, receiver and heartbeat."""

from __future__ import annotations

import inspect
import threading
import time
from collections import defaultdict
from types import SimpleNamespace

import pytest
import requests

from hooking import hook
from sglang_dcp_block.patches import bounded_get, pd_restart
from sglang_dcp_block.patches.pd_points import DECODE_POINTS

ROOM = 3


@pytest.fixture
def manager(monkeypatch):
    """A decode server's manager, as far as its heartbeat reads it; the heartbeat is SGLang's, ten times a second."""
    from sglang.srt.disaggregation.base import KVPoll
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

    monkeypatch.setattr(pd_restart, "_given", {})
    hook(monkeypatch, [point for point in DECODE_POINTS if point.hook and point.hook.__module__ == pd_restart.__name__])
    manager = object.__new__(MooncakeKVManager)
    manager.prefill_info_table, manager.connection_pool, manager.heartbeat_failures = {}, {}, {}
    manager.session_pool = defaultdict(requests.Session)
    manager.session_pool_lock, manager.connection_lock = threading.Lock(), threading.Lock()
    manager.failure_lock, manager.failure_records = threading.Lock(), {}
    manager.addr_to_rooms_tracker = defaultdict(set)
    manager.request_status = {ROOM: KVPoll.WaitingForInput}
    manager.heartbeat_interval, manager.max_failures = 0.1, 2
    manager._heartbeat_shutdown = threading.Event()
    yield manager
    manager._heartbeat_shutdown.set()
    manager.thread.join(10)


def connect(manager, address: str) -> None:
    """A request to the prefill server at ``address`` is under way, and heartbeats go on."""
    from sglang.srt.disaggregation.common.conn import CommonKVReceiver

    rank = CommonKVReceiver._get_bootstrap_info_from_server(SimpleNamespace(bootstrap_addr=address), 0, 0, 0, 0)
    manager.prefill_info_table[address] = object()
    manager.connection_pool[f"{address}_0_0_0"] = [rank]
    manager.addr_to_rooms_tracker[address].add(ROOM)
    manager.thread = manager._start_heartbeat_checker_thread()


def is_forgotten(manager, address: str, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while address in manager.prefill_info_table:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_it_is_asked_anew_and_its_requests_end(bootstrap, move_rank, manager, caplog):
    from sglang.srt.disaggregation.base import KVPoll

    connect(manager, address := bootstrap())
    assert not is_forgotten(manager, address, 0.5), "a server that lives on is kept"
    move_rank(address, 2)
    assert is_forgotten(manager, address, 10)
    assert manager.connection_pool == {}
    assert manager.request_status[ROOM] == KVPoll.Failed
    assert "Lost connection with prefill instance" in manager.failure_records[ROOM]
    assert f"{address} was restarted: expected a rank at ('127.0.0.1', 1), got ('127.0.0.1', 2)" in caplog.text


def test_sglang_alone_would_keep_it(bootstrap, move_rank, manager, monkeypatch):
    """The fault that the hook is there for; where this fails, the hook can go."""
    from sglang.srt.disaggregation.common.conn import CommonKVManager

    monkeypatch.setattr(CommonKVManager, "_on_heartbeat_success", inspect.unwrap(CommonKVManager._on_heartbeat_success))
    connect(manager, address := bootstrap())
    move_rank(address, 2)
    assert not is_forgotten(manager, address, 1)


@pytest.mark.parametrize("answer", [TimeoutError("late"), (200, b"\xff"), (200, b"[" * 9000), ConnectionResetError()])
def test_no_answer_changes_nothing(bootstrap, manager, monkeypatch, caplog, answer):
    def get(*args, **kwargs):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(bounded_get, "get", get)
    connect(manager, address := bootstrap())
    assert not is_forgotten(manager, address, 0.5)
    assert manager.thread.is_alive()
    assert "could not be read" in caplog.text


@pytest.mark.parametrize("answer", [(503, b""), (404, b"{}"), (200, b"[]"), (200, b"null"), (200, b"{}")])
def test_an_answer_that_names_no_rank_is_another_one(bootstrap, manager, monkeypatch, answer):
    """A server that has come back and has not all of its ranks answers 503."""
    monkeypatch.setattr(bounded_get, "get", lambda *args, **kwargs: answer)
    connect(manager, address := bootstrap())
    assert is_forgotten(manager, address, 10)
