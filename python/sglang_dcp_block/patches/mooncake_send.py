"""Sending KV to a decode server that keeps it in blocks: whole runs as they lie, or packed by upstream's own code.

Whatever goes wrong here becomes a nonzero status: upstream's worker thread, and with it the prefill server, would not
survive an exception. A chunk that cannot be planned fails its own request; an error of the transfer engine also fails the
session, as upstream has it. A request that the decode server has given up gets no further write: its pages are kept for the
time of one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.dcp.transfer import Segments, batches, join, plan_replicated_runs, plan_runs, segments
from sglang_dcp_block.patches import mooncake_pack, peer, transfer_counts
from sglang_dcp_block.patches.mooncake_batches import FAILED
from sglang_dcp_block.patches.transfer_counts import DIRECT, FALLBACK, PACKED, TOKENS, Transfer, counted, working_on

logger = logging.getLogger(__name__)

_planning = threading.local()
_last_send = threading.local()


def send_kv(
    original: Any,
    self: Any,
    mooncake_session_id: str,
    prefill_kv_indices: Any,
    dst_kv_ptrs: list[int],
    dst_kv_indices: Any,
    **chunk: Any,
) -> int:
    """AROUND ``MooncakeKVManager.send_kvcache_dcp``: one chunk to one decode rank.

    A decode server without blocks gets upstream's transfer, untouched and counted.

    Returns:
        0, or a nonzero status where the chunk has failed.
    """

    def as_upstream() -> int:
        sent: int = original(self, mooncake_session_id, prefill_kv_indices, dst_kv_ptrs, dst_kv_indices, **chunk)
        return sent

    _last_send.settled = False
    block_size = peer.block_size_of(registration := self.decode_kv_args_table.get(mooncake_session_id))
    if block_size == 1:
        with counted(mooncake_session_id, TOKENS) as as_tokens:
            return _noted(as_tokens, as_upstream())
    status, reason = FAILED, ""
    transfer: Transfer | None = None
    room = _room_of(self, mooncake_session_id, dst_kv_indices)
    try:
        buffers = _buffers(self, dst_kv_ptrs, chunk)
        direct = mooncake_pack.goes_direct(self, registration)
        path = FALLBACK if not buffers.drafts_fit else DIRECT if direct or chunk.get("pack_buffer") is None else PACKED
        with counted(mooncake_session_id, path) as transfer:
            transfer.is_cancelled = lambda: room is not None and _has_ended(self, room)
            if path == DIRECT:
                transfer.fallback = None if direct else transfer_counts.NO_PACK_BUFFER
                layout = DcpLayout(chunk["dst_dcp_size"], block_size)
                parts = _plan(self, prefill_kv_indices, dst_kv_indices, layout, buffers, chunk)
                status = _hand_over(self, mooncake_session_id, parts, chunk["executor"])
            else:
                transfer.fallback = transfer_counts.DRAFT_HEADS if path == FALLBACK else None
                with planning_blocks(block_size):
                    status = as_upstream()
            if _noted(transfer, status) != 0 and transfer.failure == transfer_counts.CANCELLED:
                _spare_session(self, mooncake_session_id)
                _last_send.settled = _nothing_under_way(self, transfer)
            elif status != 0:
                reason = f"the transfer engine returned {status} in batch {transfer.batches}, which ended the transfer"
    except Exception as error:
        if not isinstance(error, ValueError):  # which says expected and got
            logger.exception("Sending KV in blocks to decode session %s:", mooncake_session_id)
        status, reason = FAILED, f"{type(error).__name__}: {error}"
        _spare_session(self, mooncake_session_id)
        _last_send.settled = transfer is None or _nothing_under_way(self, transfer)
    if reason:
        _give_reason(self, room, f"KV in blocks to {mooncake_session_id}: {reason}")
    return status


def poison_unsettled(original: Any, self: Any, room: int) -> None:
    """AROUND ``MooncakeKVManager._poison_unsettled_send``, which upstream's worker calls after each failure of a send.

    Pages of a send that failed with nothing under way are idle: their decode server may hear so, and need not wait.
    """
    settled, _last_send.settled = getattr(_last_send, "settled", False), False
    if not settled:
        original(self, room)


def plan_rows(
    original: Any, src_page_indices: Any, dst_page_indices: Any, *, dcp_size: int, dcp_rank: int, **chunk: Any
) -> Any:
    """AROUND ``disaggregation.common.utils.build_dcp_token_transfer_plan``: by blocks, inside :func:`planning_blocks`.

    Work grows with tokens, as upstream's does: this is the plan of transfers that upstream's code packs and sends.
    """
    block_size = getattr(_planning, "block_size", 1)
    if block_size == 1:
        return original(src_page_indices, dst_page_indices, dcp_size=dcp_size, dcp_rank=dcp_rank, **chunk)
    from sglang.srt.disaggregation.common.utils import DCPTokenTransferPlan

    pages, layout = (src_page_indices, dst_page_indices), DcpLayout(dcp_size, block_size)
    chunk["page_size"] = chunk.pop("physical_page_size")
    runs = plan_runs(*pages, layout=layout, rank=dcp_rank, **chunk)
    chunk.pop("decode_prefix_len", None)  # as upstream: a replicated pool's pages begin behind it
    drafts = plan_replicated_runs(*pages, dcp_size=dcp_size, **chunk)
    return DCPTokenTransferPlan(*runs.rows(), *drafts.rows())


@contextmanager
def planning_blocks(block_size: int) -> Iterator[None]:
    """What this thread plans is for a decode server with such blocks."""
    _planning.block_size = block_size
    try:
        yield
    finally:
        _planning.block_size = 1


@dataclass(frozen=True, slots=True)
class _Buffers:
    """The pools' buffers, source and destination paired: the target model's layers, then the draft model's."""

    src_ptrs: Sequence[int]
    dst_ptrs: Sequence[int]
    token_bytes: Sequence[int]
    num_targets: int
    drafts_fit: bool  # whether draft rows are as wide there as here

    def segments(self, runs: Any, which: slice) -> Segments:
        return segments(runs, self.src_ptrs[which], self.dst_ptrs[which], self.token_bytes[which])


