"""Just enough SVG for the pictures of the docs: boxes, text and lines, the same bytes each time."""

from __future__ import annotations

from html import escape

RANK_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2", "#edc948", "#9c755f")
INK, PALE = "#222222", "#f2f2f2"


class Drawing:
    """A picture of a given size in pixels; shapes are drawn in the order of the calls."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            'font-family="DejaVu Sans, Verdana, sans-serif" font-size="13">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" fill="white"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, text: str = "", fill: str = PALE) -> None:
        """A box with its text in the middle."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" '
            'stroke="white" stroke-width="2"/>'
        )
        if text:
            ink = INK if fill == PALE else "white"
            self.text(x + width / 2, y + height / 2 + 5, text, anchor="middle", ink=ink)

    def text(self, x: float, y: float, text: str, anchor: str = "start", ink: str = INK, bold: bool = False) -> None:
        """Text whose baseline is at ``y``."""
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{ink}"{weight}>{escape(text)}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, ink: str = INK, width: float = 1) -> None:
        """A straight line."""
        self._parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{ink}" stroke-width="{width:g}"/>'
        )

    def as_text(self) -> str:
        """The whole file."""
        return "\n".join([*self._parts, "</svg>", ""])
