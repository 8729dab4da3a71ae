"""Prefill to decode in blocks: the transfer plan, direct or packed, and how the peers agree on the block size."""

import libcst.matchers as m

from upstream.edit import (
    add_argument,
    add_import,
    add_parameter,
    after,
    assigns,
    before,
    calls,
    condition,
    defines,
    exchange,
    on,
    reads,
    returning,
    returns,
    substitute,
    tests,
)

MESSAGE = """
[PD] Send KV to a decode server that interleaves DCP ranks by blocks

A decode rank of a server with --dcp-block-size B owns blocks of B
positions. On the prefill server these are runs of B neighbouring rows,
so build_dcp_token_transfer_plan takes interleave_size, and a run is one
segment instead of B. Runs of 16 KiB or more are sent as they lie: such
a peer needs no pack buffers and no limit on a transfer's length. With
SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICES set, a transfer is cut into
calls of as many segments, as the page copy is already.

The peers agree first, and a stock peer can misread nothing:

- A decode server with blocks adds its block size to its /route query. A
  prefill server that knows blocks answers with its own in
  PrefillServerInfo; the field is missing for anybody else, since an
  older decode server takes no unknown key. Without it the request fails
  with the reason.
- A registration names the block size in one more frame. Page sizes that
  it does not divide, and other block sizes at equal DCP sizes, where
  pages are copied as they are, reject that session.
- Success repeats the block size. Without that it is a failure: a
  prefill server may have come back without blocks at an address whose
  answer is cached.

Nothing that the servers say to each other changes where no block size
is set; a prefill rank's own registration has one key more.
"""

COMMON = "sglang.srt.disaggregation.common.conn"
MOONCAKE = "sglang.srt.disaggregation.mooncake.conn"
ASCEND = "sglang.srt.disaggregation.ascend.conn"
UTILS = "sglang.srt.disaggregation.common.utils"
MANAGER = "MooncakeKVManager"

PLAN = (
    on(
        UTILS,
        "build_dcp_token_transfer_plan",
        add_parameter("interleave_size: int = 1"),
        after(
            tests() & reads("decode_prefix_len", "virtual_page_size"),
            """
            if physical_page_size % interleave_size:
                raise ValueError(
                    f"PD DCP transfer requires blocks that divide the page size, got "
                    f"{interleave_size} tokens in pages of {physical_page_size}"
                )
            """,
        ),
        substitute(
            assigns("target_offsets"),
            """
            # Position p belongs to rank p // interleave_size % dcp_size.
            block_owners = (chunk_start + draft_offsets) // interleave_size % dcp_size
            target_offsets = np.flatnonzero(block_owners == dcp_rank)
            """,
        ),
        substitute(
            assigns("target_local"),
            """
            # The prefix is whole virtual pages, so rows count from its end.
            cycles, within = np.divmod(
                draft_local[target_offsets], interleave_size * dcp_size
            )
            target_local = cycles * interleave_size + within % interleave_size
            """,
        ),
    ),
    on(
        UTILS,
        "",
        before(
            defines("build_dcp_token_transfer_plan"),
            '''
            # A frame that names a block size says so itself: peers of other
            # releases may use the same position for something else.
            DCP_BLOCK_SIZE_TAG = b"dcp_block_size="


            def dcp_block_size_frames(block_size: int) -> List[bytes]:
                """One more frame of a message, or none where blocks are not in use."""
                if block_size == 1:
                    return []
                return [DCP_BLOCK_SIZE_TAG + str(block_size).encode("ascii")]


            def dcp_block_size_of(msg: List[bytes], index: int) -> int:
                """Tokens of a block as frame `index` of a message names it.

                1 where it names none, 0 where what it names is no number.
                """
                if len(msg) <= index or not msg[index].startswith(DCP_BLOCK_SIZE_TAG):
                    return 1
                value = msg[index][len(DCP_BLOCK_SIZE_TAG) :]
                return int(value) if value.isdigit() else 0
            ''',
        ),
    ),
)

