"""The real SGLang refuses to start rather than serve with some process placing KV otherwise; and leaves nothing running.

Refusals that need no process started are in tests/patches/test_resolution.py.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from cases import BASE
from served import as_flags
from sglang_dcp_block.cpu.environment import cpu_environment
from sglang_dcp_block.cpu.leftovers import Scratch
from tied import tied

FAULTS = Path(__file__).parents[1] / "patches" / "faults"
TARGET = "sglang.srt.layers.dcp.layout.get_dcp_lens"
AT_MOST = 300  # seconds, of a start that must be refused; alone on two cores it takes 10 to 30
BROKEN = "DCP_BLOCK_FAULT"

# Starts an Engine as an embedder might; tells what came of it, and which schedulers it leaves behind.
EMBEDDER = """
import json, re, sys, time
import psutil
from sglang.srt.entrypoints.engine import Engine

def schedulers():
    children = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    return [p.pid for p in children if {"scheduler", "spawn_main"} & set(re.split("[^a-z_]+", " ".join(p.cmdline())))]

if __name__ == "__main__":
    try:
        Engine(**json.loads(sys.argv[1]))
    except Exception as error:
        print("REFUSED", type(error).__name__, error, flush=True)
        until = time.monotonic() + 10
        while schedulers() and time.monotonic() < until:
            time.sleep(0.2)
        print("LEFT", schedulers(), flush=True)
    else:
        print("SERVES", flush=True)
"""


@dataclass
class Attempt:
    """A start that was tried."""

    status: int
    output: str
    seconds: float
    left: list[str]  # processes that outlived it

    def __str__(self) -> str:
        return f"status {self.status} after {self.seconds:.0f} s, left {self.left}\n{self.output[-6000:]}"


def of_session(session: int) -> list[psutil.Process]:
    """Processes that a command in a session of its own has started, zombies aside."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


