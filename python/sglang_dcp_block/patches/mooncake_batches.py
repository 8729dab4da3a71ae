"""Bounded batches: how many segments may be under way at once.

Mooncake's TCP transport takes about 2,048 segments for one peer, of all threads together, and fails beyond; SGLang hands
over those of all layers in one call. RDMA queues have no such end, and a call costs the least there.
"""

from __future__ import annotations

import json
import logging
import os
from typing import Any

from sglang_dcp_block.patches import transfer_counts

logger = logging.getLogger(__name__)

TCP_SEGMENTS = 1024  # under way to one peer, over all threads: half of what Mooncake takes
FAILED = -1  # as the transfer engine says it
_ATTRIBUTE = "_dcp_block_segment_limit"


def send_in_batches(original: Any, self: Any, mooncake_session_id: str, transfer_blocks: Any) -> int:
    """AROUND ``MooncakeKVManager._transfer_data``: no call beyond the limit; an error or a cancelled request ends it.

    Args:
        transfer_blocks: list of (source address, destination address, bytes).
    Returns:
        0, or the status of the batch that failed: nothing behind it is handed over, by no thread of the transfer.
    """
    transfer = transfer_counts.current()
    limit = segment_limit(self, ours=transfer is not None and transfer.path != transfer_counts.TOKENS)
    step = limit or max(len(transfer_blocks), 1)
    for first in range(0, len(transfer_blocks), step):
        batch = transfer_blocks if step >= len(transfer_blocks) else transfer_blocks[first : first + step]
        if transfer is not None:
            if transfer.is_cancelled():
                transfer.failure = transfer.failure or transfer_counts.CANCELLED
            if transfer.failure:  # here, or in another thread
                return FAILED
            transfer.add_batch(len(batch), sum(block[2] for block in batch))
        status: int = original(self, mooncake_session_id, batch)
        if status != 0:
            if transfer is not None:
                transfer.failure = transfer_counts.TRANSPORT
            return status
        if transfer is not None:
            transfer.batch_landed()
    return 0


def segment_limit(manager: Any, ours: bool = True) -> int:
    """Segments that one call may hand over; 0 where there is no limit.

    Rule: SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICES where it is set, for transfers in blocks; upstream's own transfers
    count by it already. Else, over TCP, an equal share of :data:`TCP_SEGMENTS` for each thread that sends; over RDMA none.
    """
    if ours and manager.max_transfer_batch_indices > 0:
        return int(manager.max_transfer_batch_indices)
    limit = getattr(manager, _ATTRIBUTE, None)
    if limit is None:
        limit = max(TCP_SEGMENTS // _num_threads(manager), 1) if goes_over_tcp(manager.engine) else 0
        setattr(manager, _ATTRIBUTE, limit)
        logger.info("KV transfers: %s segments a call.", limit or "any number of")
    return int(limit)


def goes_over_tcp(engine: Any) -> bool:
    """Whether Mooncake sends over TCP: told so, or because the machine has no RDMA device, whatever it was told.

    Args:
        engine: SGLang's ``MooncakeTransferEngine``.
    """
    from sglang.srt.environ import envs

    if "MC_FORCE_TCP" in os.environ:
        return True
    protocol = envs.MOONCAKE_PROTOCOL.get().lower()
    if protocol != "rdma":
        return bool(protocol == "tcp")
    ask = getattr(getattr(engine, "engine", None), "get_local_topology", None)
    if ask is None:  # not Mooncake's own engine (NPU)
        return False
    try:
        devices = [names for preferred in json.loads(ask()).values() for names in preferred]
    except Exception:
        logger.exception("Mooncake's topology is unreadable; sending in batches as for TCP.")
        return True
    return not any(devices)


def _num_threads(manager: Any) -> int:
    """Threads of this manager that send at once."""
    if manager.enable_custom_mem_pool:  # a layer a thread
        return sum(executor._max_workers for executor in manager.executors) or 1
    return len(manager.transfer_queues) or 1
