"""Pack buffers and the chunk limit that exists for their sake: for peers with short blocks, and stock peers, alone."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from servers import ROOM, Registration
from sglang.srt.disaggregation.common import conn, dcp_pack
from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVSender

from sglang_dcp_block.dcp.transfer import DIRECT_BYTES
from sglang_dcp_block.patches import peer
from sglang_dcp_block.patches.mooncake_pack import ENVIRONMENT, goes_direct, mean_token_bytes

pytestmark = pytest.mark.usefixtures("hooked")

PAGE, LAYERS, ROW_BYTES, MAX_TOKENS = 64, 61, 1152, 32768
GIB = 2**30


@pytest.fixture
def manager(monkeypatch):
    """Upstream's example: 61 MLA layers, four transfer queues, chunks of 32,768 tokens; buffers are only counted."""
    monkeypatch.setattr(conn, "max_prefill_buffer_tokens", lambda: MAX_TOKENS)
    monkeypatch.setattr(conn, "get_device", lambda: SimpleNamespace(device="cuda"))
    made = object.__new__(CommonKVManager)
    made.kv_args = SimpleNamespace(kv_item_lens=[ROW_BYTES * PAGE] * LAYERS, page_size=PAGE, num_draft_entries=0)
    made.transfer_queues = [None] * 4
    made._dcp_pack_buffers = made._dcp_pack_max_tokens = None
    made.decode_kv_args_table, made.transfer_infos = {}, {}

    def allocate(register, kv_args, count, dcp_size, max_tokens, **_):
        return [dcp_pack.dcp_pack_buffer_bytes(kv_args.kv_item_lens, PAGE, max_tokens, dcp_size)] * count

    monkeypatch.setattr(dcp_pack, "init_dcp_pack_buffers", allocate)
    yield made
    peer.registered()


def register(manager, registration):
    """The steps of upstream's bootstrap thread that matter here."""
    peer.registering(registration)
    manager._init_dcp_pack_buffers_once(registration.dst_dcp_size, include_draft=True)
    manager.decode_kv_args_table[registration.mooncake_session_id] = registration
    peer.registered()


def blocks(B, session="blocks", **changes):
    made = Registration(8, 0, B, [], mooncake_session_id=session)
    vars(made).update(changes)
    return made


STOCK = blocks(1, "stock")


def chunk_limit(manager, *registrations, dummies=()):
    """Upstream's question for a request to these decode ranks."""
    sender = object.__new__(CommonKVSender)
    sender.kv_mgr, sender.bootstrap_room = manager, ROOM
    infos = {r.mooncake_session_id: SimpleNamespace(is_dummy=r in dummies) for r in registrations}
    manager.transfer_infos[ROOM] = infos
    manager.decode_kv_args_table.update({r.mooncake_session_id: r for r in registrations})
    return sender.get_max_transfer_tokens()


def test_long_blocks_cost_no_buffers(manager, caplog):
    with caplog.at_level(logging.INFO):
        register(manager, blocks(64))
    assert manager._dcp_pack_buffers is None
    saved = MAX_TOKENS * LAYERS * ROW_BYTES
    assert round(saved / GIB, 2) == 2.14, "upstream's own example"
    assert [r.getMessage() for r in caplog.records] == [
        f"Decode session blocks takes blocks of 64 tokens as they lie: no pack buffers (4 x {saved} bytes not allocated)."
    ]
    assert chunk_limit(manager, blocks(64)) is None


@pytest.mark.parametrize("registration", [STOCK, blocks(2)], ids=["stock", "short blocks"])
def test_others_get_upstreams(manager, registration, caplog):
    with caplog.at_level(logging.INFO):
        register(manager, registration)
    assert manager._dcp_pack_buffers == [MAX_TOKENS * LAYERS * ROW_BYTES] * 4
    assert chunk_limit(manager, registration) == MAX_TOKENS
    assert caplog.records == []


def test_side_by_side_each_keeps_its_own_limit(manager, caplog):
    register(manager, blocks(64))
    register(manager, STOCK)
    assert len(manager._dcp_pack_buffers) == 4
    with caplog.at_level(logging.INFO):
        register(manager, blocks(64, "later"))
    assert caplog.records == [], "nothing is saved any more"
    assert chunk_limit(manager, blocks(64)) is None
    assert chunk_limit(manager, STOCK) == MAX_TOKENS
    assert chunk_limit(manager, blocks(2)) == MAX_TOKENS
    assert chunk_limit(manager, blocks(64), STOCK) == MAX_TOKENS
    assert chunk_limit(manager, blocks(64), STOCK, dummies=[STOCK]) is None
    assert chunk_limit(manager, blocks(64), blocks(2, "equal sizes", requires_dcp_relayout=False)) is None


def test_a_rejected_registration_costs_nothing(manager, caplog):
    with caplog.at_level(logging.INFO):
        register(manager, blocks(1, dcp_block_rejection="other row sizes"))
    assert manager._dcp_pack_buffers is None
    assert caplog.records == []
    register(manager, blocks(1, dcp_block_rejection=None))
    assert manager._dcp_pack_buffers is not None


def test_outside_a_registration_upstream_decides(manager):
    """Other transfer backends have no hook that names the peer."""
    manager._init_dcp_pack_buffers_once(8)
    assert len(manager._dcp_pack_buffers) == 4


def test_a_size_that_cannot_be_told_costs_nothing(manager, monkeypatch, caplog):
    """Whatever raises here would end upstream's bootstrap thread."""
    monkeypatch.setattr(conn, "max_prefill_buffer_tokens", lambda: 1 / 0)
    with caplog.at_level(logging.INFO):
        register(manager, blocks(64))
    assert "(size unknown: division by zero not allocated)" in caplog.text
    assert manager._dcp_pack_buffers is None


class TestThreshold:
    def test_by_the_mean_row(self, manager):
        manager.kv_args.kv_item_lens = [PAGE * 600, PAGE * 200, PAGE * 9000]
        manager.kv_args.num_draft_entries = 1
        assert mean_token_bytes(manager) == 400

    def test_default(self, manager):
        least = -(-DIRECT_BYTES // ROW_BYTES)
        assert not goes_direct(manager, blocks(least - 1))
        assert goes_direct(manager, blocks(least))

    def test_token_round_robin_is_never_direct(self, manager, monkeypatch):
        monkeypatch.setenv(ENVIRONMENT, "0")
        assert not goes_direct(manager, STOCK)
        assert not goes_direct(manager, None)
        assert goes_direct(manager, blocks(2))

    def test_no_layers(self, manager):
        manager.kv_args.kv_item_lens = []
        assert not goes_direct(manager, blocks(64))

    def test_an_unreadable_setting_is_reported_once(self, manager, monkeypatch, caplog):
        for text in ("many", "-1", "1.5", "²"):
            monkeypatch.setenv(ENVIRONMENT, text)
            assert not goes_direct(manager, blocks(2))
            assert goes_direct(manager, blocks(64))
            expected = f"{ENVIRONMENT}: expected a number of bytes, got {text!r}; using {DIRECT_BYTES}."
            assert [r.getMessage() for r in caplog.records] == [expected]
            caplog.clear()


def test_the_registration_belongs_to_its_thread():
    import threading

    seen = []
    peer.registering(STOCK)
    thread = threading.Thread(target=lambda: seen.append(peer.current_registration()))
    thread.start()
    thread.join()
    assert seen == [None]
    assert peer.current_registration() is STOCK
    peer.registered()
    assert peer.block_size_of(None) == peer.block_size_of(object()) == 1
