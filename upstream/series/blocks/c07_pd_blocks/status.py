"""Success names the block size that was sent."""

from upstream.edit import add_argument, add_import, add_parameter, before, calls, defines, on, reads, tests
from upstream.series.blocks.c07_pd_blocks.modules import COMMON, UTILS

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
