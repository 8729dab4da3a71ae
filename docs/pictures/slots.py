"""From a position of a request to a slot of ``req_to_token`` to a row of one rank."""

from __future__ import annotations

from sglang_dcp_block.dcp.layout import DcpLayout
from svg import PALE, RANK_COLOURS, Drawing

CELL, LEFT, WIDTH = 38, 190, 16
DCP_SIZE, PAGE_SIZE, BLOCK_SIZE = 2, 4, 4
VIRTUAL_PAGES = (3, 1)  # of the request, in its order


def picture() -> str:
    """16 positions, two virtual pages that the allocator gave in any order, and where the rows lie."""
    layout, virtual = DcpLayout(DCP_SIZE, BLOCK_SIZE), DCP_SIZE * PAGE_SIZE
    drawing = Drawing(LEFT + WIDTH * CELL + 20, 330, "Position, slot, row")
    drawing.text(16, 26, f"P = {DCP_SIZE} ranks, pages of {PAGE_SIZE} tokens, B = {BLOCK_SIZE}", bold=True)
    for label, top in (
        ("position in the request", 50),
        ("virtual page", 90),
        ("slot in req_to_token", 130),
        ("row of its owner", 170),
    ):
        drawing.text(16, top + 20, label)
    slots = [page * virtual + i for page in VIRTUAL_PAGES for i in range(virtual)]
    for index, page in enumerate(VIRTUAL_PAGES):
        drawing.box(LEFT + index * virtual * CELL, 90, virtual * CELL, 30, f"virtual page {page}")
    for position, slot in enumerate(slots):
        left, colour = LEFT + position * CELL, RANK_COLOURS[layout.owner(position)]
        drawing.box(left, 50, CELL, 30, str(position), colour)
        drawing.box(left, 130, CELL, 30, str(slot), colour)
        drawing.box(left, 170, CELL, 30, str(layout.local_index(slot)), colour)
    for rank in range(DCP_SIZE):
        _buffer(drawing, layout, rank, {layout.local_index(s) for s in slots if layout.owner(s) == rank})
    return drawing.as_text()


def _buffer(drawing: Drawing, layout: DcpLayout, rank: int, used: set[int]) -> None:
    """A rank's buffer: rows 0 to 15; page 0 takes padded writes."""
    top = 226 + rank * 44
    drawing.text(16, top + 20, f"buffer of rank {rank}, by row")
    for row in range(WIDTH):
        fill = RANK_COLOURS[rank] if row in used else PALE
        drawing.box(LEFT + row * CELL, top, CELL, 30, str(row), fill)
    for page in range(1, WIDTH // PAGE_SIZE):
        x = LEFT + page * PAGE_SIZE * CELL
        drawing.line(x, top - 3, x, top + 33)
