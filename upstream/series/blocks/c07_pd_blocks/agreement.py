"""The servers agree on block and page sizes before anything is sent."""

from upstream.edit import add_argument, after, assigns, before, calls, defines, on, reads, returning, tests
from upstream.series.blocks.c07_pd_blocks.modules import COMMON, MANAGER, MOONCAKE

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
