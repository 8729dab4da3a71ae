"""The model: seconds of a transfer from its segments and bytes, and from which block on packing does not pay.

It knows no queues, no congestion and no overlap. What it was compared with, and where it errs, is in
docs/transfer-model.md.
"""

from __future__ import annotations

from collections.abc import Iterable

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.transfer_model.counts import Way, count
from sglang_dcp_block.transfer_model.links import Link


def seconds(link: Link, segments: float, num_bytes: float, packings: float = 0) -> float:
    """Seconds of a transfer to one decode rank.

    Rule: ``segments * segment_seconds + num_bytes / bytes_per_second``, and where rows are packed first
    ``num_bytes / gather_bytes_per_second + packings * sync_seconds``.
    Args:
        packings: chunks that are gathered into a pack buffer; 0 for what is sent as it lies.
    Law: grows with each argument; one segment of no bytes costs ``segment_seconds``.
    """
    sent = segments * link.segment_seconds + num_bytes / link.bytes_per_second
    if not packings:
        return sent
    return sent + num_bytes / link.gather_bytes_per_second + packings * link.sync_seconds


def rank_seconds(
    link: Link,
    way: Way,
    tokens: int,
    *,
    layout: DcpLayout,
    page_size: int,
    chunk_tokens: int,
    num_layers: int,
    row_bytes: int,
    scattered: bool = False,
) -> float:
    """Seconds of one prompt to rank 0, which gets the most; ranks are taken to receive side by side.

    Arguments and errors as of :func:`counts.count`.
    """
    got = count(way, tokens, layout=layout, page_size=page_size, chunk_tokens=chunk_tokens, scattered=scattered)
    packings = got.chunks[0] if way is Way.PACKED else 0
    return seconds(link, num_layers * got.segments[0], num_layers * got.rows[0] * row_bytes, packings)


def break_even_block(
    link: Link,
    blocks: Iterable[int],
    tokens: int,
    *,
    dcp_size: int,
    page_size: int,
    chunk_tokens: int,
    num_layers: int,
    row_bytes: int,
    scattered: bool = False,
) -> int | None:
    """The smallest of ``blocks`` that is sent as it lies in no more time than packed; None if packing wins with all.

    Args:
        blocks: sizes in tokens that divide the page.
    """
    for block in sorted(blocks):
        layout = DcpLayout(dcp_size, block)
        direct, packed = (
            rank_seconds(
                link,
                way,
                tokens,
                layout=layout,
                page_size=page_size,
                chunk_tokens=chunk_tokens,
                num_layers=num_layers,
                row_bytes=row_bytes,
                scattered=scattered,
            )
            for way in (Way.DIRECT, Way.PACKED)
        )
        if direct <= packed:
            return block
    return None


def long_run_break_even(
    link: Link, row_bytes: int, *, packed_segment_rows: float = float("inf"), sync_rows: float = float("inf")
) -> float:
    """The break-even block of a long transfer as a formula, in tokens, not rounded and not bound to a page.

    Rule: sent as it lies, a row costs 1/B of a segment; packed, ``1 / packed_segment_rows`` of a segment, its bytes through
    the gather, and ``1 / sync_rows`` of a sync. Equal at
    ``1/B = 1/packed_segment_rows + (row_bytes/gather_bytes_per_second + sync_seconds/sync_rows) / segment_seconds``.
    Args:
        packed_segment_rows: rows of a packed segment: a page where the decode rank's pages are scattered.
        sync_rows: rows (of all layers) that one packing gathers.
    """
    per_row = row_bytes / link.gather_bytes_per_second + link.sync_seconds / sync_rows
    share = 1 / packed_segment_rows + per_row / link.segment_seconds
    return 1 / share
