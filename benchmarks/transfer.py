"""Token round-robin, blocks, and the least that any layout could cost: one transfer to one decode rank, side by side.

Three ways in turns over real Mooncake TCP on loopback, through the plugin's sender: token round-robin (segments of one
row), blocks of a page as they lie, and all rows of a layer gathered on the host and sent as one segment. Prints medians and
ratios, and the time of planning; every received row is checked. Times differ between machines; ratios do much less.

    python benchmarks/transfer.py [--layers 8] [--tokens 16384] [--row-bytes 1152] [--rounds 7]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

P, RANK, PAGE, BLOCK = 8, 1, 64, 64


def transfers(args: argparse.Namespace) -> dict[str, tuple[float, int]]:
    """Way -> (median seconds, segments)."""
    import numpy as np
    from servers import Pool, Receiver, Registration, make_manager, send
    from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import MooncakeTransferEngine

    import reference
    from sglang_dcp_block.patches import transfer_counts

    rng = np.random.default_rng(0)
    num_src, num_dst = args.tokens // PAGE, args.tokens // PAGE // P
    src_pages, dst_pages = rng.permutation(num_src).tolist(), rng.permutation(num_dst).tolist()
    source = Pool.random(args.layers, args.tokens, args.row_bytes)
    engine = MooncakeTransferEngine("127.0.0.1")
    manager = make_manager(source, PAGE, engine)
    rows = {
        block: np.array(reference.transfer_rows(src_pages, dst_pages, RANK, P, block, PAGE)).T for block in (1, BLOCK)
    }
    gathered = np.zeros((args.layers, args.tokens // P, args.row_bytes), np.uint8)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        receiver = Receiver(Path(folder), gathered.nbytes)
        pool = receiver.pool(*gathered.shape)

        def by_blocks(block: int) -> None:
            registration = Registration(P, RANK, block, pool.ptrs, mooncake_session_id=receiver.session)
            assert send(manager, registration, src_pages, dst_pages, num_tokens=args.tokens) == 0

        def one_segment() -> None:
            for layer in range(args.layers):
                np.take(source.memory[layer], rows[BLOCK][0], axis=0, out=gathered[layer])
            ptrs, length = Pool(gathered).ptrs, gathered[0].nbytes
            assert engine.batch_transfer_sync(receiver.session, ptrs, pool.ptrs, [length] * args.layers) == 0

        ways = {
            "token round-robin": (lambda: by_blocks(1), rows[1]),
            f"blocks of {BLOCK}": (lambda: by_blocks(BLOCK), rows[BLOCK]),
            "gathered, one segment a layer": (one_segment, np.array([rows[BLOCK][0], np.arange(args.tokens // P)])),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        segments = dict.fromkeys(ways, args.layers)
        try:
            for round_ in range(args.rounds + 1):  # the first one warms up
                for way, (transfer, (src, dst)) in ways.items():
                    pool.memory[:] = 255
                    transfer_counts.COUNTS = transfer_counts.Counts()
                    begin = time.perf_counter()
                    transfer()
                    if round_:
                        seconds[way].append(time.perf_counter() - begin)
                    np.testing.assert_array_equal(pool.memory[:, dst], source.memory[:, src], err_msg=way)
                    for totals in transfer_counts.COUNTS.by_path.values():
                        segments[way] = totals.segments
        finally:
            receiver.close()
    return {way: (statistics.median(seconds[way]), segments[way]) for way in ways}


def planning(tokens: int, rounds: int) -> tuple[float, float]:
    """(upstream's seconds, ours): the fastest of some calls in turns, one rank's share."""
    import numpy as np
    from sglang.srt.disaggregation.common.utils import build_dcp_token_transfer_plan, group_concurrent_contiguous

    from sglang_dcp_block.dcp.layout import DcpLayout
    from sglang_dcp_block.dcp.transfer import plan_runs

    rng, layout = np.random.default_rng(0), DcpLayout(P, BLOCK)
    src = rng.permutation(tokens // PAGE).astype(np.int32)
    dst = rng.permutation(tokens // PAGE // P).astype(np.int32)

    def upstream() -> None:
        plan = build_dcp_token_transfer_plan(src, dst, physical_page_size=PAGE, dcp_size=P, dcp_rank=RANK)
        group_concurrent_contiguous(plan.target_src_token_indices, plan.target_dst_token_indices)

    def ours() -> None:
        plan_runs(src, dst, page_size=PAGE, layout=layout, rank=RANK)

    best: dict[Any, float] = {upstream: float("inf"), ours: float("inf")}
    for _ in range(rounds):
        for plan, calls in ((upstream, 1), (ours, 20)):
            for _ in range(calls):
                begin = time.perf_counter()
                plan()
                best[plan] = min(best[plan], time.perf_counter() - begin)
    return best[upstream], best[ours]


def main() -> None:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--row-bytes", type=int, default=1152)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    import environment  # noqa: F401

    from sglang_dcp_block.patches import register
    from sglang_dcp_block.patches.pd_points import SENDER_POINTS

    register.arm(SENDER_POINTS)
    measured = transfers(args)
    print(f"\n{args.layers} layers x {args.tokens} tokens, rows of {args.row_bytes} bytes, DCP {P}, pages of {PAGE}\n")
    print("| way | segments | ms |\n|---|---|---|")
    for way, (seconds, segments) in measured.items():
        print(f"| {way} | {segments} | {seconds * 1e3:.1f} |")
    tokens, blocks, least = (seconds for seconds, _ in measured.values())
    print(f"\ntoken round-robin / blocks: {tokens / blocks:.1f} (15 or more expected)")
    print(f"blocks / one segment: {blocks / least:.2f} (1.5 or less expected)")
    for num_tokens in (65536, 131072):
        theirs, ours = planning(num_tokens, 20)
        print(
            f"plan of {num_tokens} tokens: {theirs * 1e3:.1f} ms upstream, {ours * 1e3:.3f} ms ({theirs / ours:.0f}x)"
        )


if __name__ == "__main__":
    main()
