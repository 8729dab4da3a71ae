"""The next pages of the free list, reordered so that the pages of a decode rank lie side by side.

A request that extends by the logical pages [f, e) takes the next e - f pages of the free list, in order. With P = 2 and
f = 3, e = 8, page 3 + j of the request gets::

    free list        20 21 22 23 24 | 25 ..
    owner, l % P      1  0  1  0  1
    rank 0's pages   20 21                            l = 4, 6
    rank 1's pages         22 23 24                   l = 3, 5, 7
    reordered        22 20 23 21 24 | 25 ..

Blocks must be pages (B = page_size): the owner of logical page l is then l % P.
"""

# Triton types device code; mypy cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dcp_block.kernels import launch


@triton.jit
def _num_pages(length, PAGE_SIZE: tl.constexpr):
    return (length + PAGE_SIZE - 1) // PAGE_SIZE


@triton.jit
def _pages_of_lower(end, rank, P: tl.constexpr):
    """How many of the logical pages [0, end) belong to ranks below ``rank``."""
    return (end // P) * rank + tl.minimum(end % P, rank)


# The free list is a window that moves a page at a time: specialising on it would recompile in the middle of serving.
# Grid: (requests + 1, programs a request); a request's programs stride over its tiles, the last row copies the pages that
# nobody takes.  All addresses are 64-bit.
@triton.jit(do_not_specialize=["num_free_pages"], do_not_specialize_on_alignment=["free_pages_ptr"])
def _group_pages_kernel(
    free_pages_ptr,
    prefix_lens_ptr,
    seq_lens_ptr,
    out_ptr,
    num_free_pages,
    P: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    REQUESTS: tl.constexpr,
    TILE: tl.constexpr,
):
    request = tl.program_id(0)
    before = tl.arange(0, REQUESTS).to(tl.int64)
    mask = before < request
    starts = tl.load(prefix_lens_ptr + before, mask=mask, other=0).to(tl.int64)
    ends = tl.load(seq_lens_ptr + before, mask=mask, other=0).to(tl.int64)
    base = tl.sum(_num_pages(ends, PAGE_SIZE) - _num_pages(starts, PAGE_SIZE))
    tile_start = tl.program_id(1).to(tl.int64) * TILE
    tile_step = tl.num_programs(1).to(tl.int64) * TILE

    if request == tl.num_programs(0) - 1:
        for rest_start in range(base + tile_start, num_free_pages, tile_step):
            place = rest_start + tl.arange(0, TILE)
            valid = place < num_free_pages
            tl.store(out_ptr + place, tl.load(free_pages_ptr + place, mask=valid), mask=valid)
    else:
        first = _num_pages(tl.load(prefix_lens_ptr + request).to(tl.int64), PAGE_SIZE)
        end = _num_pages(tl.load(seq_lens_ptr + request).to(tl.int64), PAGE_SIZE)
        for first_page in range(first + tile_start, end, tile_step):
            page = first_page + tl.arange(0, TILE)
            rank = page % P
            place = _pages_of_lower(end, rank, P) - _pages_of_lower(first, rank, P)
            place += (page - first) // P  # its own rank's pages before it are each P apart
            valid = page < end
            got = tl.load(free_pages_ptr + base + place, mask=valid)
            tl.store(out_ptr + base + (page - first), got, mask=valid)


def group_pages(
    free_pages: torch.Tensor,
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    page_size: int,
    dcp_size: int,
    tile: int = launch.TILE,
) -> torch.Tensor:
    """The free list with each request's next pages reordered by the rank that owns the logical page.

    Rule: request i takes the n_i = ceil(seq_lens[i] / page_size) - ceil(prefix_lens[i] / page_size) pages behind those of
    the requests before it. Its logical page l, of f = ceil(prefix_lens[i] / page_size) to e = f + n_i, gets the page at
    place (pages in [f, e) of ranks below l % P) + (pages in [f, l) of rank l % P) of this slice.

    Args:
        free_pages: ``[num_free_pages] int64``, dense, in the order in which they are handed out.
        prefix_lens, seq_lens: ``[num_requests] int32 or int64``, tokens before and after the extension. Together they
            take at most ``num_free_pages`` pages: the caller knows, lengths are not read here.
        page_size: tokens.
        dcp_size: P, the ranks of the decode server.
        tile: pages a program handles at a time, a power of 2. For tests.

    Returns:
        A new ``[num_free_pages]``: ``free_pages`` in another order, the same behind the pages that are taken.

    Raises:
        TypeError, ValueError: a dtype, shape or stride is not as above.

    One launch, no host sync.
    Law: each request's slice holds the same pages as before; the pages of a rank are neighbours in the old order, ascending
    with l; P = 1 changes nothing.

    >>> group_pages(
    ...     torch.arange(20, 26), torch.tensor([3 * 64]), torch.tensor([8 * 64]), page_size=64, dcp_size=2
    ... ).tolist()
    [22, 20, 23, 21, 24, 25]
    """
    _check(free_pages, prefix_lens, seq_lens, page_size, dcp_size)
    if not launch.can_launch(free_pages):
        return group_pages_torch(free_pages, prefix_lens, seq_lens, page_size=page_size, dcp_size=dcp_size)
    out = torch.empty_like(free_pages)
    num_requests, num_free_pages = seq_lens.shape[0], free_pages.shape[0]
    programs = launch.programs_per_request(num_requests + 1, num_free_pages, tile, launch.MAX_PROGRAMS)
    _group_pages_kernel[(num_requests + 1, programs)](
        free_pages,
        prefix_lens,
        seq_lens,
        out,
        num_free_pages,
        P=dcp_size,
        PAGE_SIZE=page_size,
        REQUESTS=triton.next_power_of_2(max(1, num_requests)),
        TILE=tile,
    )
    return out


def group_pages_torch(
    free_pages: torch.Tensor, prefix_lens: torch.Tensor, seq_lens: torch.Tensor, *, page_size: int, dcp_size: int
) -> torch.Tensor:
    """Twin of :func:`group_pages` for CPUs.  Reads lengths on the host."""
    out, at = free_pages.clone(), 0
    source, target = free_pages.numpy(), out.numpy()  # views: NumPy's slices cost a tenth of torch's
    for prefix_len, seq_len in zip(prefix_lens.tolist(), seq_lens.tolist(), strict=True):
        first, end = -(-prefix_len // page_size), -(-seq_len // page_size)
        request = target[at : at + end - first]
        for rank in range(dcp_size):
            pages = request[(rank - first) % dcp_size :: dcp_size]
            pages[:] = source[at : at + len(pages)]
            at += len(pages)
    return out


def _check(
    free_pages: torch.Tensor,
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    dcp_size: int,
) -> None:
    launch.check_tensor("free_pages", free_pages, (torch.int64,))
    launch.check_tensor("prefix_lens", prefix_lens, launch.INTEGERS)
    launch.check_tensor("seq_lens", seq_lens, launch.INTEGERS)
    if prefix_lens.shape != seq_lens.shape:
        raise ValueError(
            f"prefix_lens: expected {seq_lens.shape[0]} entries, one a request, got {prefix_lens.shape[0]}"
        )
    for name, value in (("page_size", page_size), ("dcp_size", dcp_size)):
        if value < 1:
            raise ValueError(f"{name}: expected 1 or more, got {value}")
