"""A chunk of a prompt to one decode rank over real Mooncake TCP: token round-robin, blocks, and what no layout can beat."""

from __future__ import annotations

from benchmarks import environment  # noqa: F401  # before what follows

import itertools  # isort: skip
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from servers import Pool, Registration, make_manager, send

import reference
from benchmarks.record import Check, Result, Row, Value, find
from benchmarks.sender import Handed, WatchedEngine, connected
from benchmarks.timing import in_turns, spread
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.kernels.group_pages import group_pages_torch

P, RANK, PAGE, BLOCK = 8, 0, 64, 64  # rank 0 holds the most of any prompt
BLOCKS = (8, 16, 32, 64, 128, 256, 512)
TOKENS, PACKED, GROUPED, ONE, MEMCPY = (
    "token round-robin",
    "host pack",
    f"blocks of {BLOCK}, grouped",
    "one segment",
    "memcpy",
)

READING = f"""
One chunk of a prompt to decode rank {RANK} of {P}, which holds the most of any prompt, from one process to another
over Mooncake TCP on loopback. Pages have {PAGE} tokens, or as many as a block that is longer; both pools were never
used, so pages ascend. Every row that arrives is compared with its source, outside the timed part, in every round. The
ways take turns.

- **{TOKENS}**: SGLang's layout and SGLang's own sender, a segment a row, in batches that the transport's queue holds.
- **{PACKED}**: the same rows, gathered on the host, then sent as one segment a layer; the least that packing could
  cost without a GPU: no plan, no copy to the device. It holds every byte twice.
- **blocks of B**: the plugin's sender, runs as they lie.
- **{GROUPED}**: the same with pages in the order of `--dcp-group-pages {P}`.
- **{ONE}**: bytes that lie in one piece a layer already, straight to Mooncake: what the transport itself costs.
- **{MEMCPY}**: the same bytes copied within this machine's memory, by one thread: what no transport can beat here.

*bytes* are those of this rank: blocks longer than a short prompt's share put more on rank {RANK} than token
round-robin does. *segments* were counted at the call of Mooncake, *staged* are bytes that were sent from anywhere but
the KV pool. A segment costs the most over TCP: it is an acknowledged round trip. Other transports have other ratios.

No layout has fewer segments than *one segment*, so grouped blocks are measured against it; that must hold. How much
faster one segment is than token round-robin depends on the machine, on the time of a round trip against that of a long
copy through the kernel: beside the factors 25 and 15 stands what one segment reaches. Over loopback, blocks
that fit one of its packets (32 rows of 1,152 bytes) are faster still: see the benchmark segment_sizes.
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is sent."""

    layers: int
    tokens: int
    row_bytes: int  # of one token in one layer

    @property
    def rank_rows(self) -> int:
        """Rows that the receiver may need: whole pages of the longest block."""
        return DcpLayout(P, max(BLOCKS)).max_local_len(self.tokens) + max(BLOCKS)


QUICK = (
    (Shape(8, 16384, 1152), 21),
    (Shape(61, 16384, 1152), 15),
    (Shape(61, 1024, 1152), 15),
    (Shape(61, 100, 1152), 15),
)
FULL = (
    *((Shape(layers, tokens, 1152), 31) for layers in (8, 61) for tokens in (100, 1024, 16384)),
    (Shape(8, 65536, 1152), 15),
    *((Shape(61, tokens, 576), 15) for tokens in (1024, 16384)),
)


