"""Prefill -> decode in ``/metrics`` of real servers: as many segments and bytes as the layout implies, and refusals."""

from __future__ import annotations

import contextlib
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

import reference
from bootstrap import close
from cases import BASE, LONG
from pd import HOST, free_port, role
from served import Served
from sglang_dcp_block import cli
from sglang_dcp_block.cpu.checkpoints import tiny_config
from sglang_dcp_block.patches import register
from sglang_dcp_block.patches.peer_refusals import REASONS, RefusedBy

pytestmark = pytest.mark.slow

PAGE, CHUNK, RANKS = BASE["page_size"], BASE["chunked_prefill_size"], 2
PREFILL_TIMEOUT = 50  # seconds, of Mooncake


@pytest.fixture(scope="module")
def servers(checkpoints, tmp_path_factory):
    """(prefill, decode), started together."""
    folder, model = tmp_path_factory.mktemp("served"), str(checkpoints("mla"))
    common = {**BASE, "model_path": model, "enable_metrics": True, "skip_server_warmup": True}

    def arguments(mode, **more):
        return {key: value for key, value in {**common, **role(mode), **more}.items() if key != "model"}

    timeout = {"MC_TRANSFER_TIMEOUT": str(PREFILL_TIMEOUT)}
    prefill = Served(arguments("prefill"), folder / "prefill.log", 1, **timeout)
    decode = Served(
        arguments("decode", tp_size=RANKS, dcp_size=RANKS, dcp_block_size=PAGE), folder / "decode.log", RANKS
    )
    with contextlib.closing(prefill), contextlib.closing(decode):
        prefill.wait()
        decode.wait()
        yield prefill, decode


def ask(servers, bootstrap_port, room, of):
    """Send one request to some of the servers; the last one's answer."""
    body = {
        "input_ids": LONG,
        "sampling_params": {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True},
        "bootstrap_host": HOST,
        "bootstrap_port": bootstrap_port,
        "bootstrap_room": room,
    }
    with ThreadPoolExecutor(len(of)) as threads:
        *_, last = threads.map(lambda server: server.ask("/generate", body), of)
    return json.loads(last)


def test_transfers(servers):
    prefill, decode = servers
    before = prefill.metrics()
    assert any(name.startswith("sglang:") for name, _ in before), "SGLang's own stand there"
    assert not any(name.startswith("sglang:dcp_block_segments") for name, _ in before)
    answer = ask(servers, prefill.arguments["disaggregation_bootstrap_port"], 1, [prefill, decode])
    assert len(answer["output_ids"]) == 3, answer

    config = tiny_config("mla")
    row_bytes = (config["kv_lora_rank"] + config["qk_rope_head_dim"]) * 4
    layers = config["num_hidden_layers"]
    chunks = [range(first, min(first + CHUNK, len(LONG))) for first in range(0, len(LONG), CHUNK)]
    blocks = {(token // PAGE, reference.owner(token, RANKS, PAGE)) for token in range(len(LONG))}
    got = prefill.metrics()
    want = {
        "transfers_total": len(chunks) * RANKS,
        "segments_total": len(blocks) * layers,
        "bytes_total": len(LONG) * row_bytes * layers,
        "batches_total": len(chunks) * RANKS,
        "transfer_seconds_count": len(chunks) * RANKS,
        "segment_bytes_count": len(chunks) * RANKS,
    }
    assert {name: got.get((f"sglang:dcp_block_{name}", ("direct",))) for name in want} == want
    assert got["sglang:dcp_block_transfer_seconds_sum", ("direct",)] > 0
    assert got["sglang:dcp_block_fallbacks_total", ("no pack buffer",)] == len(chunks) * RANKS, "short blocks, on a CPU"
    assert not any(value for (name, _), value in got.items() if "refusals" in name or "failures" in name)
    ours = {name: value for (name, _), value in decode.metrics().items() if name.startswith("sglang:dcp_block")}
    assert ours == {"sglang:dcp_block_refusals_total": 0}, "it sends nothing"


def test_what_is_alerted_on_is_shown_from_the_start(servers):
    """At 0, and all of it: an alert on growth misses a counter that appears with its first event."""
    prefill, decode = (server.metrics() for server in servers)
    for side, metrics in ((RefusedBy.PREFILL, prefill), (RefusedBy.DECODE, decode)):
        want = {(reason.value, side.value) for reason in REASONS[side]}
        assert {labels for name, labels in metrics if name == "sglang:dcp_block_refusals_total"} == want
    reasons = {labels for name, labels in prefill if name == "sglang:dcp_block_transfer_failures_total"}
    assert reasons == {("request",), ("transport",), ("cancelled",)}


def test_pages_are_kept_for_as_long_as_the_prefill_server_may_write(servers):
    """Its Mooncake has another time limit than the decode server's."""
    _, decode = servers
    said = decode.said()
    assert said.count("pages of a failed transfer are kept for 40 s instead of 30 s") == 1, "at start"
    raised = f"kept for {PREFILL_TIMEOUT + 10} s from now on: Mooncake of prefill server {HOST}:"
    assert said.count(raised) == RANKS, "at first contact, on each rank"


def test_the_doctor_finds_the_pair_well(servers, capsys):
    """And the same plugin in both."""
    urls = [word for server in servers for word in ("--url", server.url)]
    assert cli.main(["doctor", *urls, "--expect-block-size", str(PAGE)]) == 0
    said = capsys.readouterr().out
    assert "may exchange KV, in blocks of 8" in said, said
    (row,) = (line.split() for line in said.splitlines() if line.startswith(" plugin "))
    assert row == ["plugin", *[register.plugin_digest()] * 2], said


def test_a_refused_prefill_server(servers):
    """A bootstrap server of stock SGLang, with the prefill rank of the real one behind it."""
    from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

    _, decode = servers
    stock = CommonKVBootstrapServer(HOST, port := free_port())
    try:
        row = dict.fromkeys(("attn_tp_size", "attn_cp_size", "attn_dp_size", "pp_size", "system_dp_size"), 1)
        row |= dict.fromkeys(("attn_tp_rank", "attn_cp_rank", "attn_dp_rank", "pp_rank", "system_dp_rank"), 0)
        row |= {"rank_ip": HOST, "rank_port": 1, "page_size": PAGE, "kv_cache_dtype": "auto",
                "load_balance_method": "auto", "decode_allocation_policy": "early"}  # fmt: skip
        deadline = time.monotonic() + 10
        while True:
            try:
                requests.put(f"http://{HOST}:{port}/route", json=row, timeout=5).raise_for_status()
                break
            except requests.ConnectionError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        with pytest.raises(OSError, match="500"):
            ask(servers, port, 2, [decode])
    finally:
        close(stock)
    assert "got one that does not know blocks" in decode.said()
    assert decode.metrics()["sglang:dcp_block_refusals_total", ("no_blocks", "decode")] == RANKS, "once on each rank"
