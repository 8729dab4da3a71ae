"""One ``sglang serve`` process on this machine's CPUs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sglang_dcp_block.config import FLAG
from sglang_dcp_block.cpu.environment import cpu_environment
from sglang_dcp_block.cpu.leftovers import Scratch, kill_group
from sglang_dcp_block.demo.client import RequestFailed, exchange, fetch
from sglang_dcp_block.demo.plan import Case

# Limits that fit a laptop, and no use of what only a GPU has.
SMALL = shlex.split(
    "--device cpu --dtype float32 --attention-backend triton --triton-attention-num-kv-splits 2 --disable-cuda-graph "
    "--sampling-backend pytorch --grammar-backend none --disable-custom-all-reduce --skip-server-warmup "
    "--max-total-tokens 1024 --max-running-requests 4 --context-length 512 --random-seed 1 --host 127.0.0.1"
)

TAIL_LINES = 20
ERROR_LINE = re.compile(r"(\[.*?\] )?([\w.]+(Error|Exception)|error): ")  # an exception's last line, or argparse's
MAX_ERRORS = 3
PATIENCE_SECONDS = 15  # for a server to end by itself


class ServerFailed(Exception):
    """A server refused to start, died, or did not get ready in time."""


def flags(case: Case) -> list[str]:
    """What makes this case differ from the others: the flags a user would type."""
    result = ["--tp-size", str(case.tp_size)]
    if case.dcp_size > 1:
        result += ["--dcp-size", str(case.dcp_size)]
    if case.block_size is not None:
        result += [FLAG, str(case.block_size)]
    return result


def command(case: Case, model: Path, port: int) -> list[str]:
    """The whole command line of a server."""
    tokenizer = [] if (model / "tokenizer.json").exists() else ["--skip-tokenizer-init"]
    own = [*flags(case), *case.more, "--page-size", str(case.page_size), "--port", str(port)]
    return [_sglang(), "serve", "--model-path", str(model), *SMALL, *own, *tokenizer]  # the last of a flag counts


def _sglang() -> str:
    beside = Path(sys.executable).with_name("sglang")
    found = str(beside) if beside.exists() else shutil.which("sglang")
    if found is None:
        raise ServerFailed("the command `sglang` was not found: install SGLang, or run `make demo`")
    return found


def log_summary(log: Path) -> str:
    """The first errors in a server's log, which tell why it ended, and its last lines."""
    lines = log.read_text(errors="replace").splitlines()
    first = [line[:300] for line in dict.fromkeys(filter(ERROR_LINE.search, lines))][:MAX_ERRORS]
    parts = [f"--- first errors in {log}", *first] if first else []
    return "\n".join([*parts, f"--- last lines of {log}", *(line[:300] for line in lines[-TAIL_LINES:]), "---"])


def free_port() -> int:
    """A TCP port of this machine that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A server for one case; ready inside ``with``, gone after it."""

    def __init__(self, case: Case, model: Path, log: Path, port: int = 0, start_timeout: float = 900) -> None:
        self.case, self.log, self.start_timeout = case, log, start_timeout
        port = port or free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.command = command(case, model, port)
        self.start_seconds = 0.0

    def __enter__(self) -> Server:
        began = time.monotonic()
        self.scratch = Scratch()
        env = {**os.environ, **self.scratch.environ, **cpu_environment(self.case.tp_size)}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
        try:
            self._wait_until_ready(began + self.start_timeout)
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.monotonic() - began
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.stop()
        if isinstance(error, RequestFailed):
            raise self.failed(error) from error

    def failed(self, error: Exception) -> ServerFailed:
        """An error of this server's, with its log."""
        return ServerFailed(f"{self.case.name}: {error}\n{self.tail()}")

    def info(self) -> dict[str, Any]:
        """What the server says about itself."""
        result: dict[str, Any] = json.loads(self.ask("/server_info"))
        return result

    def ask(self, path: str, body: dict[str, Any] | None = None, timeout: float = 60) -> bytes:
        """GET ``path``, or POST it with a body.

        Raises:
            ServerFailed: it was refused, or not answered within ``timeout`` seconds.
        """
        try:
            return exchange(f"{self.url}{path}", body, timeout)
        except RequestFailed as error:
            raise self.failed(error) from error

    def check_alive(self) -> None:
        """Make sure that it has not ended by itself.

        Raises:
            ServerFailed: it has; with its log.
        """
        status = self.process.poll()
        if status is not None:
            raise ServerFailed(f"{self.case.name}: the server ended ({ending(status)})\n{self.tail()}")

    def tail(self) -> str:
        """Why it failed, as far as its log tells."""
        return log_summary(self.log)

    def stop(self) -> None:
        """End the server and the processes it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline and _group_lives(self.process):
            time.sleep(0.1)
        kill_group(self.process.pid)
        self.process.wait()
        self.scratch.remove()

    def _wait_until_ready(self, deadline: float) -> None:
        while True:
            status = self.process.poll()
            if status is not None:
                raise ServerFailed(
                    f"{self.case.name}: the server ended before it was ready ({ending(status)})\n{self.tail()}"
                )
            try:
                # Not /health: there, every call generates a token, which takes seconds here.
                fetch(f"{self.url}/model_info", None, timeout=5)
                return
            except RequestFailed:
                pass
            if time.monotonic() > deadline:
                raise ServerFailed(
                    f"{self.case.name}: the server was not ready in {self.start_timeout:.0f} s\n{self.tail()}"
                )
            time.sleep(0.5)


def ending(status: int) -> str:
    """What a process's return code tells."""
    return f"signal {-status}" if status < 0 else f"status {status}"


def _group_lives(leader: subprocess.Popen[bytes]) -> bool:
    leader.poll()  # a zombie leader would keep the group alive
    try:
        os.killpg(leader.pid, 0)
    except ProcessLookupError:
        return False
    return True
