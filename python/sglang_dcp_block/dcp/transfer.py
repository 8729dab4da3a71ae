"""Prefill to decode: which rows of the prefill server go where on one decode rank, as contiguous runs.

The prefill server (no DCP) keeps a request's rows in position order inside its pages; each decode rank keeps its own
blocks, one behind the other, inside its pages. For P = 2, B = 4 and pages of 8 rows, rank 1 of the decode server gets::

    prefill     page 7                        page 3
    position    0 1 2 3   4 5  6  7           8 9 10 11   12 13 14 15
    owner          0     '----1----'              0      '-----1-----'
                               |                               |
    decode, rank 1    page 5:  0 1 2 3                 4 5 6 7          runs (60, 40, 4) and (28, 44, 4)

A run is (source row, destination row, rows). Runs that follow each other on both sides are one. Work grows with blocks and
pages, never with tokens, and a layer's address lists are one multiplication: nothing here looks at a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_dcp_block.dcp.layout import DcpLayout, Int64Array

Pages = Sequence[int] | npt.NDArray[np.integer]
Addresses = int | Sequence[int] | npt.NDArray[np.uint64]
UInt64Array = npt.NDArray[np.uint64]

DIRECT_BYTES = 16384  # a block of this many bytes is sent as it lies; docs/adr/0002-direct-or-packed.md


@dataclass(frozen=True, slots=True)
class TransferRuns:
    """Contiguous pieces of a transfer to one rank, in position order."""

    src_rows: Int64Array  # [num_runs] first row on the prefill server
    dst_rows: Int64Array  # [num_runs] first row on the decode rank
    lengths: Int64Array  # [num_runs] rows, 1 or more

    @property
    def num_rows(self) -> int:
        """Rows of all runs together."""
        return int(self.lengths.sum())

    def rows(self) -> tuple[Int64Array, Int64Array]:
        """Every row by itself: (source rows, destination rows), each ``[num_rows]``.  Work grows with tokens.

        >>> runs = TransferRuns(np.array([60, 28]), np.array([40, 44]), np.array([4, 1]))
        >>> [rows.tolist() for rows in runs.rows()]
        [[60, 61, 62, 63, 28], [40, 41, 42, 43, 44]]
        """
        within = np.arange(self.num_rows) - np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)
        return np.repeat(self.src_rows, self.lengths) + within, np.repeat(self.dst_rows, self.lengths) + within


@dataclass(frozen=True, slots=True)
class Segments:
    """What a transfer engine is handed: pieces of memory, by address."""

    src: UInt64Array  # [num_segments] addresses here
    dst: UInt64Array  # [num_segments] addresses on the peer
    lengths: UInt64Array  # [num_segments] bytes

    def __len__(self) -> int:
        return len(self.lengths)

    def blocks(self) -> list[tuple[int, int, int]]:
        """The segments as (source address, destination address, bytes) of Python ints."""
        return list(zip(self.src.tolist(), self.dst.tolist(), self.lengths.tolist(), strict=True))


def plan_runs(
    src_pages: Pages,
    dst_pages: Pages,
    *,
    page_size: int,
    layout: DcpLayout,
    rank: int,
    src_page_offset: int = 0,
    decode_prefix_len: int = 0,
    num_kv_tokens: int | None = None,
) -> TransferRuns:
    """Map one chunk of a request to the runs that decode rank ``rank`` gets.

    Rule: token i of the chunk has position t = decode_prefix_len + src_page_offset * page_size + i. It goes to
    ``owner(t)``, from row ``src_pages[i // page_size] * page_size + i % page_size`` to row ``dst_pages[j // page_size] *
    page_size + j % page_size``, with j = local_index(t) - decode_prefix_len / P: its index among the rank's tokens behind
    the prefix that the decode server has already.
    Args:
        src_pages: ``[num_src_pages]`` int, the chunk's pages on the prefill server, in position order.
        dst_pages: ``[num_dst_pages]`` int, the request's virtual pages on the decode server from ``decode_prefix_len`` on;
            virtual page p is physical page p on every rank. One that this rank has no token in may be missing.
        page_size: rows of a physical page, on both sides.
        layout: the decode server's.
        rank: in [0, P).
        src_page_offset: pages of the request between the prefix and this chunk.
        decode_prefix_len: tokens; a multiple of the virtual page, page_size * P, and of B * P should B not divide the page.
        num_kv_tokens: tokens in the chunk, the last page need not be full; None means full pages.
    Returns:
        Runs in position order, none for a rank that owns nothing here.
    Raises:
        ValueError: a prefix that is no multiple, negative numbers, too few pages; saying expected and got.
    Law: over ranks and chunks every token goes out exactly once; no two runs can be joined; at most
    ceil(num_kv_tokens / (P*B)) runs where B divides the page; B = 1 is SGLang's own plan.
    Host only.

    >>> runs = plan_runs([7, 3], [5], page_size=8, layout=DcpLayout(dcp_size=2, block_size=4), rank=1)
    >>> runs.src_rows.tolist(), runs.dst_rows.tolist(), runs.lengths.tolist()
    ([60, 28], [40, 44], [4, 4])
    """
    src, dst, num_tokens = _checked(src_pages, dst_pages, page_size, src_page_offset, num_kv_tokens)
    virtual_page = layout.dcp_size * math.lcm(page_size, layout.block_size)
    if decode_prefix_len < 0 or decode_prefix_len % virtual_page:
        raise ValueError(
            f"decode_prefix_len: expected a multiple of {virtual_page} tokens (a page of {page_size} on each of "
            f"{layout.dcp_size} ranks, blocks of {layout.block_size}), got {decode_prefix_len}"
        )
    start = decode_prefix_len + src_page_offset * page_size
    positions, local, lengths = layout.runs(start, num_tokens, rank)
    if layout.dcp_size == 1 or page_size % layout.block_size:
        positions, local, lengths = _cut_at_pages(start, num_tokens, page_size, layout, rank, local, lengths)
    src_offsets, dst_offsets = positions - start, local - decode_prefix_len // layout.dcp_size
    needed_rows = int(dst_offsets[-1] + lengths[-1]) if len(lengths) else 0
    _require_pages("dst_pages", dst, needed_rows, page_size, "rows")
    return _joined(_rows(src, src_offsets, page_size), _rows(dst, dst_offsets, page_size), lengths)


def plan_replicated_runs(
    src_pages: Pages,
    dst_pages: Pages,
    *,
    page_size: int,
    dcp_size: int,
    src_page_offset: int = 0,
    num_kv_tokens: int | None = None,
) -> TransferRuns:
    """Map one chunk of a request to the runs that a pool without DCP gets, such as a draft model's: all tokens.

    Rule: every rank holds all slots in position order, ``page_size * dcp_size`` of them in a virtual page, so token i of
    the chunk goes to slot j = src_page_offset * page_size + i behind the prefix.  Arguments, errors and safety as
    :func:`plan_runs`.

    >>> runs = plan_replicated_runs([7, 3, 4], [5, 9], page_size=8, dcp_size=2)
    >>> runs.src_rows.tolist(), runs.dst_rows.tolist(), runs.lengths.tolist()
    ([56, 24, 32], [80, 88, 144], [8, 8, 8])
    """
    src, dst, num_tokens = _checked(src_pages, dst_pages, page_size, src_page_offset, num_kv_tokens)
    virtual_page, skipped = page_size * dcp_size, src_page_offset * page_size
    needed_slots = skipped + num_tokens if num_tokens else 0
    _require_pages("dst_pages", dst, needed_slots, virtual_page, "slots")
    offsets = np.arange(0, num_tokens, page_size, dtype=np.int64)
    lengths = np.minimum(num_tokens - offsets, page_size)
    return _joined(_rows(src, offsets, page_size), _rows(dst, skipped + offsets, virtual_page), lengths)


def segments(
    runs: TransferRuns, src_ptrs: Addresses, dst_ptrs: Addresses, token_bytes: int | Sequence[int]
) -> Segments:
    """Map runs to pieces of memory, in each layer's buffer.

    Args:
        src_ptrs, dst_ptrs: ``[num_layers]`` or one: addresses of the buffers.
        token_bytes: ``[num_layers]`` or one: bytes of a row.
    Returns:
        ``[num_layers * num_runs]``, layer by layer.
    Raises:
        ValueError: the numbers of layers differ.

    >>> runs = TransferRuns(np.array([60, 28]), np.array([40, 44]), np.array([4, 4]))
    >>> segments(runs, [1000, 5000], [0, 2000], 10).blocks()
    [(1600, 400, 40), (1280, 440, 40), (5600, 2400, 40), (5280, 2440, 40)]
    """
    src, dst = np.atleast_1d(np.asarray(src_ptrs, np.uint64)), np.atleast_1d(np.asarray(dst_ptrs, np.uint64))
    width = np.atleast_1d(np.asarray(token_bytes, np.uint64))
    if len(src) != len(dst) or len(width) not in (1, len(src)):
        raise ValueError(
            f"dst_ptrs, token_bytes: expected one for each of the {len(src)} sources, got {len(dst)} and {len(width)}"
        )
    width = width[:, None]
    shape = (len(src), len(runs.lengths))
    return Segments(
        (src[:, None] + runs.src_rows.astype(np.uint64) * width).ravel(),
        (dst[:, None] + runs.dst_rows.astype(np.uint64) * width).ravel(),
        np.broadcast_to(runs.lengths.astype(np.uint64) * width, shape).ravel(),
    )


def join(parts: Sequence[Segments]) -> Segments:
    """Several transfers' segments as one, in order."""
    if len(parts) == 1:
        return parts[0]
    empty = np.empty(0, np.uint64)
    return Segments(
        np.concatenate([empty, *(part.src for part in parts)]),
        np.concatenate([empty, *(part.dst for part in parts)]),
        np.concatenate([empty, *(part.lengths for part in parts)]),
    )


def batches(whole: Segments, max_segments: int) -> Iterator[Segments]:
    """Cut a transfer into pieces of at most ``max_segments``; 0 or less means no limit.  No piece is empty.

    >>> runs = TransferRuns(np.arange(5), np.arange(5), np.ones(5, np.int64))
    >>> [len(batch) for batch in batches(segments(runs, 0, 0, 8), 2)]
    [2, 2, 1]
    """
    step = max_segments if max_segments > 0 else max(len(whole), 1)
    for first in range(0, len(whole), step):
        cut = slice(first, first + step)
        yield Segments(whole.src[cut], whole.dst[cut], whole.lengths[cut])


def prefers_direct(layout: DcpLayout, token_bytes: float, threshold: int = DIRECT_BYTES) -> bool:
    """Whether runs are long enough to be sent as they lie, with nothing packed first.

    Rule: a block's bytes, B * token_bytes, reach the threshold; one rank alone (P = 1) always has long runs.
    Args:
        token_bytes: of a row; the mean over layers where they differ, since each layer has as many runs.
        threshold: bytes; docs/adr/0002-direct-or-packed.md says how the default was measured.

    >>> [prefers_direct(DcpLayout(8, block), 1152) for block in (1, 4, 8, 64)]
    [False, False, False, True]
    """
    return layout.dcp_size == 1 or layout.block_size * token_bytes >= threshold


def _checked(
    src_pages: Pages, dst_pages: Pages, page_size: int, src_page_offset: int, num_kv_tokens: int | None
) -> tuple[Int64Array, Int64Array, int]:
    """(source pages, destination pages, tokens) for a chunk that its source pages hold."""
    if page_size < 1:
        raise ValueError(f"page_size: expected 1 row or more, got {page_size}")
    if src_page_offset < 0:
        raise ValueError(f"src_page_offset: expected 0 pages or more, got {src_page_offset}")
    src, dst = np.asarray(src_pages, np.int64), np.asarray(dst_pages, np.int64)
    num_tokens = len(src) * page_size if num_kv_tokens is None else int(num_kv_tokens)
    if num_tokens < 0:
        raise ValueError(f"num_kv_tokens: expected 0 tokens or more, got {num_tokens}")
    _require_pages("src_pages", src, num_tokens, page_size, "tokens")
    return src, dst, num_tokens


def _require_pages(name: str, pages: Int64Array, needed_rows: int, page_rows: int, what: str) -> None:
    needed = -(-needed_rows // page_rows)
    if len(pages) < needed:
        raise ValueError(f"{name}: expected {needed} pages or more for {needed_rows} {what}, got {len(pages)}")
    if needed and (lowest := int(pages[:needed].min())) < 0:
        raise ValueError(f"{name}: expected page ids of 0 or more, got {lowest}")


def _rows(pages: Int64Array, offsets: Int64Array, page_rows: int) -> Int64Array:
    """Rows at ``offsets`` of a buffer that is spread over ``pages``."""
    page, within = np.divmod(offsets, page_rows)
    found: Int64Array = pages[page] * page_rows + within
    return found


def _cut_at_pages(
    start: int, num_tokens: int, page_size: int, layout: DcpLayout, rank: int, local: Int64Array, lengths: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Runs of the layout, cut where a page ends on either side, which blocks that divide the page never straddle."""
    if not len(lengths):
        return local, local, lengths
    first, end = int(local[0]), int(local[-1] + lengths[-1])
    dst_borders = np.arange(first // page_size + 1, -(-end // page_size), dtype=np.int64) * page_size
    borders = np.arange(start + page_size, start + num_tokens, page_size, dtype=np.int64)
    src_borders = layout.local_index(borders[layout.owner(borders) == rank])
    edges = np.unique(np.concatenate((local, dst_borders, src_borders, [end])))
    return layout.position(rank, edges[:-1]), edges[:-1], np.diff(edges)


def _joined(src_rows: Int64Array, dst_rows: Int64Array, lengths: Int64Array) -> TransferRuns:
    """Runs, with those joined that follow each other on both sides."""
    if not len(lengths):
        return TransferRuns(src_rows, dst_rows, lengths)
    follows = (src_rows[1:] == src_rows[:-1] + lengths[:-1]) & (dst_rows[1:] == dst_rows[:-1] + lengths[:-1])
    heads = np.flatnonzero(np.concatenate(([True], ~follows)))
    return TransferRuns(src_rows[heads], dst_rows[heads], np.add.reduceat(lengths, heads))
