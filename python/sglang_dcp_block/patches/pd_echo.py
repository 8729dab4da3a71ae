"""Prefill server: say in a transfer's status how KV was placed, and why a session was rejected."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from sglang_dcp_block.dcp import handshake


@dataclass(frozen=True, slots=True)
class Room:
    """Who a room's KV goes to."""

    number: int
    block_sizes: frozenset[int]  # of the decode ranks that get any
    has_rejected: bool


_concluded = threading.local()


def read_room_first(original: Any, manager: Any, *, bootstrap_room: int, **kwargs: Any) -> Any:
    """AROUND ``CommonKVManager.conclude_transfer``: look at the room before its status is published.

    From then on the scheduler's thread may clear it, and the message is made after that. Without the block size in it,
    the decode server would fail a transfer that had arrived.
    """
    _concluded.room = _read(manager, bootstrap_room)
    try:
        return original(manager, bootstrap_room=bootstrap_room, **kwargs)
    finally:
        del _concluded.room


def echo_block_size(
    result: list[bytes], manager: Any, *, bootstrap_room: int, status: Any, failure_reason: str | None
) -> list[bytes]:
    """AFTER ``CommonKVManager._encode_kv_status_message``: say what was sent, and why a session was rejected.

    Frames: room, status, rank, reason (read by every SGLang where it is there), block size (read by the plugin).
    """
    room: Room | None = getattr(_concluded, "room", None)
    if room is None or room.number != bootstrap_room:
        room = _read(manager, bootstrap_room)
    if room.block_sizes <= {1} and not room.has_rejected:
        return result
    reason = (failure_reason or "").encode()
    frames = [*result[:3], result[3] if len(result) > 3 else reason]
    return frames + [handshake.tagged(size) for size in sorted(room.block_sizes) if size > 1]


def _read(manager: Any, bootstrap_room: int) -> Room:
    sessions = dict(manager.transfer_infos.get(bootstrap_room, {}))  # other threads change it
    sizes = frozenset(
        getattr(manager.decode_kv_args_table.get(session), "dcp_block_size", 1)
        for session, info in sessions.items()
        if not info.is_dummy
    )
    rejected = any(session in manager.state_layout_rejections for session in sessions)
    return Room(bootstrap_room, sizes, rejected)
