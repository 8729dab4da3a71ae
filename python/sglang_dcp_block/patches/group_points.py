"""Patch points of ``--dcp-group-pages``."""

from __future__ import annotations

from sglang_dcp_block.patches import group_pages
from sglang_dcp_block.patches.register import Kind, PatchPoint

_ALLOCATOR = "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator"
_UPSTREAM = "an order of pages by decode rank in upstream's allocator"

_RELIED_ON = tuple(
    PatchPoint(f"{_ALLOCATOR}.{name}", Kind.RELIES, why, "nothing: watched for changes")
    for name, why in (
        ("clear", "The free list ascends from page 1 on."),
        ("_release_page_ids", "Freed pages wait unsorted for a merge, and never go in front of the list."),
    )
)

_EXTEND = PatchPoint(
    f"{_ALLOCATOR}.alloc_extend", Kind.AROUND,
    "Prefill servers: pages of a chunk that one decode rank gets lie side by side, one run instead of one a page. "
    "Decode servers: a request takes the free pages with the fewest gaps.",
    _UPSTREAM, group_pages.alloc_in_order,
)  # fmt: skip

# In every scheduler of a prefill server with the flag.
PREFILL_GROUP_POINTS: tuple[PatchPoint, ...] = (
    _EXTEND,
    PatchPoint(
        f"{_ALLOCATOR}.merge_and_sort_free", Kind.AROUND,
        "Prefill servers: long runs of free pages are handed out first, so that a chunk takes few of them.",
        _UPSTREAM, group_pages.merge_long_runs_first,
    ),
    *_RELIED_ON,
)  # fmt: skip

# In every scheduler of a decode server with the flag.
DECODE_GROUP_POINTS: tuple[PatchPoint, ...] = (_EXTEND, *_RELIED_ON)
