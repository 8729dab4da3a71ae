"""The same bytes over Mooncake TCP, cut into segments of different sizes: where the steps between block sizes come from."""

from __future__ import annotations

from benchmarks import environment  # noqa: F401  # before what follows

from collections.abc import Iterator  # isort: skip
from contextlib import contextmanager
from functools import partial

import numpy as np
from servers import Pool

from benchmarks.record import Result, Row
from benchmarks.sender import connected
from benchmarks.timing import in_turns, spread

LAYERS, ROWS, ROW_BYTES = 8, 2048, 1152  # a rank's share of 16,384 tokens, DCP 8
LAYER_BYTES = ROWS * ROW_BYTES
PACKET = 65_483  # payload of a packet on Linux' loopback: an MTU of 65,536 less headers and a time stamp
SIZES = (18_432, 36_864, 49_152, 61_440, PACKET, PACKET + 1, 73_728, 98_304, 147_456, LAYER_BYTES)

READING = f"""
{LAYERS} layers of {LAYER_BYTES:,} bytes, contiguous on both sides, straight to Mooncake from one process to another over
TCP on loopback, cut into segments of so many bytes; the last row is not cut. What arrives is compared in every round.

Each segment is an acknowledged round trip, so shorter ones should take longer; yet those that just fit a packet of the
loopback interface ({PACKET:,} bytes of payload) are the fastest of all, and one byte more is a step. A block of 32 rows of
{ROW_BYTES:,} bytes fits, one of 64 does not. An uncut layer costs more per byte, too, probably because nothing waits for the
receiver, and bytes leave the cache before they are copied out. Another network has other packets, and a longer round
trip: this says nothing about it.
"""


def measure(full: bool) -> Result:
    """Send the same bytes in all sizes."""
    with connected(LAYERS * LAYER_BYTES) as (engine, receiver):
        source = Pool.random(LAYERS, ROWS, ROW_BYTES)
        receiver.reset()
        target = receiver.pool(LAYERS, ROWS, ROW_BYTES)

        def send(size: int) -> None:
            starts = np.arange(0, LAYER_BYTES, size)
            lengths = np.minimum(size, LAYER_BYTES - starts).tolist() * LAYERS
            src, dst = ((np.array(pool.ptrs)[:, None] + starts).ravel().tolist() for pool in (source, target))
            status = engine.batch_transfer_sync(receiver.session, src, dst, lengths)
            if status != 0:
                raise RuntimeError(f"segments of {size} bytes: expected status 0 of Mooncake, got {status}")

        @contextmanager
        def verified(way: str, round_: int) -> Iterator[None]:
            target.memory[:] = 255
            yield
            if not np.array_equal(target.memory, source.memory):
                raise AssertionError(f"segments of {way}: expected the rows that were sent")

        ways = {f"{size:,} bytes": partial(send, size) for size in SIZES}
        seconds = in_turns(ways, 31 if full else 15, around=verified)
    spreads = {way: spread(samples) for way, samples in seconds.items()}
    uncut = list(ways)[-1]
    rows = [
        Row(way, {"segment_bytes": size}, spreads[way], uncut, spreads[uncut].p50, LAYERS * LAYER_BYTES,
            LAYERS * -(-LAYER_BYTES // size))
        for way, size in zip(ways, SIZES, strict=True)
    ]  # fmt: skip
    return Result("segment_sizes", "Transfer by the size of a segment", "s", READING, rows)