def _buffers(manager: Any, dst_kv_ptrs: list[int], chunk: dict[str, Any]) -> _Buffers:
    """Pair the buffers by upstream's rules."""
    from sglang.srt.disaggregation.utils import resolve_dcp_dst_entry_indices

    args, layer_ids = manager.kv_args, chunk["dst_layer_ids"]
    if args.kv_layer_ids or layer_ids:
        order = resolve_dcp_dst_entry_indices(args.kv_layer_ids, layer_ids, len(args.kv_data_ptrs), len(dst_kv_ptrs))

        def paired(of_src: list[int], of_dst: list[int]) -> tuple[list[int], list[int]]:
            return of_src, [of_dst[entry] for entry in order]
    else:

        def paired(of_src: list[int], of_dst: list[int]) -> tuple[list[int], list[int]]:
            own, theirs, _ = manager.get_mla_kv_ptrs_with_pp(of_src, of_dst)
            return own, theirs

    src_ptrs, dst_ptrs = paired(args.kv_data_ptrs, dst_kv_ptrs)
    token_bytes, num_targets = chunk["dcp_token_item_lens"], len(src_ptrs) - args.num_draft_entries
    drafts_fit = True
    if args.num_draft_entries and chunk.get("dst_kv_item_lens"):
        _, page_bytes = paired(args.kv_item_lens, chunk["dst_kv_item_lens"])
        slots = args.page_size * chunk["dst_dcp_size"]
        drafts_fit = list(page_bytes[num_targets:]) == [width * slots for width in token_bytes[num_targets:]]
    elif args.num_draft_entries:
        drafts_fit = chunk.get("dst_attn_tp_size") in (None, manager.attn_tp_size)
    return _Buffers(src_ptrs, dst_ptrs, token_bytes, num_targets, drafts_fit)


def _plan(
    manager: Any, src_pages: Any, dst_pages: Any, layout: DcpLayout, buffers: _Buffers, chunk: dict[str, Any]
) -> list[Segments]:
    """The chunk's segments, a piece a layer."""
    if chunk["num_kv_tokens"] is None:
        raise ValueError("num_kv_tokens: expected the chunk's tokens, got None")
    where: dict[str, Any] = {
        "page_size": manager.kv_args.page_size,
        "src_page_offset": chunk["src_page_offset"],
        "num_kv_tokens": chunk["num_kv_tokens"],
    }
    prefix = chunk["decode_prefix_len"]
    runs = plan_runs(src_pages, dst_pages, layout=layout, rank=chunk["dst_dcp_rank"], decode_prefix_len=prefix, **where)
    parts = list(batches(buffers.segments(runs, slice(buffers.num_targets)), len(runs.lengths)))
    if buffers.num_targets < len(buffers.src_ptrs):
        drafts = plan_replicated_runs(src_pages, dst_pages, dcp_size=layout.dcp_size, **where)
        parts += batches(buffers.segments(drafts, slice(buffers.num_targets, None)), len(drafts.lengths))
    return parts


def _hand_over(manager: Any, session: str, parts: list[Segments], executor: Any) -> int:
    """Hand segments to the transfer engine; the hook on ``_transfer_data`` does so in batches, until one fails."""
    transfer = transfer_counts.current()
    assert transfer is not None, "called inside counted()"

    def send(part: Segments) -> int:
        with working_on(transfer):
            status: int = manager._transfer_data(session, part.blocks())
            return status

    if manager.enable_custom_mem_pool:  # as upstream: a layer a thread
        return int(manager._await_transfer_futures([executor.submit(send, part) for part in parts]))
    return send(join(parts))


def _noted(transfer: Transfer, status: int) -> int:
    if status != 0:
        transfer.failure = transfer.failure or transfer_counts.TRANSPORT
    return status


def _has_ended(manager: Any, room: int) -> bool:
    """Whether a request has failed, been aborted, or been forgotten."""
    from sglang.srt.disaggregation.base import KVPoll

    return bool(manager.request_status.get(room, KVPoll.Failed) == KVPoll.Failed)


def _nothing_under_way(manager: Any, transfer: Transfer) -> bool:
    """Whether all that was handed over has landed; what threads of SGLang's own hand over is not known here."""
    return transfer.under_way == 0 and not bool(manager.enable_custom_mem_pool)


def _spare_session(manager: Any, session: str) -> None:
    """Make up for the failure that upstream's worker will count: this request says nothing about its session."""
    with manager.session_lock:
        manager.session_failures[session] -= 1


def _room_of(manager: Any, session: str, dst_kv_indices: Any) -> int | None:
    """The request that a chunk belongs to: upstream hands over the very page list that the request keeps."""
    for room, infos in list(manager.transfer_infos.items()):
        if getattr(infos.get(session), "dst_kv_indices", None) is dst_kv_indices:
            return int(room)
    return None


def _give_reason(manager: Any, room: int | None, reason: str) -> None:
    """Leave the reason where upstream's worker, which is told a status only, keeps the first root cause of a request."""
    logger.error("%s", reason)
    if room in manager.request_status:
        with manager.failure_lock:
            manager.failure_records.setdefault(room, reason)
