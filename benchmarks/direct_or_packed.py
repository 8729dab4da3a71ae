"""Blocks as they lie, or packed first? Both ways through the plugin's sender, in turns, over real Mooncake TCP on loopback.

Prints Markdown tables: the time of a transfer as it lies, over its time packed, by the bytes of a block; for pages of the
decode server that are scattered and for adjacent ones, which packed rows fill in one piece. Every received row is checked.
docs/adr/0002-direct-or-packed.md says what follows.

    python benchmarks/direct_or_packed.py [--tokens 8192] [--layers 8] [--rounds 9]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

P, RANK, PAGE = 8, 3, 64
BLOCKS = (4, 8, 16, 32, 64)
ROW_BYTES = (64, 1152)
WAYS = {"direct": "0", "packed": str(2**40)}  # by the threshold in bytes


class HostPacking:
    """Stands in for SGLang's gather, which is for CUDA: one pass over each layer, into a buffer that is kept."""

    def __init__(self, source: Any, num_rows: int) -> None:
        import numpy as np

        self.source, self.np = source, np
        self.buffer = np.zeros((len(source.memory), num_rows, source.row_bytes), np.uint8)

    def __call__(self, *, src_token_indices: Any, **_: object) -> tuple[list[int], Any]:
        n = len(src_token_indices)
        for layer, rows in enumerate(self.source.memory):
            self.np.take(rows, src_token_indices, axis=0, out=self.buffer[layer, :n])
        base, stride = self.buffer.ctypes.data, self.buffer.strides[0]
        return [base + layer * stride for layer in range(len(self.buffer))], self.np.arange(n)


def measure(args: argparse.Namespace, receiver: Any, engine: Any, row_bytes: int, adjacent: bool) -> None:
    """Print one row of the table for each block size."""
    import numpy as np
    from servers import Pool, Registration, make_manager, send
    from sglang.srt.disaggregation.common import dcp_pack

    import reference
    from sglang_dcp_block.patches import transfer_counts
    from sglang_dcp_block.patches.mooncake_pack import ENVIRONMENT

    rng = np.random.default_rng(0)
    num_src, num_dst = args.tokens // PAGE, args.tokens // PAGE // P
    src_pages = rng.permutation(num_src).tolist()
    dst_pages = list(range(num_dst)) if adjacent else rng.permutation(num_dst).tolist()
    source = Pool.random(args.layers, args.tokens, row_bytes)
    dcp_pack.try_pack_dcp_src = HostPacking(source, args.tokens // P)
    manager = make_manager(source, PAGE, engine)
    receiver.reset()
    pool = receiver.pool(args.layers, args.tokens // P, row_bytes)
    milliseconds: dict[tuple[int, str], list[float]] = defaultdict(list)
    segments: dict[tuple[int, str], int] = {}
    for round_ in range(args.rounds + 1):  # the first one warms up and is checked
        for block in BLOCKS:
            for way, os.environ[ENVIRONMENT] in WAYS.items():
                registration = Registration(P, RANK, block, pool.ptrs, mooncake_session_id=receiver.session)
                transfer_counts.COUNTS = transfer_counts.Counts()
                begin = time.perf_counter()
                chunk = {"num_tokens": args.tokens, "pack_buffer": object()}
                assert send(manager, registration, src_pages, dst_pages, **chunk) == 0
                if round_:
                    milliseconds[block, way].append((time.perf_counter() - begin) * 1e3)
                    continue
                segments[block, way] = transfer_counts.COUNTS.by_path[way].segments
                pairs = np.array(reference.transfer_rows(src_pages, dst_pages, RANK, P, block, PAGE))
                np.testing.assert_array_equal(pool.memory[:, pairs[:, 1]], source.memory[:, pairs[:, 0]])
                pool.memory[:] = 255
    for block in BLOCKS:
        direct, packed = (statistics.median(milliseconds[block, way]) for way in WAYS)
        print(
            f"| {row_bytes} | {block} | {block * row_bytes} | {'adjacent' if adjacent else 'scattered'} | "
            f"{segments[block, 'direct']} / {segments[block, 'packed']} | {direct:.1f} / {packed:.1f} | "
            f"{direct / packed:.2f} |",
            flush=True,
        )


def main() -> None:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    import environment  # noqa: F401
    from servers import Receiver
    from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import MooncakeTransferEngine

    from sglang_dcp_block.patches import register
    from sglang_dcp_block.patches.pd_points import SENDER_POINTS

    register.arm(SENDER_POINTS)
    engine = MooncakeTransferEngine("127.0.0.1")
    print(f"\n{args.layers} layers x {args.tokens} tokens, DCP {P}, pages of {PAGE}; median of {args.rounds} rounds\n")
    print(
        "| row (bytes) | block (tokens) | block (bytes) | decode pages | segments: as it lies / packed | ms | ratio |"
    )
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        receiver = Receiver(Path(folder), args.layers * args.tokens // P * max(ROW_BYTES))
        try:
            for row_bytes in ROW_BYTES:
                for adjacent in (False, True):
                    measure(args, receiver, engine, row_bytes, adjacent)
        finally:
            receiver.close()


if __name__ == "__main__":
    main()
