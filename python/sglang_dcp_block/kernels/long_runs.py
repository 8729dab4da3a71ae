"""Free pages in the order of the runs that they form: the longest first.

SGLang sorts its free list where it merges freed pages. A page's new place is the number of pages ahead of it: those of
longer runs, and the earlier ones of runs as long as its own. Each program counts for its own pages, so that one launch
does it, without a second sort::

    page               2   5 6 7   9 10
    length of its run  1   3 3 3   2  2
    pages ahead        5   0 1 2   3  4
    reordered          5 6 7 9 10 2
"""

# Triton types device code; mypy cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dcp_block.kernels import launch

# Pages that a program places, comparing them with as many others at a time; and the longest list for one kernel. It
# compares each page with each, 10^9 comparisons at the most: by an estimate, a millisecond of a GPU. The interpreter's
# time goes by operations.
TILE, MAX_PAGES = (1024, 1024) if launch.INTERPRETED else (128, 1 << 15)


@triton.jit
def _pages_with_offset(pages_ptr, num_pages, first_step, limit):
    """How many pages have (page - place) <= ``limit``; it never falls along an ascending list."""
    found = tl.zeros_like(limit)
    step = first_step
    while step > 0:
        probe = found + step - 1
        inside = probe < num_pages
        offset = tl.load(pages_ptr + probe, mask=inside, other=0) - probe
        found += tl.where(inside & (offset <= limit), step, 0)
        step = step // 2
    return found


@triton.jit
def _run_lengths(pages_ptr, num_pages, first_step, place):
    """The length of the run that holds the page at each place; 0 behind the list."""
    valid = place < num_pages
    offset = tl.load(pages_ptr + place, mask=valid, other=0) - place  # the same all along a run
    length = _pages_with_offset(pages_ptr, num_pages, first_step, offset)
    length -= _pages_with_offset(pages_ptr, num_pages, first_step, offset - 1)
    return tl.where(valid, length, 0)


# Grid: (programs), a tile of places each.  The list has another length each time: specialising on it would recompile in
# the middle of serving.  All addresses are 64-bit.
@triton.jit(do_not_specialize=["num_pages", "first_step"])
def _long_runs_first_kernel(pages_ptr, out_ptr, num_pages, first_step, TILE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    length = _run_lengths(pages_ptr, num_pages, first_step, place)
    ahead = tl.zeros_like(place)
    for start in range(0, num_pages, TILE):
        other = start + tl.arange(0, TILE).to(tl.int64)
        other_length = _run_lengths(pages_ptr, num_pages, first_step, other)
        longer = other_length[None, :] > length[:, None]
        earlier = (other_length[None, :] == length[:, None]) & (other[None, :] < place[:, None])
        ahead += tl.sum((longer | earlier).to(tl.int64), axis=1)
    valid = place < num_pages
    tl.store(out_ptr + ahead, tl.load(pages_ptr + place, mask=valid), mask=valid)


def long_runs_first(pages: torch.Tensor, *, tile: int = TILE) -> torch.Tensor:
    """Order pages by the length of the run that they lie in, the longest run first; equal runs as they were.

    Args:
        pages: ``[num_pages] int64``, dense, ascending, each page once.
        tile: pages a program handles at a time, a power of 2. For tests.

    Returns:
        A new ``[num_pages]`` with the same pages; each run is whole and ascending.

    Raises:
        TypeError, ValueError: a dtype, shape or stride is not as above.

    One launch, no host sync. With more than :data:`MAX_PAGES` pages, the twin's seven.

    >>> long_runs_first(torch.tensor([2, 5, 6, 7, 9, 10])).tolist()
    [5, 6, 7, 9, 10, 2]
    """
    launch.check_tensor("pages", pages, (torch.int64,))
    num_pages = pages.shape[0]
    if not launch.can_launch(pages) or num_pages > MAX_PAGES:
        return long_runs_first_torch(pages)
    out = torch.empty_like(pages)
    if num_pages > 0:
        first_step = 1 << (num_pages.bit_length() - 1)
        _long_runs_first_kernel[(triton.cdiv(num_pages, tile),)](pages, out, num_pages, first_step, TILE=tile)
    return out


def long_runs_first_torch(pages: torch.Tensor) -> torch.Tensor:
    """Twin of :func:`long_runs_first`.  Seven operators, no host sync."""
    # Page minus place is the same all along a run, and grows from run to run: so it is sorted, too.
    offset = pages - torch.arange(pages.shape[0], device=pages.device)
    length = torch.searchsorted(offset, offset, right=True) - torch.searchsorted(offset, offset)
    return pages[torch.argsort(length, descending=True, stable=True)]
