"""What servers with blocks built in and servers of the plugin say to each other, frame by frame and over real HTTP.

The patched modules are loaded beside the installed ones, so both speakers are in this process; no engine runs.
"""

from __future__ import annotations

import importlib
import socket
import sys
import threading
import time
import types
from types import SimpleNamespace

import numpy as np
import prometheus_client
import pytest
import requests

from bootstrap import close
from sglang_dcp_block.dcp import handshake
from sglang_dcp_block.dcp.handshake import Capability
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.dcp.transfer import plan_replicated_runs, plan_runs
from sglang_dcp_block.patches import active, fingerprint, pd_capability, pd_decode, pd_echo, pd_registration
from upstream import commit, edit

MODULES = tuple(f"sglang.srt.disaggregation.{name}" for name in ("common.utils", "common.conn", "mooncake.conn"))
B = 8
RANK = 3


@pytest.fixture(scope="module")
def native(series_context):
    """The modules of disaggregation as the series leaves them: ``utils``, ``conn``, ``mooncake``."""
    tree = fingerprint.installed_tree().parent
    sources = {name: (tree / f"{name.replace('.', '/')}.py").read_text() for name in MODULES}
    for one in commit.load(commit.BLOCKS):
        for name, edits in one.edits_by_module().items():
            if name in sources:
                sources[name] = edit.apply(sources[name], *edits)
    for name in MODULES:
        importlib.import_module(name)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(prometheus_client.REGISTRY, "register", lambda collector: None)  # names of metrics are taken

    originals = {name: sys.modules[name] for name in MODULES}
    patched = {}
    try:
        for name in MODULES:  # each finds the patched ones before it
            module = sys.modules[name] = types.ModuleType(name)
            module.__file__ = f"<patched {name}>"
            exec(compile(sources[name], module.__file__, "exec"), module.__dict__)
            patched[name] = module
    finally:
        sys.modules.update(originals)
        monkeypatch.undo()
    return SimpleNamespace(**dict(zip(("utils", "conn", "mooncake"), patched.values(), strict=True)))


@pytest.fixture
def plugin_decode(monkeypatch):
    """This process is a decode server of the plugin, with blocks of B tokens on 2 ranks."""
    monkeypatch.setattr(active, "_layout", DcpLayout(2, B))


def manager(of, block_size: int = 1, **more):
    """A Mooncake manager of a module, with what its messages are made of."""
    made = object.__new__(of.MooncakeKVManager)
    made.__dict__.update(
        dcp_block_size=block_size,
        dcp_size=2,
        dcp_rank=0,
        attn_tp_size=2,
        local_ip="127.0.0.1",
        rank_port=1,
        enable_staging=False,
        get_session_id=lambda: "127.0.0.1:9",
        kv_args=SimpleNamespace(
            kv_data_ptrs=[4096], aux_data_ptrs=[8192], state_data_ptrs=[], state_item_lens=[], state_layer_ids=[],
            state_dim_per_tensor=[], kv_layer_ids=[0], kv_item_lens=[16 * 64], engine_rank=0, page_size=16,
        ),
        transfer_infos={7: {"s": SimpleNamespace(is_dummy=False)}},
        state_layout_rejections={},
        _prefill_unique_rank=lambda: RANK,
        **more,
    )  # fmt: skip
    return made


def plugin_registration(stock):
    return pd_decode.register_block_size(manager(stock).build_receiver_registration_message(), None)


@pytest.fixture
def stock():
    from sglang.srt.disaggregation.mooncake import conn

    return conn


