"""Lengths: how many of a request's tokens each rank owns."""

from __future__ import annotations

from typing import Any

from sglang_dcp_block.patches.active import layout


def count_by_blocks(
    original: Any, lens: Any, dcp_size: int, dcp_rank: int, start: Any = None, interleave_size: int = 1
) -> Any:
    """AROUND ``layers.dcp.layout.get_dcp_lens``: upstream counts by runs of ``interleave_size`` already; pass ours.

    A caller that names an interleave size of its own (the NPU path) keeps it.
    """
    size = interleave_size if interleave_size != 1 else layout().block_size
    return original(lens, dcp_size, dcp_rank, start, size)
