"""A plan as one HTML file that needs nothing else: the tables and the picture."""

from __future__ import annotations

import base64
import io
from html import escape
from pathlib import Path

from rich.console import Console

from sglang_dcp_block.plan.draw import png
from sglang_dcp_block.plan.show import show
from sglang_dcp_block.plan.whole import Plan

WIDTH = 120


def write_html(plan: Plan, file: Path) -> None:
    """Write the page.

    Raises:
        NoMatplotlib: it does not load.
        OSError: the file cannot be written.
    """
    file.write_text(html(plan), encoding="utf-8")


def html(plan: Plan) -> str:
    """The page as text.

    Raises:
        NoMatplotlib: it does not load.
    """
    picture = base64.b64encode(png(plan)).decode("ascii")
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    show(plan, console)
    text = console.export_html(
        inline_styles=True, code_format='<pre style="font-family:monospace;line-height:1.3">{code}</pre>'
    )
    title = escape(f"plan: {plan.inputs.shape.name}, TP {plan.inputs.tp_size}, DCP {plan.inputs.dcp_size}")
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{title}</title></head>\n'
        f'<body style="margin:2em">\n{text}\n<img alt="{title}" style="max-width:100%" '
        f'src="data:image/png;base64,{picture}">\n</body>\n</html>\n'
    )
