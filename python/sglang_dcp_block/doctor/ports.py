"""Whether the TCP ports of a server to be started are free."""

from __future__ import annotations

import errno
import socket

from sglang_dcp_block.doctor.findings import Finding, note, ok, problem

PART = "ports"
SERVER_PORT = 30000  # SGLang's defaults
BOOTSTRAP_PORT = 8998


def check(ports: dict[str, int], host: str = "127.0.0.1", required: bool = True) -> list[Finding]:
    """A finding a port.

    Args:
        ports: flag -> port, 0 to 65535.
        host: the address that the server will listen on.
        required: whether a server with these ports was asked about; else a port in use may be a server that runs.
    """
    return [_check(flag, port, host, required) for flag, port in ports.items()]


def _check(flag: str, port: int, host: str, required: bool) -> Finding:
    what = f"{flag} {port}"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server: a port in TIME_WAIT is free
            probe.bind((host, port))
    except (OSError, OverflowError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            advice = f"Pass another {flag}, or end what listens there (ss -ltnp 'sport = :{port}' names it)."
            return (problem if required else note)(PART, what, f"in use on {host}", advice)
        return problem(
            PART, what, f"cannot listen on {host}: {error}", "Pass a --host of this machine and a port from 1024 on."
        )
    return ok(PART, what, f"free on {host}")
