"""Managers with the hooks on, and decode ranks: one process behind real Mooncake over loopback TCP for a whole module."""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Iterator

import pytest
from servers import CountingEngine, Receiver
from sglang.srt.disaggregation.mooncake import conn
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import MooncakeTransferEngine
from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

from sglang_dcp_block.patches import fingerprint, transfer_counts
from sglang_dcp_block.patches.pd_points import SENDER_POINTS

MIB = 2**20

# Read by Mooncake when it is imported and when an engine starts.
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
os.environ["MC_FORCE_TCP"] = "1"


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender's hooks, for one test; that arming puts them on for good is tested in tests/patches."""
    for point in SENDER_POINTS:
        if point.hook is None:
            continue
        path, _, name = point.target.rpartition(".")
        wrapped = _wrap_fn(fingerprint.resolve(point.target), point.hook, HookType(point.kind.value))
        monkeypatch.setattr(pkgutil.resolve_name(path), name, wrapped)
        if hasattr(conn, name):  # imported by name
            monkeypatch.setattr(conn, name, wrapped)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> transfer_counts.Counts:
    """Totals of this test alone."""
    fresh = transfer_counts.Counts()
    monkeypatch.setattr(transfer_counts, "COUNTS", fresh)
    return fresh


@pytest.fixture(scope="module")
def shared_receiver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiver]:
    receiver = Receiver(tmp_path_factory.mktemp("receiver"), 64 * MIB)
    yield receiver
    receiver.close()


@pytest.fixture
def receiver(shared_receiver: Receiver) -> Receiver:
    """Blank memory of a process that lives as long as the module; for tests that leave it healthy."""
    shared_receiver.reset()
    return shared_receiver


@pytest.fixture(scope="module")
def shared_engine() -> MooncakeTransferEngine:
    return MooncakeTransferEngine("127.0.0.1")


@pytest.fixture
def engine(shared_engine: MooncakeTransferEngine) -> CountingEngine:
    """Real Mooncake; for tests that leave it healthy."""
    return CountingEngine(shared_engine)


@pytest.fixture
def fresh_pair(tmp_path) -> Iterator[tuple[CountingEngine, Receiver]]:
    """An engine and a receiver that a test may break."""
    receiver = Receiver(tmp_path, 64 * MIB)
    yield CountingEngine(MooncakeTransferEngine("127.0.0.1")), receiver
    receiver.close()
