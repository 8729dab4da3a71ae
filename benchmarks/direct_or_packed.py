"""Blocks as they lie, or packed first? Both ways through the plugin's sender over Mooncake TCP, by the bytes of a block."""

from __future__ import annotations

from benchmarks import environment  # noqa: F401  # before what follows

import os  # isort: skip
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
from servers import Pool, Registration, make_manager, send
from sglang.srt.disaggregation.common import dcp_pack

import reference
from benchmarks.record import Result, Row, Value
from benchmarks.sender import Handed, WatchedEngine, connected
from benchmarks.timing import in_turns, spread
from sglang_dcp_block.patches.mooncake_pack import ENVIRONMENT

P, RANK, PAGE, TOKENS, LAYERS = 8, 3, 64, 8192, 8
BLOCKS = (4, 8, 16, 32, 64)
ROW_BYTES = (64, 1152)
DIRECT, PACKED = "as it lies", "packed"
THRESHOLDS = {DIRECT: "0", PACKED: str(2**40)}  # bytes of a block

READING = f"""
A chunk of {TOKENS:,} tokens in {LAYERS} layers to one rank of DCP {P}, pages of {PAGE} tokens in no order on the
prefill server. **{PACKED}** is SGLang's own code for pack buffers, with the gather done on the host, as its kernel is
for CUDA; the plan is by blocks. Its rows are still cut where a page of the decode server ends, unless those pages
happen to be adjacent. docs/adr/0002-direct-or-packed.md says what follows.
"""


class HostPacking:
    """Stands in for SGLang's gather, which is for CUDA: one pass over each layer, into a buffer that is kept."""

    def __init__(self, source: Pool, num_rows: int) -> None:
        self.source = source
        self.buffer = np.zeros((len(source.memory), num_rows, source.row_bytes), np.uint8)

    def __call__(self, *, src_token_indices: Any, **_: object) -> tuple[list[int], Any]:
        n = len(src_token_indices)
        for layer, rows in enumerate(self.source.memory):
            np.take(rows, src_token_indices, axis=0, out=self.buffer[layer, :n])
        base, stride = self.buffer.ctypes.data, self.buffer.strides[0]
        return [base + layer * stride for layer in range(len(self.buffer))], np.arange(n)


def _rows(engine: WatchedEngine, receiver: Any, row_bytes: int, adjacent: bool, rounds: int) -> Iterator[Row]:
    rng = np.random.default_rng(0)
    num_src, num_dst = TOKENS // PAGE, TOKENS // PAGE // P
    src_pages = rng.permutation(num_src).tolist()
    dst_pages = list(range(num_dst)) if adjacent else rng.permutation(num_dst).tolist()
    source = Pool.random(LAYERS, TOKENS, row_bytes)
    manager = make_manager(source, PAGE, engine)
    receiver.reset()
    pool = receiver.pool(LAYERS, TOKENS // P, row_bytes)
    pairs = {block: np.array(reference.transfer_rows(src_pages, dst_pages, RANK, P, block, PAGE)).T for block in BLOCKS}
    handed: dict[str, Handed] = {}
    calls = {f"{block} {way}": (block, way) for block in BLOCKS for way in THRESHOLDS}

    def call(name: str) -> None:
        block, way = calls[name]
        os.environ[ENVIRONMENT] = THRESHOLDS[way]
        registration = Registration(P, RANK, block, pool.ptrs, mooncake_session_id=receiver.session)
        status = send(manager, registration, src_pages, dst_pages, num_tokens=TOKENS, pack_buffer=object())
        if status != 0:
            raise RuntimeError(f"{name}: expected status 0 of the transfer, got {status}")

    @contextmanager
    def verified(name: str, round_: int) -> Iterator[None]:
        pool.memory[:] = 255
        with engine.watched(source.memory) as seen:
            if round_:
                engine.watching = None  # counting costs time
            yield
        handed.setdefault(name, seen)
        src, dst = pairs[calls[name][0]]
        np.testing.assert_array_equal(pool.memory[:, dst], source.memory[:, src], err_msg=name)

    packing = HostPacking(source, TOKENS // P)
    with mock.patch.object(dcp_pack, "try_pack_dcp_src", packing), mock.patch.dict(os.environ):
        seconds = in_turns({name: partial(call, name) for name in calls}, rounds, around=verified)
    spreads = {name: spread(samples) for name, samples in seconds.items()}
    for name, (block, way) in calls.items():
        case: dict[str, Value] = {"row_bytes": row_bytes, "block": block, "block_bytes": block * row_bytes}
        case |= {"decode_pages": "adjacent" if adjacent else "scattered", "staged": handed[name].staged_bytes}
        packed = spreads[f"{block} {PACKED}"].p50
        yield Row(way, case, spreads[name], PACKED, packed, handed[name].num_bytes, handed[name].segments)


def measure(full: bool) -> Result:
    """Send blocks of all sizes in both ways."""
    rows: list[Row] = []
    with connected(LAYERS * TOKENS // P * max(ROW_BYTES)) as (engine, receiver):
        for row_bytes in ROW_BYTES:
            for adjacent in (False, True):
                rows += _rows(engine, receiver, row_bytes, adjacent, 25 if full else 9)
    return Result("direct_or_packed", "Blocks as they lie, or packed", "s", READING, rows)