AGREEMENT = (
    on(
        COMMON,
        "PrefillServerInfo",
        before(
            assigns("prefill_http_port"),
            """
            # Only in answers to decode servers that ask, see _handle_route_get.
            dcp_block_size: Optional[int] = None
            """,
        ),
    ),
    on(
        COMMON,
        "CommonKVManager",
        before(defines("__init__"), "dcp_block_size: int = 1  # tokens"),
    ),
    on(
        COMMON,
        "CommonKVManager.__init__",
        after(assigns("self.dcp_rank"), "self.dcp_block_size = dcp_interleave_size()"),
    ),
    on(
        COMMON,
        "CommonKVManager.register_to_bootstrap",
        before(
            tests() & reads("SGLANG_RUST_SERVER"),
            'payload["dcp_block_size"] = self.dcp_block_size',
        ),
    ),
    on(
        COMMON,
        "CommonKVManager.try_ensure_parallel_info",
        after(
            assigns("url"),
            """
            if self.dcp_block_size > 1:
                url += f"&dcp_block_size={self.dcp_block_size}"
            """,
        ),
    ),
    on(
        COMMON,
        "CommonKVManager.try_ensure_parallel_info",
        before(
            calls("self._resolve_rank_mapping"),
            """
            if self.dcp_block_size > 1 and info.dcp_block_size is None:
                raise RuntimeError(
                    "Expected a prefill server that sends KV in DCP blocks of "
                    f"{self.dcp_block_size} tokens, got one that does not know "
                    "blocks. Upgrade it, or leave --dcp-block-size out."
                )

            """,
        ),
    ),
    on(
        COMMON,
        "CommonKVBootstrapServer.__init__",
        after(assigns("self.enable_kv_cache_sharding"), "self.dcp_block_size: Optional[int] = None"),
    ),
    on(
        COMMON,
        "CommonKVBootstrapServer._handle_route_put",
        before(
            assigns("dp_group_table"),
            """
            if self.dcp_block_size is None:
                self.dcp_block_size = data.get("dcp_block_size")
            """,
        ),
    ),
    on(
        COMMON,
        "CommonKVBootstrapServer._handle_route_get",
        add_argument("PrefillServerInfo", "dcp_block_size=self.dcp_block_size"),
        before(
            tests() & reads("info", "kv_layout"),
            """
            if "dcp_block_size" not in request.query:
                payload.pop("dcp_block_size")
            """,
        ),
    ),
    on(
        MOONCAKE,
        "KVArgsRegisterInfo",
        before(assigns("staging_base_ptr"), "dst_dcp_block_size: int = 1"),
    ),
    on(
        MOONCAKE,
        "KVArgsRegisterInfo.from_zmq",
        add_argument("cls", "dst_dcp_block_size=dcp_block_size_of(msg, 20)"),
    ),
    on(
        MOONCAKE,
        f"{MANAGER}.build_receiver_registration_message",
        returning("+ dcp_block_size_frames(self.dcp_block_size)"),
    ),
    on(
        MOONCAKE,
        f"{MANAGER}._validate_peer_state_layout",
        before(
            assigns("state_types"),
            """
            block_size = registration_info.dst_dcp_block_size
            if block_size < 1 or self.kv_args.page_size % block_size:
                return False, (
                    "PD DCP requires a --dcp-block-size that divides the page size "
                    f"{self.kv_args.page_size}, got {block_size} on decode"
                )
            if (
                not registration_info.requires_dcp_relayout
                and block_size != self.dcp_block_size
            ):
                # Pages are copied as they are.
                return False, (
                    "PD requires equal --dcp-block-size at equal DCP sizes: "
                    f"prefill={self.dcp_block_size}, decode={block_size}"
                )
            """,
        ),
    ),
    on(
        MOONCAKE,
        MANAGER,
        before(
            defines("start_decode_thread"),
            '''
            def room_dcp_block_size(self, bootstrap_room: int) -> int:
                for session in list(self.transfer_infos.get(bootstrap_room, {})):
                    peer = self.decode_kv_args_table.get(session)
                    if peer is not None and peer.dst_dcp_block_size > 1:
                        return peer.dst_dcp_block_size
                return 1

            def parse_kv_status_message(
                self, msg: List[bytes]
            ) -> Optional[Tuple[int, int, int, Optional[str]]]:
                """Success without our DCP block size fails: other rows were sent."""
                parsed = super().parse_kv_status_message(msg)
                if parsed is None or parsed[1] != KVPoll.Success:
                    return parsed
                sent = dcp_block_size_of(msg, 4)
                if sent == self.dcp_block_size:
                    return parsed
                room, _, prefill_rank, _ = parsed
                reason = (
                    f"Prefill sent KV in DCP blocks of {sent} tokens, expected "
                    f"{self.dcp_block_size}"
                )
                return room, int(KVPoll.Failed), prefill_rank, reason
            ''',
        ),
    ),
)

