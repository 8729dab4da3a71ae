"""Patch points of prefill/decode disaggregation over Mooncake."""

from __future__ import annotations

from sglang_dcp_block.patches import (
    mooncake_batches,
    mooncake_pack,
    mooncake_send,
    pd_capability,
    pd_decode,
    pd_echo,
    pd_registration,
    pd_release,
    pd_restart,
)
from sglang_dcp_block.patches.register import Kind, PatchPoint

_COMMON = "sglang.srt.disaggregation.common.conn"
_DECODE = "sglang.srt.disaggregation.decode"
_MOONCAKE = "sglang.srt.disaggregation.mooncake.conn"
_HANDSHAKE_UPSTREAM = "a field in PrefillServerInfo and a positional frame for the block size"
_PLAN_UPSTREAM = "interleave_size in upstream's transfer plan, planned by runs"
_RESTART_UPSTREAM = "a heartbeat in upstream that tells a restarted prefill server from one that lived on"
_GUARD_UPSTREAM = "the same guards in upstream's bootstrap thread"

# In the process of the bootstrap server, which started the prefill schedulers.
BOOTSTRAP_POINTS: tuple[PatchPoint, ...] = (
    PatchPoint(
        f"{_COMMON}.CommonKVBootstrapServer._setup_routes", Kind.AFTER,
        "GET /dcp_layout tells decode servers that this one places KV by blocks; a stock server answers 404.",
        _HANDSHAKE_UPSTREAM, pd_capability.add_route,
    ),
)  # fmt: skip

# In every scheduler of a prefill server, with or without the flag.
REGISTRATION_POINTS: tuple[PatchPoint, ...] = (
    PatchPoint(
        f"{_COMMON}.CommonKVManager._register_topology_row", Kind.AFTER,
        "Each rank reports its capability to the bootstrap server, which lives in another process.",
        _HANDSHAKE_UPSTREAM, pd_capability.report_rank,
    ),
    PatchPoint(
        f"{_MOONCAKE}.KVArgsRegisterInfo.from_zmq", Kind.AROUND,
        "Read the block size of a decode server; a registration that cannot be read rejects that session only.",
        _HANDSHAKE_UPSTREAM, pd_registration.read_registration,
    ),
    PatchPoint(
        f"{_COMMON}.CommonKVManager.requires_dcp_relayout", Kind.AROUND,
        "A topology that SGLang refuses rejects that session; raised, it would end the bootstrap thread.",
        _GUARD_UPSTREAM, pd_registration.topology,
    ),
    PatchPoint(
        f"{_COMMON}.CommonKVManager.prepare_dcp_token_item_lens", Kind.AROUND,
        "Other row sizes reject that session; raised, it would end the bootstrap thread.",
        _GUARD_UPSTREAM, pd_registration.row_sizes,
    ),
    PatchPoint(
        f"{_MOONCAKE}.MooncakeKVManager._publish_peer_registration", Kind.AROUND,
        "Equal DCP sizes copy pages as they are, so block sizes must be equal; otherwise KV would be garbled in silence.",
        _HANDSHAKE_UPSTREAM, pd_registration.publish_verdict,
    ),
    PatchPoint(
        f"{_COMMON}.CommonKVManager._make_worker_recv", Kind.AROUND,
        "Messages that cannot be read are dropped; read, they would end the bootstrap thread.",
        _GUARD_UPSTREAM, pd_registration.guarded_receive,
    ),
    PatchPoint(
        f"{_COMMON}.CommonKVManager.conclude_transfer", Kind.AROUND,
        "What is said to the decode server is made after the scheduler may have cleared the room; so it is read before.",
        _HANDSHAKE_UPSTREAM, pd_echo.read_room_first,
    ),
    PatchPoint(
        f"{_COMMON}.CommonKVManager._encode_kv_status_message", Kind.AFTER,
        "Success names the block size that was sent; failure carries the reason of a rejection.",
        _HANDSHAKE_UPSTREAM, pd_echo.echo_block_size,
    ),
)  # fmt: skip

