"""The prefill server's real bootstrap thread under registrations of every kind: it lives, and judges each session alone."""

from __future__ import annotations

import random
import struct
import threading
import time
from collections import defaultdict
from types import SimpleNamespace

import pytest
import zmq

from hooking import hook
from sglang_dcp_block.dcp import handshake
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.patches import active, peer_refusals
from sglang_dcp_block.patches.pd_points import REGISTRATION_POINTS

PAGE, ROW_BYTES, LAYERS = 8, 64, 2


@pytest.fixture
def hooked(monkeypatch):
    """The registration points on SGLang's classes, for one test."""
    hook(monkeypatch, REGISTRATION_POINTS)


@pytest.fixture
def counted(monkeypatch):
    """The reasons of refusals, as they are counted."""
    seen: list[str] = []
    monkeypatch.setattr(peer_refusals, "count", lambda side, reason: seen.append(f"{side} {reason}"))
    return seen


class Prefill:
    """The real bootstrap thread of a Mooncake prefill manager, over a real socket; nothing else of the manager runs."""

    def __init__(self, dcp_size=1):
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

        context = zmq.Context.instance()
        receiving, self.sending = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self.sending.connect(f"tcp://127.0.0.1:{receiving.bind_to_random_port('tcp://127.0.0.1')}")
        manager = object.__new__(MooncakeKVManager)
        item = ROW_BYTES * PAGE
        vars(manager).update(
            server_socket=receiving,
            server_args=SimpleNamespace(enable_pd_role_switch=True),
            deferred_bootstrap=None,
            _stopped=False,
            _worker_threads=[],
            kv_args=SimpleNamespace(
                kv_item_lens=[item] * LAYERS, num_draft_entries=0, page_size=PAGE, state_types=[], aux_data_ptrs=[1]
            ),
            dcp_size=dcp_size,
            dcp_rank=0,
            is_mla_backend=True,
            is_hybrid_mla_backend=False,
            state_tp_size=1,
            attn_tp_size=1,
            session_lock=threading.Lock(),
            decode_kv_args_table={},
            state_layout_rejections={},
            state_strides_validated=set(),
            failed_sessions=set(),
            session_failures=defaultdict(int),
            failed_session_probes={},
            transfer_infos={},
            req_to_decode_prefix_len={},
            request_status={},
            _staging_ctx=None,
            _init_dcp_pack_buffers_once=lambda *args, **kwargs: None,
            resolve_kv_replica_factor=lambda infos: None,
            update_status=lambda room, status: manager.request_status.update({room: status}),
        )
        self.manager = manager
        manager.start_prefill_thread()
        (self.thread,) = manager._worker_threads

    def tell(self, *frames: bytes) -> None:
        self.sending.send_multipart(list(frames))

    def verdict(self, session: str):
        """(registered?, rejection reason) once the thread has dealt with ``session``."""
        deadline = time.monotonic() + 10
        while session not in self.manager.decode_kv_args_table:
            assert self.thread.is_alive(), "the bootstrap thread died"
            assert time.monotonic() < deadline, f"no verdict on {session}"
            time.sleep(0.01)
        return self.manager.state_layout_rejections.get(session)

    def close(self) -> None:
        self.manager._stopped = True
        self.thread.join(5)
        self.sending.close(0)
        self.manager.server_socket.close(0)


@pytest.fixture
def prefill(hooked, monkeypatch):
    import sglang.srt.disaggregation.mooncake.conn as conn

    monkeypatch.setattr(conn, "get_spec", lambda: SimpleNamespace(speculative_algorithm=None))
    made = []

    def make(dcp_size=1, block_size=1):
        monkeypatch.setattr(active, "_layout", DcpLayout(dcp_size, block_size) if block_size > 1 else None)
        made.append(Prefill(dcp_size))
        return made[-1]

    yield make
    for server in made:
        server.close()


def registration(session="s:1", dcp_size=8, dcp_rank=0, block=None, row_bytes=ROW_BYTES) -> list[bytes]:
    item = row_bytes * PAGE
    frames = [
        b"None", b"127.0.0.1", b"1234", session.encode(), struct.pack("2Q", 1, 2), struct.pack("Q", 1), b"", b"0", b"1",
        str(item).encode(), b"", b"", b"", b"", b"", b"", str(dcp_size).encode(), str(dcp_rank).encode(), b"",
        struct.pack("2Q", item, item),
    ]  # fmt: skip
    return frames if block is None else [*frames, handshake.tagged(block)]


@pytest.mark.parametrize("block", [None, 1, 4, 8])
def test_relayout_peers_of_any_block_size(prefill, block):
    server = prefill()
    server.tell(*registration(block=block))
    assert server.verdict("s:1") is None
    info = server.manager.decode_kv_args_table["s:1"]
    assert (info.dcp_block_size, info.requires_dcp_relayout) == (block or 1, True)


