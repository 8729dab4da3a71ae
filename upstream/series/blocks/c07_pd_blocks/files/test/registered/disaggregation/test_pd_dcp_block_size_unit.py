"""PD transfer to a decode server with DCP blocks: the plan, and what the peers say."""

import asyncio
import json
import threading
import unittest
from collections import defaultdict
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common import conn as common_conn
from sglang.srt.disaggregation.common.conn import (
    CommonKVBootstrapServer,
    CommonKVSender,
)
from sglang.srt.disaggregation.common.utils import (
    TransferKVChunk,
    build_dcp_token_transfer_plan,
    dcp_block_size_frames,
    dcp_block_size_of,
    group_concurrent_contiguous,
)
from sglang.srt.disaggregation.mooncake import conn
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="base-a-test-cpu")

ROUTE_QUERY = {
    "prefill_dp_rank": "-1",
    "prefill_cp_rank": "-1",
    "target_tp_rank": "-1",
    "target_pp_rank": "-1",
}


class TestTransferPlan(unittest.TestCase):
    def _deal(self, page, dcp_size, block, rank, offset, prefix, tokens, src, dst):
        """Rows of a rank, token by token."""
        pairs = []
        for i in range(tokens):
            position = prefix + offset * page + i
            if position // block % dcp_size != rank:
                continue
            # How many tokens of the rank lie before it, behind the prefix.
            local = sum(p // block % dcp_size == rank for p in range(prefix, position))
            pairs.append(
                (
                    src[i // page] * page + i % page,
                    dst[local // page] * page + local % page,
                )
            )
        return pairs

    def test_matches_dealing_token_by_token(self):
        rng = np.random.default_rng(0)
        for page, dcp_size, block in ((4, 2, 1), (4, 2, 2), (4, 2, 4), (8, 3, 4)):
            virtual = page * dcp_size
            for prefix in (0, virtual):
                for offset, tokens in (
                    (0, 1),
                    (0, 3 * page),
                    (1, 5),
                    (2, 4 * page - 1),
                ):
                    src = rng.permutation(40)[: -(-tokens // page)]
                    dst = rng.permutation(40)[:20]
                    for rank in range(dcp_size):
                        with self.subTest(
                            page=page, block=block, prefix=prefix, offset=offset
                        ):
                            plan = build_dcp_token_transfer_plan(
                                src,
                                dst,
                                physical_page_size=page,
                                dcp_size=dcp_size,
                                dcp_rank=rank,
                                src_page_offset=offset,
                                decode_prefix_len=prefix,
                                num_kv_tokens=tokens,
                                interleave_size=block,
                            )
                            got = list(
                                zip(
                                    plan.target_src_token_indices.tolist(),
                                    plan.target_dst_token_indices.tolist(),
                                )
                            )
                            want = self._deal(
                                page,
                                dcp_size,
                                block,
                                rank,
                                offset,
                                prefix,
                                tokens,
                                src,
                                dst,
                            )
                            self.assertEqual(got, want)

    def test_a_block_is_one_run(self):
        plan = build_dcp_token_transfer_plan(
            np.arange(8),
            np.arange(4),
            physical_page_size=8,
            dcp_size=2,
            dcp_rank=1,
            interleave_size=8,
        )
        runs, _ = group_concurrent_contiguous(
            plan.target_src_token_indices, plan.target_dst_token_indices
        )
        self.assertEqual([len(run) for run in runs], [8, 8, 8, 8])

    def test_a_block_that_does_not_divide_the_page(self):
        with self.assertRaisesRegex(ValueError, "divide the page size"):
            build_dcp_token_transfer_plan(
                np.arange(2),
                np.arange(2),
                physical_page_size=8,
                dcp_size=2,
                dcp_rank=0,
                interleave_size=3,
            )


class TestFrames(unittest.TestCase):
    def test_round_trip(self):
        self.assertEqual(dcp_block_size_frames(1), [])
        message = [b"a", *dcp_block_size_frames(64)]
        self.assertEqual(dcp_block_size_of(message, 1), 64)
        self.assertEqual(dcp_block_size_of(message, 2), 1)

    def test_what_peers_of_other_releases_send(self):
        self.assertEqual(dcp_block_size_of([b"64"], 0), 1)
        self.assertEqual(dcp_block_size_of([b"dcp_block_size=x"], 0), 0)
        self.assertEqual(dcp_block_size_of([b"dcp_block_size="], 0), 0)


def _manager(block_size=1, dcp_size=1, page=16, item_lens=(16 * 1152,), **more):
    manager = object.__new__(conn.MooncakeKVManager)
    manager.__dict__.update(
        dcp_size=dcp_size,
        dcp_rank=0,
        dcp_block_size=block_size,
        kv_args=SimpleNamespace(
            page_size=page,
            kv_item_lens=list(item_lens),
            num_draft_entries=0,
            state_types=[],
        ),
        state_tp_size=1,
        attn_tp_size=1,
        transfer_infos={},
        decode_kv_args_table={},
        _dcp_pack_max_tokens=None,
        max_transfer_batch_indices=0,
    )
    manager.__dict__.update(more)
    return manager


def _peer(block_size, relayout=True):
    return SimpleNamespace(
        dst_dcp_block_size=block_size,
        requires_dcp_relayout=relayout,
        dst_attn_tp_size=1,
    )


class TestRegistration(unittest.TestCase):
    def _verdict(self, manager, peer):
        spec = SimpleNamespace(speculative_algorithm=None)
        with patch.object(conn, "get_spec", lambda: spec):
            return manager._validate_peer_state_layout(peer)[1]

    def test_relayout_takes_any_block_that_divides_the_page(self):
        for block_size in (1, 4, 16):
            self.assertIsNone(self._verdict(_manager(), _peer(block_size)))
        for block_size in (0, 3, 32):
            self.assertIn("divides", self._verdict(_manager(), _peer(block_size)))

    def test_equal_dcp_sizes_need_equal_blocks(self):
        manager = _manager(block_size=4, dcp_size=2)
        self.assertIsNone(self._verdict(manager, _peer(4, relayout=False)))
        for block_size in (1, 8):
            verdict = self._verdict(manager, _peer(block_size, relayout=False))
            self.assertIn(f"prefill=4, decode={block_size}", verdict)


def _conclude(manager, status, reason=None):
    """What the decode server of room 7 is sent."""
    sent = []
    manager.__dict__.update(
        attn_tp_rank=3,
        pp_size=1,
        pp_rank=0,
        attn_cp_size=1,
        attn_cp_rank=0,
        deferred_bootstrap=None,
        request_status={7: KVPoll.Transferring},
        failure_records={},
        failure_lock=threading.Lock(),
        _send_multipart_locked=lambda url, parts, is_ipv6: sent.append(parts),
    )
    target = SimpleNamespace(is_dummy=False, endpoint="127.0.0.1", dst_port=5)
    manager.transfer_infos[7] = {"one": target}
    manager.conclude_transfer(bootstrap_room=7, status=status, failure_reason=reason)
    (message,) = sent
    return message


class TestStatusMessage(unittest.TestCase):
    def _sent(self, block_size, status, reason=None):
        manager = _manager()
        manager.decode_kv_args_table["one"] = _peer(block_size)
        return _conclude(manager, status, reason)

    def test_a_decode_server_without_blocks_gets_what_it_got(self):
        self.assertEqual(len(self._sent(1, KVPoll.Success)), 3)

    def test_success_repeats_the_block_size(self):
        message = self._sent(8, KVPoll.Success)
        success = (7, int(KVPoll.Success), 3, None)
        self.assertEqual(_manager(8).parse_kv_status_message(message), success)
        for other in (message[:3], self._sent(4, KVPoll.Success)):
            got = _manager(8).parse_kv_status_message(other)
            self.assertEqual(got[:3], (7, int(KVPoll.Failed), 3))
            self.assertIn("expected 8", got[3])

    def test_also_where_the_room_is_cleared_meanwhile(self):
        manager = _manager()
        manager.decode_kv_args_table["one"] = _peer(8)
        manager.update_status = lambda room, status: manager.transfer_infos.pop(room)
        message = _conclude(manager, KVPoll.Success)
        self.assertEqual(dcp_block_size_of(message, 4), 8)

    def test_failure_comes_with_its_reason(self):
        message = self._sent(8, KVPoll.Failed, "full")
        self.assertEqual(
            _manager(8).parse_kv_status_message(message),
            (7, int(KVPoll.Failed), 3, "full"),
        )

    def test_a_rejected_session_hears_why(self):
        manager = _manager(
            is_mla_backend=False,
            is_hybrid_mla_backend=False,
            session_lock=threading.Lock(),
            failed_sessions=set(),
            session_failures={},
            failed_session_probes={},
            state_strides_validated=set(),
            state_layout_rejections={},
            server_socket=None,
            _worker_threads=[],
            _stopped=False,
        )
        # A decode server without KV buffers; DCP 1 to 2 needs MLA.
        frames = [b"None", b"here", b"1", b"one", b"", b"", b"\0" * 4, b"0", b"1", b"0"]
        frames += [b"\0" * 4, b"\0" * 4, b"", b"", b"", b"", b"2", b"0", b"", b""]

        def recv():
            manager._stopped = True
            return [*frames, *dcp_block_size_frames(8)]

        manager._make_worker_recv = lambda socket: recv
        manager.start_prefill_thread()
        manager._worker_threads[0].join(10)
        self.assertIn("1 -> 2", manager.state_layout_rejections["one"])
        message = _conclude(manager, KVPoll.Failed, "1 -> 2")
        self.assertEqual(_manager(8).parse_kv_status_message(message)[3], "1 -> 2")


class TestRegistrationFrame(unittest.TestCase):
    def _registered(self, block_size):
        """What a prefill server reads of this decode server's registration."""
        manager = _manager(block_size, dcp_size=2)
        manager.__dict__.update(
            local_ip="127.0.0.1",
            rank_port=5,
            enable_staging=False,
            get_session_id=lambda: "one",
        )
        manager.kv_args.__dict__.update(
            kv_data_ptrs=[64],
            aux_data_ptrs=[],
            state_data_ptrs=[],
            state_item_lens=[],
            state_layer_ids=[],
            kv_layer_ids=[],
            engine_rank=0,
        )
        frames = manager.build_receiver_registration_message()
        return conn.KVArgsRegisterInfo.from_zmq(frames), len(frames)

    def test_the_block_size_arrives(self):
        stock, num_frames = self._registered(1)
        blocks, num_frames_with_blocks = self._registered(8)
        self.assertEqual(stock.dst_dcp_block_size, 1)
        self.assertEqual(blocks.dst_dcp_block_size, 8)
        self.assertEqual(num_frames_with_blocks, num_frames + 1)


class TestSend(unittest.TestCase):
    ROW, PAGE = 4, 8

    def _segments(self, block_size, status=0, **more):
        """Segments of each call for rank 1 of 2: four pages here, two there, one layer."""
        manager = _manager(page=self.PAGE, item_lens=[self.ROW * self.PAGE], **more)
        manager.kv_args.__dict__.update(kv_data_ptrs=[1000], kv_layer_ids=[])
        manager.__dict__.update(enable_custom_mem_pool=False, is_mla_backend=True)
        manager.get_mla_kv_ptrs_with_pp = lambda src, dst: (src, dst, len(src))
        calls = []
        manager._transfer_data = lambda session, blocks: calls.append(blocks) or status
        got = manager.send_kvcache_dcp(
            "one",
            np.arange(4),
            [5000],
            np.arange(2),
            dcp_token_item_lens=[self.ROW],
            dst_dcp_size=2,
            dst_dcp_rank=1,
            src_page_offset=0,
            decode_prefix_len=0,
            num_kv_tokens=4 * self.PAGE,
            executor=None,
            dst_layer_ids=[],
            dst_dcp_block_size=block_size,
        )
        self.assertEqual(got, status)
        return calls

    def test_a_block_is_one_segment(self):
        (blocks,) = self._segments(8)
        self.assertEqual(blocks, [(1032, 5000, 32), (1096, 5032, 32)])
        (tokens,) = self._segments(1)
        self.assertEqual(len(tokens), 16)

    def test_in_batches_where_a_limit_is_set(self):
        calls = self._segments(1, max_transfer_batch_indices=6)
        self.assertEqual([len(call) for call in calls], [6, 6, 4])

    def test_a_batch_that_fails_is_the_last(self):
        calls = self._segments(1, status=-1, max_transfer_batch_indices=6)
        self.assertEqual([len(call) for call in calls], [6])


class TestTransferWorker(unittest.TestCase):
    def _sent(self, block_size, buffers):
        """What the worker passes on for a peer with blocks of that size."""
        peer = _peer(block_size)
        peer.__dict__.update(
            dcp_token_item_lens=[1152],
            dst_kv_ptrs=[5000],
            dst_kv_item_lens=[],
            dst_kv_layer_ids=[],
            dst_dcp_size=2,
            dst_dcp_rank=1,
            dst_tp_rank=0,
        )
        request = SimpleNamespace(
            is_dummy=False,
            mooncake_session_id="one",
            dst_device_kv_indices=None,
            dst_kv_indices=np.arange(1),
            decode_prefix_len=0,
        )
        sent = {}
        manager = _manager(
            decode_kv_args_table={"one": peer},
            transfer_infos={7: {"one": request}},
            request_status={7: KVPoll.Transferring},
            _staging_outstanding=defaultdict(int),
            session_lock=threading.Lock(),
            failed_sessions=set(),
            state_layout_rejections={},
            enable_trace=False,
            enable_staging=False,
            enable_deferred_decode_kv_release=False,
            _dcp_pack_buffers=buffers,
            _get_dsa_cache_transfer_skip_flags=lambda peer: (False, False),
            send_kvcache_dcp=lambda *args, **kwargs: sent.update(kwargs) or 0,
        )
        manager.kv_args.kv_data_ptrs = [1000]
        chunk = TransferKVChunk(
            room=7,
            prefill_kv_indices=np.arange(2),
            index_slice=slice(0, 2),
            is_last_chunk=False,
            prefill_aux_index=None,
            state_indices=None,
            num_kv_tokens=32,
        )
        pending = [chunk, None]
        manager.transfer_worker(SimpleNamespace(get=lambda: pending.pop(0)), None)
        return sent["dst_dcp_block_size"], sent["pack_buffer"]

    def test_block_size_and_buffer_are_those_of_the_peer(self):
        self.assertEqual(self._sent(1, ["buffer"]), (1, "buffer"))
        self.assertEqual(self._sent(8, ["buffer"]), (8, "buffer"))
        # Long runs, beside another peer that needs the buffer.
        self.assertEqual(self._sent(16, ["buffer"]), (16, None))
        self.assertEqual(self._sent(16, None), (16, None))


class TestPacking(unittest.TestCase):
    def test_long_runs_are_sent_as_they_lie(self):
        manager = _manager()
        needs = {b: manager.needs_dcp_pack(_peer(b)) for b in (1, 8, 16)}
        self.assertEqual(needs, {1: True, 8: True, 16: False})

    def test_the_pack_buffer_limits_only_those_who_need_it(self):
        manager = _manager()
        manager._dcp_pack_max_tokens = 32
        manager.transfer_infos[7] = {"one": SimpleNamespace(is_dummy=False)}
        sender = SimpleNamespace(kv_mgr=manager, bootstrap_room=7)
        for block_size, limit in ((1, 32), (8, 32), (16, None)):
            manager.decode_kv_args_table["one"] = _peer(block_size)
            self.assertEqual(CommonKVSender.get_max_transfer_tokens(sender), limit)


class TestRoute(unittest.TestCase):
    def _server(self, **more):
        server = object.__new__(CommonKVBootstrapServer)
        server.__dict__.update(
            attn_tp_size=1,
            attn_cp_size=1,
            dp_size=1,
            pp_size=1,
            page_size=16,
            kv_cache_dtype=None,
            kv_layout=None,
            dsv41_spec_layout=None,
            follow_bootstrap_room=True,
            enable_dsa_cache_layer_split=False,
            enable_kv_cache_sharding=False,
            prefill_http_port=None,
            decode_allocation_policy="early",
            dcp_block_size=1,
            _registered_count=1,
        )
        server.__dict__.update(more)
        return server

    def _answer(self, server=None, **query):
        server = server or self._server()
        request = SimpleNamespace(query={**ROUTE_QUERY, **query})
        response = asyncio.run(server._handle_route_get(request))
        return json.loads(response.text)

    def test_only_who_asks_is_told(self):
        self.assertNotIn("dcp_block_size", self._answer())
        self.assertEqual(self._answer(dcp_block_size="64")["dcp_block_size"], 1)

    def test_prefill_ranks_register_what_is_answered(self):
        rows = []
        manager = _manager(8)
        manager.__dict__.update(
            dist_init_addr=None,
            bootstrap_host="127.0.0.1",
            bootstrap_port=1,
            local_ip="127.0.0.1",
            rank_port=5,
            kv_cache_dtype_str="auto",
            kv_layout=None,
            dsv41_spec_layout=None,
            _register_topology_row=lambda url, row: rows.append(row),
        )
        for name in ("attn_tp", "attn_cp", "attn_dp", "pp", "system_dp"):
            manager.__dict__.update({f"{name}_size": 1, f"{name}_rank": 0})
        parallel = SimpleNamespace(
            enable_cp_tp_group_sharing=False,
            load_balance_method="follow_bootstrap_room",
            enable_dsa_cache_layer_split=False,
            enable_kv_cache_sharding=False,
        )
        disagg = SimpleNamespace(disaggregation_decode_allocation_policy="early")
        with patch.multiple(
            common_conn,
            get_parallel=lambda: parallel,
            get_serving=lambda: SimpleNamespace(port=80),
            get_disagg=lambda: disagg,
        ):
            manager.register_to_bootstrap()
        server = self._server(
            dcp_block_size=None,
            lock=asyncio.Lock(),
            prefill_port_table={},
            _registered_count=0,
        )

        async def body():
            return json.loads(json.dumps(rows[0]))

        asyncio.run(server._handle_route_put(SimpleNamespace(json=body)))
        answer = self._answer(server, dcp_block_size="64")
        self.assertEqual(answer["dcp_block_size"], 8)

    def test_a_decode_server_asks_only_with_blocks(self):
        for block_size, asks in ((1, False), (64, True)):
            manager = _manager(block_size)
            manager.prefill_info_table = {}
            with patch.object(common_conn.requests, "get") as get:
                get.return_value.status_code = 503
                self.assertFalse(manager.try_ensure_parallel_info("here:1"))
            (url,) = get.call_args.args
            self.assertEqual("dcp_block_size=64" in url, asks)

    def test_a_prefill_server_without_blocks_is_rejected(self):
        manager = _manager(64)
        manager.__dict__.update(
            prefill_info_table={},
            kv_cache_dtype_str="auto",
            kv_layout=None,
            dsv41_spec_layout=None,
            is_mla_backend=True,
        )
        with patch.object(common_conn.requests, "get") as get:
            get.return_value.status_code = 200
            get.return_value.json.return_value = self._answer()
            with self.assertRaisesRegex(RuntimeError, "blocks of 64"):
                manager.try_ensure_parallel_info("here:1")
        self.assertEqual(manager.prefill_info_table, {})


if __name__ == "__main__":
    unittest.main()
