"""Planning a chunk for one decode rank: runs of blocks against SGLang's plan, which lists every token."""

from __future__ import annotations

from benchmarks import environment  # noqa: F401  # before what follows

from collections.abc import Callable  # isort: skip
from typing import Any

import numpy as np
from sglang.srt.disaggregation.common.utils import build_dcp_token_transfer_plan, group_concurrent_contiguous

from benchmarks.record import Check, Result, Row, find
from benchmarks.timing import in_turns, spread
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.dcp.transfer import plan_runs

P, RANK, PAGE, BLOCK = 8, 0, 64, 64
TOKENS = (64, 1024, 16384, 131072, 1048576)
STOCK, OURS = "SGLang's plan, by tokens", f"runs of blocks of {BLOCK}"

READING = f"""
Which rows of the prefill server go where on decode rank {RANK} of {P}; pages of {PAGE} tokens in no order on either
side, the worst case for both. SGLang lists the rows of the rank and groups neighbours among them; the plugin computes
runs from the page lists. CPU, one thread. Where SGLang packs, it needs the list of rows for its gather too.
"""


def measure(full: bool) -> Result:
    """Plan chunks of all lengths."""
    rows: list[Row] = []
    for tokens in TOKENS:
        calls = max(1, min(200, 2**22 // tokens // 16))
        rng = np.random.default_rng(0)
        src = rng.permutation(-(-tokens // PAGE)).astype(np.int32)
        dst = rng.permutation(-(-tokens // PAGE // P) or 1).astype(np.int32)
        segments: dict[str, int] = {}

        def stock(src: Any = src, dst: Any = dst, tokens: int = tokens, segments: dict[str, int] = segments) -> None:
            plan = build_dcp_token_transfer_plan(
                src, dst, physical_page_size=PAGE, dcp_size=P, dcp_rank=RANK, num_kv_tokens=tokens
            )
            grouped = group_concurrent_contiguous(plan.target_src_token_indices, plan.target_dst_token_indices)
            segments[STOCK] = len(grouped[0])

        def ours(src: Any = src, dst: Any = dst, tokens: int = tokens, segments: dict[str, int] = segments) -> None:
            runs = plan_runs(src, dst, page_size=PAGE, layout=DcpLayout(P, BLOCK), rank=RANK, num_kv_tokens=tokens)
            segments[OURS] = len(runs.lengths)

        ways = {STOCK: _times(stock, max(1, calls // 20)), OURS: _times(ours, calls)}
        seconds = in_turns(ways, 40 if full else 15)
        spreads = {
            STOCK: spread([value / max(1, calls // 20) for value in seconds[STOCK]]),
            OURS: spread([value / calls for value in seconds[OURS]]),
        }
        rows += [
            Row(way, {"tokens": tokens}, times, STOCK, spreads[STOCK].p50, segments=segments[way])
            for way, times in spreads.items()
        ]
    theirs, own = find(rows, STOCK, tokens=131072), find(rows, OURS, tokens=131072)
    checks = (
        Check("plan of 131,072 tokens, ms, p50", own.spread.p50 * 1e3, 0.5, at_most=True),
        Check("plan of 131,072 tokens, SGLang's ÷ blocks, p50", theirs.spread.p50 / own.spread.p50, 100, at_most=False),
    )
    return Result("planning", "Planning a transfer", "s", READING, rows, checks)


def _times(call: Callable[[], None], calls: int) -> Callable[[], None]:
    def repeated() -> None:
        for _ in range(calls):
            call()

    return repeated
