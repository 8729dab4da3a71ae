"""Segments and rows that each decode rank gets of prompts, counted with the layout's maps.

Pages of both pools are made up: *fresh* ones follow each other, as in a pool that was never used; of *scattered* ones no two
are neighbours, the worst that a fragmented pool can be. Then a rank's share of a chunk is one range of its rows that is cut
at multiples of a length, and nothing has to be planned; tests compare with what the sender's planner makes of such pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from sglang_dcp_block.dcp.layout import DcpLayout, Int64Array


class Way(StrEnum):
    """How a rank's share leaves the prefill server."""

    DIRECT = "direct"  # runs as they lie; with B = 1 that is a segment a token
    PACKED = "packed"  # gathered first; cut where the decode rank's pages are
    GROUPED = "grouped"  # as they lie, from pages that were placed by decode rank (--dcp-group-pages)
    ONE_SEGMENT = "one segment"  # all of a rank's share of a layer at once: the least that any layout could cost


@dataclass(frozen=True, slots=True)
class Counts:
    """What prompts are in one layer. Everything by decode rank."""

    rows: tuple[int, ...]
    segments: tuple[int, ...]
    chunks: tuple[int, ...]  # chunks in which the rank gets anything


def count(
    way: Way,
    tokens: int | Sequence[int],
    numbers: int | Sequence[int] = 1,
    *,
    layout: DcpLayout,
    page_size: int,
    chunk_tokens: int,
    scattered: bool = False,
) -> Counts:
    """Map prompts to what each decode rank gets of them in one layer.

    Rule: a prompt leaves in chunks of ``chunk_tokens``. A rank's share of a chunk is a range of its local indices. A segment
    ends where the range does, and at multiples of the block (DIRECT), of the page (other ways, in scattered pages), or
    nowhere else (other ways, in fresh pages, and one rank alone).
    Args:
        tokens: of each prompt.
        numbers: of prompts of each length.
        layout: the decode server's; its block divides the page.
        page_size: rows of a page, on both sides.
        chunk_tokens: of chunked prefill, a multiple of the page.
        scattered: no two pages are neighbours, on either side; grouping then has nothing to work with.
    Raises:
        ValueError: numbers that do not fit each other, saying expected and got.
    Law: as :func:`dcp.transfer.plan_runs` plans them. Rows sum to the tokens over ranks, in every way; DIRECT with B = 1 and
    more than one rank has as many segments as rows; GROUPED in fresh pages has one segment a rank and chunk.

    >>> layout, sizes = DcpLayout(2, 4), {"page_size": 4, "chunk_tokens": 16}
    >>> [count(way, 32, layout=layout, **sizes).segments for way in Way]
    [(4, 4), (2, 2), (2, 2), (1, 1)]
    """
    lengths, weights = np.atleast_1d(np.asarray(tokens, np.int64)), np.atleast_1d(np.asarray(numbers, np.int64))
    _check(way, int(lengths.min(initial=0)), layout, page_size, chunk_tokens)
    starts = np.zeros_like(lengths)
    if way is not Way.ONE_SEGMENT:
        starts, lengths, weights = _chunks(lengths, np.broadcast_to(weights, lengths.shape), chunk_tokens)
    cut = _cut(way, layout, page_size, scattered)
    rows, segments, chunks = [], [], []
    for rank in range(layout.dcp_size):
        first, end = layout.local_len(starts, rank), layout.local_len(starts + lengths, rank)
        some = end > first
        pieces = some if cut is None else some * (-(-end // cut) - first // cut)
        rows.append(int(((end - first) * weights).sum()))
        segments.append(int((pieces * weights).sum()))
        chunks.append(int((some * weights).sum()))
    return Counts(tuple(rows), tuple(segments), tuple(chunks))


def _chunks(lengths: Int64Array, weights: Int64Array, chunk_tokens: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """(first tokens, tokens, weights) of all chunks of prompts; whole ones once for all prompts that have them."""
    whole = lengths // chunk_tokens
    prompts = np.zeros(int(whole.max(initial=0)) + 1, np.int64)  # by their number of whole chunks
    np.add.at(prompts, whole, weights)
    having = prompts[::-1].cumsum()[::-1][1:]  # prompts that have the first whole chunk, the second, ...
    starts = np.concatenate((np.arange(len(having)), whole)) * chunk_tokens
    tokens = np.concatenate((np.full_like(having, chunk_tokens), lengths % chunk_tokens))
    return starts, tokens, np.concatenate((having, weights))


def _cut(way: Way, layout: DcpLayout, page_size: int, scattered: bool) -> int | None:
    """Rows at whose multiples a rank's share of a chunk is cut; None if at none."""
    if way is Way.ONE_SEGMENT:
        return None
    if way is Way.DIRECT and layout.dcp_size > 1:
        return layout.block_size
    return page_size if scattered else None


def _check(way: Way, tokens: int, layout: DcpLayout, page_size: int, chunk_tokens: int) -> None:
    if tokens < 0:
        raise ValueError(f"tokens: expected 0 or more, got {tokens}")
    if page_size < 1 or page_size % layout.block_size:
        raise ValueError(f"page size: expected a multiple of the block of {layout.block_size} tokens, got {page_size}")
    if way is Way.GROUPED and layout.block_size != page_size:
        raise ValueError(f"grouped pages: expected blocks of a page of {page_size}, got {layout.block_size}")
    if chunk_tokens < 1 or chunk_tokens % page_size:
        raise ValueError(f"chunk: expected a multiple of the page of {page_size} tokens, got {chunk_tokens}")
