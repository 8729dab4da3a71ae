"""Upstream's transfer worker around the hooks: whatever fails, the thread lives, and a failure stays with its request."""

from __future__ import annotations

import re
import threading
import time
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
from servers import MemoryEngine, Pool, Registration, make_manager
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.conn import AbortNotification
from sglang.srt.disaggregation.common.utils import FastQueue, TransferKVChunk

pytestmark = pytest.mark.usefixtures("hooked")

PAGE, SESSION = 16, "127.0.0.1:1"


class Worker:
    """The real worker loop, in a thread, over a pool of four pages of rows; nothing is told to decode servers."""

    def __init__(self, engine=None, block_size=16, receiver=None, **changes):
        self.source = Pool.random(2, 10 * PAGE, 24)
        self.received = receiver.pool(2, 10 * PAGE, 24) if receiver else Pool.blank(2, 10 * PAGE, 24)
        self.session = receiver.session if receiver else SESSION
        self.engine = engine or MemoryEngine()
        manager = make_manager(self.source, PAGE, self.engine)
        self.told, self.acknowledged = [], []
        vars(manager).update(
            request_status={},
            enable_trace=False,
            enable_staging=False,
            pp_size=1,
            bootstrap_port=0,
            deferred_bootstrap=None,
            state_layout_rejections={},
            failed_session_probes={},
            req_to_decode_prefix_len={},
            _staging_outstanding=defaultdict(int),
            _deferred_ack_targets={},
            _deferred_ack_poisoned_rooms=set(),
            _get_dsa_cache_transfer_skip_flags=lambda registration: (False, False),
            send_aux=lambda *args: 0,
            send_kv_status_message=lambda **told: self.told.append(told),
            _prefill_unique_rank=lambda: 0,
            _send_multipart_locked=lambda endpoint, frames, **_: self.acknowledged.append(int(frames[1])),
            **changes,
        )
        registration = Registration(2, 0, block_size, self.received.ptrs, mooncake_session_id=self.session)
        registration.dcp_token_item_lens = [24, 24]
        manager.decode_kv_args_table[self.session] = registration
        self.manager, self.queue = manager, FastQueue()
        self.thread = threading.Thread(target=manager.transfer_worker, args=(self.queue, None), daemon=True)
        self.thread.start()

    def request(self, room, src_pages, dst_pages, tokens, prefix=0):
        """Send one request to one decode rank; its status when the worker is done with it."""
        info = SimpleNamespace(
            room=room, endpoint="127.0.0.1", dst_port=1, mooncake_session_id=self.session, is_dummy=False,
            dst_kv_indices=np.array(dst_pages, np.int32), dst_device_kv_indices=None, decode_prefix_len=prefix,
            required_dst_info_num=1,
        )  # fmt: skip
        self.manager.request_status[room] = KVPoll.WaitingForInput
        self.manager.transfer_infos[room] = {self.session: info}
        pages = np.array(src_pages, np.int32)
        self.queue.put(TransferKVChunk(room, pages, slice(0, len(src_pages)), True, 0, None, num_kv_tokens=tokens))
        deadline = time.monotonic() + 10
        while room in self.manager.transfer_infos and self.thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.002)
        return self.manager.request_status[room]

    def abort(self, room):
        """The decode rank gives the request up, as the bootstrap thread hears it."""
        frames = AbortNotification(room, "127.0.0.1", 1, generation=1).to_zmq()
        assert self.manager._handle_abort_notification(frames)

    def close(self):
        self.queue.put(None)
        self.thread.join(10)
        assert not self.thread.is_alive()


@pytest.fixture
def worker():
    made = Worker()
    yield made
    made.close()


