"""Pack buffers: for the decode servers whose blocks are too short to be sent as they lie, and for them alone.

Upstream gathers the rows of a chunk in a buffer of each transfer queue before sending, which costs gigabytes of device
memory, and cuts transfers at the buffer's size. Long blocks need neither.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.dcp.transfer import DIRECT_BYTES, prefers_direct
from sglang_dcp_block.patches import peer

logger = logging.getLogger(__name__)

ENVIRONMENT = "SGLANG_DCP_BLOCK_DIRECT_BYTES"  # bytes of a block from which on it is sent as it lies


def goes_direct(manager: Any, registration: Any) -> bool:
    """Whether a decode server's blocks are sent as they lie. Token round-robin never is: it goes upstream's way."""
    block_size = peer.block_size_of(registration)
    if block_size == 1:
        return False
    layout = DcpLayout(registration.dst_dcp_size, block_size)
    return prefers_direct(layout, mean_token_bytes(manager), _threshold(os.environ.get(ENVIRONMENT, "")))


def mean_token_bytes(manager: Any) -> float:
    """Bytes of a row, on average over the target model's layers."""
    lens = manager.kv_args.kv_item_lens
    targets = lens[: len(lens) - manager.kv_args.num_draft_entries]
    return sum(targets) / (len(targets) * manager.kv_args.page_size) if targets else 0.0


def buffers_when_needed(original: Any, self: Any, dcp_size: int, *, include_draft: bool = False) -> None:
    """AROUND ``CommonKVManager._init_dcp_pack_buffers_once``: not for a decode server that goes direct or is rejected."""
    registration: Any = peer.current_registration()
    if not (_is_rejected(registration) or goes_direct(self, registration)):
        original(self, dcp_size, include_draft=include_draft)
    elif self._dcp_pack_buffers is None and not _is_rejected(registration):
        logger.info(
            "Decode session %s takes blocks of %d tokens as they lie: no pack buffers (%s not allocated).",
            registration.mooncake_session_id, peer.block_size_of(registration), _saved(self, dcp_size, include_draft),
        )  # fmt: skip


def chunk_limit_when_packed(original: Any, self: Any) -> int | None:
    """AROUND ``CommonKVSender.get_max_transfer_tokens``: the buffers' size cuts only what goes through them."""
    limit: int | None = original(self)
    if limit is None:
        return None
    registrations = self.kv_mgr.decode_kv_args_table
    for session, info in list(self.kv_mgr.transfer_infos.get(self.bootstrap_room, {}).items()):
        registration = registrations.get(session)
        if info.is_dummy or registration is None or not registration.requires_dcp_relayout:
            continue
        if not goes_direct(self.kv_mgr, registration):
            return limit
    return None


def _is_rejected(registration: Any) -> bool:
    return getattr(registration, "dcp_block_rejection", None) is not None


@functools.lru_cache(maxsize=8)  # an unreadable value is reported once
def _threshold(text: str) -> int:
    if not text:
        return DIRECT_BYTES
    if not text.isdecimal():
        logger.error("%s: expected a number of bytes, got %r; using %d.", ENVIRONMENT, text, DIRECT_BYTES)
        return DIRECT_BYTES
    return int(text)


def _saved(manager: Any, dcp_size: int, include_draft: bool) -> str:
    """What upstream would have allocated on CUDA devices, as text. Never raises: a log line may not end the caller."""
    try:
        from sglang.srt.disaggregation.common.conn import ceil_align, get_schedule, max_prefill_buffer_tokens
        from sglang.srt.disaggregation.common.dcp_pack import dcp_pack_buffer_bytes

        lens, num_draft = manager.kv_args.kv_item_lens, manager.kv_args.num_draft_entries
        tokens = ceil_align(max_prefill_buffer_tokens() or get_schedule().max_prefill_tokens, manager.kv_args.page_size)
        packed = lens if include_draft else lens[: len(lens) - num_draft]
        size = dcp_pack_buffer_bytes(packed, manager.kv_args.page_size, tokens, dcp_size)
        return f"{len(manager.transfer_queues)} x {size} bytes"
    except Exception as error:
        return f"size unknown: {error}"
