"""Orders of free pages to choose from: what is shipped, and what was tried beside it.

An order is two functions: one for the list after freed pages were merged into it (ascending), one for the list just before
a batch takes its pages from the front. Here they work on NumPy arrays; the shipped ones are the plugin's own hooks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.kernels import launch
from sglang_dcp_block.kernels.free_runs import fewest_gaps_first
from sglang_dcp_block.kernels.group_pages import group_pages_torch
from sglang_dcp_block.kernels.long_runs import long_runs_first
from sglang_dcp_block.patches import active, group_pages

Pages = torch.Tensor
Needs = list[int]  # pages that each request of a batch takes


@dataclass(frozen=True, slots=True)
class Order:
    """How one variant of the study treats both servers."""

    name: str
    grouped: bool = True
    merge: Callable[[Pages], Pages] | None = None  # prefill server, the merged list
    take: Callable[[Pages, Needs], Pages] | None = None  # prefill server, before grouping
    decode_gaps: bool = False  # decode server: fewest gaps first
    shipped: bool = False  # run the plugin's hooks instead of the functions here


def runs(pages: Pages) -> list[Pages]:
    """The runs of neighbours of a list, in its order."""
    cuts = torch.nonzero(pages[1:] != pages[:-1] + 1).flatten() + 1
    return list(torch.tensor_split(pages, cuts)) if len(pages) else []


def window(pages: Pages, needs: Needs) -> Pages:
    """The successive entries with the fewest gaps."""
    return fewest_gaps_first(pages, sum(needs)) if sum(needs) else pages


def small_from_the_end(pages: Pages, needs: Needs, small: int = 16) -> Pages:
    """Of a list with long runs first: requests of few pages take from its short end."""
    front, end, taken = 0, len(pages), []
    for need in needs:
        if need < small:
            end -= need
            taken.append(pages[end : end + need])
        else:
            taken.append(pages[front : front + need])
            front += need
    return torch.cat([*taken, pages[front:end]])


def smallest_rest(pages: Pages, needs: Needs) -> Pages:
    """Of a list with long runs first: whole runs from the front, the rest of the batch from the smallest that holds it."""
    need, whole = sum(needs), 0
    if not need:
        return pages
    found = runs(pages)
    for run in found:
        if whole + len(run) > need:
            break
        whole += len(run)
    rest = need - whole
    first = 0
    fits = []
    for run in found:
        if first >= whole and len(run) >= rest:
            fits.append(first)
        first += len(run)
    if not rest or not fits:
        return pages
    at = fits[-1]
    return torch.cat([pages[:whole], pages[at : at + rest], pages[whole:at], pages[at + rest :]])


def best_fit(pages: Pages, needs: Needs) -> Pages:
    """Each request, the largest first: the smallest run that holds it, else the longest and again for what is left."""
    rest = np.sort(pages.numpy())
    taken: list[list[Any]] = [[] for _ in needs]
    for index in sorted(range(len(needs)), key=lambda i: -needs[i]):
        need = needs[index]
        while need:
            cuts = np.flatnonzero(np.diff(rest) != 1) + 1
            starts = np.concatenate(([0], cuts))
            lengths = np.diff(np.concatenate((starts, [len(rest)])))
            fits = np.flatnonzero(lengths >= need)
            run = fits[np.argmin(lengths[fits])] if len(fits) else np.argmax(lengths)
            part = slice(starts[run], starts[run] + min(need, lengths[run]))
            taken[index].append(rest[part])
            need -= len(rest[part])
            rest = np.delete(rest, part)
    return torch.from_numpy(np.concatenate([*(part for parts in taken for part in parts), rest]))


ORDERS = (
    Order("stock", grouped=False),
    Order("grouped"),
    Order("grouped, long runs first", merge=long_runs_first),
    Order("grouped, long runs first, decode with few gaps (--dcp-group-pages)", shipped=True, decode_gaps=True),
)
# Tried and left out, on top of the shipped order of the decode server.
LEFT_OUT = (
    Order("grouped, window with fewest gaps", take=window, decode_gaps=True),
    Order(
        "long runs first, small requests from the end", merge=long_runs_first, take=small_from_the_end, decode_gaps=True
    ),
    Order("long runs first, rest from the smallest run", merge=long_runs_first, take=smallest_rest, decode_gaps=True),
    Order("best fit of each request (not possible without a sync)", take=best_fit, decode_gaps=True),
)


@contextlib.contextmanager
def installed(order: Order, page_size: int, dcp_size: int) -> Iterator[None]:
    """Let SGLang's allocator use an order: the one with pages of ``page_size`` is the prefill server's."""
    stock_extend, stock_merge = (
        PagedTokenToKVPoolAllocator.alloc_extend,
        PagedTokenToKVPoolAllocator.merge_and_sort_free,
    )

    def extend(self: Any, prefix_lens: Any, prefix_lens_cpu: Any, seq_lens: Any, *rest: Any) -> Any:
        arguments = (prefix_lens, prefix_lens_cpu, seq_lens, *rest)
        on_decode_server = self.page_size != page_size
        if order.decode_gaps if on_decode_server else order.shipped:
            layout = DcpLayout(dcp_size, page_size) if on_decode_server else None
            with mock.patch.multiple(active, _layout=layout, group_pages=dcp_size):
                return group_pages.alloc_in_order(stock_extend, self, *arguments)
        if not on_decode_server:
            needs = (-(-seq_lens // page_size) - -(-prefix_lens // page_size)).tolist()
            if rest[-1] // page_size + len(needs) + 1 > len(self.free_pages):
                self.merge_and_sort_free()
            if sum(needs) <= len(self.free_pages):
                if order.take:
                    self.free_pages = order.take(self.free_pages, needs)
                if order.grouped:
                    self.free_pages = group_pages_torch(
                        self.free_pages, prefix_lens, seq_lens, page_size=page_size, dcp_size=dcp_size
                    )
        return stock_extend(self, *arguments)

    def merge(self: Any) -> None:
        if self.page_size == page_size and order.shipped:
            group_pages.merge_long_runs_first(stock_merge, self)
        elif self.page_size == page_size and order.merge and self.staged_pages:
            stock_merge(self)
            self.free_pages = order.merge(self.free_pages)
        else:
            stock_merge(self)

    hooks = mock.patch.multiple(PagedTokenToKVPoolAllocator, alloc_extend=extend, merge_and_sort_free=merge)
    with hooks, mock.patch.object(launch, "INTERPRETED", False):  # the kernel's twin: an interpreted kernel is slow
        yield
