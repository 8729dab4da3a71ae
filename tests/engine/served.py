"""A server of the real SGLang, started as operators start it: ``sglang serve``, asked over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from sglang_dcp_block.cpu.environment import cpu_environment
from sglang_dcp_block.cpu.leftovers import Scratch, kill_group
from tied import tied


def as_flags(arguments: dict[str, Any]) -> list[str]:
    """Engine keywords as flags of the command line."""
    flags = []
    for name, value in arguments.items():
        if value is not False:
            flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return flags


class Served:
    """Starts on construction, in a session of its own; ``close`` ends it and everything it started."""

    def __init__(self, arguments: dict[str, Any], log: Path, ranks: int, **environ: str) -> None:
        self.arguments, self.log = arguments, log
        self.url = f"http://{arguments['host']}:{arguments['port']}"
        self.scratch = Scratch()
        env = {**os.environ, "SGLANG_PLUGINS": "dcp_block,dcp_block_cpu", **self.scratch.environ, **environ}
        env.update(cpu_environment(ranks, env))
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                tied([str(Path(sys.executable).with_name("sglang")), "serve", *as_flags(arguments)]),
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True,
            )  # fmt: skip

    def wait(self, timeout: float = 420) -> None:
        """Until it answers."""
        deadline = time.monotonic() + timeout
        while True:
            with contextlib.suppress(OSError):
                self.ask("/model_info", timeout=5)
                return
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.said()[-6000:]}"
            assert time.monotonic() < deadline, f"not ready in {timeout:.0f} s:\n{self.said()[-6000:]}"
            time.sleep(0.5)

    def ask(self, path: str, body: Any = None, timeout: float = 300) -> str:
        """GET, or POST where there is a body; raises OSError for no answer or another one than 200."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is on this machine
        with opener.open(request, timeout=timeout) as reply:
            return str(reply.read().decode())

    def metrics(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """What ``/metrics`` shows: (name, label values in the order of label names) -> value."""
        families = text_string_to_metric_families(self.ask("/metrics"))
        samples = [sample for family in families for sample in family.samples]
        return {(s.name, tuple(value for _, value in sorted(s.labels.items()))): s.value for s in samples}

    def said(self) -> str:
        """Its log."""
        return self.log.read_text(errors="replace")

    def close(self) -> None:
        """SGLang's processes are one group: end it."""
        kill_group(self.process.pid)
        self.process.wait()
        self.scratch.remove()
