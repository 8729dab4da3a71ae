"""A peer that does not fit is rejected; a prefill server and a decode server go on with the others."""

import threading
import unittest
from collections import defaultdict
from types import SimpleNamespace
from unittest import mock

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common import conn as common
from sglang.srt.disaggregation.common.conn import CommonKVReceiver, CommonKVSender
from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang.srt.disaggregation.mooncake import conn
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


def registration(session, dcp_size=1):
    """Frames of a decode server without KV buffers."""
    frames = [b"None", b"127.0.0.1", b"1", session, b"", b"", b"\0" * 4, b"0", b"1"]
    frames += [b"0", b"\0" * 4, b"\0" * 4, b"", b"", b"", b""]
    return [*frames, str(dcp_size).encode(), b"0", b"", b""]


class TestMooncakePeerRejection(unittest.TestCase):
    def setUp(self):
        self.manager = object.__new__(conn.MooncakeKVManager)
        self.manager.__dict__.update(
            dcp_size=1,
            dcp_rank=0,
            is_mla_backend=False,
            is_hybrid_mla_backend=False,
            session_lock=threading.Lock(),
            failed_sessions=set(),
            session_failures={},
            failed_session_probes={},
            state_strides_validated=set(),
            state_layout_rejections={},
            decode_kv_args_table={},
            transfer_infos={},
            _worker_threads=[],
            _stopped=False,
            server_socket=None,
            _dcp_pack_max_tokens=8,
        )
        self.manager._publish_peer_registration = self._publish

    def _publish(self, session, info):
        with self.manager.session_lock:
            self.manager.state_layout_rejections.pop(session, None)
            self.manager.decode_kv_args_table[session] = info

    def _run(self, *messages):
        """The real bootstrap thread, on these messages."""
        pending = list(messages)

        def recv():
            if len(pending) == 1:
                self.manager._stopped = True
            return pending.pop(0)

        self.manager._make_worker_recv = lambda socket: recv
        self.manager.start_prefill_thread()
        self.manager._worker_threads[0].join(10)
        self.assertEqual(pending, [])

    def test_others_are_registered_after_one_that_does_not_fit(self):
        # DCP 1 to 2 needs MLA.
        self._run(registration(b"bad", dcp_size=2), registration(b"good"))
        self.assertIn("good", self.manager.decode_kv_args_table)
        self.assertEqual(list(self.manager.state_layout_rejections), ["bad"])
        self.assertIn(
            "Unsupported PD DCP topology: 1 -> 2",
            self.manager.state_layout_rejections["bad"],
        )

    def test_unreadable_registration(self):
        self._run(registration(b"bad")[:8], registration(b"good"))
        self.assertEqual(list(self.manager.state_layout_rejections), ["bad"])

    def test_nothing_else_is_kept_of_the_session(self):
        self.manager.failed_sessions.add("bad")
        self.manager.state_strides_validated.add("bad")
        self._run(registration(b"bad", dcp_size=2))
        self.assertEqual(self.manager.failed_sessions, set())
        self.assertEqual(self.manager.state_strides_validated, set())

    def test_registering_again_lifts_it(self):
        self._run(registration(b"one", dcp_size=2), registration(b"one"))
        self.assertEqual(self.manager.state_layout_rejections, {})

    def test_no_transfer_limit_from_a_rejected_session(self):
        self.manager.transfer_infos[7] = {"bad": SimpleNamespace(is_dummy=False)}
        sender = SimpleNamespace(kv_mgr=self.manager, bootstrap_room=7)
        self.assertIsNone(CommonKVSender.get_max_transfer_tokens(sender))


ANSWER = dict.fromkeys(("attn_tp_size", "attn_cp_size", "dp_size", "pp_size"), 1)
ANSWER |= {"kv_cache_dtype": "auto", "follow_bootstrap_room": True}


