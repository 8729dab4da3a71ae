"""The launcher's last check: schedulers that agree serve; otherwise all of them are ended, and the reason is told."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from sglang_dcp_block.patches import arming, register
from sglang_dcp_block.patches.agreement import REPORT_KEY, DisagreementError, Report
from sglang_dcp_block.patches.points import scheduler_points
from sglang_dcp_block.patches.startup_points import CONTROLLER_POINTS

# Asks its parent to quit when a process ends, as a scheduler does when it loses another one.
WATCHER = """
import os, select, signal, sys
watched = os.pidfd_open(int(sys.argv[1]))
print("watching", flush=True)
select.select([watched], [], [])
os.kill(os.getppid(), signal.SIGQUIT)
"""


class Child:
    """As much of a multiprocessing.Process as the check needs."""

    def __init__(self, *command: str) -> None:
        self.popen = subprocess.Popen([sys.executable, "-c", *command], stdout=subprocess.PIPE, text=True)
        self.pid = self.popen.pid
        self.popen.stdout.readline()  # it is up

    def join(self, timeout: float) -> None:
        self.popen.wait(timeout)


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[Child], list[int]]]:
    """Two schedulers, the second with a child of its own and an eye on the first; and the SIGQUITs that arrive."""
    runtime_context = pytest.importorskip("sglang.srt.runtime_context")
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: None)
    monkeypatch.setattr(arming, "armed_block_size", lambda _: 8)
    resolved = SimpleNamespace(disaggregation_mode="null", enable_hierarchical_cache=False)
    monkeypatch.setattr(arming, "_resolved", lambda _: resolved)
    monkeypatch.setattr(arming, "_schedulers_on_node", lambda _: 2)
    quits: list[int] = []
    before = signal.signal(signal.SIGQUIT, lambda *_: quits.append(1))
    first = Child("import subprocess, sys; c = subprocess.Popen(['sleep', '60']); print(c.pid, flush=True); c.wait()")
    children = [first, Child(WATCHER, str(first.pid))]
    yield children, quits
    for child in children:
        child.popen.kill()
        child.popen.wait()
    signal.signal(signal.SIGQUIT, before)


def info(**changes: Any) -> dict[str, Any]:
    digest = register.digest(scheduler_points("null"), 8)
    fields = {
        "block_size": 8,
        "dcp_size": 2,
        "page_size": 8,
        "digest": digest,
        "plugin_digest": register.plugin_digest(),
        "capacity_tokens": 64,
        "rows_per_rank": 32,
    }
    return {"status": "ready", REPORT_KEY: Report(**{**fields, **changes}).as_info()}


def test_schedulers_that_agree_are_left_running(family: tuple[list[Child], list[int]]) -> None:
    children, quits = family
    infos = [info(), info()]
    result = arming.require_ranks_agree(lambda readers, processes: infos, ["a", "b"], children)
    assert result is infos
    assert result[0][REPORT_KEY]["num_ranks"] == 2
    assert all(child.popen.poll() is None for child in children)
    assert quits == []


def failing(readers: list[str], processes: list[Child]) -> list[dict[str, Any]]:
    raise RuntimeError("Rank 1 scheduler died during initialization")


@pytest.mark.parametrize(
    ("wait", "error", "text"),
    [
        (lambda readers, processes: [info(), {"status": "ready"}], DisagreementError, "scheduler 1 reported no block"),
        (lambda readers, processes: [info(), info(block_size=16)], DisagreementError, "scheduler 1 is armed with"),
        (lambda readers, processes: [info(), info(), info()], DisagreementError, "expected reports of 2 schedulers"),
        (failing, RuntimeError, "Rank 1 scheduler died"),
    ],
)
def test_otherwise_all_are_ended_and_the_reason_is_told(
    family: tuple[list[Child], list[int]], wait: Any, error: type[Exception], text: str
) -> None:
    children, quits = family
    started = [p for child in children for p in (psutil.Process(child.pid), *psutil.Process(child.pid).children())]
    assert len(started) == 3
    with pytest.raises(error, match=text):
        arming.require_ranks_agree(wait, ["a", "b"], children)
    assert all(child.popen.poll() is not None for child in children)
    _, alive = psutil.wait_procs(started, timeout=5)
    assert alive == []
    time.sleep(0.2)
    assert quits == [], "a scheduler asked the launcher to quit before it could tell the reason"


@pytest.mark.parametrize("block_size", [None, 8])
@pytest.mark.parametrize("ranks", [0, 2])
def test_a_data_parallel_controller_speaks_for_its_schedulers(
    monkeypatch: pytest.MonkeyPatch, block_size: int | None, ranks: int
) -> None:
    """Its start-up info is what /server_info shows; SGLang's own holds a fixed set of keys."""
    runtime_context = pytest.importorskip("sglang.srt.runtime_context")
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: None)
    monkeypatch.setattr(arming, "armed_block_size", lambda _: block_size)
    monkeypatch.setattr(arming, "armed_group_pages", lambda _: ranks)
    own = {"dcp_group_pages": ranks} if ranks else {}
    infos = [{**(info() if block_size else {"status": "ready"}), **own}] * 2
    said = arming.merge_controller_reports({"startup_time": 1}, SimpleNamespace(_scheduler_init_infos=infos))
    assert said.pop("startup_time") == 1
    assert said.pop("dcp_group_pages", 0) == ranks
    assert said.pop("dcp_block_size", None) == block_size
    assert (said.pop(REPORT_KEY, {}).get("num_ranks")) == (2 if block_size else None)
    assert said == {}


@pytest.mark.parametrize("ranks", [0, 2])
def test_the_controller_of_a_prefill_server_is_armed_for_grouping(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    armed: list[Any] = []
    monkeypatch.setattr(arming, "armed_group_pages", lambda _: ranks)
    monkeypatch.setattr(register, "arm", armed.append)
    arming._arm_grouping(None, "dp_controller")
    assert armed == ([CONTROLLER_POINTS] if ranks else [])


def test_a_scheduler_that_is_gone_already(family: tuple[list[Child], list[int]]) -> None:
    children, _ = family
    children[1].popen.kill()
    children[1].popen.wait()
    with pytest.raises(RuntimeError, match="Rank 1 scheduler died"):
        arming.require_ranks_agree(failing, ["a", "b"], children)
    assert children[0].popen.poll() is not None
