"""What transfers to decode servers cost: segments, bytes, batches and seconds, by peer and by the way they were sent.

A transfer is one chunk of one request to one decode rank. The thread that sends it carries a :class:`Transfer`, to which
each call of the transfer engine adds. Totals go to the log and to Prometheus, beside SGLang's own metrics. What upstream's
code sends from a thread a layer (custom memory pools) has no such thread: its segments are not counted, its time is.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from sglang_dcp_block.patches import prometheus
from sglang_dcp_block.patches.prometheus import Metrics

logger = logging.getLogger(__name__)

TOKENS = "tokens"  # token round-robin, as SGLang sends it
DIRECT = "direct"  # runs of blocks, as they lie
PACKED = "packed"  # blocks too short to be sent as they lie: packed by SGLang's code
FALLBACK = "fallback"  # blocks that only SGLang's own code can send

# Why a transfer did not go the way its blocks ask for, and why one failed.
DRAFT_HEADS, NO_PACK_BUFFER = "draft heads", "no pack buffer"
REQUEST, TRANSPORT, CANCELLED = "request", "transport", "cancelled"  # it could not be planned; Mooncake; it had ended

SUMMARY_EVERY = 256  # transfers between two summaries in the log
_MAX_PEERS = 1024  # of the most recent ones; decode servers come and go

_thread = threading.local()


@dataclass(slots=True)
class Transfer:
    """One chunk to one decode rank."""

    peer: str  # Mooncake session
    path: str
    segments: int = 0
    batches: int = 0  # calls of the transfer engine
    num_bytes: int = 0
    seconds: float = 0.0
    fallback: str | None = None  # DRAFT_HEADS or NO_PACK_BUFFER
    failure: str | None = None  # REQUEST, TRANSPORT or CANCELLED
    under_way: int = 0  # calls of the transfer engine that have not come back with success
    is_cancelled: Callable[[], bool] = bool  # whether its request has ended meanwhile; asked before each call
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add_batch(self, segments: int, num_bytes: int) -> None:
        """One call of the transfer engine; from any thread."""
        with self._lock:
            self.segments += segments
            self.num_bytes += num_bytes
            self.batches += 1
            self.under_way += 1

    def batch_landed(self) -> None:
        """The engine has reported success for one call."""
        with self._lock:
            self.under_way -= 1


@dataclass(slots=True)
class Totals:
    """Sums over transfers."""

    transfers: int = 0
    segments: int = 0
    batches: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    fallbacks: int = 0
    failures: int = 0

    def add(self, transfer: Transfer) -> None:
        """Count one transfer."""
        self.transfers += 1
        self.segments += transfer.segments
        self.batches += transfer.batches
        self.num_bytes += transfer.num_bytes
        self.seconds += transfer.seconds
        self.fallbacks += transfer.fallback is not None
        self.failures += transfer.failure is not None


class Counts:
    """Totals of a process, by path and by peer; safe to use from several threads."""

    def __init__(self) -> None:
        self.by_path: dict[str, Totals] = {}
        self.by_peer: dict[str, Totals] = {}
        self._lock = threading.Lock()
        self._num_transfers = 0

    def add(self, transfer: Transfer) -> None:
        """Count a transfer that ended, and log: each at debug, a summary now and then at info."""
        with self._lock:
            self.by_path.setdefault(transfer.path, Totals()).add(transfer)
            totals = self.by_peer.pop(transfer.peer, None) or Totals()
            totals.add(transfer)
            self.by_peer[transfer.peer] = totals  # last in order
            if len(self.by_peer) > _MAX_PEERS:
                del self.by_peer[next(iter(self.by_peer))]
            self._num_transfers += 1
            summary = self._summary() if self._num_transfers % SUMMARY_EVERY == 0 else None
        logger.debug(
            "KV to %s (%s): %d segments, %d bytes, %d batches, %.1f ms%s",
            transfer.peer, transfer.path, transfer.segments, transfer.num_bytes, transfer.batches, transfer.seconds * 1e3,
            f", failed ({transfer.failure})" if transfer.failure else "",
        )  # fmt: skip
        if summary is not None:
            logger.info("KV sent to decode ranks so far: %s", summary)

    def summary(self) -> str:
        """All paths in one line."""
        with self._lock:
            return self._summary()

    def _summary(self) -> str:
        return "; ".join(
            f"{path}: {t.transfers} transfers, {t.segments} segments of {t.num_bytes // max(t.segments, 1)} bytes on "
            f"average, {t.num_bytes / 2**20:.1f} MiB, {t.batches} batches, {t.seconds:.2f} s, {t.fallbacks} fallbacks, "
            f"{t.failures} failures"
            for path, t in sorted(self.by_path.items())
        )


COUNTS = Counts()


def current() -> Transfer | None:
    """The transfer that this thread works on."""
    return getattr(_thread, "transfer", None)


@contextmanager
def working_on(transfer: Transfer) -> Iterator[None]:
    """What this thread sends belongs to ``transfer``."""
    before = current()
    _thread.transfer = transfer
    try:
        yield
    finally:
        _thread.transfer = before


@contextmanager
def counted(peer: str, path: str) -> Iterator[Transfer]:
    """A transfer of this thread, counted when it ends; one that raises has failed."""
    transfer = Transfer(peer, path)
    begin = time.perf_counter()
    try:
        with working_on(transfer):
            yield transfer
    except BaseException:
        transfer.failure = transfer.failure or REQUEST
        raise
    finally:
        transfer.seconds = time.perf_counter() - begin
        COUNTS.add(transfer)
        prometheus.write(functools.partial(_to_prometheus, transfer))


def begin() -> None:
    """Show what wants to be looked at from the start on, at 0: Prometheus sees growth only from a value that it has seen."""

    def zeros(metrics: Metrics) -> None:
        prometheus.show(metrics["fallbacks"], [(DRAFT_HEADS,), (NO_PACK_BUFFER,)])
        prometheus.show(metrics["failures"], [(REQUEST,), (TRANSPORT,), (CANCELLED,)])

    prometheus.write(zeros)


def _to_prometheus(transfer: Transfer, metrics: Metrics) -> None:
    path = transfer.path
    metrics["transfers"].labels(path).inc()
    for name in ("segments", "num_bytes", "batches"):
        metrics[name].labels(path).inc(getattr(transfer, name))
    metrics["seconds"].labels(path).observe(transfer.seconds)
    if transfer.segments:
        metrics["segment_bytes"].labels(path).observe(transfer.num_bytes / transfer.segments)
    for name, reason in (("fallbacks", transfer.fallback), ("failures", transfer.failure)):
        if reason is not None:
            metrics[name].labels(reason).inc()
