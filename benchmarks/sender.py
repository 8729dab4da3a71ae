"""A prefill server's sender, and one decode rank's memory in another process behind real Mooncake TCP on loopback."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import environment  # noqa: F401  # before SGLang and the tests' servers

from servers import Receiver  # isort: skip
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import MooncakeTransferEngine

from sglang_dcp_block.patches import register
from sglang_dcp_block.patches.pd_points import SENDER_POINTS


@dataclass
class Handed:
    """What was handed to Mooncake."""

    segments: int = 0
    num_bytes: int = 0
    staged_bytes: int = 0  # from anywhere but the KV pool


class WatchedEngine:
    """SGLang's Mooncake engine; counts what it is handed, while told to."""

    def __init__(self, engine: Any) -> None:
        self.real = engine
        self.engine = engine.engine  # as SGLang's wrapper has it
        self.watching: Handed | None = None
        self.pool = range(0)  # addresses of the KV pool

    def batch_transfer_sync(self, session: str, src: list[int], dst: list[int], lengths: list[int]) -> int:
        if (handed := self.watching) is not None:
            handed.segments += len(lengths)
            handed.num_bytes += sum(lengths)
            handed.staged_bytes += sum(n for at, n in zip(src, lengths, strict=True) if at not in self.pool)
        status: int = self.real.batch_transfer_sync(session, src, dst, lengths)
        return status

    @contextmanager
    def watched(self, memory: Any) -> Iterator[Handed]:
        """Count inside; ``memory``, a dense NumPy array, is the KV pool."""
        begin = memory.ctypes.data
        self.pool, self.watching = range(begin, begin + memory.nbytes), Handed()
        try:
            yield self.watching
        finally:
            self.watching = None


@contextmanager
def connected(num_bytes: int) -> Iterator[tuple[WatchedEngine, Receiver]]:
    """An engine, with the plugin's sender armed, and a receiver with ``num_bytes`` of memory."""
    register.arm(SENDER_POINTS)  # for the life of this process
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        receiver = Receiver(Path(folder), num_bytes)
        try:
            yield WatchedEngine(MooncakeTransferEngine("127.0.0.1")), receiver
        finally:
            receiver.close()
