"""Segments and rows that each decode rank gets of one prompt, counted with the sender's own planner.

Pages of both pools are made up: *fresh* ones follow each other, as in a pool that was never used; of *scattered* ones no two
are neighbours, the worst that a fragmented pool can be.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from sglang_dcp_block.dcp.layout import DcpLayout, Int64Array
from sglang_dcp_block.dcp.transfer import TransferRuns, plan_runs


class Way(StrEnum):
    """How a rank's share leaves the prefill server."""

    DIRECT = "direct"  # runs as they lie; with B = 1 that is a segment a token
    PACKED = "packed"  # gathered first; cut where the decode rank's pages are
    GROUPED = "grouped"  # as they lie, from pages that were placed by decode rank (--dcp-group-pages)
    ONE_SEGMENT = "one segment"  # all of a rank's share of a layer at once: the least that any layout could cost


@dataclass(frozen=True, slots=True)
class Counts:
    """One prompt, in one layer. Everything by decode rank."""

    rows: tuple[int, ...]
    segments: tuple[int, ...]
    chunks: tuple[int, ...]  # chunks in which the rank gets anything

    def __add__(self, other: Counts) -> Counts:
        pairs = ((self.rows, other.rows), (self.segments, other.segments), (self.chunks, other.chunks))
        return Counts(*(tuple(a + b for a, b in zip(mine, theirs, strict=True)) for mine, theirs in pairs))

    def times(self, number: int) -> Counts:
        """As many prompts of the same length."""
        return Counts(*(tuple(number * n for n in values) for values in (self.rows, self.segments, self.chunks)))


def nothing(dcp_size: int) -> Counts:
    """What adds nothing."""
    return Counts(*(((0,) * dcp_size),) * 3)


def count(
    way: Way,
    tokens: int,
    *,
    layout: DcpLayout,
    page_size: int,
    chunk_tokens: int,
    scattered: bool = False,
) -> Counts:
    """Map a prompt to what each decode rank gets of it in one layer.

    Rule: the prompt leaves in chunks of ``chunk_tokens``; each is planned by :func:`dcp.transfer.plan_runs`.
    Args:
        tokens: of the prompt.
        layout: the decode server's.
        page_size: rows of a page, on both sides; a multiple of the block for every way but PACKED and DIRECT with B = 1.
        chunk_tokens: of chunked prefill, a multiple of the page.
        scattered: no two pages are neighbours, on either side; grouping then has nothing to work with.
    Raises:
        ValueError: numbers that do not fit each other, saying expected and got.
    Law: rows sum to ``tokens`` over ranks, in every way; DIRECT with B = 1 and more than one rank has as many segments as
    rows; GROUPED in fresh pages has one segment a rank and chunk.

    >>> layout, sizes = DcpLayout(2, 4), {"page_size": 4, "chunk_tokens": 16}
    >>> [count(way, 32, layout=layout, **sizes).segments for way in Way]
    [(4, 4), (2, 2), (2, 2), (1, 1)]
    """
    _check(way, tokens, layout, page_size, chunk_tokens)
    ranks = range(layout.dcp_size)
    if way is Way.ONE_SEGMENT:
        rows = tuple(layout.local_len(tokens, rank) for rank in ranks)
        some = tuple(int(number > 0) for number in rows)
        return Counts(rows, some, some)
    virtual_page = layout.dcp_size * math.lcm(page_size, layout.block_size)
    total = nothing(layout.dcp_size)
    repeats: dict[tuple[int, int], int] = {}  # chunks that begin at the same place of a virtual page count alike
    for first in range(0, tokens, chunk_tokens):
        kind = (first % virtual_page, min(chunk_tokens, tokens - first))
        repeats[kind] = repeats.get(kind, 0) + 1
    for (offset, length), number in repeats.items():
        total += _of_chunk(way, offset, length, layout, page_size, scattered).times(number)
    return total


@functools.lru_cache(maxsize=65536)
def _of_chunk(way: Way, offset: int, length: int, layout: DcpLayout, page_size: int, scattered: bool) -> Counts:
    """One chunk that begins ``offset`` tokens behind the begin of a virtual page."""
    step = 2 if scattered else 1
    num_src = -(-length // page_size)
    virtual_page = layout.dcp_size * page_size
    src = step * _source_order(way, offset // page_size, num_src, layout.dcp_size)
    dst = step * np.arange(-(-(offset + length) // virtual_page) * max(1, layout.block_size // page_size))
    rows, segments = [], []
    for rank in range(layout.dcp_size):
        runs = plan_runs(
            src,
            dst,
            page_size=page_size,
            layout=layout,
            rank=rank,
            src_page_offset=offset // page_size,
            num_kv_tokens=length,
        )
        rows.append(runs.num_rows)
        segments.append(_stretches(runs) if way is Way.PACKED else len(runs.lengths))
    return Counts(tuple(rows), tuple(segments), tuple(int(number > 0) for number in rows))


def _source_order(way: Way, first_page: int, num_pages: int, dcp_size: int) -> Int64Array:
    """Physical pages of a chunk, by logical page: ascending, or with those of a decode rank side by side."""
    order = np.arange(num_pages)
    if way is Way.GROUPED:
        order[np.argsort((first_page + order) % dcp_size, kind="stable")] = np.arange(num_pages)
    return order


def _stretches(runs: TransferRuns) -> int:
    """Contiguous pieces on the decode rank alone: the source is a pack buffer."""
    if not len(runs.lengths):
        return 0
    return 1 + int(np.count_nonzero(runs.dst_rows[1:] != runs.dst_rows[:-1] + runs.lengths[:-1]))


def _check(way: Way, tokens: int, layout: DcpLayout, page_size: int, chunk_tokens: int) -> None:
    if tokens < 0:
        raise ValueError(f"tokens: expected 0 or more, got {tokens}")
    if page_size < 1 or page_size % layout.block_size:
        raise ValueError(f"page size: expected a multiple of the block of {layout.block_size} tokens, got {page_size}")
    if way is Way.GROUPED and layout.block_size != page_size:
        raise ValueError(f"grouped pages: expected blocks of a page of {page_size}, got {layout.block_size}")
    if chunk_tokens < 1 or chunk_tokens % page_size:
        raise ValueError(f"chunk: expected a multiple of the page of {page_size} tokens, got {chunk_tokens}")
