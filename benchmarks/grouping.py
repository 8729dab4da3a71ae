"""What ``--dcp-group-pages`` adds to scheduling a chunk of 16k tokens, in the loop of SGLang's own prefill scheduler."""

from __future__ import annotations

from benchmarks import environment  # noqa: F401  # before what follows

import random  # isort: skip
import statistics
import time
from array import array
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.prefill_scheduler import prefill_scheduler, run
from benchmarks.record import Check, Result, Row
from benchmarks.timing import spread
from counting import counted
from sglang_dcp_block.kernels import launch
from sglang_dcp_block.patches import active, group_pages

PAGE, P, TOKENS, POOL_PAGES = 64, 8, 16384, 8192
STOCK, GROUPED = "stock", f"--dcp-group-pages {P}"
WHOLE, ALLOCATION = "a pass of the scheduler's loop", "allocation, with the merge of freed pages"

READING = f"""
SGLang's own scheduler of a prefill server in one process on the CPU: its real loop, queues, radix cache, pools
({POOL_PAGES:,} pages of {PAGE} tokens) and KV bookkeeping. Only two things are missing: the model's forward pass, and
a transfer. Each pass of the loop takes a new prompt of {TOKENS:,} tokens as one chunk: match with the cache, evict,
admit, allocate, write the request table, build the batch, hand the pages over, leave them to the cache, answer. The
pool is full, so each allocation merges freed pages: the most that the flag ever costs. Passes take turns, with the
flag's hooks on and off; times are CPU time of the scheduler's thread.

On a GPU the allocation is one kernel of SGLang's and one of the plugin's, and where it merges freed pages a copy and a
sort of SGLang's and one more kernel of the plugin's. Here both sides' kernels are their plain torch twins, and SGLang's
own is slow, so the figure is also given with SGLang's allocation left out of what it is compared with.
"""


class _Hooks:
    """Puts the hooks of the flag on the allocator's class, or takes them off; times each allocation."""

    def __init__(self, allocator: Any) -> None:
        self.allocator = allocator
        self.extend, self.merge = self.allocator.alloc_extend, self.allocator.merge_and_sort_free
        self.seconds: list[float] = []
        self.merges: list[bool] = []  # whether it merged freed pages

    def put(self, grouped: bool) -> None:
        extend, merge = self.extend, self.merge

        def timed(allocator: Any, *args: Any, **kwargs: Any) -> Any:
            args = (*args, *kwargs.values())
            freed = bool(allocator.staged_pages)
            begin = time.thread_time()
            taken = group_pages.alloc_in_order(extend, allocator, *args) if grouped else extend(allocator, *args)
            self.seconds.append(time.thread_time() - begin)
            self.merges.append(freed and not allocator.staged_pages)
            return taken

        self.allocator.alloc_extend = timed
        self.allocator.merge_and_sort_free = (
            (lambda allocator: group_pages.merge_long_runs_first(merge, allocator)) if grouped else merge
        )

    def remove(self) -> None:
        self.allocator.alloc_extend, self.allocator.merge_and_sort_free = self.extend, self.merge


def _prompts(number: int) -> Iterator[array[int]]:
    rng = random.Random(0)
    for _ in range(number):
        yield array("q", rng.choices(range(2, 500), k=TOKENS))


def passes(rounds: int) -> dict[str, dict[str, list[float]]]:
    """What is timed -> way -> seconds of each pass."""
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

    warm_up = 2 * POOL_PAGES * PAGE // TOKENS
    hooks = _Hooks(PagedTokenToKVPoolAllocator)
    before = active.group_pages, launch.INTERPRETED
    active.group_pages, launch.INTERPRETED = P, False
    try:
        with prefill_scheduler(PAGE, POOL_PAGES, TOKENS) as scheduler:
            whole = run(scheduler, _prompts(warm_up + 2 * rounds), lambda number: hooks.put(bool(number % 2)))
    finally:
        hooks.remove()
        active.group_pages, launch.INTERPRETED = before
    if len(hooks.seconds) != len(whole) or not all(hooks.merges[warm_up:]):
        seen = f"{len(hooks.seconds)} allocations, {sum(hooks.merges)} of them with a merge, in {len(whole)} passes"
        raise RuntimeError(f"expected an allocation with a merge of freed pages a pass, got {seen}")
    return {
        what: {STOCK: seconds[warm_up::2], GROUPED: seconds[warm_up + 1 :: 2]}
        for what, seconds in ((WHOLE, whole), (ALLOCATION, hooks.seconds))
    }


def counts(merging: bool) -> tuple[int, int]:
    """(launches, host syncs) that the flag adds to an allocation, counted; where it merges freed pages, or not."""
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator as Allocator

    extend, merge = Allocator.alloc_extend, Allocator.merge_and_sort_free
    before = active.group_pages, Allocator.merge_and_sort_free
    found = []
    try:
        for grouped in (False, True):
            active.group_pages = P
            pool = Allocator(
                4 * TOKENS, PAGE, dtype=torch.float16, device="cpu", kvcache=torch.empty(0), need_sort=True
            )
            pool.use_triton_kernels = True
            if grouped:
                Allocator.merge_and_sort_free = lambda self: group_pages.merge_long_runs_first(merge, self)
            if merging:
                pool.free(pool.alloc(4 * TOKENS))
            lens = torch.tensor([0]), torch.tensor([0]), torch.tensor([TOKENS]), torch.tensor([TOKENS])
            arguments = (*lens, torch.tensor([-1]), TOKENS)
            with counted() as count:
                taken = group_pages.alloc_in_order(extend, pool, *arguments) if grouped else extend(pool, *arguments)
            assert taken is not None
            assert len(taken) == TOKENS
            found.append((count.total, count.syncs))
    finally:
        active.group_pages, Allocator.merge_and_sort_free = before
    (launches, syncs), (our_launches, our_syncs) = found
    return our_launches - launches, our_syncs - syncs


def measure(full: bool) -> Result:
    """Count, then time."""
    launches, syncs = counts(merging=False)
    merge_launches, merge_syncs = counts(merging=True)
    seconds = passes(600 if full else 200)
    rows = [
        Row(way, {"timed": what, "tokens": TOKENS}, spread(ways[way]), STOCK, statistics.median(ways[STOCK]))
        for what, ways in seconds.items()
        for way in (STOCK, GROUPED)
    ]
    whole = statistics.median(seconds[WHOLE][STOCK])
    own = statistics.median(seconds[ALLOCATION][STOCK])
    added = statistics.median(seconds[ALLOCATION][GROUPED]) - own
    checks = (
        Check("launches added to an allocation", launches, 2, at_most=True),
        Check("launches added to an allocation that merges", merge_launches, 2, at_most=True),
        Check("host syncs added to an allocation", syncs, 0, at_most=True),
        Check("host syncs added to an allocation that merges", merge_syncs, 0, at_most=True),
        Check("time added to a chunk, % of SGLang's pass", 100 * added / whole, 5, at_most=True),
    )
    more = (
        f"Added to an allocation: {added * 1e3:.3f} ms, {added / whole:.1%} of SGLang's pass, {added / (whole - own):.1%} "
        f"of the pass without its own allocation."
    )
    return Result("grouping", "Cost of --dcp-group-pages to the scheduler", "s", READING, rows, checks, more)