def test_a_request_that_cannot_be_planned_fails_alone(worker, counts):
    assert worker.request(1, [3, 4], [], 32) == KVPoll.Failed
    reason = worker.manager.failure_records[1]
    assert re.fullmatch(
        r"KV in blocks to 127.0.0.1:1: ValueError: dst_pages: expected 1 pages or more for 16 rows, got 0", reason
    )
    assert [told["failure_reason"] for told in worker.told] == [reason], "the decode server gets the reason"
    assert worker.request(2, [3, 4], [5], 32, prefix=7) == KVPoll.Failed
    assert "decode_prefix_len: expected a multiple of 32 tokens" in worker.manager.failure_records[2]
    assert worker.request(3, [3, 4], [5], None) == KVPoll.Failed
    assert worker.request(4, [3, 4], [5], 33) == KVPoll.Failed
    # The session is as good as before.
    assert worker.manager.failed_sessions == set()
    assert set(worker.manager.session_failures.values()) == {0}
    assert worker.request(5, [3, 4], [5], 32) == KVPoll.Success
    np.testing.assert_array_equal(worker.received.memory[:, 80:96], worker.source.memory[:, 48:64])
    assert counts.by_path["direct"].failures == 4


def test_anything_else_that_raises_fails_the_request_alone(worker, monkeypatch, caplog):
    assert worker.request(9, [3], [], 16) == KVPoll.Failed
    assert not any(record.exc_info for record in caplog.records), "the message says it all"
    monkeypatch.setattr(worker.manager, "get_mla_kv_ptrs_with_pp", lambda *args: 1 / 0)
    assert worker.request(1, [3], [5], 16) == KVPoll.Failed
    assert "ZeroDivisionError" in worker.manager.failure_records[1]
    assert any(record.exc_info for record in caplog.records)
    monkeypatch.undo()
    assert worker.thread.is_alive()
    assert worker.manager.failed_sessions == set()


def test_an_error_of_the_engine_fails_the_session_as_upstream_has_it(counts):
    worker = Worker(MemoryEngine(fail_call=1), max_transfer_batch_indices=1)
    try:
        assert worker.request(1, [3, 4], [5], 32) == KVPoll.Failed
        assert (
            "the transfer engine returned -1 in batch 2, which ended the transfer" in worker.manager.failure_records[1]
        )
        assert worker.manager.failed_sessions == {SESSION}
        assert counts.by_path["direct"].failures == 1
        assert worker.request(2, [3, 4], [5], 32) == KVPoll.Failed
        assert "is not alive" in worker.manager.failure_records[2], "upstream's reason"
        assert worker.engine.calls == [1, 1]
    finally:
        worker.close()


def test_the_reason_is_the_failed_requests_alone(worker):
    """Another request to the same decode rank is under way."""
    worker.manager.request_status[8] = KVPoll.Transferring
    pages = np.array([5], np.int32)
    worker.manager.transfer_infos[8] = {SESSION: SimpleNamespace(dst_kv_indices=pages, is_dummy=False)}
    assert worker.request(1, [3, 4], [], 32) == KVPoll.Failed
    assert set(worker.manager.failure_records) == {1}
    del worker.manager.transfer_infos[8]


