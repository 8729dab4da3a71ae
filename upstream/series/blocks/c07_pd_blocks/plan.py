"""The plan of a transfer: runs of a block, and the calls that they are cut into."""

from upstream.edit import add_parameter, after, assigns, before, defines, on, reads, substitute, tests
from upstream.series.blocks.c07_pd_blocks.modules import UTILS

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
