"""Prefill server, registration: a decode server's layout is read, judged and remembered per session.

SGLang reads registrations in one unguarded thread: whatever raises there ends the bootstrap of every later request.  So a
registration that cannot be read, or whose geometry does not fit, becomes a rejection of that session, with a reason that
travels back to the decode server; the thread and all other sessions go on.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from typing import Any

from sglang_dcp_block.dcp import handshake
from sglang_dcp_block.dcp.handshake import Side
from sglang_dcp_block.patches import active, peer, peer_refusals
from sglang_dcp_block.patches.peer_refusals import Reason, Refusal

logger = logging.getLogger(__name__)

_CONTROL = ("WATERMARK", "STAGING_RSP", "ABORT")  # SGLang's own messages; their handlers guard themselves
_FIRST_TRAILING_FRAME = 18  # frames before it are SGLang's; a tag among them would be data


def read_registration(original: Any, cls: type, msg: list[bytes]) -> Any:
    """AROUND ``KVArgsRegisterInfo.from_zmq``: read the block size too; what cannot be read is marked, not raised."""
    try:
        info = original(cls, msg)
        info.dcp_block_size = handshake.block_size_in(msg[_FIRST_TRAILING_FRAME:])
        info.dcp_block_rejection = None
    except Exception as error:  # any byte may be wrong: frames, numbers, lengths
        text = f"registration could not be read: {type(error).__name__}: {error}"
        info = _unreadable(cls, msg, Refusal(Reason.UNREADABLE, text))
    peer.registering(info)
    return info


def topology(original: Any, manager: Any, dst_dcp_size: int, dst_dcp_rank: int) -> bool:
    """AROUND ``CommonKVManager.requires_dcp_relayout``: SGLang's refusal of a topology, kept, for this session only."""
    try:
        return bool(original(manager, dst_dcp_size, dst_dcp_rank))
    except RuntimeError as error:
        if not _mark(Refusal(Reason.TOPOLOGY, str(error))):
            raise
        return False


def row_sizes(original: Any, manager: Any, dst_page_item_lens: list[int | None], dst_dcp_size: int) -> list[int]:
    """AROUND ``CommonKVManager.prepare_dcp_token_item_lens``: other row sizes than ours reject this session only."""
    try:
        lens: list[int] = original(manager, dst_page_item_lens, dst_dcp_size)
        return lens
    except (RuntimeError, TypeError, ZeroDivisionError) as error:
        if not _mark(Refusal(Reason.ROW_SIZES, str(error))):
            raise
        return []


def publish_verdict(original: Any, manager: Any, mooncake_session_id: str, decode_kv_args: Any) -> str | None:
    """AROUND ``MooncakeKVManager._publish_peer_registration``: judge the layout, then let SGLang judge the rest.

    Returns:
        The reason of a rejection, or None. A rejected session is published with it, so its requests fail with the reason.
    """
    refusal: Refusal | None = decode_kv_args.dcp_block_rejection or _misfit(manager, decode_kv_args)
    try:
        if refusal is None:
            verdict: str | None = original(manager, mooncake_session_id, decode_kv_args)
            if verdict is not None:
                peer_refusals.count(peer_refusals.RefusedBy.PREFILL, Reason.UPSTREAM)
            return verdict
    except Exception as error:
        refusal = Refusal(Reason.UPSTREAM, f"{type(error).__name__}: {error}")
    finally:
        peer.registered()
    peer_refusals.count(peer_refusals.RefusedBy.PREFILL, refusal.reason)
    with manager.session_lock:
        manager._unblacklist_session(mooncake_session_id)
        manager.state_strides_validated.discard(mooncake_session_id)
        manager.state_layout_rejections[mooncake_session_id] = refusal.text
        manager.decode_kv_args_table[mooncake_session_id] = decode_kv_args
    return refusal.text


def guarded_receive(
    original: Any, manager: Any, socket: Any, *args: Any, **kwargs: Any
) -> Callable[[], list[bytes] | None]:
    """AROUND ``CommonKVManager._make_worker_recv``: messages that SGLang's thread could not read are dropped."""
    receive: Callable[[], list[bytes] | None] = original(manager, socket, *args, **kwargs)

    def guarded() -> list[bytes] | None:
        msg = receive()
        if msg is None or _readable(msg):
            return msg
        peer_refusals.count(peer_refusals.RefusedBy.PREFILL, Reason.MESSAGE)
        logger.error(
            "Dropped a message of %d frames that starts with %r: expected a registration or a transfer request.",
            len(msg),
            msg[:1],
        )
        return None

    return guarded


def _mark(refusal: Refusal) -> bool:
    """Note ``refusal`` for the registration that this thread is reading; False if it reads none."""
    info = peer.current_registration()
    if info is None:
        return False
    info.dcp_block_rejection = info.dcp_block_rejection or refusal
    return True


def _readable(msg: list[bytes]) -> bool:
    """Whether SGLang's thread gets through this message: what it reads unguarded is read here first.

    Registrations are the exception: they are read later, by :func:`read_registration`, which remembers why one failed.
    """
    from sglang.srt.disaggregation.mooncake.conn import TransferInfo

    try:
        head = msg[0].decode("ascii")
        if head in _CONTROL:
            return True
        msg[3].decode("ascii")
        if head != "None":
            int(head)
            int(msg[7].decode("ascii"))
            TransferInfo.from_zmq(msg)
    except (IndexError, ValueError, struct.error):
        return False
    return True


def _unreadable(cls: Any, msg: list[bytes], refusal: Refusal) -> Any:
    info = cls(
        room="None",
        endpoint="",
        dst_port=0,
        mooncake_session_id=msg[3].decode("ascii", errors="replace"),
        dst_kv_ptrs=[],
        dst_aux_ptrs=[],
        dst_state_data_ptrs=[],
        dst_tp_rank=0,
        dst_attn_tp_size=1,
        dst_kv_item_len=0,
        dst_state_item_lens=[],
        dst_state_dim_per_tensor=[],
        dst_kv_layer_ids=[],
        dst_state_layer_ids=[],
    )
    info.dcp_block_size = 1
    info.dcp_block_rejection = refusal
    return info


def _misfit(manager: Any, info: Any) -> Refusal | None:
    text = handshake.why_not(_own_side(manager), _peer_side(manager, info))
    return None if text is None else Refusal(Reason.LAYOUT, text)


def _own_side(manager: Any) -> Side:
    return Side(manager.dcp_size, active.layout_or_stock(manager.dcp_size).block_size, manager.kv_args.page_size)


def _peer_side(manager: Any, info: Any) -> Side:
    """A registration names no page size: the decode server has compared it before it registered."""
    return Side(info.dst_dcp_size, info.dcp_block_size, manager.kv_args.page_size)
