"""What a prefill server says at the end of a transfer, by SGLang's own ``conclude_transfer``."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

from hooking import hook
from sglang_dcp_block.dcp import handshake
from sglang_dcp_block.patches.pd_points import REGISTRATION_POINTS

ROOM, BLOCK = 7, 8


class Prefill:
    """A manager with a transfer to a decode rank with blocks; keeps what it sends."""

    def __init__(self, block_size: int = BLOCK) -> None:
        self.sent: list[list[bytes]] = []
        self.manager = object.__new__(MooncakeKVManager)
        vars(self.manager).update(
            attn_tp_rank=0, pp_size=1, pp_rank=0, attn_cp_size=1, attn_cp_rank=0,
            request_status={ROOM: KVPoll.Transferring}, failure_records={}, failure_lock=threading.Lock(),
            deferred_bootstrap=None, state_layout_rejections={},
            transfer_infos={ROOM: {"s:1": SimpleNamespace(is_dummy=False, endpoint="127.0.0.1", dst_port=5)}},
            decode_kv_args_table={"s:1": SimpleNamespace(dcp_block_size=block_size)},
            _send_multipart_locked=lambda endpoint, parts, is_ipv6: self.sent.append(parts),
        )  # fmt: skip

    def conclude(self, status: int = KVPoll.Success, reason: str | None = None) -> list[bytes]:
        self.manager.conclude_transfer(bootstrap_room=ROOM, status=status, failure_reason=reason)
        (parts,) = self.sent
        return parts


@pytest.fixture(autouse=True)
def hooked(monkeypatch):
    hook(monkeypatch, REGISTRATION_POINTS)


def test_success_names_the_block_size():
    assert handshake.block_size_in(Prefill().conclude()) == BLOCK


def test_also_where_the_scheduler_clears_the_room_meanwhile():
    """As ``CommonKVSender.clear`` does once it has polled the success, which is published before it is sent."""
    prefill = Prefill()

    def publish(room, status):
        prefill.manager.request_status[room] = status
        del prefill.manager.transfer_infos[room]

    prefill.manager.update_status = publish
    assert handshake.block_size_in(prefill.conclude()) == BLOCK


def test_a_stock_decode_server_gets_the_message_of_stock():
    assert len(Prefill(block_size=1).conclude()) == 3


def test_a_rejected_session_is_told_the_reason():
    prefill = Prefill(block_size=1)
    prefill.manager.state_layout_rejections["s:1"] = "no"
    assert prefill.conclude(KVPoll.Failed, "no")[3] == b"no"


def test_one_room_after_another():
    """What is known of a room is forgotten with its conclusion."""
    prefill = Prefill()
    prefill.conclude()
    prefill.manager.decode_kv_args_table["s:1"].dcp_block_size = 1
    prefill.sent.clear()
    prefill.manager.request_status[ROOM] = KVPoll.Transferring
    assert len(prefill.conclude()) == 3
