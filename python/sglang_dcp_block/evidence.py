"""What was tried with blocks, how far, and by which tests: plain data, from which the docs' table is made.

What is refused stands in :data:`sglang_dcp_block.support.RULES`.  A row without tests is unknown: nothing refuses it, and
nobody has run it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sglang_dcp_block.support import HOST_TRANSFERS


class State(StrEnum):
    """How far something was tried."""

    TESTED = "tested"  # by a whole engine, or by the real transfer engine between processes
    METADATA = "metadata tested"  # up to what a kernel or library is given, and what it makes of that by its contract
    UNKNOWN = "unknown"  # not refused, not run


@dataclass(frozen=True, slots=True)
class Evidence:
    """One combination."""

    area: str
    what: str  # as an operator would name it
    state: State
    how: str
    tests: tuple[str, ...] = ()  # FILE::TEST below tests/; none exactly where the state is unknown


_IN_INTERPRETER = "SGLang's own Triton kernels, in Triton's interpreter"
_STAND_INS = "torch stand-ins for FlashInfer's two wrappers"
_ATTENTION = "attention"
_COMM = "`--dcp-comm-backend`"
_HOST = "HiCache (MLA)"
_PD = "prefill to decode (MLA, Mooncake TCP)"
_GPU = "on a GPU"

ROWS: tuple[Evidence, ...] = (
    Evidence(
        _ATTENTION, "triton, GQA and MHA", State.TESTED, _IN_INTERPRETER,
        ("engine/test_dcp2.py::test_log_probabilities_and_rows", "engine/test_gqa_dcp8.py::test_tp8_dcp8"),
    ),
    Evidence(
        _ATTENTION, "triton, MLA (a path that the plugin adds)", State.TESTED, _IN_INTERPRETER,
        ("engine/test_dcp2.py::test_log_probabilities_and_rows", "engine/test_mla_edges.py::test_tp8_dcp8"),
    ),
    Evidence(
        _ATTENTION, "flashinfer, MLA", State.TESTED, _STAND_INS,
        ("engine/test_dcp2.py::test_log_probabilities_and_rows", "engine/test_mla_edges.py::test_any_chunk_end"),
    ),
    Evidence(
        _ATTENTION, "flashinfer, MLA: replay of CUDA graphs", State.METADATA, "the buffers that a graph reads",
        ("patches/test_graph_buffers.py::test_flashinfer_mla",),
    ),
    Evidence(
        _ATTENTION, "trtllm_mla, MLA, pages of 32 or 64", State.METADATA, "lengths, page tables, CUDA graph buffers",
        ("patches/test_page_tables.py::test_decode_equals_dense_attention",
         "patches/test_page_tables.py::test_page_table_is_right_for_every_token"),
    ),
    Evidence(
        _ATTENTION, "cutedsl_mla, MLA, pages of 32 or 64", State.METADATA, "the same, and the bound of the kernel's mask",
        ("patches/test_page_tables.py::test_decode_equals_dense_attention",
         "patches/test_page_tables.py::test_cutedsl_refuses_several_queries_a_request"),
    ),
    Evidence(
        _ATTENTION, "KV cache of FP8, fused write of trtllm_mla", State.METADATA, "the ids that the kernel gets",
        ("patches/test_page_tables.py::test_fused_fp8_write_gets_placed_ids",),
    ),
    Evidence(_ATTENTION, "KV cache of FP8, the other backends that take it", State.UNKNOWN, "not run"),
    Evidence(
        _COMM, "ag_rs", State.TESTED, "whole engine; the merge against dense float64",
        ("engine/test_dcp2.py::test_log_probabilities_and_rows", "kernels/test_merge.py::test_merge_equals_dense_attention"),
    ),
    Evidence(
        _COMM, "a2a", State.TESTED, "whole engine; the merge against dense float64",
        ("engine/test_mla_comm.py::test_all_to_all", "kernels/test_merge.py::test_merge_equals_dense_attention"),
    ),
    Evidence(
        _COMM, "fi_a2a (SGLang's default on SM100)", State.METADATA, "packing and merge; FlashInfer's exchange not run",
        ("kernels/test_merge.py::test_no_nan_reaches_the_all_to_all_combine",),
    ),
    *(
        Evidence(
            _HOST, f"--hicache-io-backend {backend} --hicache-mem-layout {layout}", State.TESTED,
            "torch stand-ins for the transfer kernels",
            ("engine/test_hicache.py::test_evicted_rows_come_back",
             "patches/test_host_cache.py::test_rows_return_where_dealing_puts_them"),
        )
        for backend, layout in HOST_TRANSFERS
    ),
    Evidence(
        _HOST, "--hicache-storage-backend file", State.TESTED, "pages are found again by servers of the same block size",
        ("engine/test_hicache.py::test_pages_in_storage_are_of_one_layout", "patches/test_host_cache.py::TestStorage"),
    ),
    Evidence(
        _PD, "DCP 1 to DCP 2 and 8, blocks of a page and shorter", State.TESTED, "every row read back",
        ("engine/test_pd.py::test_blocks_arrive_where_they_belong",
         "engine/test_pd_matrix.py::TestOnePrefillServer::test_blocks_shorter_than_a_page",
         "engine/test_pd_matrix.py::TestEightRanks::test_from_one_and_from_two_ranks"),
    ),
    Evidence(
        _PD, "a stock decode server, token round-robin", State.TESTED, "served as before",
        ("engine/test_pd_matrix.py::TestOnePrefillServer::test_stock_decode_server",),
    ),
    Evidence(
        _PD, "DCP 2 to DCP 2, the same block size", State.TESTED, "pages copied as they are",
        ("engine/test_pd_matrix.py::TestOneDecodeServer::test_equal_dcp_and_block_sizes",),
    ),
    Evidence(
        _PD, "--dcp-group-pages on both sides", State.TESTED, "one segment a rank and layer, counted",
        ("engine/test_pd_grouped.py::test_a_chunk_is_one_segment_a_rank_and_layer",),
    ),
    Evidence(
        _PD, "a prefix cache on the decode server", State.TESTED, "--disaggregation-decode-enable-radix-cache",
        ("engine/test_pd_matrix.py::TestOnePrefillServer::test_prefix_cache_of_the_decode_server",),
    ),
    Evidence(
        _PD, "retraction with a copy on the host", State.TESTED,
        "--disaggregation-decode-retraction-backup cpu_tensor", ("engine/test_pd_retraction.py::test_the_copy_comes_back",),
    ),
    Evidence(
        _PD, "a prefill server without the plugin", State.TESTED, "refused by the decode server, with the reason",
        ("engine/test_pd.py::test_a_stock_prefill_server_is_refused_and_others_are_served",
         "engine/test_pd_matrix.py::TestOneDecodeServer::test_a_prefill_server_that_comes_back_without_the_plugin"),
    ),
    Evidence(
        _PD, "servers that die or stop in mid-transfer", State.TESTED, "no page lost, others served",
        ("engine/test_pd_faults.py::test_a_decode_server_that_is_killed",
         "engine/test_pd_faults.py::test_a_prefill_server_that_is_killed"),
    ),
    Evidence(_PD, "RDMA, several nodes, pools in CUDA memory", State.UNKNOWN, "not run"),
    Evidence(
        "several nodes", "two nodes of one rank on one machine", State.TESTED, "served if all agree, refused if not",
        ("engine/test_refusals.py::TestTwoNodes",),
    ),
    Evidence(_GPU, "this project's kernels, a rank after the other", State.UNKNOWN, "`make gpu-check` runs them"),
    Evidence(_GPU, "a whole server", State.UNKNOWN, "not run"),
    Evidence(_GPU, "SGLang's official image, docker/Dockerfile", State.UNKNOWN, "not built"),
)  # fmt: skip
