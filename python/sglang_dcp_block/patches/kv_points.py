"""Patch points of the KV cache: where SGLang writes, reads, counts and indexes it under DCP."""

from __future__ import annotations

from sglang_dcp_block.patches import (
    cutedsl_mla,
    lengths,
    mla_decode,
    mla_gather,
    reads,
    triton_gqa,
    triton_mla,
    trtllm_mla,
    write_door,
)
from sglang_dcp_block.patches.register import Kind, PatchPoint

_LAYOUT_UPSTREAM = "interleave_size passed through upstream's DCP layout on CUDA, as on NPU"
_TRITON_MLA_UPSTREAM = "MLA under DCP in upstream's Triton backend"
_CUTEDSL_UPSTREAM = "a mask in FlashInfer's cute-dsl kernel that knows blocks, or none for one query token"
_TRTLLM = "sglang.srt.layers.attention.trtllm_mla_backend.TRTLLMMLABackend"
_CUTEDSL = "sglang.srt.layers.attention.cutedsl_mla_backend.CuteDslMLABackend"

# In every scheduler: the layout itself.
KV_POINTS: tuple[PatchPoint, ...] = (
    PatchPoint(
        "sglang.srt.layers.dcp.layout.get_dcp_lens", Kind.AROUND,
        "Per-rank lengths count blocks; otherwise lengths and indices disagree.",
        _LAYOUT_UPSTREAM, lengths.count_by_blocks,
    ),
    PatchPoint(
        "sglang.srt.mem_cache.kv_index_translator.KVIndexTranslator.__init__", Kind.AFTER,
        "The write door: write ids carry the block owner and row; otherwise KV lands token round-robin.",
        _LAYOUT_UPSTREAM, write_door.open_write_door,
    ),
    PatchPoint(
        "sglang.srt.mem_cache.kv_index_translator.KVIndexTranslator.translate_dcp_read_ids", Kind.AROUND,
        "Reads find a slot in its block's row.",
        _LAYOUT_UPSTREAM, reads.read_rows,
    ),
    PatchPoint(
        "sglang.srt.layers.attention.triton_backend.TritonAttnBackend._dcp_kv_indices", Kind.REPLACE,
        "Index arrays of decode and extend go by blocks; upstream's kernel strides by dcp_size. No rank leaves a "
        "collective because its own share is empty.",
        _LAYOUT_UPSTREAM, triton_gqa.plan_kv_indices,
    ),
    PatchPoint(
        "sglang.srt.layers.attention.triton_backend.TritonAttnBackend._set_kv_buffer", Kind.AROUND,
        "The owner is read from the placed write id; upstream reads it from the position, token by token.",
        _LAYOUT_UPSTREAM, triton_gqa.write_kv,
    ),
    PatchPoint(
        "sglang.srt.models.utils.enable_fused_set_kv_buffer", Kind.AROUND,
        "The fused write of some models ignores DCP owners on CUDA; every rank would write every token.",
        "native blocks: the plan has localized what a fused write takes", triton_gqa.no_fused_write,
    ),
    PatchPoint(
        "sglang.srt.layers.dcp.planner.plan_dcp_decode_metadata", Kind.REPLACE,
        "MLA decode reads this rank's blocks of the index stream; upstream's kernel strides by dcp_size.",
        _LAYOUT_UPSTREAM, mla_decode.plan_decode,
    ),
    PatchPoint(
        "sglang.srt.layers.attention.flashinfer_mla_backend.FlashInferMLAAttnBackend.forward_decode", Kind.AROUND,
        "A rank without KV of a request contributes out = 0, LSE = -inf; upstream leaves its output uninitialised.",
        "the same guard in upstream's backend", mla_decode.decode_with_empty_ranks,
    ),
    PatchPoint(
        "sglang.srt.layers.dcp.planner.prepare_decode_context_parallel_metadata", Kind.AROUND,
        "MLA extend reads this rank's blocks of each prefix; upstream takes every dcp_size-th entry of the batch.",
        _LAYOUT_UPSTREAM, mla_gather.own_prefix_rows,
    ),
    PatchPoint(
        "sglang.srt.layers.dcp.comm.all_gather_kv_cache_for_dcp", Kind.REPLACE,
        "The gathered prefix comes back in position order, and all ranks send equally much, empty ones too.",
        _LAYOUT_UPSTREAM, mla_gather.gather_prefix,
    ),
    PatchPoint(
        "sglang.srt.layers.dcp.layout.filter_dcp_local_chunk_kv_indices", Kind.REPLACE,
        "Chunks of a long prefix start anywhere; this rank's slots of one are whole blocks and two cut ones.",
        _LAYOUT_UPSTREAM, mla_gather.own_chunk,
    ),
    PatchPoint(
        "sglang.srt.layers.dcp.layout.maybe_dcp_kernel_indices", Kind.REPLACE,
        "Copies of KV to the host take this rank's rows of a run of slots, also of one that ends inside a block.",
        _LAYOUT_UPSTREAM, mla_gather.rows_of_run,
    ),
    PatchPoint(
        "sglang.srt.layers.attention.triton_backend.TritonAttnBackend.forward_decode", Kind.AROUND,
        "Triton MLA decode: queries come gathered, and the model wants the LSE.",
        _TRITON_MLA_UPSTREAM, triton_mla.decode,
    ),
    PatchPoint(
        "sglang.srt.layers.attention.triton_backend.TritonAttnBackend.forward_extend", Kind.AROUND,
        "Triton MLA extend: the prefix lies in the gathered buffer.",
        _TRITON_MLA_UPSTREAM, triton_mla.extend,
    ),
    PatchPoint(
        "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla.is_mla_dcp_lse_base_on_e", Kind.AROUND,
        "The merge of Triton MLA's partial outputs uses natural logarithms.",
        _TRITON_MLA_UPSTREAM, triton_mla.triton_lse_is_natural,
    ),
    PatchPoint(
        "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla.DeepseekMLAForwardMixin.init_mla_forward",
        Kind.AFTER,
        "Admit triton to the backends of the absorbed path; without it the merge has no LSE.",
        _TRITON_MLA_UPSTREAM, triton_mla.admit_triton,
    ),
    PatchPoint(
        f"{_TRTLLM}._get_dcp_local_max_seq_len", Kind.REPLACE,
        "The length that CUDA graphs are captured with bounds this rank's share; upstream's formula is up to B - 1 short.",
        _LAYOUT_UPSTREAM, trtllm_mla.local_max_seq_len,
    ),
    PatchPoint(
        f"{_TRTLLM}._apply_dcp_cuda_graph_metadata", Kind.AFTER,
        "cutedsl_mla: its kernel hides rows by token round-robin positions; a bound that hides none of this rank's.",
        _CUTEDSL_UPSTREAM, cutedsl_mla.bound_in_graph,
    ),
    PatchPoint(
        f"{_TRTLLM}.init_forward_metadata", Kind.AFTER,
        "cutedsl_mla: the same bound for steps outside CUDA graphs.",
        _CUTEDSL_UPSTREAM, cutedsl_mla.bound_in_eager,
    ),
    PatchPoint(
        f"{_CUTEDSL}._run_decode_kernel", Kind.AROUND,
        "cutedsl_mla: refuse several query tokens a request, which that bound cannot serve.",
        _CUTEDSL_UPSTREAM, cutedsl_mla.one_query_a_request,
    ),
)  # fmt: skip