STATUS = (
    on(
        COMMON,
        "CommonKVManager",
        before(
            defines("_encode_kv_status_message"),
            '''
            def room_dcp_block_size(self, bootstrap_room: int) -> int:
                """Tokens of a block on the decode server of a room; 1 without blocks."""
                return 1
            ''',
        ),
    ),
    on(
        COMMON,
        "CommonKVManager._encode_kv_status_message",
        add_parameter("dcp_block_size: int = 1"),
        before(
            tests() & reads("kv_status_msg_tag"),
            """
            if dcp_block_size > 1:
                # With the reason, and their size, to a decode server with DCP blocks.
                if not self.kv_status_msg_carries_reason:
                    parts.append((failure_reason or "").encode("utf-8"))
                parts += dcp_block_size_frames(dcp_block_size)
            """,
        ),
    ),
    on(
        COMMON,
        "CommonKVManager.send_kv_status_message",
        add_parameter("dcp_block_size: int = 1"),
        add_argument("self._encode_kv_status_message", "dcp_block_size=dcp_block_size"),
    ),
    on(
        COMMON,
        "CommonKVManager.conclude_transfer",
        before(
            calls("self.update_status"),
            """
            # Read first: once the status is published, the sender may clear the room.
            dcp_block_size = self.room_dcp_block_size(bootstrap_room)
            """,
        ),
        add_argument("self.send_kv_status_message", "dcp_block_size=dcp_block_size"),
    ),
    on(
        COMMON,
        "",
        add_import(UTILS, "dcp_block_size_frames"),
        add_import("sglang.srt.runtime_context", "dcp_interleave_size"),
    ),
)

