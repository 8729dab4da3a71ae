"""The doctor asks running servers over real HTTP: good answers, hostile ones, and pairs that do not fit."""

from __future__ import annotations

import contextlib
import http.server
import io
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rich.console import Console

from sglang_dcp_block import cli
from sglang_dcp_block.doctor import http as doctor_http
from sglang_dcp_block.doctor import pair, report, server
from sglang_dcp_block.doctor.findings import Finding, Level
from sglang_dcp_block.doctor.http import Unanswered, address, get_json
from sglang_dcp_block.doctor.server import Server

Answer = Callable[[http.server.BaseHTTPRequestHandler], None]

REPORT = {
    "block_size": 16,
    "dcp_size": 2,
    "page_size": 16,
    "digest": "0" * 16,
    "plugin_digest": "a" * 16,
    "rows_per_rank": 1024,
    "num_ranks": 2,
}
COMMON: dict[str, Any] = {
    "version": "0.5.23",
    "model_path": "/models/tiny",
    "tp_size": 2,
    "attention_backend": "flashinfer",
    "prefill_attention_backend": None,
    "kv_cache_dtype": "auto",
    "disaggregation_transfer_backend": "mooncake_tcp",
    "enable_metrics": False,
    "max_total_num_tokens": 2048,
    "api_key": "a secret",
}
DECODE = {
    **COMMON,
    "disaggregation_mode": "decode",
    "dcp_size": 2,
    "page_size": 16,
    "dcp_block_size": 16,
    "dcp_block": REPORT,
}
STOCK = {key: value for key, value in DECODE.items() if key not in ("dcp_block", "dcp_block_size")}
PREFILL = {**COMMON, "disaggregation_mode": "prefill", "dcp_size": 1, "tp_size": 1, "page_size": 16}
CAPABILITY = {
    "protocol": 1,
    "dcp_size": 1,
    "block_size": 1,
    "page_size": 16,
    "digest": "1" * 16,
    "transfer_timeout_seconds": 30,
    "plugin_digest": "a" * 16,
}


ZERO = b'sglang:dcp_block_refusals_total{reason="layout",side="decode"} 0.0\n'


def send(body: bytes | object, status: int = 200, **headers: str) -> Answer:
    """An answer with a body, as JSON unless it is bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(data)

    return answer


class Fake:
    """A real HTTP server on loopback that answers as told."""

    def __init__(self, answers: dict[str, Answer]) -> None:
        self.asked: list[tuple[str, str | None]] = []  # path and authorization
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fake.asked.append((self.path, self.headers["Authorization"]))
                with contextlib.suppress(OSError):  # the doctor has hung up
                    answers.get(self.path, send(b"not here", 404))(self)

            def log_message(self, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.url = address(f"http://127.0.0.1:{self.port}")
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def fake() -> Iterator[Callable[..., Fake]]:
    """fake({path: answer}) -> a server that runs until the end of the test."""
    started: list[Fake] = []

    def start(answers: dict[str, Answer]) -> Fake:
        started.append(Fake(answers))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture
def sglang(fake: Callable[..., Fake]) -> Callable[..., Fake]:
    """sglang(info, ...) -> a server with this /server_info; a prefill server's bootstrap routes are its own."""

    def start(info: dict[str, Any], capability: Answer | None = None, metrics: Answer | None = None) -> Fake:
        answers: dict[str, Answer] = {}
        if capability:
            answers["/dcp_layout"] = capability
        if metrics:
            answers["/metrics"] = metrics
        started = fake(answers)
        answers["/server_info"] = send({"disaggregation_bootstrap_port": started.port, **info})
        return started

    return start


def looked_at(fake: Fake, **options: Any) -> Server:
    return server.look_at(fake.url, **{"timeout": 5.0, **options})


def problems(findings: Any) -> list[Finding]:
    return [finding for finding in findings if finding.level is Level.PROBLEM]


