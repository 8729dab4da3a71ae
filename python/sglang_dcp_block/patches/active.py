"""The layout that this process is armed with: one for all hooks, set once at start.

Hooks ask :func:`layout` each time they run; nothing else of the process's state reaches them.
"""

from __future__ import annotations

from sglang_dcp_block.dcp.layout import DcpLayout

_layout: DcpLayout | None = None

group_pages = 0  # decode ranks that this process groups pages for; 0 where it does not
prefill_is_armed = False  # whether this scheduler of a prefill server may claim to know blocks


def activate(layout: DcpLayout) -> None:
    """Make ``layout`` the one that every hook of this process uses."""
    global _layout
    _layout = layout


def layout() -> DcpLayout:
    """The active layout.

    Raises:
        RuntimeError: the process was never armed, so no hook may run.
    """
    if _layout is None:
        raise RuntimeError("no active DCP block layout: expected the plugin to be armed in this process")
    return _layout


def is_active() -> bool:
    """Whether this process is armed."""
    return _layout is not None


def layout_or_stock(dcp_size: int) -> DcpLayout:
    """The active layout, or SGLang's own token round-robin over ``dcp_size`` ranks in a process without blocks."""
    return _layout if _layout is not None else DcpLayout(dcp_size, 1)
