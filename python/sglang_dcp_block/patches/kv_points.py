"""Patch points of the KV cache: where SGLang writes, reads, counts and indexes it under DCP."""

from __future__ import annotations

from sglang_dcp_block.patches import lengths, reads, triton_gqa, write_door
from sglang_dcp_block.patches.register import Kind, PatchPoint

_LAYOUT_UPSTREAM = "interleave_size passed through upstream's DCP layout on CUDA, as on NPU"

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
        "a check of dcp_enabled in upstream's function", triton_gqa.no_fused_write,
    ),
)  # fmt: skip

RELIED_ON: tuple[PatchPoint, ...] = tuple(
    PatchPoint(target, Kind.RELIES, why, "nothing: watched for changes")
    for target, why in (
        ("sglang.srt.layers.attention.triton_backend.TritonAttnBackend._forward_extend_dcp",
         "Leaves out the prefix collectives exactly where the index array is empty."),
        ("sglang.srt.layers.attention.triton_backend.TritonAttnBackend.forward_decode",
         "Fills LSE with -inf first, so a rank without KV is neutral in the merge."),
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
    )
)  # fmt: skip