def drip(handler: http.server.BaseHTTPRequestHandler) -> None:
    """A byte now and then, for ever."""
    handler.send_response(200)
    handler.end_headers()
    for _ in range(200):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.05)


def drip_headers(handler: http.server.BaseHTTPRequestHandler) -> None:
    """The same, before the body begins."""
    for _ in range(200):
        handler.wfile.write(b"H")
        handler.wfile.flush()
        time.sleep(0.05)


def huge(handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    for _ in range(64):
        handler.wfile.write(b"[" * 2**20)


HOSTILE: dict[str, tuple[Answer, str]] = {
    "not JSON": (send(b"hello"), "/server_info: expected JSON, got b'hello' (JSONDecodeError)"),
    "a web page": (
        send(b"<html><h1 class=x>Welcome</h1></html>"),
        "/server_info: expected JSON, got a web page, 'Welcome'",
    ),
    "not UTF-8": (send(b"\xff\xfe\x00{"), "expected JSON"),
    "empty": (send(b""), "expected JSON"),
    "deep": (send(b"[" * 200_000), "expected JSON"),
    "a list": (send([1, 2]), "expected an object, got list"),
    "null": (send(b"null"), "expected an object, got NoneType"),
    "nothing known": (send({}), "version: expected str, got None"),
    "wrong types": (send({**DECODE, "dcp_size": "2"}), "dcp_size: expected int, got '2'"),
    "a bool for a number": (send({**DECODE, "page_size": True}), "page_size: expected int, got True"),
    "another mode": (
        send({**DECODE, "disaggregation_mode": "both"}),
        "disaggregation_mode: expected null, prefill or decode, got 'both'",
    ),
    "a negative block size": (
        send({**DECODE, "dcp_block_size": -16, "dcp_block": {**REPORT, "block_size": -16}}),
        "dcp_block_size: expected 1 or more, got -16",
    ),
    "no TP": (send({**DECODE, "tp_size": 0}), "tp_size: expected 1 or more, got 0"),
    "no ranks": (send({**DECODE, "dcp_size": 0}), "dcp_size: expected 1 or more, got 0"),
    "an optional one of a wrong type": (send({**DECODE, "tp_size": [2]}), "tp_size: expected int, got [2]"),
    "not found": (send(b"no\n  such page", 404), "status 404 (Not Found): no such page"),
    "an error": (send(b"", 500), "status 500 (Internal Server Error)"),
    "an error of a kind of its own": (send(b"", 599), "status 599"),
    "unauthorized": (send(b"", 401), "status 401"),
    "a redirect": (send(b"", 302, Location="file:///etc/passwd"), "status 302"),
    "short": (send(b"{", Content_Length="100"), "/server_info: "),
    "no HTTP": (
        lambda handler: handler.wfile.write(b"\x16\x03\x01 hello\r\n\r\n"),
        "/server_info: expected HTTP, got '\\x16\\x03\\x01 hello'",
    ),
    "another protocol": (
        lambda handler: handler.wfile.write(b"\x00\x01SSH-2.0-OpenSSH\r\n"),
        "/server_info: expected HTTP, got '\\x00\\x01SSH-2.0-OpenSSH'",
    ),
    "nothing at all": (lambda handler: None, "/server_info: "),
    "huge": (huge, "/server_info: "),
    "a byte now and then": (drip, "no whole answer in 1 s"),
    "headers now and then": (drip_headers, "answer in 1 s"),
}


PROXY = b"""\
<!DOCTYPE html>
<html><head>
<title>
502 Bad&nbsp;Gateway</title></head>
<body><center><h1>502 Bad Gateway</h1></center><hr><center>nginx</center></body></html>
"""


class TestWebPages:
    """What stands between the doctor and a server answers in HTML."""

    @pytest.mark.parametrize(
        ("body", "got"),
        [
            (PROXY, "a web page, '502 Bad Gateway'"),
            (b"\xef\xbb\xbf<html><H1 id='x'>Oh no</H1>", "a web page, 'Oh no'"),
            (b"<?xml version='1.0'?><a/>", "a web page"),
            (b"<title>" + b"x" * 5000, f"a web page, '{'x' * 80}'"),
            (b"<title>\x1b[31m</title>", "a web page, '\\x1b[31m'"),
            (b"<" * 10**6, "a web page"),
        ],
    )
    def test_its_title_is_told(self, body: bytes, got: str, fake: Callable[..., Fake]) -> None:
        (finding,) = looked_at(fake({"/server_info": send(body, 502)})).findings
        assert finding.got == f"/server_info: status 502 (Bad Gateway): {got}"

    @pytest.mark.parametrize(
        ("status", "advice"),
        [(502, "A proxy"), (200, "A proxy"), (301, "No redirect"), (404, "A router"), (401, "api-key")],
    )
    def test_what_to_do(self, status: int, advice: str, fake: Callable[..., Fake]) -> None:
        (finding,) = looked_at(fake({"/server_info": send(PROXY, status)})).findings
        assert advice in finding.advice

    def test_capabilities_and_counters_too(self, sglang: Callable[..., Fake]) -> None:
        info = {**PREFILL, "enable_metrics": True}
        found = looked_at(sglang(info, send(PROXY, 502), metrics=send(PROXY, 503))).findings
        assert not [finding for finding in found if "<" in finding.got]
        assert sum("a web page, '502 Bad Gateway'" in finding.got for finding in found) == 2


class TestHostileAnswers:
    @pytest.mark.parametrize("name", HOSTILE)
    def test_each_becomes_a_problem(self, name: str, fake: Callable[..., Fake]) -> None:
        answer, text = HOSTILE[name]
        began = time.monotonic()
        found = looked_at(fake({"/server_info": answer}), timeout=1.0)
        assert time.monotonic() - began < 8
        assert not found.was_read
        (finding,) = found.findings
        assert finding.level is Level.PROBLEM
        assert text in finding.got
        assert finding.advice

    def test_nobody_there(self, fake: Callable[..., Fake]) -> None:
        gone = fake({})
        gone.close()
        (finding,) = looked_at(gone).findings
        assert (finding.level, "refused" in finding.got) == (Level.PROBLEM, True)

    def test_a_server_that_never_answers(self, fake: Callable[..., Fake]) -> None:
        (finding,) = looked_at(fake({"/server_info": lambda handler: time.sleep(3)}), timeout=0.3).findings
        assert "no answer in 0.3 s" in finding.got

    @pytest.mark.parametrize(
        ("report", "text"),
        [
            (None, "expected the ranks' report, got None"),
            ([], "expected the ranks' report, got []"),
            ({}, "expected the ranks' report, got block_size None, dcp_size None, page_size None"),
            ({**REPORT, "digest": 5}, "expected the ranks' report, got digest 5"),
            ({**REPORT, "num_ranks": -2}, "expected the ranks' report, got num_ranks -2"),
            ({**REPORT, "rows_per_rank": 0}, "expected the ranks' report, got rows_per_rank 0"),
            ({**REPORT, "block_size": 8}, "its ranks are armed with (8, 2, 16), it was started with (16, 2, 16)"),
        ],
    )
    def test_a_report_that_is_none(self, report: object, text: str, sglang: Callable[..., Fake]) -> None:
        (finding,) = problems(looked_at(sglang({**DECODE, "dcp_block": report})).findings)
        assert text in finding.got

    @pytest.mark.parametrize(
        ("answer", "level", "text"),
        [
            (send(b"", 404), Level.NOTE, "does not know blocks"),
            (send({"error": "1 of 2 ranks have reported"}, 503), Level.PROBLEM, "1 of 2 ranks have reported"),
            (send({"error": "prefill ranks disagree"}, 409), Level.PROBLEM, "withheld"),
            (send(b"hm"), Level.PROBLEM, "expected JSON"),
            (send({**CAPABILITY, "protocol": 2}), Level.PROBLEM, "expected protocol 1, got 2"),
            (send({**CAPABILITY, "page_size": 64}), Level.PROBLEM, "but /server_info has DCP 1, pages of 16"),
            (drip, Level.PROBLEM, "no whole answer"),
            (send(CAPABILITY), Level.OK, "knows blocks, protocol 1"),
        ],
    )
    def test_capabilities(self, answer: Answer, level: Level, text: str, sglang: Callable[..., Fake]) -> None:
        found = looked_at(sglang(PREFILL, answer), timeout=1.0)
        finding = next(finding for finding in found.findings if finding.what.startswith("capability"))
        assert finding.level is level
        assert text in finding.got

    @pytest.mark.parametrize("port", [0, -1, 70000])
    def test_a_bootstrap_port_that_is_none(self, port: int, sglang: Callable[..., Fake]) -> None:
        (finding,) = problems(looked_at(sglang({**PREFILL, "disaggregation_bootstrap_port": port})).findings)
        assert f"expected a port, got {port}" in finding.got

    def test_metrics_that_cannot_be_had(self, sglang: Callable[..., Fake]) -> None:
        found = looked_at(sglang({**DECODE, "enable_metrics": True}, metrics=send(b"", 500)))
        assert found.findings[-1].level is Level.NOTE
        assert "status 500" in found.findings[-1].got


class TestGoodAnswers:
    def test_a_server_with_blocks(self, sglang: Callable[..., Fake]) -> None:
        found = looked_at(sglang({**DECODE, "enable_metrics": True}, metrics=send(ZERO)))
        assert {finding.level for finding in found.findings} == {Level.OK}
        assert "blocks of 16 tokens over 2 ranks, pages of 16; 1,024 rows a rank" in found.findings[1].got
        assert found.mode == "decode"
        assert found.side.block_size == 16

    @pytest.mark.parametrize(("dcp_size", "text"), [(1, "no DCP"), (2, "token round-robin over 2 ranks: no blocks")])
    def test_a_server_without(self, dcp_size: int, text: str, sglang: Callable[..., Fake]) -> None:
        info = {**DECODE, "dcp_size": dcp_size, "disaggregation_mode": "null"}
        del info["dcp_block"], info["dcp_block_size"]
        found = looked_at(sglang(info))
        assert [(f.level, f.got) for f in found.findings[1:]] == [(Level.NOTE, text)]
        assert found.side.block_size == 1

    def test_an_unknown_sglang_is_noted(self, sglang: Callable[..., Fake]) -> None:
        finding = looked_at(sglang({**DECODE, "version": "0.5.99"})).findings[0]
        assert (finding.level, finding.got) == (Level.NOTE, "0.5.99; the plugin here knows 0.5.23")

    def test_counters_that_are_not_zero_are_told(self, sglang: Callable[..., Fake]) -> None:
        text = (
            "# HELP sglang:dcp_block_refusals_total x\n"
            'sglang:dcp_block_refusals_total{reason="layout",side="decode"} 2.0\n'
            'sglang:dcp_block_refusals_total{side="decode",reason="layout",x="1"} 1.0\n'
            'sglang:dcp_block_refusals_total{reason="no_blocks",side="decode"} 0.0\n'
            'sglang:dcp_block_transfer_failures_total{reason="transport"} 4.0\n'
            'sglang:dcp_block_transfer_failures_total{reason="transport"} 1e.\n'
        )
        found = looked_at(sglang({**DECODE, "enable_metrics": True}, metrics=send(text.encode())))
        assert found.findings[-1].got == "refused (decode layout): 3, failed transfers (transport): 4"
        off = looked_at(sglang(DECODE))
        assert (off.findings[-1].level, off.findings[-1].got) == (Level.NOTE, "off")
        quiet = looked_at(sglang({**DECODE, "enable_metrics": True}, metrics=send(ZERO)))
        assert quiet.findings[-1].level is Level.OK

    def test_counters_that_are_not_there_are_told(self, sglang: Callable[..., Fake]) -> None:
        """They begin with 0; a server without the plugin between its peers has none."""
        found = looked_at(sglang({**DECODE, "enable_metrics": True}, metrics=send(b"other 1\n")))
        assert (found.findings[-1].level, found.findings[-1].got) == (Level.NOTE, "the plugin's are not there")
        assert "an error in the server's log" in found.findings[-1].advice

    @pytest.mark.parametrize("metrics", [send(b"other 1\n"), send({"sglang:dcp_block_refusals_total": 0}), send(b"")])
    def test_no_counters_are_not_taken_for_counters_at_0(self, metrics: Answer, sglang: Callable[..., Fake]) -> None:
        """A server alone has none, nor has stock SGLang."""
        stock = {**STOCK, "enable_metrics": True}
        for info in ({**DECODE, "disaggregation_mode": "null", "enable_metrics": True}, stock):
            finding = looked_at(sglang(info, metrics=metrics)).findings[-1]
            assert (finding.level, finding.got) == (Level.NOTE, "the plugin's are not there")
            assert finding.advice.startswith("Nothing is counted here")

    def test_the_key_is_sent_to_the_server(self, sglang: Callable[..., Fake]) -> None:
        asked = sglang(DECODE)
        looked_at(asked, api_key="k")
        assert asked.asked == [("/server_info", "Bearer k")]

    def test_a_prefix_of_the_url_is_kept(self, fake: Callable[..., Fake]) -> None:
        answers = fake({"/one/server_info": send(DECODE)})
        assert server.look_at(address(f"http://127.0.0.1:{answers.port}/one/"), 5.0).was_read


class TestAddress:
    def test_a_host_alone_is_http(self) -> None:
        assert address("localhost:30000").geturl() == "http://localhost:30000"

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "ftp://x",
            "http://",
            "http://h:port",
            "http://h:99999",
            "http://h:0",
            "file:///x",
        ],
    )
    def test_anything_else_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match="expected the URL of a server"):
            address(text)

    @pytest.mark.parametrize(
        ("text", "what"),
        [
            ("http://user:secret@h:1", "a user or a password: the servers' key is --api-key"),
            ("http://user:secret@h:port", "a user or a password"),
            ("user:secret@h", "a user or a password"),
            ("http://h:1?key=secret", "a query"),
            ("http://h:1/#secret", "a fragment"),
        ],
    )
    def test_what_may_be_a_secret_is_refused_and_not_shown(
        self, text: str, what: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as end:
            cli.main(["doctor", "--url", text])
        said = capsys.readouterr().err
        assert end.value.code == 2
        assert f"got one with {what}" in said
        assert "secret" not in said

    def test_https_is_spoken(self, fake: Callable[..., Fake]) -> None:
        with pytest.raises(Unanswered, match=r"expected TLS, got: .*SSL") as caught:
            get_json(address(f"https://127.0.0.1:{fake({}).port}"), "/", 5.0)
        assert "http://" in caught.value.advice

    def test_a_certificate_that_is_not_trusted(self) -> None:
        what, advice = doctor_http._why(ssl.SSLCertVerificationError(1, "self-signed certificate"), 1.0)
        assert "expected a certificate that is trusted here, got: " in what
        assert "SSL_CERT_FILE" in advice

    def test_what_speaks_no_http_may_have_tls(self, fake: Callable[..., Fake]) -> None:
        answer, _ = HOSTILE["no HTTP"]
        (finding,) = looked_at(fake({"/server_info": answer})).findings
        assert "try https://" in finding.advice


class TestPairs:
    def both(
        self, sglang: Callable[..., Fake], prefill: dict[str, Any], decode: dict[str, Any], **capability: Any
    ) -> Any:
        answer = send({**CAPABILITY, **capability})
        return [looked_at(sglang({**PREFILL, **prefill}, answer)), looked_at(sglang({**DECODE, **decode}))]

    def test_a_pair_that_fits(self, sglang: Callable[..., Fake]) -> None:
        servers = self.both(sglang, {}, {})
        (finding,) = pair.check(servers)
        assert (finding.level, finding.got) == (Level.OK, "may exchange KV, in blocks of 16")
        assert not any(row.differs for row in pair.rows(servers))

    @pytest.mark.parametrize(
        ("prefill", "decode", "level", "text"),
        [
            ({"page_size": 64}, {}, Level.PROBLEM, "page size differs: 64 and 16"),
            ({"page_size": 64}, {}, Level.PROBLEM, "expected equal page sizes, got 64 on prefill and 16 on decode"),
            ({"kv_cache_dtype": "fp8_e4m3"}, {}, Level.PROBLEM, "KV cache type differs: fp8_e4m3 and auto"),
            ({"disaggregation_transfer_backend": "mooncake"}, {}, Level.OK, "may exchange KV"),
            ({}, {"disaggregation_transfer_backend": "nixl"}, Level.PROBLEM, "transfer differs: mooncake and nixl"),
            ({"version": "0.5.22"}, {}, Level.NOTE, "SGLang differs: 0.5.22 and 0.5.23"),
            ({"model_path": "/other/place/tiny/"}, {}, Level.OK, "may exchange KV"),
            ({"model_path": "/models/other"}, {}, Level.NOTE, "model differs: other and tiny"),
            ({"dcp_size": 4}, {}, Level.PROBLEM, "DCP 4 to DCP 2: SGLang sends from DCP 1, or between equal sizes"),
            ({"dcp_group_pages": 8}, {}, Level.NOTE, "pages are grouped for 8 decode ranks"),
            ({"dcp_group_pages": 2}, {}, Level.OK, "may exchange KV"),
        ],
    )
    def test_what_differs(
        self, prefill: Any, decode: Any, level: Level, text: str, sglang: Callable[..., Fake]
    ) -> None:
        capability = {key: prefill[key] for key in ("page_size", "dcp_size") if key in prefill}
        findings = pair.check(self.both(sglang, prefill, decode, **capability))
        assert any(finding.level is level and text in finding.got for finding in findings), findings

    @pytest.mark.parametrize(
        ("prefill", "decode", "shown"),
        [("b" * 16, "a" * 16, "bbbbbbbbbbbbbbbb"), (None, "a" * 16, "unknown"), ("b" * 99, "a" * 16, None)],
    )
    def test_plugins_that_differ(
        self, prefill: str | None, decode: str, shown: str | None, sglang: Callable[..., Fake]
    ) -> None:
        servers = self.both(sglang, {}, {"dcp_block": {**REPORT, "plugin_digest": decode}}, plugin_digest=prefill)
        found = [finding.got for finding in problems(pair.check(servers))]
        (row,) = (row for row in pair.rows(servers) if row.what == "plugin")
        if shown is None:  # no capability
            assert (row.cells, row.differs) == (("-", "a" * 16), False)
        else:
            assert found == [f"plugin differs: {shown} and {decode}"]
            assert (row.cells, row.differs) == ((shown, decode), True)

    @pytest.mark.parametrize("digest", [None, 5, {}, ""])
    def test_a_decode_server_that_does_not_tell_its_plugin(self, digest: object, sglang: Callable[..., Fake]) -> None:
        servers = self.both(sglang, {}, {"dcp_block": {**REPORT, "plugin_digest": digest}})
        (finding,) = problems(pair.check(servers))
        assert finding.got.startswith("plugin differs: aaaaaaaaaaaaaaaa and ")

    def test_a_server_without_blocks_has_no_plugin_to_compare(self, sglang: Callable[..., Fake]) -> None:
        servers = [looked_at(sglang(PREFILL, send(CAPABILITY))), looked_at(sglang(STOCK))]
        assert not problems(pair.check(servers))
        (row,) = (row for row in pair.rows(servers) if row.what == "plugin")
        assert (row.cells, row.differs) == (("a" * 16, "-"), False)

    def test_a_prefill_server_that_does_not_know_blocks(self, sglang: Callable[..., Fake]) -> None:
        prefill, decode = looked_at(sglang(PREFILL)), looked_at(sglang(DECODE))
        (finding,) = problems(pair.check([prefill, decode]))
        assert "does not say that it knows them" in finding.got
        (finding,) = pair.check([prefill, looked_at(sglang(STOCK))])
        assert (finding.level, finding.got) == (Level.OK, "may exchange KV, token by token")

    def test_no_pair(self, sglang: Callable[..., Fake]) -> None:
        decode = looked_at(sglang(DECODE))
        assert pair.check([decode]) == []
        (finding,) = pair.check([decode, decode])
        assert (finding.level, finding.got) == (
            Level.PROBLEM,
            "expected a prefill and a decode server, got decode, decode",
        )

    def test_a_server_that_could_not_be_read_is_left_out(self, sglang: Callable[..., Fake]) -> None:
        decode, unread = looked_at(sglang(DECODE)), Server("gone", ())
        assert pair.check([decode, unread]) == []
        assert all(len(row.cells) == 1 for row in pair.rows([decode, unread]))


class TestCommand:
    def test_a_pair_by_the_command_line(self, sglang: Callable[..., Fake], capsys: pytest.CaptureFixture[str]) -> None:
        prefill, decode = sglang(PREFILL, send(CAPABILITY)), sglang(DECODE)
        urls = ["--url", prefill.url.geturl(), "--url", decode.url.geturl()]
        assert cli.main(["doctor", *urls, "--expect-block-size", "16"]) == 0
        said = capsys.readouterr().out
        assert "side by side" in said
        assert "No problem" in said
        assert "a secret" not in said
        assert cli.main(["doctor", *urls, "--expect-block-size", "64", "--json"]) == 1
        data = json.loads(said := capsys.readouterr().out)
        assert data["status"] == 1
        assert [f["got"] for f in data["findings"] if f["level"] == "problem"] == ["expected 64, got 16"]
        assert data["side_by_side"]["servers"] == [prefill.url.geturl(), decode.url.geturl()]
        assert "a secret" not in said

    def test_no_server_gives_orders_to_the_terminal(
        self, sglang: Callable[..., Fake], capsys: pytest.CaptureFixture[str]
    ) -> None:
        odd = {**COMMON, "disaggregation_mode": "null", "dcp_size": 1, "page_size": 16}
        urls = [
            sglang({**odd, "version": "0.5.23\x1b[2J", "model_path": "m\x1b]0;t\x07"}).url.geturl(),
            sglang({**odd, "version": "[bold]x[/bold]"}).url.geturl(),
        ]
        assert cli.main(["doctor", "--url", urls[0], "--url", urls[1]]) == 1
        said = capsys.readouterr().out
        assert "\x1b" not in said
        assert "\x07" not in said
        assert "0.5.23\\x1b[2J; the plugin here" in said
        assert "[bold]x[/bold]; the plugin here" in said

    def test_an_address_is_no_markup(self) -> None:
        console = Console(record=True, width=120, file=io.StringIO())
        report.show(
            console, [], ["http://[fe80::1]:30000", "http://b:1"], [pair.Row("mode", ("prefill", "decode"), False)]
        )
        assert "http://[fe80::1]:30000" in console.export_text()

    def test_what_differs_is_marked(self, sglang: Callable[..., Fake], capsys: pytest.CaptureFixture[str]) -> None:
        prefill = sglang({**PREFILL, "page_size": 64}, send({**CAPABILITY, "page_size": 64}))
        assert cli.main(["doctor", "--url", prefill.url.geturl(), "--url", sglang(DECODE).url.geturl()]) == 1
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(" page size"))
        assert line.split() == ["page", "size", "64", "16", "DIFFERS"]

    def test_another_plugin_is_marked(self, sglang: Callable[..., Fake], capsys: pytest.CaptureFixture[str]) -> None:
        prefill = sglang(PREFILL, send({**CAPABILITY, "plugin_digest": "b" * 16}))
        urls = ["--url", prefill.url.geturl(), "--url", sglang(DECODE).url.geturl()]
        assert cli.main(["doctor", *urls]) == 1
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(" plugin"))
        assert line.split() == ["plugin", "b" * 16, "a" * 16, "DIFFERS"]

    def test_blocks_of_ranks_that_say_otherwise_are_not_the_expected_ones(
        self, sglang: Callable[..., Fake], capsys: pytest.CaptureFixture[str]
    ) -> None:
        url = sglang({**DECODE, "dcp_block": {**DECODE["dcp_block"], "block_size": 8}}).url.geturl()
        assert cli.main(["doctor", "--url", url, "--expect-block-size", "16", "--json"]) == 1
        (finding,) = (
            one for one in json.loads(capsys.readouterr().out)["findings"] if one["what"] == "expected block size"
        )
        assert (finding["level"], finding["got"]) == ("problem", "not judged: its layout is unclear")

    def test_blocks_that_nobody_could_be_asked_for_are_a_problem(
        self, sglang: Callable[..., Fake], fake: Callable[..., Fake], capsys: pytest.CaptureFixture[str]
    ) -> None:
        prefill, gone = sglang(PREFILL, send(CAPABILITY)).url.geturl(), fake({}).url.geturl()
        for urls, got in (([prefill], "prefill"), ([prefill, gone], "prefill, one that was not read")):
            argv = [word for url in urls for word in ("--url", url)]
            assert cli.main(["doctor", *argv, "--expect-block-size", "16", "--json"]) == 1
            finding = json.loads(capsys.readouterr().out)["findings"][-1]
            assert finding["level"] == "problem"
            assert finding["got"] == f"not judged: expected a server that decodes, got {got}"
        assert cli.main(["doctor", "--url", prefill]) == 0

    @pytest.mark.parametrize(
        "argv",
        [
            ["--url", "http://h:1", "--", "--tp", "8"],
            ["--expect-block-size", "8"],
        ],
    )
    def test_options_that_do_not_go_together(self, argv: list[str]) -> None:
        assert cli.main(["doctor", *argv]) == 2

    def test_a_key_that_no_header_takes_is_not_shown(self, capsys: pytest.CaptureFixture[str]) -> None:
        for key in ("sec\nret", "sec→ret"):
            with pytest.raises(SystemExit) as end:
                cli.main(["doctor", "--url", "http://h:1", "--api-key", key])
            said = capsys.readouterr().err
            assert end.value.code == 2
            assert "--api-key: expected printable ASCII characters" in said
            assert "sec" not in said

    @pytest.mark.parametrize(
        "argv", [["--url", "ftp://h"], ["--timeout", "0"], ["--url", "h", "--expect-block-size", "x"]]
    )
    def test_values_that_are_none(self, argv: list[str]) -> None:
        with pytest.raises(SystemExit) as end:
            cli.main(["doctor", *argv])
        assert end.value.code == 2


def test_no_answer_is_kept_beyond_the_limit(monkeypatch: pytest.MonkeyPatch, fake: Callable[..., Fake]) -> None:
    monkeypatch.setattr(doctor_http, "MAX_BYTES", 10)
    asked = fake({"/x": send({"a": "0123456789"})})
    with pytest.raises(Unanswered, match="more than"):
        get_json(asked.url, "/x", 5.0)
