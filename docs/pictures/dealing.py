"""How tokens are dealt to ranks, and what of an ordered source each rank gets: one picture a layout."""

from __future__ import annotations

from sglang_dcp_block.dcp.layout import DcpLayout
from svg import INK, RANK_COLOURS, Drawing

CELL, LEFT, NUM_TOKENS, DCP_SIZE = 30, 150, 24, 4


def picture(block_size: int) -> str:
    """24 tokens of a request over four ranks, in blocks of ``block_size`` tokens."""
    layout = DcpLayout(DCP_SIZE, block_size)
    name = "Token round-robin (B = 1)" if block_size == 1 else f"Block round-robin, B = {block_size}"
    drawing = Drawing(LEFT + NUM_TOKENS * CELL + 20, 310, name)
    drawing.text(16, 26, f"{name}, P = {DCP_SIZE} ranks", bold=True)
    drawing.text(16, 65, "request, in order")
    drawing.text(16, 82, "(prefill's side)")
    for position in range(NUM_TOKENS):
        owner = layout.owner(position)
        drawing.box(LEFT + position * CELL, 50, CELL, 34, str(position), RANK_COLOURS[owner])
    _segments(drawing, layout)
    for rank in range(DCP_SIZE):
        top = 140 + rank * 36
        drawing.text(16, top + 20, f"rank {rank}")
        for row in range(layout.local_len(NUM_TOKENS, rank)):
            drawing.box(LEFT + row * CELL, top, CELL, 30, str(layout.position(rank, row)), RANK_COLOURS[rank])
    count = len(layout.runs(0, NUM_TOKENS, 0)[0])
    drawing.text(
        16, 300, f"Each rank stores its rows without gaps. Rank 0's share of the ordered source is {count} pieces."
    )
    return drawing.as_text()


def _segments(drawing: Drawing, layout: DcpLayout) -> None:
    """A bar under every contiguous piece of rank 0's share."""
    starts, _, lengths = layout.runs(0, NUM_TOKENS, 0)
    drawing.text(16, 110, "pieces for rank 0")
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        left, right = LEFT + start * CELL + 3, LEFT + (start + length) * CELL - 3
        drawing.line(left, 105, right, 105, INK, 3)
