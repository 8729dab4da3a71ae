"""Decode server: ask the prefill server about blocks first, name ours when registering, and take only what was agreed."""

from __future__ import annotations

import json
import logging
import time
from typing import Any
from urllib.parse import urlencode

from sglang_dcp_block.dcp import handshake
from sglang_dcp_block.dcp.handshake import HandshakeError, Side
from sglang_dcp_block.patches import bounded_get, pd_release, peer_refusals
from sglang_dcp_block.patches.active import layout
from sglang_dcp_block.patches.peer_refusals import Reason, Refusal

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 5


def register_block_size(result: list[bytes], manager: Any) -> list[bytes]:
    """AFTER ``MooncakeKVManager.build_receiver_registration_message``: name our block size in a trailing frame."""
    return [*result, handshake.tagged(layout().block_size)]


def ask_prefill_first(
    original: Any, queue: Any, addr_to_reqs: dict[str, list[Any]]
) -> tuple[dict[str, list[Any]], list[Any]]:
    """AROUND ``DecodePreallocQueue._ensure_prefill_info``: only prefill servers that place by blocks as agreed pass.

    A refused server costs its own requests, which end with the reason; requests to other servers go on. Upstream's own
    refusals of a server, which would take the scheduler down, end the same way.  Requests that come within upstream's retry
    interval after that end without another question: a question can hold up the scheduler for seconds.

    Args:
        addr_to_reqs: bootstrap address -> requests that wait for it.
    Returns:
        (addresses that are ready with their requests, requests that wait on).
    """
    ready: dict[str, list[Any]] = {}
    remaining: list[Any] = []
    refused = _lately_refused(queue)
    for addr, requests_there in addr_to_reqs.items():
        if addr in refused:
            _fail(requests_there, addr, refused[addr][1])
            continue
        known = addr in queue.kv_manager.prefill_info_table
        refusal = None
        try:
            ready_here, remaining_here = original(queue, {addr: requests_there})
        except (RuntimeError, AssertionError) as error:
            refusal = Refusal(Reason.UPSTREAM, str(error))
        else:
            if ready_here and not known:
                refusal = _refusal(addr, queue)
                if refusal is not None:  # a later request asks again
                    queue.kv_manager.prefill_info_table.pop(addr, None)
        if refusal is not None:
            peer_refusals.count(peer_refusals.RefusedBy.DECODE, refusal.reason)
            refused[addr] = time.monotonic(), refusal
            _fail(requests_there, addr, refusal)
            continue
        ready.update(ready_here)
        remaining.extend(remaining_here)
    return ready, remaining


def require_echo(original: Any, manager: Any, msg: list[bytes]) -> tuple[int, int, int, str | None] | None:
    """AROUND ``CommonKVManager.parse_kv_status_message``: success without our block size in it is a failure.

    A prefill server may come back without the plugin at an address that was asked before; its rows would be token
    round-robin.
    """
    from sglang.srt.disaggregation.base import KVPoll

    parsed: tuple[int, int, int, str | None] | None = original(manager, msg)
    if parsed is None or parsed[1] != int(KVPoll.Success):
        return parsed
    expected = layout().block_size
    try:
        got = handshake.block_size_in(msg)
    except HandshakeError as error:
        got, reason = -1, f": {error}"
    else:
        reason = ""
    if got == expected:
        return parsed
    peer_refusals.count(peer_refusals.RefusedBy.DECODE, Reason.NO_ECHO)
    room, _, rank, _ = parsed
    return (
        room,
        int(KVPoll.Failed),
        rank,
        (
            f"prefill sent KV in blocks of {got}, expected {expected}{reason}. "
            "Install the same sglang-dcp-block on the prefill server, and restart it."
        ),
    )


def _lately_refused(queue: Any) -> dict[str, tuple[float, Refusal]]:
    """Address -> when it was refused and why, within upstream's retry interval; older ones are forgotten here."""
    oldest = time.monotonic() - queue._ensure_retry_interval
    before: dict[str, tuple[float, Refusal]] = getattr(queue, "dcp_block_refused", {})
    lately = {addr: one for addr, one in before.items() if one[0] > oldest}
    queue.dcp_block_refused = lately
    return lately


def _refusal(addr: str, queue: Any) -> Refusal | None:
    """Why the prefill server at ``addr`` may not send to us, or None."""
    if layout().block_size == 1:  # token round-robin: stock sends it, and one with blocks judges our registration
        return None
    ours = Side(layout().dcp_size, layout().block_size, queue.kv_manager.kv_args.page_size)
    try:
        status, body = bounded_get.get(addr, handshake.ROUTE, seconds=TIMEOUT_SECONDS, max_bytes=handshake.MAX_BYTES)
        if status == 404:
            if _has_blocks_built_in(addr, ours):
                return None  # it judges our registration
            return Refusal(
                Reason.NO_BLOCKS,
                f"expected one that places KV in blocks of {ours.block_size}, got one that does not know blocks. "
                "Install sglang-dcp-block beside the prefill server's SGLang, or start this server without "
                "--dcp-block-size.",
            )
        if status != 200:
            return Refusal(
                Reason.WITHHELD, f"its block capability is withheld ({status}: {_line(body.decode(errors='replace'))})"
            )
        capability = handshake.capability_from(json.loads(body))
    except (*bounded_get.ERRORS, RecursionError) as error:
        return Refusal(Reason.UNREADABLE, f"its block capability could not be read: {_line(str(error))}")
    if misfit := handshake.why_not(capability.side, ours):
        return Refusal(Reason.LAYOUT, misfit)
    if early := pd_release.refusal_of(queue.transfer_queue, addr, capability.transfer_timeout_seconds):
        return Refusal(Reason.EARLY_RELEASE, early)
    return None


def _line(text: str) -> str:
    """A peer's words in a log: on one line, printable, and not too many."""
    return "".join(char if char.isprintable() else " " for char in text[:300])


def _has_blocks_built_in(addr: str, ours: Side) -> bool:
    """Whether the prefill server at ``addr`` answers as a SGLang of the patch series does.

    Raises:
        OSError, HTTPException, ValueError: it could not be read.
    """
    topology = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
    query = urlencode({**dict.fromkeys(topology, "-1"), handshake.FIELD: ours.block_size})
    path = f"{handshake.TOPOLOGY_ROUTE}?{query}"
    status, body = bounded_get.get(addr, path, seconds=TIMEOUT_SECONDS, max_bytes=handshake.MAX_BYTES)
    if status != 200:
        raise HandshakeError(f"expected status 200 of {path}, got {status}")
    return handshake.knows_blocks(json.loads(body))


def _fail(decode_requests: list[Any], addr: str, refusal: Refusal) -> None:
    from sglang.srt.disaggregation.base import KVPoll

    reason = f"prefill server {addr} refused: {refusal}"
    logger.error("%s", reason)
    for decode_request in decode_requests:
        receiver = decode_request.kv_receiver
        if receiver is None:  # already taken out of the queue
            continue
        receiver.kv_mgr.record_failure(receiver.bootstrap_room, reason)
        receiver.kv_mgr.update_status(receiver.bootstrap_room, KVPoll.Failed)
        receiver.conclude_state = KVPoll.Failed
