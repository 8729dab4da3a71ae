"""Runs go as they lie where they are long enough, else through the pack buffers."""

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
    returns,
    substitute,
)
from upstream.series.blocks.c07_pd_blocks.modules import ASCEND, COMMON, MANAGER, MOONCAKE

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