def test_equal_dcp_sizes_need_equal_block_sizes(prefill):
    """Pages are copied as they are: the first of the handshake's tests, because it would corrupt in silence."""
    server = prefill(dcp_size=2, block_size=8)
    server.tell(*registration("equal:1", dcp_size=2, block=8))
    server.tell(*registration("other:1", dcp_size=2, block=4))
    server.tell(*registration("stock:1", dcp_size=2))
    assert server.verdict("equal:1") is None
    assert "equal block sizes" in server.verdict("other:1")
    assert "equal block sizes" in server.verdict("stock:1")


@pytest.mark.parametrize(
    ("frames", "reason", "label"),
    [
        (registration("bad:1", dcp_size=8, block=6), "divides its page size", "layout"),
        (registration("bad:1", row_bytes=32, block=8), "geometry", "row_sizes"),
        ([*registration("bad:1"), handshake.TAG + b"x"], "expected a positive number", "unreadable"),
        (registration("bad:1", block=8)[:9], "could not be read", "unreadable"),
        ([*registration("bad:1")[:4], b"odd", *registration("bad:1")[5:]], "could not be read", "unreadable"),
    ],
)
def test_a_bad_registration_costs_its_session_only(prefill, counted, frames, reason, label):
    server = prefill()
    server.tell(*frames)
    assert reason in server.verdict("bad:1")
    server.tell(*registration("good:1", block=8))
    assert server.verdict("good:1") is None
    assert counted == [f"prefill {label}"]


@pytest.mark.parametrize("raises", [False, True])
def test_what_sglang_refuses_itself_is_counted_as_that(prefill, counted, monkeypatch, raises):
    server = prefill()
    monkeypatch.setattr(server.manager, "_validate_peer_state_layout", lambda info: 1 / 0 if raises else (True, "why"))
    server.tell(*registration(block=8))
    assert server.verdict("s:1") == ("ZeroDivisionError: division by zero" if raises else "why")
    assert counted == ["prefill upstream"]


def test_a_message_that_is_dropped_is_counted(prefill, counted):
    server = prefill()
    server.tell(b"7", b"127.0.0.1")
    server.tell(*registration("good:1", block=8))
    assert server.verdict("good:1") is None
    assert counted == ["prefill message"]


def test_unsupported_topology_costs_its_session_only(prefill, counted):
    server = prefill(dcp_size=4)
    server.tell(*registration("bad:1", dcp_size=2))
    assert "Unsupported PD DCP topology" in server.verdict("bad:1")
    server.tell(*registration("good:1", dcp_size=4))
    assert server.verdict("good:1") is None
    assert counted == ["prefill topology"]


def test_a_session_that_registers_again_is_judged_again(prefill):
    server = prefill(dcp_size=2, block_size=8)
    server.tell(*registration("s:1", dcp_size=2, block=4))
    assert server.verdict("s:1") is not None
    server.manager.decode_kv_args_table.clear()
    server.tell(*registration("s:1", dcp_size=2, block=8))
    assert server.verdict("s:1") is None


def transfer_request(session: str, room: int) -> list[bytes]:
    pages = struct.pack("3i", 1, 2, 3)
    return [str(room).encode(), b"127.0.0.1", b"1234", session.encode(), pages, b"0", b"", b"1", b"0", b""]


def test_a_replayed_registration_changes_nothing(prefill):
    server = prefill()
    frames = registration("s:1", block=8)
    for _ in range(3):
        server.tell(*frames)
    server.tell(*registration("last:1", block=8))
    assert server.verdict("last:1") is None
    assert server.verdict("s:1") is None
    assert server.manager.decode_kv_args_table["s:1"].dcp_block_size == 8


@pytest.mark.parametrize("messages", [2000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_fuzzed_messages_never_end_the_thread(prefill, messages):
    """Messages with frames dropped, swapped, cut and replaced; then a good registration is still understood."""
    server, rng = prefill(), random.Random(7)
    for round_ in range(messages):
        frames = registration(f"f:{round_}", block=rng.choice([None, 1, 4, 8]))
        for _ in range(rng.randint(1, 4)):
            i = rng.randrange(len(frames)) if frames else 0
            match rng.randrange(4):
                case 0:
                    frames = frames[:i]
                case 1 if frames:
                    frames[i] = rng.randbytes(rng.randint(0, 9))
                case 2 if frames:
                    frames[i] = frames[i][: rng.randint(0, 3)]
                case 3 if frames:
                    j = rng.randrange(len(frames))
                    frames[i], frames[j] = frames[j], frames[i]
        server.tell(*(frames or [b""]))
    server.tell(*registration("good:1", block=8))
    deadline = time.monotonic() + 60 + messages / 100
    while "good:1" not in server.manager.decode_kv_args_table:
        assert server.thread.is_alive(), "a fuzzed message ended the bootstrap thread"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for session, info in server.manager.decode_kv_args_table.items():
        if session not in server.manager.state_layout_rejections:
            assert PAGE % info.dcp_block_size == 0, "accepted nonsense"
