"""Reading a peer's answer over HTTP when the peer may be anything: within a time and a size, and from that peer alone."""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import time

ERRORS = (OSError, http.client.HTTPException, ValueError)  # what :func:`get` raises, also of names and addresses


def get(address: str, path: str, *, seconds: float, max_bytes: int) -> tuple[int, bytes]:
    """GET ``path`` from ``address``; (status, body).

    Redirects are not followed and no proxy is asked. The peer is asked to close the connection, so that all of its answer
    is read before any of it is looked at: a timeout of the socket alone would bound each read, not their sum.

    Args:
        address: ``host:port``.
        seconds: for connecting, and again for everything after it.
        max_bytes: of the whole answer, headers and all.
    Raises:
        TimeoutError: the answer was not complete in time.
        ValueError: the answer is larger.
        OSError, http.client.HTTPException: no connection, or an answer that is not HTTP or not whole.
    """
    connection = http.client.HTTPConnection(address, timeout=seconds)
    with contextlib.closing(connection):
        connection.request("GET", path, headers={"Connection": "close"})
        received = _read_all(connection.sock, seconds, max_bytes)
    reply = http.client.HTTPResponse(_Received(received))
    reply.begin()
    return reply.status, reply.read()


def _read_all(peer: socket.socket, seconds: float, max_bytes: int) -> bytes:
    deadline, received = time.monotonic() + seconds, bytearray()
    while (left := deadline - time.monotonic()) > 0:
        peer.settimeout(left)
        if not (piece := peer.recv(1 << 16)):
            return bytes(received)
        received += piece
        if len(received) > max_bytes:
            raise ValueError(f"expected at most {max_bytes} bytes, got more")
    raise TimeoutError(f"expected an answer within {seconds:g} s")


class _Received(socket.socket):
    """What ``HTTPResponse`` takes for a socket: bytes that are there already."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def makefile(self, *args: object, **kwargs: object) -> io.BytesIO:  # type: ignore[override]
        return io.BytesIO(self.data)
