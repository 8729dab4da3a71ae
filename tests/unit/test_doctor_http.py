"""The doctor asks over real HTTP: which URLs, hostile answers, web pages, TLS."""

from __future__ import annotations

import http.server
import ssl
import time
from collections.abc import Callable

import pytest
from doctor_servers import CAPABILITY, DECODE, PREFILL, REPORT, Answer, Fake, looked_at, problems, send

from sglang_dcp_block import cli
from sglang_dcp_block.doctor import http as doctor_http
from sglang_dcp_block.doctor.findings import Level
from sglang_dcp_block.doctor.http import Unanswered, address, get_json


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

    def test_an_alert_is_of_a_server_that_has_tls(self) -> None:
        alert = ssl.SSLError(1, "[SSL: TLSV1_ALERT_PROTOCOL_VERSION] tlsv1 alert protocol version")
        alert.reason = "TLSV1_ALERT_PROTOCOL_VERSION"
        assert doctor_http._why(alert, 1.0) == (f"expected TLS, got: {alert}", "")

    def test_what_speaks_no_http_may_have_tls(self, fake: Callable[..., Fake]) -> None:
        answer, _ = HOSTILE["no HTTP"]
        (finding,) = looked_at(fake({"/server_info": answer})).findings
        assert "try https://" in finding.advice


def test_no_answer_is_kept_beyond_the_limit(monkeypatch: pytest.MonkeyPatch, fake: Callable[..., Fake]) -> None:
    monkeypatch.setattr(doctor_http, "MAX_BYTES", 10)
    asked = fake({"/x": send({"a": "0123456789"})})
    with pytest.raises(Unanswered, match="more than"):
        get_json(asked.url, "/x", 5.0)
