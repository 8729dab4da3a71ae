"""Servers for the doctor to look at: real HTTP on loopback, with the answers of SGLang or of anything else."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Callable
from typing import Any

from sglang_dcp_block.doctor import server
from sglang_dcp_block.doctor.findings import Finding, Level
from sglang_dcp_block.doctor.http import address
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


def looked_at(fake: Fake, **options: Any) -> Server:
    return server.look_at(fake.url, **{"timeout": 5.0, **options})


def problems(findings: Any) -> list[Finding]:
    return [finding for finding in findings if finding.level is Level.PROBLEM]
