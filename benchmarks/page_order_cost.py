"""What ``--dcp-group-pages`` adds to scheduling a chunk of 16k tokens on the CPU: CPU time, rounds in turns.

A round matches a prompt with the cache, evicts, allocates the chunk, writes the request table and leaves the chunk to the
cache, by SGLang's own code (tests/paged_server.py), with kernels as their torch twins. The pool is full, so each
round merges freed pages.

    python benchmarks/page_order_cost.py [--rounds 101]
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array

PAGE, P, TOKENS, POOL_PAGES = 64, 8, 16384, 8192


def main() -> None:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=101)
    args = parser.parse_args()
    import environment  # noqa: F401
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator as Allocator

    from paged_server import PagedServer, Request
    from sglang_dcp_block.kernels import launch
    from sglang_dcp_block.patches import active, group_pages

    launch.INTERPRETED, active.group_pages = False, P
    extend, merge = Allocator.alloc_extend, Allocator.merge_and_sort_free
    methods = {
        "stock": (extend, merge),
        "--dcp-group-pages": (
            lambda self, *args: group_pages.alloc_in_order(extend, self, *args),
            lambda self: group_pages.merge_long_runs_first(merge, self),
        ),
    }
    servers = {name: PagedServer(POOL_PAGES, PAGE, TOKENS) for name in methods}
    milliseconds: dict[str, list[float]] = {name: [] for name in methods}
    warm_up = 2 * POOL_PAGES * PAGE // TOKENS
    for round_ in range(warm_up + args.rounds):
        for name, (Allocator.alloc_extend, Allocator.merge_and_sort_free) in methods.items():
            server, prompt = servers[name], array("q", range(round_ << 32, (round_ << 32) + TOKENS))
            begin = time.process_time()
            request = Request(round_, prompt)
            server.admit(request)
            assert server.extend([request], [TOKENS])
            server.checkpoint(request)
            if round_ >= warm_up:
                milliseconds[name].append((time.process_time() - begin) * 1e3)
            server.release(request, keep=True)
    for name, times in milliseconds.items():
        p20, p50, p80 = (statistics.quantiles(times, n=10)[i] for i in (1, 4, 7))
        print(f"{name:20s} p20 {p20:.2f} ms, p50 {p50:.2f} ms, p80 {p80:.2f} ms")
    stock, ours = milliseconds.values()
    added = statistics.median(after - before for before, after in zip(stock, ours, strict=True))
    print(f"added, median of rounds: {added:+.2f} ms, {added / statistics.median(stock):+.1%}")


if __name__ == "__main__":
    main()