class TestRegistration:
    def test_both_send_the_same_frames(self, native, stock, plugin_decode):
        assert manager(native.mooncake, B).build_receiver_registration_message() == plugin_registration(stock)

    def test_without_blocks_it_is_that_of_the_release(self, native, stock):
        theirs = manager(stock).build_receiver_registration_message()
        assert manager(native.mooncake, 1).build_receiver_registration_message() == theirs

    def test_the_built_in_side_reads_it(self, native, stock, plugin_decode):
        read = native.mooncake.KVArgsRegisterInfo.from_zmq
        assert read(plugin_registration(stock)).dst_dcp_block_size == B
        assert read(manager(stock).build_receiver_registration_message()).dst_dcp_block_size == 1

    def test_the_plugin_reads_it(self, native, stock):
        message = manager(native.mooncake, B).build_receiver_registration_message()
        original = stock.KVArgsRegisterInfo.from_zmq.__func__
        info = pd_registration.read_registration(original, stock.KVArgsRegisterInfo, message)
        assert (info.dcp_block_size, info.dcp_block_rejection) == (B, None)


class TestStatus:
    """Success and failure of a transfer, from prefill to decode."""

    @pytest.fixture(params=["built in", "plugin"])
    def send(self, request, native, stock):
        """send(status, reason, block_size) -> frames of a prefill server of one kind."""
        from sglang.srt.disaggregation.base import KVPoll

        def send(status, reason=None, block_size=B):
            of = native.mooncake if request.param == "built in" else stock
            peer = SimpleNamespace(dst_dcp_block_size=block_size, dcp_block_size=block_size)
            sender = manager(of, decode_kv_args_table={"s": peer})
            said = {"bootstrap_room": 7, "status": getattr(KVPoll, status), "failure_reason": reason}
            if of is stock:
                return pd_echo.echo_block_size(sender._encode_kv_status_message(**said), sender, **said)
            return sender._encode_kv_status_message(**said, dcp_block_size=sender.room_dcp_block_size(7))

        return send

    @pytest.fixture(params=["built in", "plugin"])
    def receive(self, request, native, stock, plugin_decode, monkeypatch):
        """receive(frames) -> (status, reason) as a decode server of one kind takes it."""
        from sglang.srt.disaggregation.base import KVPoll

        monkeypatch.setattr(pd_decode.peer_refusals, "count", lambda side, reason: None)

        def receive(frames):
            if request.param == "built in":
                room, status, rank, reason = manager(native.mooncake, B).parse_kv_status_message(frames)
            else:
                original = type(manager(stock)).parse_kv_status_message
                room, status, rank, reason = pd_decode.require_echo(original, manager(stock), frames)
            assert (room, rank) == (7, RANK)
            return "Success" if status == KVPoll.Success else "Failed" if status == KVPoll.Failed else status, reason

        return receive

    def test_success(self, send, receive):
        assert receive(send("Success")) == ("Success", None)

    def test_failure_with_its_reason(self, send, receive):
        assert receive(send("Failed", "no room")) == ("Failed", "no room")

    def test_success_of_other_blocks_is_a_failure(self, send, receive):
        for block_size in (4, 1):
            status, reason = receive(send("Success", block_size=block_size))
            assert status == "Failed"
            assert f"expected {B}" in reason


