"""The decode server's side of the handshake, against SGLang's real bootstrap server and real queue method."""

from __future__ import annotations

import dataclasses
import inspect
import json
import threading
import time
from types import SimpleNamespace

import pytest
import requests
from decode_queue import Queue

from hooking import hook
from sglang_dcp_block.dcp import handshake
from sglang_dcp_block.dcp.handshake import Capability
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.patches import active, pd_capability, pd_decode, peer_refusals, register
from sglang_dcp_block.patches.pd_points import DECODE_POINTS

HOLD = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"

CAPABILITY = Capability(handshake.PROTOCOL, 1, 1, 8, "digest")


@pytest.fixture(autouse=True)
def armed(monkeypatch):
    monkeypatch.setattr(active, "_layout", DcpLayout(2, 8))
    for variable in (HOLD, f"{HOLD}_TIMEOUT", "MC_TRANSFER_TIMEOUT"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def counted(monkeypatch):
    """The reasons of refusals, as they are counted."""
    seen: list[str] = []
    monkeypatch.setattr(peer_refusals, "count", lambda side, reason: seen.append(f"{side} {reason}"))
    return seen


def report(address: str, capability: Capability = CAPABILITY, rank: str = "0-0-0-0-0") -> requests.Response:
    body = {"rank": rank, "capability": capability.as_json()}
    return requests.put(f"http://{address}{handshake.ROUTE}", json=body, timeout=5)


def test_a_prefill_server_with_blocks_is_ready(bootstrap, counted):
    address = bootstrap()
    assert report(address).status_code == 200
    assert Queue().ask(address) == ([address], {})
    assert counted == []


def test_a_stock_one_is_refused_with_the_reason_and_others_go_on(bootstrap, counted):
    stock, good = bootstrap(knows_blocks=False), bootstrap()
    report(good)
    queue = Queue()
    ready, reasons = queue.ask(stock, good)
    assert ready == [good]
    assert "does not know blocks" in reasons[stock]
    assert stock not in queue.kv_manager.prefill_info_table, "a later request must ask again"
    assert counted == ["decode no_blocks"]
    queue.ask(stock)
    assert counted == ["decode no_blocks"] * 2, "once each time it is asked"


def test_the_next_requests_are_told_the_same_without_asking(bootstrap, counted):
    """A question can take seconds of the scheduler, which all requests share."""
    address, queue = bootstrap(), Queue()
    queue._ensure_retry_interval = 60.0
    report(address, Capability(handshake.PROTOCOL, 1, 1, 16, "d"))
    _, first = queue.ask(address)
    report(address)  # would be taken, if it were asked
    assert queue.ask(address) == ([], first)
    assert counted == ["decode layout"], "counted where it is judged"
    queue._ensure_retry_interval = 0.0
    assert queue.ask(address) == ([address], {}), "asked anew later"


def test_the_pause_begins_when_the_answer_is_there(bootstrap, counted, monkeypatch):
    monkeypatch.setattr(pd_capability, "PATIENCE_SECONDS", 0.5)
    address, queue = bootstrap(), Queue()
    queue._ensure_retry_interval = 0.4
    queue.ask(address)
    queue.ask(address)
    assert counted == ["decode withheld"]


def test_being_told_the_same_does_not_make_the_pause_longer(bootstrap):
    """Under steady traffic a server that was mended would be refused for good."""
    address, queue = bootstrap(), Queue()
    queue._ensure_retry_interval = 0.5
    report(address, Capability(handshake.PROTOCOL, 1, 1, 16, "d"))
    queue.ask(address)
    report(address)
    began = time.monotonic()
    while queue.ask(address)[0] == []:
        assert time.monotonic() - began < 5
        time.sleep(0.05)
    assert queue.dcp_block_refused == {}, "an address that nobody asks again is not kept"


def test_a_refused_one_that_was_mended_is_ready(bootstrap, counted, monkeypatch):
    monkeypatch.setattr(pd_capability, "PATIENCE_SECONDS", 0.1)
    address, queue = bootstrap(), Queue()
    queue.ask(address)
    report(address)
    assert queue.ask(address) == ([address], {})
    assert queue.ask(address) == ([address], {})


def test_with_block_size_1_a_stock_one_is_as_good(bootstrap, monkeypatch):
    monkeypatch.setattr(active, "_layout", DcpLayout(2, 1))
    stock = bootstrap(knows_blocks=False)
    assert Queue().ask(stock) == ([stock], {})


def test_a_report_on_its_way_is_waited_for(bootstrap):
    """Ranks report just after they register; a decode server with waiting requests may ask between the two."""
    address = bootstrap()
    late = threading.Timer(0.3, report, [address])
    late.start()
    assert Queue().ask(address) == ([address], {})
    late.join()


def test_waiting_for_reports_ends_for_good(bootstrap, monkeypatch):
    """A server that stays silent must not hold up decode servers again and again."""
    monkeypatch.setattr(pd_capability, "PATIENCE_SECONDS", 2)
    address = bootstrap()
    Queue().ask(address)
    began = time.monotonic()
    Queue().ask(address)
    assert time.monotonic() - began < 2


def test_a_capability_not_all_ranks_stand_for_is_withheld(bootstrap, counted, monkeypatch):
    monkeypatch.setattr(pd_capability, "PATIENCE_SECONDS", 0.1)
    address = bootstrap()
    _, reasons = Queue().ask(address)
    assert "0 of 1 ranks have reported" in reasons[address]
    report(address)
    report(address, Capability(handshake.PROTOCOL, 1, 1, 8, "another"), rank="0-0-0-1-0")
    _, reasons = Queue().ask(address)
    assert "prefill ranks disagree" in reasons[address]
    assert counted == ["decode withheld"] * 2


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        (Capability(handshake.PROTOCOL, 2, 4, 8, "d"), "equal block sizes"),
        (Capability(handshake.PROTOCOL, 1, 1, 16, "d"), "equal page sizes"),
    ],
)
def test_another_layout_is_refused(bootstrap, counted, capability, reason):
    address = bootstrap()
    report(address, capability)
    assert reason in Queue().ask(address)[1][address]
    assert counted == ["decode layout"]