# In every scheduler of a prefill server: sending.
SENDER_POINTS: tuple[PatchPoint, ...] = (
    PatchPoint(
        f"{_MOONCAKE}.MooncakeKVManager.send_kvcache_dcp", Kind.AROUND,
        "A decode server with blocks gets runs of whole blocks; an error fails the request, not the worker thread.",
        _PLAN_UPSTREAM, mooncake_send.send_kv,
    ),
    PatchPoint(
        "sglang.srt.disaggregation.common.utils.build_dcp_token_transfer_plan", Kind.AROUND,
        "Short blocks that upstream's code packs are planned by blocks.",
        _PLAN_UPSTREAM, mooncake_send.plan_rows,
    ),
    PatchPoint(
        f"{_MOONCAKE}.MooncakeKVManager._transfer_data", Kind.AROUND,
        "Mooncake's TCP transport fails beyond about 2,048 segments under way; sent in batches below that, and counted.",
        "bounded batches in upstream's send_kvcache_dcp, as in its page copy", mooncake_batches.send_in_batches,
    ),
    PatchPoint(
        f"{_COMMON}.CommonKVManager._init_dcp_pack_buffers_once", Kind.AROUND,
        "No gigabytes of pack buffers for a decode server whose blocks are sent as they lie.",
        _PLAN_UPSTREAM, mooncake_pack.buffers_when_needed,
    ),
    PatchPoint(
        f"{_COMMON}.CommonKVSender.get_max_transfer_tokens", Kind.AROUND,
        "The size of pack buffers cuts only the transfers that go through them.",
        _PLAN_UPSTREAM, mooncake_pack.chunk_limit_when_packed,
    ),
    PatchPoint(
        f"{_MOONCAKE}.MooncakeKVManager._poison_unsettled_send", Kind.AROUND,
        "Pages of a send that failed with nothing under way are idle; marked, a decode server would keep them for the time.",
        "sends that stop between batches in upstream", mooncake_send.poison_unsettled,
    ),
    *(
        PatchPoint(target, Kind.RELIES, why, "nothing: watched for changes")
        for target, why in (
            (f"{_MOONCAKE}.MooncakeKVManager.transfer_worker",
             "Fails a request, and a session from its first counted failure on, by the status; dies of exceptions."),
            (f"{_COMMON}.CommonKVManager.get_mla_kv_ptrs_with_pp", "Pairs the buffers of both sides."),
            ("sglang.srt.disaggregation.utils.resolve_dcp_dst_entry_indices", "Pairs the buffers by layer id."),
            ("sglang.srt.disaggregation.common.dcp_pack.dcp_pack_buffer_bytes", "Sizes the buffers that are not needed."),
        )
    ),
)  # fmt: skip

PREFILL_POINTS: tuple[PatchPoint, ...] = REGISTRATION_POINTS + SENDER_POINTS

# In every scheduler of a decode server with blocks.
DECODE_POINTS: tuple[PatchPoint, ...] = (
    PatchPoint(
        f"{_DECODE}.DecodePreallocQueue._ensure_prefill_info", Kind.AROUND,
        "Ask a prefill server about blocks before the first request; a stock one would send token round-robin rows.",
        _HANDSHAKE_UPSTREAM, pd_decode.ask_prefill_first,
    ),
    PatchPoint(
        f"{_MOONCAKE}.MooncakeKVManager.build_receiver_registration_message", Kind.AFTER,
        "Name our block size when registering.",
        _HANDSHAKE_UPSTREAM, pd_decode.register_block_size,
    ),
    PatchPoint(
        f"{_COMMON}.CommonKVManager.parse_kv_status_message", Kind.AROUND,
        "Success without our block size is a failure: the prefill server may have come back without blocks.",
        _HANDSHAKE_UPSTREAM, pd_decode.require_echo,
    ),
    PatchPoint(
        f"{_COMMON}.CommonKVReceiver._get_bootstrap_info_from_server", Kind.AFTER,
        "Remember where the ranks of a prefill server listen.",
        _RESTART_UPSTREAM, pd_restart.remember_rank,
    ),
    PatchPoint(
        f"{_COMMON}.CommonKVManager._on_heartbeat_success", Kind.AFTER,
        "A prefill server that restarts between two heartbeats, with blocks or without, is asked anew.",
        _RESTART_UPSTREAM, pd_restart.drop_if_restarted,
    ),
    PatchPoint(
        f"{_DECODE}.DecodeTransferQueue.__init__", Kind.AFTER,
        "Pages of a failed transfer are kept for as long as Mooncake may write them; SGLang's time knows nothing of it.",
        "a release timeout in upstream that follows the transfer engine's", pd_release.hold_long_enough,
    ),
    *(
        PatchPoint(target, Kind.RELIES, why, "nothing: watched for changes")
        for target, why in (
            (f"{_DECODE}.DecodeTransferQueue._defer_release", "Reads the queue's seconds for each transfer that failed."),
            (f"{_DECODE}.DecodeTransferQueue.resolve_deferred_releases", "Releases when acknowledged, or then."),
            (f"{_COMMON}.CommonKVManager._handle_node_failure", "Forgets a lost prefill server, and ends its requests."),
            (f"{_COMMON}.CommonKVManager._start_heartbeat_checker_thread", "Calls the hook after each answer."),
        )
    ),
)  # fmt: skip