class Start:
    """A command in the CPU environment and in a session of its own, with a fault put in."""

    def __init__(self, log: Path, command: list[str], ranks: int = 2, plugins: str = "", **environ: str) -> None:
        allowed = plugins or "dcp_block,dcp_block_cpu,dcp_block_faults"
        path = os.pathsep.join(filter(None, [str(FAULTS), os.environ.get("PYTHONPATH", "")]))
        self.scratch = Scratch()
        env = {**os.environ, "SGLANG_PLUGINS": allowed, "PYTHONPATH": path, **self.scratch.environ, **environ}
        env.update(cpu_environment(ranks, env))
        self.log, self.began = log, time.monotonic()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                tied(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def end(self, timeout: float = AT_MOST) -> Attempt:
        """Wait for the command to end by itself, and then a little for everything that it started."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"neither refused nor ended in {timeout:.0f} s:\n{self.said()[-6000:]}")
        seconds, until = time.monotonic() - self.began, time.monotonic() + 15
        while of_session(self.process.pid) and time.monotonic() < until:
            time.sleep(0.2)
        left = [f"{p.pid} {p.name()}" for p in of_session(self.process.pid)]
        self.kill()
        return Attempt(self.process.returncode, self.said(), seconds, left)

    def kill(self) -> None:
        for process in of_session(self.process.pid):
            with_pid = process.pid
            try:
                os.kill(with_pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(10)
        self.scratch.remove()


@pytest.fixture
def starts(tmp_path: Path, checkpoints: Any) -> Iterator[Any]:
    """starts(..., fault=...) -> Start; whatever it started is ended after the test."""
    started: list[Start] = []
    model = str(checkpoints("gqa"))

    def arguments(**changes: Any) -> dict[str, Any]:
        return {**BASE, "model_path": model, "tp_size": 2, "dcp_size": 2, "dcp_block_size": 4, **changes}

    def start(
        *, serve: bool = False, fault: str | None = None, rank: int | None = None, plugins: str = "", **changes: Any
    ) -> Start:
        wanted = arguments(**changes)
        environ = {}
        if fault is not None:
            environ[BROKEN] = fault
        if rank is not None:
            environ[f"{BROKEN}_RANK"] = str(rank)
        embedder = tmp_path / "embedder.py"
        embedder.write_text(EMBEDDER)
        command = [sys.executable, str(embedder), json.dumps(wanted)]
        if serve:
            command = [str(Path(sys.executable).with_name("sglang")), "serve", *as_flags(wanted)]
        started.append(Start(tmp_path / f"start{len(started)}.log", command, plugins=plugins, **environ))
        return started[-1]

    yield start
    for each in started:
        each.kill()


def assert_refused(attempt: Attempt, *texts: str) -> None:
    assert attempt.left == [], attempt
    assert "SERVES" not in attempt.output, attempt
    assert "The server is fired up" not in attempt.output, attempt
    for text in texts:
        assert text in attempt.output, attempt


class TestBeforeAnyProcess:
    @pytest.mark.parametrize(
        ("fault", "text"),
        [
            (
                "altered_source",
                f"1 patch point(s) do not fit SGLang 0.5.23 (known versions: 0.5.23).\n  {TARGET}: source ",
            ),
            ("unknown_version", "do not fit SGLang 0.5.99 (known versions: 0.5.23)"),
        ],
    )
    def test_a_server_of_an_unknown_sglang(self, starts: Any, fault: str, text: str) -> None:
        attempt = starts(serve=True, fault=fault).end()
        assert attempt.status == 1, attempt
        assert_refused(attempt, "PatchError: cannot place KV in blocks: ", text)

    def test_a_server_whose_plugin_is_left_out(self, starts: Any) -> None:
        attempt = starts(serve=True, plugins="dcp_block_cpu").end()
        assert attempt.status == 2, attempt
        assert_refused(attempt, "sglang serve: error: unrecognized arguments: --dcp-block-size 4")


class TestInTheRanks:
    """The launching process finds nothing wrong; a rank does, or is found out."""

    def test_one_rank_with_another_sglang(self, starts: Any) -> None:
        """The other rank would wait for it; the program that tried to start the engine lives on."""
        attempt = starts(fault="altered_source", rank=1).end()
        assert_refused(
            attempt,
            "PatchError: cannot place KV in blocks: 1 patch point(s)",
            f"{TARGET}: source ",
            "REFUSED RuntimeError Rank 1 scheduler died during initialization",
            "LEFT []",
        )

    def test_a_target_that_another_plugin_took(self, starts: Any) -> None:
        attempt = starts(serve=True, fault="broken_target").end()
        assert attempt.status == 1, attempt
        assert_refused(attempt, f"{TARGET}: SGLang's HookRegistry did not apply our around hook")

    def test_one_rank_without_the_plugin(self, starts: Any) -> None:
        """The rank starts as stock SGLang: only its missing report gives it away."""
        attempt = starts(fault="cannot_load", rank=1).end()
        assert "this rank has a broken installation" in attempt.output, attempt
        assert_refused(
            attempt,
            "REFUSED DisagreementError the ranks do not agree on the KV layout, so none may serve: scheduler 1 reported no "
            "block layout: the plugin is not loaded in it.",
            "LEFT []",
        )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.slow
class TestTwoNodes:
    """Two "nodes" of one rank each on this machine. Each has a launcher of its own, which sees its own rank only."""

    def nodes(self, starts: Any, second: dict[str, Any]) -> tuple[Start, Start]:
        common = {"nnodes": 2, "dist_init_addr": f"127.0.0.1:{free_port()}", "fault": "impatient"}
        return starts(**common, node_rank=0), starts(**common, node_rank=1, **second)

    def test_all_alike_serve(self, starts: Any) -> None:
        first, _ = self.nodes(starts, {})
        attempt = first.end()
        assert (attempt.status, attempt.left) == (0, []), attempt
        assert "SERVES" in attempt.output, attempt

    def test_a_node_without_the_flag(self, starts: Any) -> None:
        """Its rank joins the others as stock SGLang and posts nothing."""
        first, second = self.nodes(starts, {"dcp_block_size": None})
        attempt = first.end()
        assert attempt.status != 0, attempt
        assert_refused(
            attempt,
            "DisagreementError: the ranks do not agree on the KV layout, so none may serve: ranks [1] reported no block "
            "layout within 5 s: expected all 2 ranks to be armed, on every node.",
        )
        assert "KV in blocks" not in second.said()

    def test_a_node_with_another_block_size(self, starts: Any) -> None:
        for node in self.nodes(starts, {"dcp_block_size": 8}):
            attempt = node.end()
            assert attempt.status != 0, attempt
            assert_refused(attempt, "is armed with digest ", "other ranks with {")
