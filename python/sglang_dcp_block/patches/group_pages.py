"""``--dcp-group-pages P``: pages in an order that makes long runs of a transfer.

SGLang hands out the next pages of a free list. Only the order of that list is changed, before SGLang takes from it: which
pages are free, how many are taken and when freed ones are merged stays SGLang's. Every rank sees the same lengths in
the same order, so all have the same list.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_dcp_block.kernels.free_runs import fewest_gaps_first
from sglang_dcp_block.kernels.group_pages import group_pages
from sglang_dcp_block.kernels.long_runs import long_runs_first
from sglang_dcp_block.patches import active


def alloc_in_order(
    original: Any, self: Any, prefix_lens: torch.Tensor, prefix_lens_cpu: torch.Tensor, seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor, extend_num_tokens: int, num_new_pages: int | None = None,
) -> torch.Tensor | None:  # fmt: skip
    """AROUND ``PagedTokenToKVPoolAllocator.alloc_extend``: order the pages that it is about to take; no host sync.

    Prefill server: grouped by decode rank; a launch more, none for a batch that takes at most P pages.
    Decode server (which calls it once a request, never for a decode step): those with the fewest gaps; a dozen more.
    """
    from sglang.srt.utils import get_num_new_pages

    if num_new_pages is None:
        num_new_pages = get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu)
    # SGLang merges freed pages where its own bound asks for it; afterwards that would undo the order.
    if extend_num_tokens // self.page_size + len(prefix_lens) + 1 > len(self.free_pages):
        self.merge_and_sort_free()
    on_decode_server = active.is_active()  # with this flag, only decode servers have blocks of their own
    if (1 if on_decode_server else active.group_pages) < num_new_pages <= len(self.free_pages):
        if on_decode_server:
            self.free_pages = fewest_gaps_first(self.free_pages, num_new_pages)
        else:
            self.free_pages = group_pages(
                self.free_pages,
                prefix_lens,
                seq_lens,
                page_size=self.page_size,
                dcp_size=active.group_pages,
            )
    taken: torch.Tensor | None = original(
        self, prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, num_new_pages
    )
    return taken


def merge_long_runs_first(original: Any, self: Any) -> None:
    """AROUND ``PagedTokenToKVPoolAllocator.merge_and_sort_free`` of a prefill server: long runs are handed out first.

    A launch more than SGLang's own. A call without freed pages changes nothing, as in SGLang: the list may be grouped
    already.
    """
    if self.staged_pages:
        original(self)
        self.free_pages = long_runs_first(self.free_pages)