def test_an_unreadable_answer_is_refused(bootstrap, counted, monkeypatch):
    address = bootstrap()
    report(address)
    monkeypatch.setattr(handshake, "PROTOCOL", 2)
    assert "could not be read: expected protocol 2, got 1" in Queue().ask(address)[1][address]
    assert counted == ["decode unreadable"]


@pytest.mark.parametrize(("environ", "seconds"), [({}, 30), ({"MC_TRANSFER_TIMEOUT": "77"}, 77)])
def test_a_prefill_rank_tells_how_long_its_mooncake_may_write(bootstrap, monkeypatch, environ, seconds):
    address = bootstrap()
    monkeypatch.setattr(active, "_layout", None)
    monkeypatch.setattr(active, "prefill_is_armed", True)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    ranks = ("system_dp_rank", "attn_dp_rank", "attn_cp_rank", "attn_tp_rank", "pp_rank")
    payload = {**dict.fromkeys(ranks, 0), "page_size": 8}
    pd_capability.report_rank(None, SimpleNamespace(dcp_size=1), f"http://{address}/route", payload)
    told = requests.get(f"http://{address}{handshake.ROUTE}", timeout=5).json()
    assert told["transfer_timeout_seconds"] == seconds
    assert told["plugin_digest"] == register.plugin_digest()