class TestTopology:
    """The first question, over HTTP."""

    @pytest.fixture
    def bootstrap(self, monkeypatch):
        """bootstrap(class) -> address of a running bootstrap server with one registered rank."""
        servers = []

        def start(cls, **row_of_rank):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            servers.append(cls("127.0.0.1", port))
            row = dict.fromkeys(("attn_tp_size", "attn_cp_size", "attn_dp_size", "pp_size", "system_dp_size"), 1)
            row |= dict.fromkeys(("attn_tp_rank", "attn_cp_rank", "attn_dp_rank", "pp_rank", "system_dp_rank"), 0)
            row |= {"rank_ip": "127.0.0.1", "rank_port": 1, "page_size": 16, "kv_cache_dtype": "auto", **row_of_rank}
            deadline = time.monotonic() + 20
            while True:
                try:
                    requests.put(f"http://127.0.0.1:{port}/route", json=row, timeout=5).raise_for_status()
                    return f"127.0.0.1:{port}"
                except requests.ConnectionError:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)

        yield start
        for server in servers:
            close(server)

    def asked(self, of, block_size, address):
        """The topology that a built-in decode server keeps of a prefill server; None if it could not read one."""
        asking = manager(of, block_size, prefill_info_table={}, kv_cache_dtype_str="auto", is_mla_backend=True)
        asking.__dict__.update(is_hybrid_mla_backend=False, kv_layout=None, dsv41_spec_layout=None)
        asking._resolve_rank_mapping = lambda info: None
        return asking.prefill_info_table.get(address) if asking.try_ensure_parallel_info(address) else None

    def test_built_in_asks_built_in(self, native, bootstrap):
        address = bootstrap(native.conn.CommonKVBootstrapServer, dcp_block_size=1)
        assert self.asked(native.mooncake, B, address).dcp_block_size == 1
        assert self.asked(native.mooncake, 1, address).dcp_block_size is None

    def test_stock_asks_built_in(self, native, stock, bootstrap):
        """A decode server of the release as it is takes no key that it does not know."""
        address = bootstrap(native.conn.CommonKVBootstrapServer, dcp_block_size=1)
        assert self.asked(stock, 1, address) is not None

    def test_built_in_asks_stock(self, native, bootstrap):
        from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

        with pytest.raises(RuntimeError, match="does not know blocks"):
            self.asked(native.mooncake, B, bootstrap(CommonKVBootstrapServer))

    def test_the_plugin_asks_built_in(self, native, bootstrap, plugin_decode):
        address = bootstrap(native.conn.CommonKVBootstrapServer, dcp_block_size=1)
        queue = SimpleNamespace(kv_manager=SimpleNamespace(kv_args=SimpleNamespace(page_size=16)))
        assert pd_decode._refusal(address, queue) is None

    def test_built_in_asks_the_plugin(self, native, bootstrap, monkeypatch):
        from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

        class WithPlugin(CommonKVBootstrapServer):
            def _setup_routes(self):
                pd_capability.add_route(super()._setup_routes(), self)

        address = bootstrap(WithPlugin)
        body = {"rank": "0-0-0-0-0", "capability": Capability(handshake.PROTOCOL, 1, 1, 16, "d").as_json()}
        report = threading.Timer(
            0.2, requests.put, [f"http://{address}{handshake.ROUTE}"], {"json": body, "timeout": 5}
        )
        report.start()
        assert self.asked(native.mooncake, B, address).dcp_block_size == 1
        report.join()


@pytest.mark.parametrize(("page", "dcp_size", "block"), [(4, 2, 1), (4, 2, 2), (8, 4, 8), (16, 3, 4)])
def test_both_plan_the_same_rows(native, page, dcp_size, block):
    rng = np.random.default_rng(7)
    layout, virtual = DcpLayout(dcp_size, block), page * dcp_size
    for prefix in (0, 2 * virtual):
        for offset, tokens in ((0, 1), (0, 5 * page), (1, 3 * page + 1), (3, page - 1)):
            src = rng.permutation(64)[: -(-tokens // page)].astype(np.int32)
            dst = rng.permutation(64)[:16].astype(np.int32)
            for rank in range(dcp_size):
                where = {"src_page_offset": offset, "num_kv_tokens": tokens}
                theirs = native.utils.build_dcp_token_transfer_plan(
                    src, dst, physical_page_size=page, dcp_size=dcp_size, dcp_rank=rank, decode_prefix_len=prefix,
                    interleave_size=block, **where,
                )  # fmt: skip
                runs = plan_runs(
                    src, dst, page_size=page, layout=layout, rank=rank, decode_prefix_len=prefix, **where
                ).rows()
                drafts = plan_replicated_runs(src, dst, page_size=page, dcp_size=dcp_size, **where).rows()
                for ours, got in zip(
                    (*runs, *drafts),
                    (
                        theirs.target_src_token_indices,
                        theirs.target_dst_token_indices,
                        theirs.draft_src_token_indices,
                        theirs.draft_dst_token_indices,
                    ),
                    strict=True,
                ):
                    np.testing.assert_array_equal(ours, got)
