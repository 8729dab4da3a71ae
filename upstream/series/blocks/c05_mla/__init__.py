"""MLA: the gathered prefix, decode's index stream, and the backends FlashInfer, TensorRT-LLM and CuTe DSL."""

import libcst.matchers as m

from upstream.edit import (
    add_argument,
    add_import,
    add_parameter,
    after,
    assigns,
    before,
    calls,
    comment,
    defines,
    docstring,
    drop,
    exchange,
    on,
    reads,
    substitute,
    tests,
)

MESSAGE = """
[DCP] Support --dcp-block-size in the MLA backends

flashinfer, trtllm_mla and cutedsl_mla. The all-gather of a prefix moves
whole cycles of blocks, as it moved whole cycles of tokens; a rank's
share of it is selected request by request, as in chunked prefix
caching, since a prefix need not end at a cycle. Decode's index stream
and all lengths go by the interleave size. MLA pools take the localized
loc of the plan, as under the unified pool.

With blocks, FlashInfer's decode makes rows without KV on this rank
neutral, as the other two backends do: short requests have such rows on
the last ranks, and the a2a merge would multiply NaN by a weight of 0.

The CuTe DSL kernel masks row i by the position i * cp_world + cp_rank,
which is not that of a block's row. A single query token sees every row
of its rank, so its bound is made of the rank's own length.
"""

_LAYOUT = "sglang.srt.layers.dcp.layout"
_PLANNER = "sglang.srt.layers.dcp.planner"
_COMM = "sglang.srt.layers.dcp.comm"
_KERNELS = "sglang.kernels.ops.attention.dcp_kernels"
_POOL = "sglang.srt.mem_cache.memory_pool"
_TRANSLATOR = "sglang.srt.mem_cache.kv_index_translator"
_FLASHINFER = "sglang.srt.layers.attention.flashinfer_mla_backend"
_TRTLLM = "sglang.srt.layers.attention.trtllm_mla_backend"
_CUTEDSL = "sglang.srt.layers.attention.cutedsl_mla_backend"

