"""A server's pages without its model: SGLang's own allocator and radix tree, called as its scheduler calls them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache


class Request:
    """What the cache asks of SGLang's ``Req``."""

    priority = 0
    session = session_id = kv_rotation_base = extra_key = cache_salt = lock = last_node = None

    def __init__(self, name: int, prompt: array[int]) -> None:
        self.rid = str(name)
        self.prompt, self.output_ids = prompt, array("q")
        self.kv = ReqKvInfo()
        self.length = 0  # tokens with a slot
        self.is_finished = False

    @property
    def origin_input_ids(self) -> array[int]:
        return self.prompt

    @property
    def full_untruncated_fill_ids(self) -> array[int]:
        return self.prompt + self.output_ids

    @property
    def rest(self) -> int:
        """Tokens of the prompt without a slot."""
        return max(0, len(self.prompt) - self.length)

    def finished(self) -> bool:
        return self.is_finished


class PagedServer:
    """One rank's pool of pages with a prefix cache over it.

    Args:
        num_pages: pages of the pool, the sink not counted.
        page_size: slots of a page; with DCP, of a virtual page.
        max_context: tokens of the longest request.
        with_events: whether the cache tells what it stores and drops.
    """

    def __init__(
        self, num_pages: int, page_size: int, max_context: int, max_requests: int = 64, with_events: bool = False
    ) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.table = ReqToTokenPool(max_requests, max_context, device="cpu", enable_memory_saver=False)
        self.allocator = PagedTokenToKVPoolAllocator(
            num_pages * page_size, page_size, dtype=torch.float16, device="cpu", kvcache=None, need_sort=True
        )
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.table,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page_size,
                tree_components=(ComponentType.FULL,),
                tree_core_backend="python",
                enable_kv_cache_events=with_events,
            )
        )

    def admit(self, request: Request) -> int:
        """Match a request's prompt with the cache; returns the tokens found there."""
        key = RadixKey(request.prompt, limit=len(request.prompt) - 1)
        match = self.tree.match_prefix(MatchPrefixParams(key=key))
        request.last_node = match.last_device_node
        request.lock = self.tree.lock(request.last_node)
        request.length = request.kv.cache_protected_len = request.kv.cache_inserted_len = match.device_prefix_len
        return request.length

    def extend(self, requests: Sequence[Request], num_tokens: Sequence[int], reserve_tokens: int = 0) -> bool:
        """Give each request slots for its next tokens, after evicting what is needed (or ``reserve_tokens``).

        Returns whether there was room; where not, nothing has changed but for evictions.
        """
        starts = [request.length for request in requests]
        ends = [start + num for start, num in zip(starts, num_tokens, strict=True)]
        need = sum(num_tokens) + len(requests) * self.page_size
        evict_from_tree_cache(self.tree, max(need, reserve_tokens))
        prefixes = [
            self.slots(request) if request.kv.holds_kv else self.tree.path_device_indices(request.last_node)[:start]
            for request, start in zip(requests, starts, strict=True)
        ]
        prefix_lens, seq_lens = torch.tensor(starts), torch.tensor(ends)
        last = torch.tensor([int(prefix[-1]) if len(prefix) else -1 for prefix in prefixes])
        slots = self.allocator.alloc_extend(prefix_lens, prefix_lens, seq_lens, seq_lens, last, sum(num_tokens))
        if slots is None:
            return False
        for request, prefix in zip(requests, prefixes, strict=True):
            if not request.kv.holds_kv:
                (request.kv.req_pool_idx,) = self.table.alloc_rows(1)
                self._row(request)[: len(prefix)] = prefix.to(torch.int32)
        for request, end, new in zip(requests, ends, slots.split(list(num_tokens)), strict=True):
            self._row(request)[request.length : end] = new.to(torch.int32)
            self._grow(request, end)
        return True

    def decode(self, requests: Sequence[Request], tokens: Sequence[int]) -> bool:
        """Give each request a slot for one generated token; returns whether there was room."""
        evict_from_tree_cache(self.tree, len(requests) * self.page_size)
        lens = torch.tensor([request.length + 1 for request in requests])
        last = torch.stack([self._row(request)[request.length - 1] for request in requests]).to(torch.int64)
        slots = self.allocator.alloc_decode(lens, lens, last)
        if slots is None:
            return False
        for request, slot, token in zip(requests, slots, tokens, strict=True):
            self._row(request)[request.length] = int(slot)
            request.output_ids.append(token)
            self._grow(request, request.length + 1)
        return True

    def checkpoint(self, request: Request) -> None:
        """Leave what a request has so far to the cache, as after each chunk."""
        self.tree.checkpoint(request, up_to=request.length)

    def release(self, request: Request, keep: bool) -> None:
        """End or retract a request; with ``keep`` the cache takes what it can, else only what it has already stays."""
        request.is_finished = keep
        if request.kv.holds_kv:
            if keep:
                self.checkpoint(request)
            self.tree.free_kv_row(request.kv, [(request.kv.cache_protected_len, request.length)])
        self.tree.unlock(request.lock)
        request.lock = None
        if request.kv.holds_kv:
            self.tree.on_release(request, checkpointed=keep)
            self.table.free(request)
            request.kv.mark_kv_released()

    def evict(self, num_tokens: int) -> None:
        """Drop the cache's least recently used tokens, as far as no request holds them."""
        self.tree.evict(EvictParams(num_tokens=num_tokens))

    def slots(self, request: Request) -> torch.Tensor:
        """``[length] int64``, a request's slots in position order."""
        return self._row(request)[: request.length].to(torch.int64)

    def free_pages(self) -> torch.Tensor:
        """Pages that nobody has."""
        return self.allocator.get_all_free_pages()

    def _row(self, request: Request) -> torch.Tensor:
        row: torch.Tensor = self.table.req_to_token[request.kv.req_pool_idx]
        return row

    def _grow(self, request: Request, length: int) -> None:
        request.length = request.kv.kv_allocated_len = request.kv.kv_committed_len = length


def pages_of(slots: torch.Tensor, page_size: int) -> Any:
    """``[num_pages]`` NumPy: the pages of slots in position order, as SGLang derives them for a transfer."""
    return (slots[::page_size] // page_size).numpy()