class TestDecodeRejectsPrefill(unittest.TestCase):
    def setUp(self):
        self.manager = object.__new__(conn.MooncakeKVManager)
        self.manager.__dict__.update(
            kv_args=SimpleNamespace(page_size=64),
            kv_cache_dtype_str="auto",
            defer_decode_allocation=False,
            addr_to_rooms_tracker=defaultdict(set),
            prefill_response_tracker={},
            request_status={},
            failure_records={},
            failure_lock=threading.Lock(),
            _deferred_ack_targets={},
            _deferred_ack_poisoned_rooms=set(),
            _staging_outstanding={},
            prefill_info_table={"good:1": object()},
            server_socket=None,
        )
        self.num_asked = 0
        self.queue = object.__new__(DecodePreallocQueue)
        self.queue.__dict__.update(
            kv_manager=self.manager,
            _ensure_last_attempt_time={},
            _ensure_retry_count={},
            _ensure_retry_interval=0,
            _prefill_rejections={},
            _max_ensure_retries=15,
        )

    def _request(self, address, room):
        receiver = CommonKVReceiver(self.manager, address, room)
        return SimpleNamespace(kv_receiver=receiver)

    def _ensure(self, page_size, *requests):
        answer = SimpleNamespace(
            status_code=200, json=lambda: {**ANSWER, "page_size": page_size}
        )
        waiting = {}
        for request in requests:
            waiting.setdefault(request.kv_receiver.bootstrap_addr, []).append(request)
        with mock.patch.object(common.requests, "get", return_value=answer) as get:
            result = self.queue._ensure_prefill_info(waiting)
        self.num_asked += get.call_count
        return result

    def test_others_are_served_beside_one_that_does_not_fit(self):
        bad, good = self._request("bad:1", 7), self._request("good:1", 8)
        ready, remaining = self._ensure(16, bad, good)
        self.assertEqual((ready, remaining), ({"good:1": [good]}, []))
        self.assertEqual(self.manager.request_status[7], KVPoll.Failed)
        self.assertIn("page_size=16", self.manager.failure_records[7])
        self.assertEqual(self.manager.request_status[8], KVPoll.Bootstrapping)

    def test_the_next_ones_are_told_the_same_without_asking(self):
        self.queue._ensure_retry_interval = 60
        for room in (7, 8):
            self._ensure(16, self._request("bad:1", room))
            self.assertIn("page_size=16", self.manager.failure_records[room])
        self.assertEqual(self.num_asked, 1)

    def test_it_is_asked_anew_later(self):
        self._ensure(16, self._request("bad:1", 7))
        self.assertNotIn("bad:1", self.manager.prefill_info_table)
        later = self._request("bad:1", 9)
        self._ensure(32, later)
        self.assertIn("page_size=32", self.manager.failure_records[9])

    def test_what_is_asserted_is_a_rejection_too(self):
        with mock.patch.object(
            self.manager, "try_ensure_parallel_info", side_effect=AssertionError("pp")
        ):
            self._ensure(64, self._request("bad:1", 7))
        self.assertEqual(self.manager.failure_records[7], "pp")

    def test_a_request_that_has_failed_keeps_its_reason(self):
        request = self._request("bad:1", 7)
        request.kv_receiver.abort()
        self._ensure(16, request)
        self.assertIn("AbortReq", self.manager.failure_records[7])

    def test_attempts_are_counted_anew(self):
        self.queue._ensure_retry_count["bad:1"] = 14
        self._ensure(16, self._request("bad:1", 7))
        self.assertEqual(self.queue._ensure_retry_count, {})

    def test_a_request_that_left_the_queue(self):
        gone = SimpleNamespace(kv_receiver=None)
        answer = SimpleNamespace(
            status_code=200, json=lambda: {**ANSWER, "page_size": 16}
        )
        with mock.patch.object(common.requests, "get", return_value=answer):
            self.assertEqual(
                self.queue._ensure_prefill_info({"bad:1": [gone]}), ({}, [])
            )


if __name__ == "__main__":
    unittest.main()