class TestPagesThatMayStillBeWritten:
    """The prefill server's Mooncake is the one that writes, so its time counts."""

    def ask(self, bootstrap, timeout):
        """(queue, address, answer) with a prefill server that tells ``timeout``."""
        report(address := bootstrap(), dataclasses.replace(CAPABILITY, transfer_timeout_seconds=timeout))
        queue = Queue()
        return queue, address, queue.ask(address)

    @pytest.mark.parametrize(("timeout", "hold"), [(30, 40.0), (31, 41.0), (300, 310.0), (5, 40.0), (None, 40.0)])
    def test_a_hold_that_nobody_chose_is_raised(self, bootstrap, caplog, timeout, hold):
        queue, address, answer = self.ask(bootstrap, timeout)
        assert answer == ([address], {})
        assert queue.transfer_queue.deferred_kv_release_timeout == hold
        said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert said == (
            [f"Pages of a failed transfer are kept for {hold:g} s from now on: Mooncake of prefill server {address} may "
             f"write for {timeout} s."] if hold > 40 else []
        )  # fmt: skip

    def test_the_longest_one_counts(self, bootstrap):
        queue, _, _ = self.ask(bootstrap, 300)
        report(address := bootstrap(), dataclasses.replace(CAPABILITY, transfer_timeout_seconds=60))
        queue.ask(address)
        assert queue.transfer_queue.deferred_kv_release_timeout == 310.0

    @pytest.mark.parametrize(("timeout", "refused"), [(30, False), (31, True), (None, False)])
    def test_one_that_was_chosen_is_not_changed(self, bootstrap, monkeypatch, counted, timeout, refused):
        monkeypatch.setenv(f"{HOLD}_TIMEOUT", "40")
        queue, address, (ready, reasons) = self.ask(bootstrap, timeout)
        assert queue.transfer_queue.deferred_kv_release_timeout == 40.0
        assert (ready, counted) == (([], ["decode early_release"]) if refused else ([address], []))
        if refused:
            assert "expected pages of a failed transfer to be kept for 41 s or more, got " in reasons[address]
            assert f"{HOLD}_TIMEOUT=40" in reasons[address]
            assert address not in queue.kv_manager.prefill_info_table

    def test_without_a_hold_no_time_is_enough(self, bootstrap, monkeypatch, counted):
        monkeypatch.setenv(HOLD, "0")
        _, address, (ready, reasons) = self.ask(bootstrap, 30)
        assert (ready, counted) == ([], ["decode early_release"])
        assert f"got {HOLD} off" in reasons[address]

    def test_with_block_size_1_sglangs_own_time_stays(self, bootstrap, monkeypatch):
        monkeypatch.setattr(active, "_layout", DcpLayout(2, 1))
        queue, _, _ = self.ask(bootstrap, 300)
        assert queue.transfer_queue.deferred_kv_release_timeout == 40.0

    @pytest.mark.parametrize(
        ("block_size", "environ", "hold"),
        [
            (8, {}, 40.0),
            (8, {"MC_TRANSFER_TIMEOUT": "100"}, 110.0),
            (8, {f"{HOLD}_TIMEOUT": "120"}, 120.0),
            (1, {}, 30.0),
        ],
    )
    def test_sglangs_queue_is_made_with_it(self, monkeypatch, block_size, environ, hold):
        from sglang.srt.disaggregation import decode

        monkeypatch.setattr(active, "_layout", DcpLayout(2, block_size))
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        hook(monkeypatch, [p for p in DECODE_POINTS if "DecodeTransferQueue" in p.target])
        group = SimpleNamespace(cpu_group=None)
        monkeypatch.setattr(decode, "get_parallel", lambda: SimpleNamespace(attn_tp_group=group, tp_rank=0))
        disagg = SimpleNamespace(disaggregation_decode_host_receive_threshold=1)
        monkeypatch.setattr(decode, "get_disagg", lambda: disagg)
        queue = decode.DecodeTransferQueue(None, None, SimpleNamespace(spec_algorithm=None), None)
        assert queue.deferred_kv_release_timeout == hold
        queue._defer_release(
            SimpleNamespace(kv_receiver=SimpleNamespace(abort_notified=False), metadata_buffer_index=0)
        )
        ((_, began, deadline, _, _),) = queue._deferred_releases
        assert deadline - began == pytest.approx(hold), "and keeps pages for so long"


def test_an_answer_is_asked_for_once(bootstrap):
    address, queue = bootstrap(), Queue()
    report(address)
    queue.ask(address)
    report(address, Capability(handshake.PROTOCOL, 2, 4, 8, "d"))
    assert queue.ask(address) == ([address], {}), "known servers cost no round trip; the echo guards against a change"


@pytest.mark.parametrize("kind", [RuntimeError, AssertionError])  # of pages and types; of PP and CP sizes
def test_upstreams_own_refusal_costs_the_requests_not_the_scheduler(counted, kind):
    ready, reasons = Queue(error=kind("Page size mismatch: 16 and 8")).ask("1.2.3.4:5")
    assert ready == []
    assert "Page size mismatch" in reasons["1.2.3.4:5"]
    assert counted == ["decode upstream"]


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"rank": 1}', b'{"rank": 1, "capability": 5}', b"\xff"])
def test_nonsense_reports_are_refused(bootstrap, body):
    address = bootstrap()
    assert requests.put(f"http://{address}{handshake.ROUTE}", data=body, timeout=5).status_code == 400
    assert report(address).status_code == 200


