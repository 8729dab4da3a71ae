"""Asks a server over HTTP and believes nothing: whatever comes back becomes data or a reason, in bounded time and memory."""

from __future__ import annotations

import html
import http.client
import json
import queue
import re
import ssl
import threading
import time
from typing import Any
from urllib.parse import SplitResult, urlsplit

from sglang_dcp_block.shown import shown

MAX_BYTES = 8 * 2**20
CHUNK_BYTES = 2**16
SAID_CHARACTERS = 200  # of an answer that is shown
_TITLE = re.compile(r"<(title|h1)\b[^>]*>([^<]*)", re.IGNORECASE)


class Unanswered(Exception):
    """There is no usable answer; the text says why.

    ``status`` is the HTTP status where there was one; ``advice`` what to do, where the fault itself tells.
    """

    def __init__(self, text: str, status: int | None = None, advice: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.advice = advice


# What is never sent, so it is refused; it may be a secret, so it is not shown.
_REFUSED = {"@": "a user or a password: the servers' key is --api-key", "?": "a query (?)", "#": "a fragment (#)"}


def address(text: str) -> SplitResult:
    """Read a server's URL.

    Raises:
        ValueError: it is none, or has a user, a query or a fragment; saying expected and got.

    >>> address("http://10.0.0.1:30000").hostname
    '10.0.0.1'
    """
    for letter, what in _REFUSED.items():
        if letter in text:
            raise ValueError(f"expected the URL of a server, as http://HOST:30000, got one with {what}")
    try:
        url = urlsplit(text if "//" in text else f"http://{text}")
        if url.scheme in ("http", "https") and url.hostname and url.port != 0:
            return url
    except ValueError:
        pass
    raise ValueError(f"expected the URL of a server, as http://HOST:30000, got {text!r}")


def get_json(url: SplitResult, path: str, timeout: float, api_key: str | None = None) -> Any:
    """The JSON answer to ``GET path``.

    Args:
        timeout: seconds, for all of it.
    Raises:
        Unanswered: no connection, no answer in time, another status than 200, too long, or not JSON.
    """
    body = get(url, path, timeout, api_key)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        got = _page(body) or f"{body[:60]!r} ({type(error).__name__})"
        raise Unanswered(f"{path}: expected JSON, got {got}", 200) from error


def get(url: SplitResult, path: str, timeout: float, api_key: str | None = None) -> bytes:
    """The body of the answer to ``GET path``.  No redirect is followed, no proxy asked.

    Raises:
        Unanswered: as :func:`get_json`, but for the last.
    """
    answers: queue.Queue[bytes | Exception] = queue.Queue(1)

    def ask() -> None:
        try:
            answers.put(_get(url, path, timeout, api_key))
        except Exception as error:
            answers.put(error)

    # A server that sends a byte now and then never runs into a socket's own timeout.
    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=timeout + 1)
    except queue.Empty:
        raise Unanswered(f"{path}: no whole answer in {timeout:g} s") from None
    if isinstance(answer, bytes):
        return answer
    if isinstance(answer, Unanswered):
        raise answer
    what, advice = _why(answer, timeout)
    raise Unanswered(f"{path}: {what[:200]}", advice=advice) from answer


def _why(error: Exception, timeout: float) -> tuple[str, str]:
    """Why there is no answer, and what to do where the error tells; else nothing."""
    if isinstance(error, TimeoutError):
        return f"no answer in {timeout:g} s", ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"expected a certificate that is trusted here, got: {error}", "Set SSL_CERT_FILE to its authority's."
    if isinstance(error, ssl.SSLError):
        has_none = error.reason in ("WRONG_VERSION_NUMBER", "UNEXPECTED_EOF_WHILE_READING")
        return f"expected TLS, got: {error}", "Try http://: the server may have no TLS." if has_none else ""
    if isinstance(error, http.client.BadStatusLine) and not isinstance(error, http.client.RemoteDisconnected):
        advice = "Look whether this is the server's --port, and try https://: the server may have TLS."
        return f"expected HTTP, got {shown(str(error).strip())}", advice
    return str(error) or type(error).__name__, ""


def _get(url: SplitResult, path: str, timeout: float, api_key: str | None) -> bytes:
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    assert url.hostname is not None, "address() has looked"
    connection = kind(url.hostname, url.port, timeout=timeout)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    until = time.monotonic() + timeout
    try:
        connection.request("GET", f"{url.path.rstrip('/')}{path}", headers=headers)
        response = connection.getresponse()
        body = bytearray()
        while chunk := response.read1(CHUNK_BYTES):
            body += chunk
            if len(body) > MAX_BYTES:
                raise Unanswered(f"{path}: an answer of more than {MAX_BYTES >> 20} MiB")
            if time.monotonic() > until:
                raise Unanswered(f"{path}: no whole answer in {timeout:g} s")
        if response.status != 200:
            status = f"status {response.status}{_phrase(response.status)}"
            said = _page(bytes(body)) or " ".join(body[:SAID_CHARACTERS].decode(errors="replace").split())
            raise Unanswered(f"{path}: {status}{f': {said}' if said else ''}", response.status)
        return bytes(body)
    finally:
        connection.close()


def _phrase(status: int) -> str:
    name = http.client.responses.get(status)
    return f" ({name})" if name else ""


def _page(body: bytes) -> str | None:
    """What a web page is about, as proxies send them; None for anything else.  Its markup would tell nobody anything."""
    text = body[:4096].decode(errors="replace").lstrip("\ufeff \t\r\n")
    if not text.startswith("<"):
        return None
    found = _TITLE.search(text)
    title = " ".join(html.unescape(found[2]).split())[:80] if found else ""
    return f"a web page, {title!r}" if title else "a web page"
