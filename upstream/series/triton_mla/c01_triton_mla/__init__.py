"""MLA under DCP in the Triton backend, which serves GQA and MHA there."""

import libcst.matchers as m

from upstream.edit import (
    after,
    assigns,
    before,
    calls,
    condition,
    defines,
    exchange,
    guard,
    on,
    reads,
    returns,
    substitute,
    tests,
)

MESSAGE = """
[DCP] Support MLA models in the Triton backend

With --dcp-size > 1 the Triton backend serves MHA and GQA models only:
its MLA path writes through the pool's combined-row door, which resolves
no DCP owners, and returns no LSE for the model to merge.

Decode gets the queries of all ranks from the model, so it gathers none,
and hands its output and natural LSE to the model's merge. Extend reads
the prefix that the model has gathered. Writes take the MLA door. This
is the one MLA path of DCP that needs Triton alone, with and without
--dcp-block-size.

An FP8 KV cache is refused: neither the write nor the gathered prefix
knows the scales of a layer. Layers of FP8 checkpoints carry scales with
any cache; without an FP8 one, rows are written and read without them.
So is ROCm, whose lean decode kernel returns no LSE.
"""

_TRITON = "sglang.srt.layers.attention.triton_backend"
_FORWARD_MLA = "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla"

PAGES = (
    (
        "docs_new/docs/advanced_features/dcp_block_size.mdx",
        "| `flashinfer`, `trtllm_mla` or `cutedsl_mla` |",
        "| `flashinfer`, `trtllm_mla`, `cutedsl_mla`, or `triton` without an FP8 KV cache |",
    ),
)

EDITS = (
    on(
        "sglang.srt.arg_groups.dcp_block_hook",
        "",
        substitute(
            assigns("MLA_BACKENDS"),
            'MLA_BACKENDS: frozenset = frozenset({"flashinfer", "triton", "trtllm_mla", "cutedsl_mla"})',
        ),
    ),
    on(
        _FORWARD_MLA,
        "is_mla_dcp_lse_base_on_e",
        exchange("the backends with a natural LSE", m.Set(), '{"flashmla", "cutedsl_mla", "aiter", "triton"}'),
    ),
    on(
        _FORWARD_MLA,
        "DeepseekMLAForwardMixin.forward_absorb_core",
        guard(
            # The call outside the absorbed backends: it gets the concatenated query.
            assigns("attn_output") & calls("self.attn_mqa") & reads("q"),
            "self.is_dcp_mla_decode_phase(forward_batch)",
            otherwise="""
            attn_output, lse = self.attn_mqa_for_dcp_decode(
                q, k, k_nope, forward_batch, save_kv_cache=save_kv_cache
            )
            """,
        ),
    ),
    on(
        _TRITON,
        "TritonAttnBackend.__init__",
        before(
            assigns("mla_config"),
            """
            if self.use_mla and self.dcp_size > 1:
                if _is_hip:
                    # Its lean decode kernel returns no LSE.
                    raise ValueError(
                        "The Triton backend supports no MLA models with --dcp-size > 1 "
                        "on ROCm. Use another attention backend."
                    )
                if model_runner.kv_cache_dtype.itemsize == 1:
                    # Neither the write nor the gathered prefix knows a layer's scales.
                    raise ValueError(
                        "The Triton backend supports no FP8 KV cache for MLA models "
                        "with --dcp-size > 1. Use --kv-cache-dtype auto or another "
                        "attention backend."
                    )
            """,
        ),
    ),
    on(
        _TRITON,
        "TritonAttnBackend._set_kv_buffer",
        before(
            tests() & reads("self", "dcp_size"),
            """
            if self.use_mla and self.dcp_size > 1:
                # The pool's combined-row door resolves no DCP owners.
                self.token_to_kv_pool.set_mla_kv_buffer(
                    layer, loc_info, v, k[..., layer.v_head_dim :]
                )
                return
            """,
        ),
    ),
    on(
        _TRITON,
        "TritonAttnBackend.forward_decode",
        condition(reads("use_mla"), "self.use_mla and self.dcp_size == 1"),
        # The write has dropped the scale, so the read must not apply it.
        condition(
            reads("layer", "k_scale", "v_scale"),
            """(
            layer.k_scale is not None
            and layer.v_scale is not None
            and not (self.use_mla and self.dcp_size > 1)
            )""",
        ),
        guard(
            assigns("q_for_decode") & calls("all_gather"), "not self.use_mla", "MLA models gather the query themselves."
        ),
        before(
            assigns("o") & calls("cp_lse_ag_out_rs_mha"),
            """
            if self.use_mla:
                # The model merges. Rows without KV on this rank must be neutral.
                o_for_decode.masked_fill_(local_lse.isneginf().unsqueeze(-1), 0)
                return o_for_decode.flatten(1).to(q.dtype), local_lse
            """,
        ),
    ),
    on(
        _TRITON,
        "TritonAttnBackend.forward_extend",
        exchange(
            "the test for a layer without scales",
            m.Comparison(m.Attribute(m.Name("layer"), m.Name("k_scale")), [m.ComparisonTarget(m.Is(), m.Name("None"))]),
            "(layer.k_scale is None or (self.use_mla and self.dcp_size > 1))",
        ),
        before(
            returns() & calls("_forward_extend_dcp"),
            """
            if self.use_mla:
                return self._forward_extend_dcp_mla(
                    layer, forward_batch, q, k, v, o, logits_soft_cap, sinks
                )
            """,
        ),
    ),
    on(
        _TRITON,
        "TritonAttnBackend",
        after(
            defines("_forward_extend_dcp"),
            '''
            def _forward_extend_dcp_mla(
                self,
                layer: RadixAttention,
                forward_batch: ForwardBatch,
                q,
                k,
                v,
                o,
                logit_cap,
                sinks,
            ):
                """Extend over the prefix that the model has gathered from all ranks.

                Without a prefix it may be the up-projected MHA form of the layer; then
                nothing is read from the buffer.
                """
                metadata = self.forward_metadata
                gathered = forward_batch.attn_dcp_metadata
                heads, v_head_dim = layer.tp_q_head_num, layer.v_head_dim
                kv_indptr = torch.zeros_like(metadata.kv_indptr)
                kv_indptr[1:] = torch.cumsum(forward_batch.extend_prefix_lens, dim=0)
                self.extend_attention_fwd(
                    q_extend=q.view(-1, heads, layer.qk_head_dim).contiguous(),
                    k_extend=k.contiguous(),
                    v_extend=v.contiguous(),
                    o_extend=o.view(-1, heads, v_head_dim),
                    k_buffer=gathered.dcp_kv_buffer,
                    v_buffer=gathered.dcp_kv_buffer[..., :v_head_dim],
                    qo_indptr=metadata.qo_indptr,
                    kv_indptr=kv_indptr,
                    kv_indices=torch.arange(
                        gathered.dcp_extend_prefix_lens_sum, device=q.device
                    ),
                    custom_mask=None,
                    is_causal=True,
                    mask_indptr=None,
                    max_len_extend=metadata.max_extend_len,
                    k_scale=1.0,
                    v_scale=1.0,
                    sm_scale=layer.scaling,
                    logit_cap=logit_cap,
                    sinks=sinks,
                    xai_temperature_len=layer.xai_temperature_len,
                )
                return o
            ''',
        ),
    ),
)
