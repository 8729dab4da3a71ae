"""The demo's servers: what becomes of one that dies, hangs or refuses.  Stand-ins take the place of ``sglang serve``."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest

from sglang_dcp_block.demo import servers
from sglang_dcp_block.demo.client import RequestFailed, complete
from sglang_dcp_block.demo.plan import Case
from sglang_dcp_block.demo.servers import Server, ServerFailed

CASE = Case("TP2+DCP2 B=8", tp_size=2, dcp_size=2, block_size=8, page_size=16)

DIES = "import sys; print('ValueError: no such model'); print('x' * 9); sys.exit(3)"
HANGS = "import time; time.sleep(60)"
# Ready at once; refuses completions; has a child process, as SGLang has schedulers.
SERVES = """
import http.server, subprocess, sys, tempfile
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("child", child.pid, flush=True)
print("temporary", tempfile.NamedTemporaryFile(delete=False).name, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"{}")
    def do_POST(self):
        self.send_response(500); self.end_headers(); self.wfile.write(b"no KV left")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    def make(script: str, **kwargs) -> Server:
        monkeypatch.setattr(servers, "command", lambda case, model, port: [sys.executable, "-c", script, str(port)])
        return Server(CASE, tmp_path, tmp_path / "server.log", **kwargs)

    return make


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
            return True
        time.sleep(0.05)
    return False


def test_a_server_that_dies_shows_its_errors(stand_in):
    with pytest.raises(ServerFailed) as caught, stand_in(DIES):
        pass
    text = str(caught.value)
    assert "TP2+DCP2 B=8: the server ended before it was ready (status 3)" in text
    assert text.index("first errors") < text.index("ValueError: no such model") < text.index("last lines")


def test_a_server_that_hangs_is_ended(stand_in):
    server = stand_in(HANGS, start_timeout=0.3)
    with pytest.raises(ServerFailed, match="not ready in 0 s"), server:
        pass
    assert server.process.returncode is not None


def test_a_server_ends_with_its_children(stand_in):
    with stand_in(SERVES) as server:
        assert server.info() == {}
        child = int(server.log.read_text().split()[1])
    assert gone(child)
    assert server.process.returncode is not None
    (temporary,) = re.findall("temporary (.*)", server.log.read_text())
    assert Path(temporary).parent == server.scratch.folder
    assert not Path(temporary).exists()


def test_a_refused_request_shows_the_log(stand_in):
    with pytest.raises(ServerFailed, match="status 500: no KV left") as caught, stand_in(SERVES) as server:
        complete(server.url, "text", 8, timeout=5)
    assert "last lines" in str(caught.value)


def test_a_page_that_is_refused_shows_the_log(stand_in):
    with pytest.raises(ServerFailed, match="status 500: no KV left") as caught, stand_in(SERVES) as server:
        server.ask("/flush_cache", {})
    assert "last lines" in str(caught.value)


def test_a_server_that_ended_is_noticed(stand_in):
    with stand_in(SERVES) as server:
        server.check_alive()
        server.process.kill()
        server.process.wait()
        with pytest.raises(ServerFailed, match=r"the server ended \(signal 9\)"):
            server.check_alive()


def test_no_server_at_all():
    with pytest.raises(RequestFailed, match="refused"):
        complete(f"http://127.0.0.1:{servers.free_port()}", (1, 2), 8, timeout=5)


def test_the_flags_are_what_a_user_would_type(monkeypatch, tmp_path):
    monkeypatch.setattr(servers, "_sglang", lambda: "sglang")
    words = servers.command(CASE, tmp_path, 1234)
    assert words[:2] == ["sglang", "serve"]
    assert "--tp-size 2 --dcp-size 2 --dcp-block-size 8 --page-size 16 --port 1234" in " ".join(words)
    assert "--skip-tokenizer-init" in words
    (tmp_path / "tokenizer.json").touch()
    assert "--skip-tokenizer-init" not in servers.command(CASE, tmp_path, 1234)
    plain = Case("TP8", tp_size=8, dcp_size=1, block_size=None, page_size=8)
    assert servers.flags(plain) == ["--tp-size", "8"]
