"""Hostile peers on the layout route: a decode server that reads any answer, and a prefill server that is told anything."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from decode_queue import Queue

from sglang_dcp_block.dcp import handshake
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.patches import active, pd_decode, peer_refusals

MESSAGES = [1000, pytest.param(100_000, marks=pytest.mark.slow)]
PAGE = 8
GOOD = {
    "protocol": 1, "dcp_size": 1, "block_size": 1, "page_size": PAGE, "digest": "d", "transfer_timeout_seconds": 30,
    "plugin_digest": "p",
}  # fmt: skip
RANK = "0-0-0-0-0"


@pytest.fixture(autouse=True)
def armed(monkeypatch):
    """This process as a decode server of two ranks; refusals are not counted."""
    monkeypatch.setattr(active, "_layout", DcpLayout(2, PAGE))
    monkeypatch.setattr(peer_refusals, "count", lambda side, reason: None)
    monkeypatch.setattr(pd_decode.logger, "disabled", True)
    monkeypatch.delenv("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT", raising=False)


def odd(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value."""
    match rng.randrange(9 if depth < 3 else 7):
        case 0:
            return rng.choice([None, True, False])
        case 1:
            return rng.choice([0, -1, 1, 2, 8, 2**31 - 1, 2**31, 2**63, 10**30, -(10**30)])
        case 2:
            return rng.choice([1.0, 8.0, -0.0, 1e308, 0.1, float("nan"), float("inf")])
        case 3:
            return "".join(chr(rng.randrange(1, 0xD800)) for _ in range(rng.randint(0, 5)))
        case 4:
            return rng.choice(["8", "1", "", "auto", "64", "\0", "a" * 1000])
        case 5:
            return rng.randint(-5, 70)
        case 6:
            return {}
        case 7:
            return [odd(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return {rng.choice([*GOOD, "rank", "x"]): odd(rng, depth + 1) for _ in range(rng.randint(0, 4))}


def capability(rng: random.Random) -> Any:
    """One that is good, or is not any more."""
    if rng.random() < 0.05:
        return odd(rng)
    told: dict[str, Any] = dict(GOOD)
    for _ in range(rng.randint(0, 2)):
        match rng.randrange(3):
            case 0:
                told[rng.choice(list(GOOD))] = odd(rng)
            case 1:
                told.pop(rng.choice(list(GOOD)), None)
            case 2:
                told[str(rng.random())] = odd(rng)
    return told


def is_capability(told: Any) -> bool:
    """Whether this is one by the protocol."""

    def number(name: str) -> bool:
        return type(told.get(name)) is int and 1 <= told[name] <= 2**31 - 1

    def text(value: Any) -> bool:
        return type(value) is str and len(value) <= 64

    return (
        type(told) is dict
        and text(told.get("digest"))
        and (told.get("plugin_digest") is None or text(told["plugin_digest"]))
        and all(number(name) for name in ("protocol", "dcp_size", "block_size", "page_size"))
        and told["protocol"] == 1
        and (told.get("transfer_timeout_seconds") is None or number("transfer_timeout_seconds"))
    )


def fits(told: Any) -> bool:
    """Whether a decode server of two ranks takes KV from a prefill server that says so."""
    equal = told["dcp_size"] != 2 or told["block_size"] == PAGE
    return told["page_size"] == PAGE and equal


def damaged(message: bytes, rng: random.Random) -> bytes:
    """Bytes dropped, doubled, changed, put in and cut off."""
    data = bytearray(message)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0:
                del data[at : at + rng.randint(1, 9)]
            case 1:
                data[at:at] = data[at : at + rng.randint(1, 20)]
            case 2:
                data[at : at + 1] = rng.randbytes(1)
            case 3:
                data[at:at] = rng.randbytes(rng.randint(1, 9))
            case 4 if rng.random() < 0.3:
                del data[at:]
    return bytes(data)


def objects_in(message: bytes) -> Iterator[Any]:
    """Whatever JSON objects its bytes hold."""
    for first, last in itertools.product(re.finditer(rb"\{", message), re.finditer(rb"\}", message)):
        with contextlib.suppress(ValueError):
            yield json.loads(message[first.start() : last.end()])


def answer(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", "Content-Type: application/json", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


Reply = Callable[[socket.socket], None]  # what a server does with a connection that has asked


class Prefill:
    """Answers connections one after another, each with what ``reply`` gives, and closes."""

    def __init__(self, reply: Reply) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listening.getsockname()[1]}"
        self.reply, self.closing, self.error = reply, False, None
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self) -> None:
        while not self.closing:
            connection, _ = self.listening.accept()
            with connection, contextlib.suppress(OSError):
                connection.settimeout(10)
                asked = b""
                while b"\r\n\r\n" not in asked and (more := connection.recv(65536)):
                    asked += more
                if asked:
                    self.reply(connection)

    def close(self) -> None:
        self.closing = True
        with contextlib.suppress(OSError):
            socket.create_connection(self.listening.getsockname(), 1).close()
        self.thread.join(15)
        self.listening.close()


@contextlib.contextmanager
def prefill(reply: Reply) -> Iterator[str]:
    server = Prefill(reply)
    with contextlib.closing(server):
        yield server.address


class OurEnd(socket.socket):
    """Of a pair within this process, which has no options of TCP."""

    def setsockopt(self, *args: Any) -> None:
        pass


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("messages", MESSAGES)
def test_a_decode_server_reads_any_answer(messages, monkeypatch):
    """The other end of a real socket has answered already; a server in a thread would only take longer."""
    rng, address, message, seen = random.Random(7), "127.0.0.1:1", b"", {True: 0, False: 0}

    open_ends: list[socket.socket] = []

    def connect(*args: Any) -> socket.socket:
        for end in open_ends:
            end.close()
        ours, theirs = socket.socketpair()
        theirs.sendall(message)
        theirs.shutdown(socket.SHUT_WR)
        open_ends[:] = [theirs]
        return OurEnd(fileno=ours.detach())

    with monkeypatch.context() as patch:
        patch.setattr(socket, "create_connection", connect)
        for number in range(messages):
            told, status, whole = capability(rng), "200 OK", True
            body = json.dumps(told).encode()
            match rng.randrange(8):
                case 0:
                    status = rng.choice(
                        ["404 Not Found", "503 Busy", "409 Conflict", "500 Oops", "204 Nothing", "302 Go"]
                    )
                    message = answer(body, status, f"Location: http://{address}/elsewhere")
                case 1:
                    body = rng.choice(
                        [b"[" * 60_000, b'{"a":' * 20_000, b"9" * 5000, b"", b"\xff\xfe", rng.randbytes(99)]
                    )
                    message, whole = answer(body), False
                case 2 | 3:
                    message, whole = damaged(answer(body), rng), False
                case _:
                    message = answer(body)
            queue = Queue()
            ready, reasons = queue.ask(address)
            assert (address in ready) != (address in reasons), "neither taken nor refused"
            taken = bool(ready)
            if whole:
                assert taken == (status == "200 OK" and is_capability(told) and fits(told)), (number, message)
            elif taken:  # what was damaged still says so
                assert any(is_capability(said) and fits(said) for said in objects_in(message)), (number, message)
            else:
                assert len(reasons[address]) < 2000
            seen[taken] += 1
    assert min(seen.values()) > messages / 20, seen


def drips(head: bytes, rest: bytes) -> Reply:
    """Ten bytes a second, after the first ones."""

    def reply(connection: socket.socket) -> None:
        connection.sendall(head)
        for byte in rest:
            connection.sendall(bytes([byte]))
            time.sleep(0.1)

    return reply


def pours(head: bytes, piece: bytes) -> Reply:
    """The same again and again, after the first bytes."""

    def reply(connection: socket.socket) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(piece)

    return reply


BODY = json.dumps(GOOD).encode()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
SLOW = {
    "never answers": lambda connection: time.sleep(5),
    "closes at once": lambda connection: None,
    "sends headers byte by byte": drips(b"", answer(BODY)),
    "sends its body byte by byte": drips(HEAD + b"\r\n", BODY),
    "has no end of headers": pours(HEAD, b"X-More: more\r\n"),
    "has no end of a header": pours(HEAD, b"x" * 999),
    "always continues": pours(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "has no end of body": pours(HEAD + b"\r\n", b" " * 9999),
    "has no end of chunks": pours(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "hangs up early": lambda connection: connection.sendall(HEAD + b"Content-Length: 99999999\r\n\r\n" + BODY),
}


@pytest.mark.parametrize("kind", SLOW)
def test_a_decode_server_does_not_wait_for_ever(monkeypatch, kind):
    monkeypatch.setattr(pd_decode, "TIMEOUT_SECONDS", 1)
    with prefill(SLOW[kind]) as address:
        began = time.monotonic()
        ready, reasons = Queue().ask(address)
        assert time.monotonic() - began < 4, "it waited"
        assert ready == []
        assert "could not be read" in reasons[address]


def test_a_redirect_leads_nowhere():
    with (
        prefill(lambda connection: connection.sendall(answer(BODY))) as good,
        prefill(lambda c: c.sendall(answer(BODY, "302 Found", f"Location: http://{good}/dcp_layout"))) as other,
    ):
        assert Queue().ask(good) == ([good], {})
        assert "302" in Queue().ask(other)[1][other]


# --- the prefill server's route ------------------------------------------------------------------------------------


class Told:
    """A connection to the route, opened again where the server has closed it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.connection = http.client.HTTPConnection(address, timeout=10)

    def say(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        for _ in range(2):
            try:
                self.connection.request(method, path, body, headers)
                reply = self.connection.getresponse()
                return reply.status, reply.read()
            except (ConnectionError, http.client.RemoteDisconnected):
                self.connection.close()
        raise AssertionError("the server hung up twice")

    def garbage(self, data: bytes) -> None:
        """Raw bytes, and whatever comes back."""
        host, _, port = self.address.partition(":")
        with socket.create_connection((host, int(port)), 10) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass


def rank(rng: random.Random) -> Any:
    ranks = ["0-0-0-0-0", "0-0-0-1-0", "3-0-12-7-1"]
    bad = [
        "",
        "0",
        "0-0-0-0",
        "0-0-0-0-0-0",
        "a-b-c-d-e",
        "٠-0-0-0-0",
        "-1-0-0-0-0",
        "0-0-0-0-0\n",
        "9" * 9999,
        odd(rng),
    ]
    return rng.choice(ranks if rng.random() < 0.7 else bad)


def is_rank(told: Any) -> bool:
    parts = told.split("-") if type(told) is str else []
    return len(parts) == 5 and all(part and all(c in "0123456789" for c in part) and len(part) < 10 for part in parts)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("messages", MESSAGES)
def test_a_prefill_server_is_told_anything(bootstrap, messages):
    rng, address = random.Random(7), bootstrap()
    told, seen = Told(address), {True: 0, False: 0}
    for number in range(messages):
        report: Any = {"rank": rank(rng), "capability": capability(rng)}
        if rng.random() < 0.1:
            report = odd(rng)
        body, whole = json.dumps(report).encode(), True
        headers = {"Content-Type": "application/json"}
        match rng.randrange(10):
            case 0:
                body, whole = damaged(body, rng), False
            case 1:
                body = rng.choice([b"[" * 60_000, b'{"a":' * 20_000, b"9" * 5000, b"", b"\xff\xfe", b"0" * (2 << 20)])
                whole = False
            case 2:
                odd_type = "application/json; charset=" + rng.choice(
                    ["nonsense", "utf-16", "idna", "rot13", "base64", ""]
                )
                headers["Content-Type"] = rng.choice(["text/plain", "multipart/form-data", "", odd_type])
            case 3:
                query = "".join(rng.choices("abc=&%?/+;0123456789\\", k=rng.randint(0, 40)))
                status, _ = told.say(rng.choice(["GET", "POST", "DELETE", "HEAD"]), f"/dcp_layout?{query}", b"", {})
                assert status in (200, 405, 409, 503), (number, status)
                continue
            case 4 if rng.random() < 0.2:
                head = b"PUT /dcp_layout HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
                told.garbage(damaged(head + body, rng))
                continue
        status, said = told.say("PUT", "/dcp_layout", body, headers)
        if whole:
            is_good = type(report) is dict and is_rank(report.get("rank")) and is_capability(report.get("capability"))
            assert status == (200 if is_good else 400), (number, status, report)
        assert status in (200, 400, 413), (number, status, body[:300])
        assert len(said) < 2000
        seen[status == 200] += 1
    assert min(seen.values()) > messages / 20, seen


def test_what_a_stranger_says_is_no_rank(bootstrap):
    address = bootstrap()
    told = Told(address)
    body = json.dumps({"rank": "stranger", "capability": GOOD}).encode()
    assert told.say("PUT", handshake.ROUTE, body, {})[0] == 400
    assert told.say("PUT", handshake.ROUTE, json.dumps({"rank": RANK, "capability": GOOD}).encode(), {})[0] == 200
    assert json.loads(told.say("GET", handshake.ROUTE, b"", {})[1]) == GOOD