def status_message(status: str, *frames: bytes) -> list[bytes]:
    from sglang.srt.disaggregation.base import KVPoll

    return [b"7", str(int(getattr(KVPoll, status))).encode(), b"0", *frames]


@pytest.mark.parametrize(
    ("frames", "ok"),
    [
        ((b"", handshake.tagged(8)), True),
        ((), False),
        ((b"", handshake.tagged(4)), False),
        ((b"", handshake.TAG + b"x"), False),
    ],
)
def test_success_counts_only_with_our_block_size(counted, frames, ok):
    from sglang.srt.disaggregation.base import KVPoll
    from sglang.srt.disaggregation.common.conn import CommonKVManager

    parse = inspect.unwrap(CommonKVManager.parse_kv_status_message)
    manager = SimpleNamespace(kv_status_msg_tag=None)
    room, status, rank, reason = pd_decode.require_echo(parse, manager, status_message("Success", *frames))
    assert (room, rank) == (7, 0)
    assert status == int(KVPoll.Success if ok else KVPoll.Failed)
    assert (reason is None) if ok else ("expected 8" in (reason or ""))
    assert counted == ([] if ok else ["decode no_echo"])


def test_a_failure_keeps_its_own_reason():
    from sglang.srt.disaggregation.common.conn import CommonKVManager

    parse = inspect.unwrap(CommonKVManager.parse_kv_status_message)
    manager = SimpleNamespace(kv_status_msg_tag=None)
    assert pd_decode.require_echo(parse, manager, status_message("Failed", b"why"))[3] == "why"


class TestBlocksBuiltIn:
    """Peers whose SGLang has blocks built in: they ask, and answer, in SGLang's own topology route."""

    TOPOLOGY = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"

    @pytest.fixture
    def built_in(self, bootstrap, monkeypatch):
        """The address of a stock bootstrap server that names a block size to those who ask, as the patch series does."""
        from aiohttp import web
        from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

        original = CommonKVBootstrapServer._handle_route_get

        async def with_field(self, request):
            response = await original(self, request)
            if "dcp_block_size" in request.query and response.status == 200:
                return web.json_response({**json.loads(response.text), "dcp_block_size": 1})
            return response

        monkeypatch.setattr(CommonKVBootstrapServer, "_handle_route_get", with_field)
        return bootstrap(knows_blocks=False)

    def test_such_a_prefill_server_is_ready(self, built_in, counted):
        assert Queue().ask(built_in) == ([built_in], {})
        assert counted == []

    def test_such_a_decode_server_is_told(self, bootstrap):
        address = bootstrap()
        report(address, dataclasses.replace(CAPABILITY, dcp_size=2, block_size=8))
        answer = requests.get(f"http://{address}{self.TOPOLOGY}&dcp_block_size=64", timeout=5).json()
        assert answer["dcp_block_size"] == 8
        assert answer["page_size"] == 8

    def test_who_does_not_ask_gets_what_stock_answers(self, bootstrap):
        """SGLang's decode servers take no key that they do not know."""
        from sglang.srt.disaggregation.common.conn import PrefillServerInfo

        address = bootstrap()
        report(address)
        PrefillServerInfo(**requests.get(f"http://{address}{self.TOPOLOGY}", timeout=5).json())

    def test_it_asks_again_until_all_ranks_stand_for_it(self, bootstrap, monkeypatch):
        monkeypatch.setattr(pd_capability, "PATIENCE_SECONDS", 0.1)
        address = bootstrap()
        url = f"http://{address}{self.TOPOLOGY}&dcp_block_size=64"
        assert requests.get(url, timeout=5).status_code == 503
        report(address)
        assert requests.get(url, timeout=5).status_code == 200
        report(address, dataclasses.replace(CAPABILITY, digest="another"), rank="0-0-0-1-0")
        assert requests.get(url, timeout=5).status_code == 409