class _Bench:
    """All ways of sending one shape."""

    def __init__(self, shape: Shape, engine: WatchedEngine, receiver: Any) -> None:
        self.shape, self.engine, self.receiver = shape, engine, receiver
        self.source = Pool.random(shape.layers, -(-shape.tokens // max(BLOCKS)) * max(BLOCKS), shape.row_bytes)
        receiver.reset()
        self.target = receiver.pool(shape.layers, shape.rank_rows, shape.row_bytes)
        self.rows: dict[str, Any] = {}  # way -> (rows here, rows there), [2, num_rows]
        self.handed: dict[str, Handed] = {}
        self.ways: dict[str, Callable[[], None]] = {}
        self.blocks: dict[str, int] = {}
        self._add_sent(TOKENS, 1)
        self.gathered = np.empty((shape.layers, self.rows[TOKENS].shape[1], shape.row_bytes), np.uint8)
        self._add(PACKED, 1, np.stack([self.rows[TOKENS][0], np.arange(self.gathered.shape[1])]), self._pack)
        for block in BLOCKS:
            self._add_sent(f"blocks of {block}", block)
        self._add_sent(GROUPED, BLOCK, grouped=True)
        num_rows = self.rows[f"blocks of {BLOCK}"].shape[1]
        contiguous = np.stack([np.arange(num_rows)] * 2)
        self._add(ONE, BLOCK, contiguous, lambda: self._straight(self.source, num_rows))
        self._add(MEMCPY, BLOCK, contiguous, lambda: self._copy(num_rows))

    def _add(self, way: str, block: int, rows: Any, call: Callable[[], None]) -> None:
        self.ways[way], self.blocks[way], self.rows[way] = call, block, rows

    def _add_sent(self, way: str, block: int, grouped: bool = False) -> None:
        page, tokens = max(PAGE, block), self.shape.tokens
        num_pages = -(-tokens // page)
        src_pages = torch.arange(num_pages)
        if grouped:
            lens = torch.tensor([0]), torch.tensor([tokens])
            src_pages = group_pages_torch(src_pages, *lens, page_size=page, dcp_size=P)
        src, dst = src_pages.tolist(), list(range(-(-num_pages // P)))
        manager = make_manager(self.source, page, self.engine)

        def call() -> None:
            registration = Registration(P, RANK, block, self.target.ptrs, mooncake_session_id=self.receiver.session)
            status = send(manager, registration, src, dst, num_tokens=tokens)
            if status != 0:
                raise RuntimeError(f"{way}: expected status 0 of the transfer, got {status}")

        pairs = reference.transfer_rows(src, dst, RANK, P, block, page, num_tokens=tokens)
        self._add(way, block, np.array(pairs).T, call)

    def _pack(self) -> None:
        for layer, rows in enumerate(self.source.memory):
            np.take(rows, self.rows[TOKENS][0], axis=0, out=self.gathered[layer])
        self._straight(Pool(self.gathered), self.gathered.shape[1])

    def _straight(self, pool: Pool, num_rows: int) -> None:
        lengths = [num_rows * self.shape.row_bytes] * self.shape.layers
        status = self.engine.batch_transfer_sync(self.receiver.session, pool.ptrs, self.target.ptrs, lengths)
        if status != 0:
            raise RuntimeError(f"expected status 0 of Mooncake, got {status}")

    def _copy(self, num_rows: int) -> None:
        np.copyto(self.target.memory[:, :num_rows], self.source.memory[:, :num_rows])

    @contextmanager
    def verified(self, way: str, round_: int) -> Iterator[None]:
        """Nothing there before, every row there afterwards, and nothing else."""
        src, dst = self.rows[way]
        sent = np.take(self.source.memory, src, axis=1)  # so every way's rows have just been read
        self.target.memory[:] = 255
        if round_ == 0:
            with self.engine.watched(self.source.memory) as handed:
                yield
            self.handed[way] = handed
        else:
            yield
        others = np.setdiff1d(np.arange(self.shape.rank_rows), dst)
        for arrived, layer in zip(self.target.memory, sent, strict=True):
            if not (np.array_equal(arrived[dst], layer) and (arrived[others] == 255).all()):
                raise AssertionError(f"{way}: expected this rank's rows where the layout puts them, and no others")


def _rows(bench: _Bench, seconds: Mapping[str, list[float]]) -> Iterator[Row]:
    spreads = {way: spread(samples) for way, samples in seconds.items()}
    shape = bench.shape
    for way, times in spreads.items():
        handed = bench.handed[way]
        case: dict[str, Value] = {"layers": shape.layers, "tokens": shape.tokens, "row_bytes": shape.row_bytes}
        case |= {"block": bench.blocks[way], "staged": handed.staged_bytes}
        num_bytes = bench.rows[way].shape[1] * shape.row_bytes * shape.layers
        assert handed.num_bytes in (0, num_bytes), f"{way}: expected {num_bytes} bytes, got {handed.num_bytes}"
        yield Row(way, case, times, TOKENS, spreads[TOKENS].p50, num_bytes, handed.segments)


def checks(rows: list[Row]) -> Iterator[Check]:
    """What must hold for chunks of 16k tokens."""
    for layers in (8, 61):
        times = {
            way: find(rows, way, layers=layers, tokens=16384, row_bytes=1152)
            for way in (TOKENS, PACKED, f"blocks of {BLOCK}", GROUPED, ONE)
        }
        grouped, blocks = times[GROUPED].spread.p50, times[f"blocks of {BLOCK}"].spread.p50
        name = f"{layers} layers × 16,384 tokens"
        one, token = times[ONE].spread.p50, times[TOKENS].spread.p50
        yield Check(f"{name}: {GROUPED} ÷ {ONE}, p50", grouped / one, 1.10, at_most=True)
        yield Check(f"{name}: blocks of {BLOCK} ÷ {ONE}, p50", blocks / one, 1.25, at_most=True)
        yield Check(f"{name}: blocks of {BLOCK} ÷ {PACKED}, p50", blocks / times[PACKED].spread.p50, 1.5, at_most=True)
        reached = f"({ONE}: {token / one:.3g}), p50"
        yield Check(f"{name}: {TOKENS} ÷ {GROUPED} {reached}", token / grouped, 25, at_most=False)
        yield Check(f"{name}: {TOKENS} ÷ blocks of {BLOCK} {reached}", token / blocks, 15, at_most=False)
        yield Check(f"{name}: {GROUPED}, segments a layer", (times[GROUPED].segments or 0) / layers, 1, at_most=True)
        yield Check(f"{name}: {GROUPED}, bytes staged", float(times[GROUPED].case["staged"]), 0, at_most=True)


def draw(rows: list[Row], figure: Any) -> None:
    """Times of all ways, a panel a shape."""
    shapes = list(dict.fromkeys((row.case["layers"], row.case["tokens"], row.case["row_bytes"]) for row in rows))
    figure.set_size_inches(4.2 * min(len(shapes), 4), 3.4 * -(-len(shapes) // 4))
    panels = figure.subplots(-(-len(shapes) // 4), min(len(shapes), 4), squeeze=False).flat
    for panel, shape in itertools.zip_longest(panels, shapes):
        if shape is None:
            panel.remove()
            continue
        own = [row for row in rows if (row.case["layers"], row.case["tokens"], row.case["row_bytes"]) == shape]
        middles = [row.spread.p50 * 1e3 for row in own]
        errors = [
            [1e3 * (row.spread.p50 - row.spread.p20) for row in own],
            [1e3 * (row.spread.p80 - row.spread.p50) for row in own],
        ]
        colours = ["tab:blue" if "blocks" in row.way else "tab:grey" for row in own]
        panel.barh([row.way for row in own], middles, xerr=errors, color=colours)
        panel.invert_yaxis()
        panel.set(
            xscale="log", title=f"{shape[0]} layers × {shape[1]:,} tokens\nrows of {shape[2]:,} bytes", xlabel="ms"
        )


def measure(full: bool) -> Result:
    """Send all shapes in all ways."""
    rows: list[Row] = []
    for shape, rounds in FULL if full else QUICK:
        with connected(shape.layers * shape.rank_rows * shape.row_bytes) as (engine, receiver):
            bench = _Bench(shape, engine, receiver)
            slow = (TOKENS, f"blocks of {BLOCKS[0]}") if shape.layers * shape.tokens > 10**5 else ()
            rows += _rows(bench, in_turns(bench.ways, rounds, around=bench.verified, slow=slow))
    return Result(
        "transfer", "Transfer of a chunk to a decode rank", "s", READING, rows, tuple(checks(rows)),
        draw=lambda figure: draw(rows, figure),
    )  # fmt: skip
