"""Requests to a pair of servers, and the command line.  Stand-ins take the place of ``sglang serve``."""

from __future__ import annotations

import importlib
import sys

import pytest

from sglang_dcp_block.demo import servers
from sglang_dcp_block.demo.pd import __main__ as command_line
from sglang_dcp_block.demo.pd import mooncake
from sglang_dcp_block.demo.pd.client import ask_pair
from sglang_dcp_block.demo.pd.plan import pd_plan
from sglang_dcp_block.demo.servers import Server, ServerFailed

PREFILL, DECODE = pd_plan(2).prefills[0], pd_plan(2).decodes[1]

# Answers with the room as its token; does what its second argument says with the next request.
STAND_IN = """
import http.server, json, os, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def say(self, status, body):
        self.send_response(status); self.end_headers(); self.wfile.write(json.dumps(body).encode())
    def do_GET(self):
        self.say(200, {})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if sys.argv[2] == "die":
            print("RuntimeError: out of rows", flush=True); os._exit(9)
        if sys.argv[2] == "wait":
            time.sleep(60)
        if sys.argv[2] == "refuse":
            return self.say(500, {"error": "does not know blocks"})
        finish = {"type": "abort", "message": "KV transfer failed"} if sys.argv[2] == "abort" else {"type": "length"}
        meta = {"output_token_logprobs": [[-0.5, 7, None]], "prompt_tokens": len(body["input_ids"]), "cached_tokens": 4,
                "finish_reason": finish}
        self.say(200, {"output_ids": [body["bootstrap_room"], body["bootstrap_port"]], "meta_info": meta})
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def pair(monkeypatch, tmp_path):
    """pair(what the prefill server does, what the decode server does) -> their replies to two prompts."""

    def ask(prefill: str, decode: str, timeout: float = 20):
        deeds = {PREFILL: prefill, DECODE: decode}
        monkeypatch.setattr(
            servers, "command", lambda case, model, port: [sys.executable, "-c", STAND_IN, str(port), deeds[case]]
        )
        with (
            Server(PREFILL, tmp_path, tmp_path / "prefill.log") as first,
            Server(DECODE, tmp_path, tmp_path / "decode.log") as second,
        ):
            return ask_pair(first, second, 1234, [(1, 2, 3), (4, 5)], 8, timeout)

    return ask


def test_both_servers_get_each_request_in_a_room_of_its_own(pair):
    one, other = pair("serve", "serve")
    assert one.answer.prompt_tokens == 3
    assert other.answer.prompt_tokens == 2
    assert one.answer.tokens[1] == 1234
    assert one.answer.tokens[0] != other.answer.tokens[0]
    assert one.cached_tokens == 4


@pytest.mark.parametrize(("prefill", "decode"), [("die", "wait"), ("wait", "die")])
def test_a_server_that_dies_ends_the_wait_for_its_partner(pair, prefill, decode):
    with pytest.raises(ServerFailed, match=r"the server ended \(status 9\)") as caught:
        pair(prefill, decode)
    assert "RuntimeError: out of rows" in str(caught.value)
    assert str(caught.value).startswith(PREFILL.name if prefill == "die" else DECODE.name)


@pytest.mark.parametrize(
    ("deed", "words"), [("refuse", "does not know blocks"), ("abort", "aborted: KV transfer failed")]
)
def test_a_refusal_ends_the_wait_for_the_partner(pair, deed, words):
    with pytest.raises(ServerFailed, match=words) as caught:
        pair("wait", deed)
    assert str(caught.value).startswith(DECODE.name)
    with pytest.raises(ServerFailed, match=words) as caught:
        pair(deed, "wait")
    assert str(caught.value).startswith(PREFILL.name)


def test_a_server_that_hangs_ends_the_wait(pair):
    with pytest.raises(ServerFailed, match="no answer in 1 s"):
        pair("serve", "wait", timeout=1)


@pytest.mark.parametrize(
    "argv", [["--dcp", "3"], ["--dcp", "many"], ["--start-timeout", "0"], ["--answer-timeout", "nan"], ["--real"]]
)
def test_bad_options_are_refused(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        command_line.main(argv)
    assert caught.value.code == 2
    assert argv[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ImportError("libibverbs.so.1: cannot open shared object file"), "apt-get install libibverbs1"),
        (ImportError("libother.so: cannot open shared object file"), "install the system library that it names"),
        (ModuleNotFoundError("No module named 'mooncake'"), "mooncake-transfer-engine-non-cuda"),
    ],
)
def test_without_mooncake_nothing_starts(monkeypatch, capsys, error, words):
    def fail(name: str) -> None:
        assert name == "mooncake.engine"
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)
    monkeypatch.setattr(command_line, "carry_out", lambda *_: pytest.fail("it started"))
    with pytest.raises(mooncake.MooncakeMissing):
        mooncake.check()
    assert command_line.main([]) == 1
    printed = capsys.readouterr().err
    assert words in printed
    assert str(error) in printed


def test_the_servers_get_their_roles(monkeypatch, tmp_path):
    monkeypatch.setattr(servers, "_sglang", lambda: "sglang")
    words = " ".join(servers.command(DECODE, tmp_path, 1234))
    assert "--tp-size 2 --dcp-size 2 --dcp-block-size 16" in words
    assert "--disaggregation-mode decode --disaggregation-transfer-backend mooncake_tcp" in words
    assert words.rindex("--attention-backend flashinfer") > words.rindex("--attention-backend triton")
    assert "--enable-metrics" in servers.command(PREFILL, tmp_path, 1234)
    assert "--dcp-block-size" not in servers.command(PREFILL, tmp_path, 1234)