EDITS = (
    on(
        "sglang.srt.arg_groups.dcp_block_hook",
        "",
        substitute(
            assigns("MLA_BACKENDS"),
            'MLA_BACKENDS: frozenset = frozenset({"flashinfer", "trtllm_mla", "cutedsl_mla"})',
        ),
    ),
    *(
        on(module, "", add_import("sglang.srt.runtime_context", "dcp_interleave_size"))
        for module in (_LAYOUT, _PLANNER, _COMM, _POOL, _FLASHINFER, _TRTLLM, _CUTEDSL)
    ),
    # Lengths, and this rank's share of a prefix.
    on(
        _LAYOUT,
        "update_local_kv_lens_for_dcp",
        add_argument("get_dcp_lens", "interleave_size=dcp_interleave_size()"),
    ),
    on(
        _LAYOUT,
        "",
        before(
            defines("filter_dcp_local_chunk_kv_indices"),
            '''
            def _filter_dcp_blocks(
                kv_indices: torch.Tensor,
                chunk_starts_cpu: torch.Tensor,
                chunk_seq_lens_cpu: torch.Tensor,
            ) -> torch.Tensor:
                """This rank's blocks of each request's chunk, which may start and end inside one.

                The selection is made of lengths on the host, so its size is known there.
                """
                parallel = get_parallel()
                layout = (parallel.dcp_size, parallel.dcp_rank)
                interleave_size = dcp_interleave_size()
                starts, lens = chunk_starts_cpu.long(), chunk_seq_lens_cpu.long()
                firsts = get_dcp_lens(starts, *layout, interleave_size=interleave_size)
                counts = get_dcp_lens(lens, *layout, starts, interleave_size)
                requests = torch.repeat_interleave(counts)
                local = torch.arange(len(requests)) + (firsts - counts.cumsum(0) + counts)[requests]
                positions = get_dcp_positions(local, *layout, interleave_size)
                selected = positions + (lens.cumsum(0) - lens - starts)[requests]
                if kv_indices.is_cuda:
                    selected = selected.pin_memory()  # a pageable copy waits for the stream
                return kv_indices[selected.to(kv_indices.device, non_blocking=True)]
            ''',
        ),
    ),
    on(
        _LAYOUT,
        "filter_dcp_local_chunk_kv_indices",
        before(
            assigns("dcp_size"),
            """
            if dcp_interleave_size() > 1:
                return _filter_dcp_blocks(kv_indices, chunk_starts_cpu, chunk_seq_lens_cpu)

            """,
        ),
    ),
    on(
        _PLANNER,
        "",
        add_import(_LAYOUT, "filter_dcp_local_chunk_kv_indices"),
    ),
    on(
        _PLANNER,
        "prepare_decode_context_parallel_metadata",
        before(
            assigns("translator"),
            """
            if dcp_interleave_size() > 1:
                prefix_lens_cpu = torch.as_tensor(extend_prefix_lens_cpu)
                dcp_widened_prefix = filter_dcp_local_chunk_kv_indices(
                    dcp_prefix_kv_indices, torch.zeros_like(prefix_lens_cpu), prefix_lens_cpu
                )
            else:
                # Whole cycles (the allocator's page is widened), so no nonzero().
                dcp_widened_prefix = dcp_prefix_kv_indices[
                    parallel.dcp_rank :: parallel.dcp_size
                ]
            """,
        ),
    ),
    on(
        _PLANNER,
        "prepare_decode_context_parallel_metadata",
        comment(assigns("translator"), "`get_mla_kv_buffer` reads rows, so this rank's ids are translated here."),
        substitute(
            assigns("dcp_local_prefix_kv_indices"),
            "dcp_local_prefix_kv_indices = translator.translate_dcp_read_ids(dcp_widened_prefix)",
        ),
    ),
    on(
        _PLANNER,
        "plan_dcp_decode_metadata",
        docstring(
            """
            Shard `kv_indices` to this DCP rank in place; return the shard's length.

            `kv_lens` / `kv_indptr` are rewritten to the per-rank lengths, and the ids
            at this rank's positions are compacted into `kv_indices[:total_local_len]`,
            still WIDENED. The returned length bounds the prefix the caller hands to
            `KVIndexTranslator.translate_dcp_read_ids`.
            """
        ),
        add_argument("update_kv_lens_and_indices", "interleave_size=dcp_interleave_size()"),
    ),
    on(
        _KERNELS,
        "update_kv_lens_and_indices",
        add_parameter("interleave_size: tl.constexpr = 1"),
        substitute(
            assigns("kv_indice_offsets"),
            """
            kv_indice_offsets = kv_indices_start + _dcp_position(
                offsets, dcp_world_size, dcp_rank, interleave_size
            )
            """,
        ),
    ),
    # The gathered prefix.
    on(_COMM, "", add_import(_LAYOUT, "get_dcp_lens")),
    on(
        _COMM,
        "_all_gather_dcp_kv_cache",
        exchange(
            "the shape of what was gathered",
            m.BinaryOperation(left=m.Tuple(), operator=m.Add(), right=m.Attribute(m.Name("kv_a"), m.Name("shape"))),
            "(dcp_world_size, -1, dcp_interleave_size()) + kv_a.shape[1:]",
        ),
    ),
    on(
        _COMM,
        "all_gather_kv_cache_for_dcp",
        substitute(
            assigns("left_pads") & reads("dcp_rank"),
            """
            # Every rank sends the cycles that a part lies in, whole: equally many rows.
            interleave_size = dcp_interleave_size()
            cycle = dcp_world_size * interleave_size
            first_cycles = prefix_starts_cpu // cycle
            end_cycles = (prefix_starts_cpu + prefix_kv_lens_cpu + cycle - 1) // cycle
            padded_lens = (end_cycles - first_cycles) * interleave_size
            left_pads = get_dcp_lens(
                prefix_starts_cpu % cycle,
                dcp_world_size,
                dcp_rank,
                interleave_size=interleave_size,
            )
            """,
        ),
        drop(assigns("left_pads") & reads("int32")),
        drop(assigns("right_pads"), expected=2),
        drop(assigns("padded_lens")),
        substitute(
            assigns("local_kv_lens"),
            """
            local_kv_lens = get_dcp_lens(
                prefix_kv_lens_cpu,
                dcp_world_size,
                dcp_rank,
                prefix_starts_cpu,
                interleave_size,
            )
            """,
        ),
        exchange(
            "a part's first position in its cycle",
            m.BinaryOperation(left=m.Subscript(m.Name("prefix_starts_cpu")), operator=m.Modulo()),
            "prefix_starts_cpu[req_idx] % cycle",
        ),
    ),
    # The pool.
    on(
        _TRANSLATOR,
        "KVIndexTranslator.__init__",
        after(
            assigns("localize") & calls("partial"),
            """
            if not _is_npu:
                # Nothing is left for the pool to resolve.
                token_to_kv_pool.write_loc_is_dcp_resolved = True
            """,
        ),
    ),
    on(
        _POOL,
        "MLATokenToKVPool",
        after(
            defines("_write_loc_dcp_span"),
            """
            @property
            def _slot_dcp_span(self) -> int:
                \"\"\"How many slots of `req_to_token` one stored row spans.\"\"\"
                if self.write_loc_is_dcp_resolved and dcp_interleave_size() > 1:
                    return get_parallel().attn_dcp_size
                return self._write_loc_dcp_span
            """,
        ),
    ),
    *(
        on(
            _POOL,
            f"MLATokenToKVPool.{copy}",
            exchange(
                "the span of a slot",
                m.Attribute(m.Name("self"), m.Name("_write_loc_dcp_span")),
                "self._slot_dcp_span",
            ),
            add_argument("maybe_dcp_kernel_indices", "dcp_interleave_size()"),
        )
        for copy in ("get_cpu_copy", "load_cpu_copy")
    ),
    # FlashInfer.
    on(_FLASHINFER, "", add_import("sglang.kernels.ops.attention.fixup_zero_kv", "fixup_zero_kv_rows")),
    on(
        _FLASHINFER,
        "FlashInferMLAAttnBackend.forward_decode",
        before(
            assigns("out") & reads("view"),
            """
            if dcp_interleave_size() > 1:
                # Short requests have no KV on the last ranks; nothing is known of rows
                # that the wrapper had nothing to attend to.
                kv_indptr = self.indices_updater_decode.kv_indptr[: out.shape[0] + 1]
                fixup_zero_kv_rows(
                    out, lse, kv_indptr.diff(), self.q_indptr_decode[: len(kv_indptr)], 1
                )
            """,
        ),
    ),
    # TensorRT-LLM, and what CuTe DSL shares with it.
    on(
        _TRTLLM,
        "TRTLLMMLABackend.__init__",
        after(
            assigns("self._fused_set_kv_concat_q_fp8"),
            """
            if dcp_interleave_size() > 1:
                # The plan has localized the loc, which the fused kernel does not take.
                self._fused_set_kv_concat_q_fp8 = False
            """,
        ),
    ),
    on(
        _TRTLLM,
        "TRTLLMMLABackend._get_dcp_local_seq_lens",
        add_argument("get_dcp_lens", "interleave_size=dcp_interleave_size()"),
    ),
    on(
        _TRTLLM,
        "TRTLLMMLABackend._get_dcp_local_max_seq_len",
        substitute(
            assigns("local_max"),
            """
            # Shares grow with length, so the longest request bounds them all.
            local_max = int(self._get_dcp_local_seq_lens(torch.tensor(max_seq_len)))
            """,
        ),
    ),
    on(
        _CUTEDSL,
        "CuteDslMLABackend._run_decode_kernel",
        after(
            tests() & reads("causal_seqs"),
            """
            if dcp_interleave_size() > 1:
                # The kernel masks row i by position i * cp_world + cp_rank. One query
                # token sees every row of its rank: bound the mask by those alone.
                assert query.shape[1] == 1, "blocks know no mask for several queries"
                causal_seqs = seq_lens * cp_world
            """,
        ),
    ),
)
