"""Memory that a layout costs beside the KV itself: pack buffers of the prefill server, and rows that no token fills."""

from __future__ import annotations

from benchmarks import environment  # noqa: F401  # before what follows

from collections.abc import Iterator  # isort: skip
from types import SimpleNamespace
from typing import Any
from unittest import mock

from servers import Registration
from sglang.srt.disaggregation.common import conn, dcp_pack

from benchmarks.record import Check, Result, Row, Spread, Value
from sglang_dcp_block.patches import peer, register
from sglang_dcp_block.patches.pd_points import SENDER_POINTS

P, PAGE, QUEUES = 8, 64, 4
TOKENS = "token round-robin"
STAGING, ROUNDING = "pack buffers of a prefill rank", "rows that a request takes and does not fill, all ranks"
SHAPES = (("DeepSeek-V3, Kimi-K2: 61 layers, bf16", 61, 1152), ("the same, fp8 with scales", 61, 656))
CHUNKS = (8192, 32768)
LENGTHS = (1, 100, 1000, 16384, 131072)

READING = f"""
**{STAGING}**: what SGLang allocates on a GPU for a decode server of {P} ranks, by its own function, for {QUEUES}
transfer queues, and chunks of at most so many tokens; and whether it is asked to for a decode server with blocks, by
the plugin's hook on the function that allocates. Blocks of 8 tokens are below the limit from which blocks are sent as
they lie (docs/adr/0002-direct-or-packed.md), so they are packed as token round-robin is.

**{ROUNDING}**: memory is handed out in virtual pages of {PAGE} × {P} tokens, in both layouts, so this is not a cost
of blocks: the bytes are the same. It is here because it is the larger part for short requests.
"""


def staging(row_bytes: int, layers: int, chunk: int, block: int) -> int:
    """Bytes that a prefill rank allocates when a decode server with such blocks registers."""
    manager = object.__new__(conn.CommonKVManager)
    manager.kv_args = SimpleNamespace(kv_item_lens=[row_bytes * PAGE] * layers, page_size=PAGE, num_draft_entries=0)
    manager.transfer_queues = [None] * QUEUES
    manager._dcp_pack_buffers = manager._dcp_pack_max_tokens = None
    allocated: list[int] = []

    def allocate(_: Any, args: Any, count: int, dcp_size: int, max_tokens: int, **__: Any) -> list[int]:
        size = dcp_pack.dcp_pack_buffer_bytes(args.kv_item_lens, args.page_size, max_tokens, dcp_size)
        allocated.extend([size] * count)
        return [size] * count

    with (
        mock.patch.object(conn, "max_prefill_buffer_tokens", return_value=chunk),
        mock.patch.object(conn, "get_device", return_value=SimpleNamespace(device="cuda")),
        mock.patch.object(dcp_pack, "init_dcp_pack_buffers", allocate),
    ):
        peer.registering(Registration(P, 0, block, []))
        try:
            manager._init_dcp_pack_buffers_once(P, include_draft=True)
        finally:
            peer.registered()
    return sum(allocated)


def unfilled_rows(tokens: int, page_size: int, ranks: int) -> int:
    """Rows of all ranks that a request of so many tokens takes in vain.

    >>> unfilled_rows(5, 64, 8)
    507
    """
    virtual_page = page_size * ranks
    return -tokens % virtual_page


def _rows() -> Iterator[Row]:
    for name, layers, row_bytes in SHAPES:
        for chunk in CHUNKS:
            packed = staging(row_bytes, layers, chunk, 1)
            for way, block in ((TOKENS, 1), ("blocks of 8", 8), ("blocks of 64", 64)):
                size = staging(row_bytes, layers, chunk, block)
                case: dict[str, Value] = {"memory": STAGING, "model": name, "tokens": chunk, "block": block}
                yield Row(way, case, Spread.exactly(size), TOKENS, packed, size)
    name, layers, row_bytes = SHAPES[0]
    for tokens in LENGTHS:
        size = unfilled_rows(tokens, PAGE, P) * layers * row_bytes
        for way, block in ((TOKENS, 1), ("blocks of 64", 64)):
            case = {"memory": ROUNDING, "model": name, "tokens": tokens, "block": block}
            yield Row(way, case, Spread.exactly(size), TOKENS, size, size)


def measure(full: bool) -> Result:
    """Ask SGLang's functions."""
    register.arm(SENDER_POINTS)
    rows = list(_rows())
    direct = sum(row.num_bytes or 0 for row in rows if row.case["memory"] == STAGING and row.case["block"] == 64)
    checks = (Check("bytes of pack buffers for blocks of 64", direct, 0, at_most=True),)
    return Result("memory", "Memory beside the KV", "bytes", READING, rows, checks)