RELIED_ON: tuple[PatchPoint, ...] = tuple(
    PatchPoint(target, Kind.RELIES, why, "nothing: watched for changes")
    for target, why in (
        ("sglang.srt.layers.attention.triton_backend.TritonAttnBackend._forward_extend_dcp",
         "Leaves out the prefix collectives exactly where the index array is empty."),
        ("sglang.srt.layers.attention.triton_backend.TritonAttnBackend._update_decode_kv_buffers",
         "CUDA graph capture and replay fill their buffers through _dcp_kv_indices."),
        ("sglang.srt.layers.attention.triton_backend.TritonAttnBackend._dcp_lens",
         "Counts through get_dcp_lens."),
        ("sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer",
         "Writes exactly the masked rows."),
        ("sglang.srt.mem_cache.kv_loc_plan.KVLocPlan",
         "Binds write ids through IdSpace.write once an iteration, and pads them with slot 0."),
        ("sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.__init__",
         "Virtual pages of page_size * dcp_size slots, the first one a sink."),
        ("sglang.srt.layers.dcp.comm.cp_lse_ag_out_rs_mha",
         "Merges by log-sum-exp, with NaN and infinity of empty ranks made neutral."),
        ("sglang.srt.layers.dcp.comm.cp_lse_ag_out_rs_mla", "Merges by log-sum-exp in the LSE's own base."),
        ("sglang.srt.layers.dcp.comm.dcp_a2a_lse_reduce", "The same merge after an all-to-all; it has no NaN guard."),
        ("sglang.srt.layers.dcp.comm.all_gather_kv_cache_for_mla_extend",
         "Gathers through all_gather_kv_cache_for_dcp, and appends the new tokens."),
        ("sglang.srt.layers.dcp.comm.all_gather_kv_cache_for_mha_extend",
         "Gathers through all_gather_kv_cache_for_dcp, and weaves the new tokens in."),
        ("sglang.srt.layers.dcp.comm.all_gather_kv_cache_for_mha_chunk_extend",
         "Gathers through all_gather_kv_cache_for_dcp, with the chunk's first positions."),
        ("sglang.srt.layers.dcp.layout.update_local_kv_lens_for_dcp",
         "Host lengths of CUDA graph replay count through get_dcp_lens, as the device's do."),
        ("sglang.srt.layers.attention.flashinfer_mla_backend.FlashInferMLAIndicesUpdaterDecode.call_begin_forward",
         "Plans over the narrowed stream and translates its slots to rows afterwards, in place."),
        ("sglang.srt.layers.attention.flashinfer_mla_backend.FlashInferMLAAttnBackend._apply_cuda_graph_metadata",
         "Replay fills kv_len_arr_cpu with this rank's lengths before planning."),
        ("sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla.DeepseekMLAForwardMixin."
         "forward_absorb_core",
         "Takes (out, LSE) from the backends of the absorbed path, and merges with the named LSE base."),
        ("sglang.srt.mem_cache.memory_pool.MLATokenToKVPool.set_mla_kv_buffer",
         "Writes id // dcp_size on rank id % dcp_size."),
        (f"{_TRTLLM}._get_dcp_local_seq_lens", "Counts through get_dcp_lens."),
        (f"{_TRTLLM}._fill_dcp_block_kv_indices", "Builds page tables with the kernel below, from this rank's lengths."),
        ("sglang.kernels.ops.attention.dcp_kernels.create_mla_kv_page_table_for_dcp",
         "Reads a position of each virtual page, one that exists wherever this rank has a token there."),
        (f"{_TRTLLM}._set_kv_and_concat_q_fp8_fused", "Writes id // dcp_size on rank id % dcp_size, as the pool does."),
        (f"{_TRTLLM}._forward_decode_dcp", "Makes rows without KV neutral by this rank's lengths."),
        (f"{_CUTEDSL}.forward_decode",
         "Makes rows without KV neutral by this rank's lengths, and takes the kernel's bound from global_seq_lens_k alone."),
    )
)  # fmt: skip
