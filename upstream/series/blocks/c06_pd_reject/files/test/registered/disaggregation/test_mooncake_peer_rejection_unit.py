"""A decode registration that does not fit is rejected; the bootstrap thread goes on."""

import threading
import unittest
from types import SimpleNamespace

from sglang.srt.disaggregation.common.conn import CommonKVSender
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

    def test_registering_again_lifts_it(self):
        self._run(registration(b"one", dcp_size=2), registration(b"one"))
        self.assertEqual(self.manager.state_layout_rejections, {})

    def test_no_transfer_limit_from_a_rejected_session(self):
        self.manager.transfer_infos[7] = {"bad": SimpleNamespace(is_dummy=False)}
        sender = SimpleNamespace(kv_mgr=self.manager, bootstrap_room=7)
        self.assertIsNone(CommonKVSender.get_max_transfer_tokens(sender))


if __name__ == "__main__":
    unittest.main()