SEND = (
    on(
        COMMON,
        "CommonKVManager",
        before(
            defines("_register_staging_memory"),
            '''
            def needs_dcp_pack(self, registration) -> bool:
                """Whether rows for this decode rank are gathered before they are sent."""
                return True
            ''',
        ),
    ),
    on(
        MOONCAKE,
        "",
        before(
            defines("KVArgsRegisterInfo"),
            """
            # Packing a shorter run costs less than the segments that it saves.
            DCP_DIRECT_RUN_BYTES = 16384
            """,
        ),
    ),
    on(
        MOONCAKE,
        MANAGER,
        before(
            defines("send_kvcache_dcp"),
            '''
            def needs_dcp_pack(self, registration: KVArgsRegisterInfo) -> bool:
                """Runs of a block that are long enough are sent as they lie.

                A run's bytes are a mean over the target layers, each of which has as
                many runs.
                """
                num_target = len(self.kv_args.kv_item_lens) - self.kv_args.num_draft_entries
                block_size = registration.dst_dcp_block_size
                if block_size == 1 or num_target == 0:
                    return True
                page_bytes = sum(self.kv_args.kv_item_lens[:num_target]) / num_target
                run_bytes = block_size * page_bytes / self.kv_args.page_size
                return run_bytes < DCP_DIRECT_RUN_BYTES
            ''',
        ),
    ),
    on(
        COMMON,
        "CommonKVSender.get_max_transfer_tokens",
        condition(
            reads("requires_dcp_relayout"),
            """(
            not info.is_dummy
            and registration is not None
            and registration.requires_dcp_relayout
            and self.kv_mgr.needs_dcp_pack(registration)
            )""",
        ),
    ),
    on(
        MOONCAKE,
        f"{MANAGER}.start_prefill_thread.bootstrap_thread",
        after(
            assigns("decode_kv_args"),
            """
            # Known from here on, so that a session rejected below is told why.
            self.decode_kv_args_table.setdefault(mooncake_session_id, decode_kv_args)
            """,
        ),
        substitute(
            calls("_init_dcp_pack_buffers_once"),
            """
            if self.needs_dcp_pack(decode_kv_args):
                self._init_dcp_pack_buffers_once(
                    decode_kv_args.dst_dcp_size, include_draft=True
                )
            """,
        ),
    ),
    on(
        MOONCAKE,
        f"{MANAGER}.transfer_worker",
        exchange(
            "the test for pack buffers",
            m.IfExp(test=m.Attribute(attr=m.Name("_dcp_pack_buffers"))),
            """(
                self._dcp_pack_buffers[worker_index]
                if self._dcp_pack_buffers
                and self.needs_dcp_pack(target_rank_registration_info)
                else None
            )""",
        ),
        add_argument("self.send_kvcache_dcp", "dst_dcp_block_size=target_rank_registration_info.dst_dcp_block_size"),
    ),
    on(
        MOONCAKE,
        f"{MANAGER}.send_kvcache_dcp",
        add_parameter("dst_dcp_block_size: int = 1"),
        add_argument("build_dcp_token_transfer_plan", "interleave_size=dst_dcp_block_size"),
        substitute(
            assigns("ret") & calls("self._transfer_data") & reads("transfer_blocks"),
            "ret = send_in_batches(transfer_blocks)",
        ),
        before(
            defines("process_sliced_draft"),
            '''
            def send_in_batches(transfer_blocks) -> int:
                """One that fails is the last."""
                step = self.max_transfer_batch_indices
                if step <= 0:
                    return self._transfer_data(mooncake_session_id, transfer_blocks)
                for start in range(0, len(transfer_blocks), step):
                    ret = self._transfer_data(
                        mooncake_session_id, transfer_blocks[start : start + step]
                    )
                    if ret != 0:
                        return ret
                return 0

            ''',
        ),
    ),
    on(
        MOONCAKE,
        f"{MANAGER}.send_kvcache_dcp.process_layer",
        substitute(
            returns() & calls("self._transfer_data"),
            "return send_in_batches(set_transfer_blocks(src_ptr, dst_ptr, token_item_len, groups))",
        ),
    ),
    on(
        MOONCAKE,
        "",
        add_import("sglang.srt.disaggregation.common.utils", "dcp_block_size_frames", "dcp_block_size_of"),
    ),
    on(
        ASCEND,
        "AscendKVManager.send_kvcache_dcp",
        add_parameter("dst_dcp_block_size: int = 1"),
        add_argument("send_kvcache_dcp", "dst_dcp_block_size=dst_dcp_block_size"),
    ),
)

ADMISSION = (
    on(
        "sglang.srt.arg_groups.dcp_block_hook",
        "validate_dcp_block_size",
        before(
            assigns("model_config"),
            """
            if cfg.disaggregation_mode == "decode" and not use_mla_backend(server_args):
                raise ValueError(
                    "--dcp-block-size > 1 requires an MLA model on a decode server of PD "
                    "disaggregation."
                )
            """,
        ),
        exchange(
            "the key of disaggregation",
            m.SimpleString('"--disaggregation-mode"'),
            '"KV transfer in PD disaggregation over anything but Mooncake"',
        ),
        exchange(
            "the test for disaggregation",
            m.Comparison(left=m.Attribute(attr=m.Name("disaggregation_mode"))),
            """(
                cfg.disaggregation_mode != "null"
                and cfg.disaggregation_transfer_backend not in ("mooncake", "fake")
            )""",
        ),
    ),
)

# The decode server of that test asks for its block size, too.
PAGES = (
    (
        "test/registered/disaggregation/test_mooncake_peer_rejection_unit.py",
        'kv_cache_dtype_str="auto",\n',
        'kv_cache_dtype_str="auto",\n            dcp_block_size=1,\n',
    ),
)

EDITS = PLAN + AGREEMENT + STATUS + SEND + ADMISSION