class TestPagesThatMayStillBeWritten:
    """Upstream acknowledges the pages of an aborted request as idle when nothing writes them any more, and not before."""

    @pytest.fixture
    def make(self):
        made = []

        def make(engine, **changes):
            made.append(Worker(engine, enable_deferred_decode_kv_release=True, **changes))
            return made[-1]

        yield make
        for worker in made:
            worker.close()

    def aborting(self, worker, room, call, status=0):
        """The engine's call of this number is interrupted by an abort, and then comes back with ``status``."""
        engine = worker.engine
        send, calls = engine.batch_transfer_sync, engine.calls

        def interrupted(*args):
            if len(calls) == call:
                worker.abort(room)
                assert worker.acknowledged == [], "the call is under way"
                if status != 0:
                    calls.append(0)
                    return status
            return send(*args)

        engine.batch_transfer_sync = interrupted

    @pytest.mark.parametrize("fail_call", [0, 1])
    def test_a_call_that_failed_is_never_acknowledged(self, make, fail_call):
        worker = make(MemoryEngine(fail_call=fail_call), max_transfer_batch_indices=1)
        assert worker.request(1, [3, 4], [5], 32) == KVPoll.Failed
        assert worker.manager._deferred_ack_poisoned_rooms == {1}
        worker.abort(1)
        assert worker.acknowledged == []
        assert len(worker.engine.calls) == fail_call + 1, "nothing is handed over behind it"

    def test_nor_one_of_the_real_engine(self, make, fresh_pair):
        engine, receiver = fresh_pair
        worker = make(engine, receiver=receiver)
        self.aborting(worker, 1, 0)
        assert worker.request(1, [3, 4], [5], 32) == KVPoll.Failed
        assert worker.acknowledged == [1], "it came back in good order: the pages are idle"
        receiver.kill()
        assert worker.request(2, [3, 4], [5], 32) == KVPoll.Failed
        worker.abort(2)
        assert worker.manager._deferred_ack_poisoned_rooms == {2}
        assert worker.acknowledged == [1]

    def test_a_call_that_failed_under_an_abort(self, make):
        worker = make(MemoryEngine(), max_transfer_batch_indices=1)
        self.aborting(worker, 1, 1, status=-1)
        assert worker.request(1, [3, 4], [5], 32) == KVPoll.Failed
        assert (worker.acknowledged, worker.manager._deferred_ack_poisoned_rooms) == ([], {1})

    def test_an_aborted_request_gets_no_further_batch(self, make, counts):
        """Otherwise its last write would end a time limit a batch later, and the decode server waits for one."""
        worker = make(MemoryEngine(), max_transfer_batch_indices=1)
        assert worker.request(9, [3, 4, 5], [5, 6], 48) == KVPoll.Success
        in_all = len(worker.engine.calls)
        assert in_all > 2
        self.aborting(worker, 1, in_all + 1)
        assert worker.request(1, [3, 4, 5], [5, 6], 48) == KVPoll.Failed
        assert len(worker.engine.calls) == in_all + 2, "the one under way was the last"
        assert worker.acknowledged == [1], "what was handed over has landed"
        assert worker.manager.failed_sessions == set()
        assert worker.request(2, [3, 4], [5], 32) == KVPoll.Success, "the session is as good as before"
        assert (counts.by_path["direct"].failures, counts.by_path["direct"].transfers) == (1, 3)

    def test_a_request_that_has_ended_gets_none(self, make):
        """A chunk goes to one decode rank after the other: the request may end while another one is served."""
        worker = make(MemoryEngine())
        plan = worker.manager.get_mla_kv_ptrs_with_pp

        def ended(*args):
            worker.abort(1)
            return plan(*args)

        worker.manager.get_mla_kv_ptrs_with_pp = ended
        assert worker.request(1, [3, 4], [5], 32) == KVPoll.Failed
        assert worker.engine.calls == []
        assert worker.acknowledged == [1]

    def test_pages_of_a_request_that_could_not_be_planned_are_idle(self, make):
        worker = make(MemoryEngine())
        assert worker.request(1, [3, 4], [], 32) == KVPoll.Failed
        assert worker.manager._deferred_ack_poisoned_rooms == set()
        worker.abort(1)
        assert worker.acknowledged == [1]

    def test_what_raises_in_a_call_is_never_acknowledged(self, make):
        worker = make(MemoryEngine())
        worker.engine.batch_transfer_sync = lambda *args: 1 / 0
        assert worker.request(1, [3, 4], [5], 32) == KVPoll.Failed
        worker.abort(1)
        assert worker.acknowledged == []

    def test_a_verdict_is_good_for_one_failure(self, make):
        worker = make(MemoryEngine())
        worker.manager.send_aux = lambda *args: -1
        assert worker.request(1, [3, 4], [], 32) == KVPoll.Failed
        assert worker.request(2, [], [], 0) == KVPoll.Failed, "a last chunk without KV sends metadata alone"
        assert worker.manager._deferred_ack_poisoned_rooms == {2}, "which may still be written"


def test_a_request_that_ended_meanwhile_leaves_no_reason_behind():
    """A later request may reuse its number."""
    worker = Worker()
    try:
        worker.engine.batch_transfer_sync = lambda *args: worker.manager.request_status.pop(1) and -1
        with pytest.raises(KeyError):
            worker.request(1, [3, 4], [5], 32)
        assert worker.manager.failure_records == {}
    finally:
        worker.close()
