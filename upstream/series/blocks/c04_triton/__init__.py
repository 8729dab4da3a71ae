"""MHA and GQA in the Triton backend, and the write ids that all backends share."""

import libcst.matchers as m

from upstream.edit import (
    add_argument,
    add_import,
    add_parameter,
    assigns,
    before,
    calls,
    comment,
    condition,
    defines,
    docstring,
    drop,
    exchange,
    on,
    reads,
    set_argument,
    substitute,
    tests,
)

MESSAGE = """
[DCP] Support --dcp-block-size in the Triton backend (MHA and GQA)

Slots keep position order in req_to_token, so the allocator, the radix
tree and PD page lists do not change. Writes are localized once an
iteration by the KVLocPlan, as on NPU; tokens of other ranks go to the
padding sink, as under the unified pool. Reads go by position through
the layout: the index kernel takes the interleave size, and a slot's row
is that of its block.

With the default of one token every index is what it was.
"""

_TRANSLATOR = "sglang.srt.mem_cache.kv_index_translator"
_TRITON = "sglang.srt.layers.attention.triton_backend"
_KERNELS = "sglang.kernels.ops.attention.dcp_kernels"

EDITS = (
    on(
        "sglang.srt.arg_groups.dcp_block_hook",
        "",
        substitute(
            assigns("MHA_BACKENDS"),
            'MHA_BACKENDS: frozenset = frozenset({"triton"})',
            keep_comment=True,
        ),
    ),
    # Writes.
    on(
        _TRANSLATOR,
        "KVIndexTranslator.__init__",
        condition(
            reads("_is_npu", "dcp_enabled", "is_draft_worker"),
            """
            (_is_npu or dcp_interleave_size() > 1)
            and parallel.dcp_enabled
            and not is_draft_worker
            """,
        ),
        comment(
            assigns("localize") & calls("partial"),
            """
            A target on NPU, or with blocks, writes its rank's share of the
            window in rank-local slots. Other ranks' tokens become -1 on NPU
            and the sink elsewhere. The scheduler, `req_to_token` and the
            replicated draft pool keep the slots the window is planned in.
            """,
        ),
        set_argument("partial", "interleave_size", "page_size if _is_npu else dcp_interleave_size()"),
        add_argument("partial", "non_local=-1 if _is_npu else 0"),
    ),
    on(
        _TRITON,
        "TritonAttnBackend._set_kv_buffer",
        condition(reads("self", "dcp_size"), "self.dcp_size > 1 and dcp_interleave_size() == 1"),
        comment(
            tests() & reads("self", "dcp_size"),
            """
            Single tokens: each rank stores those it owns, at loc // dcp_size,
            through the masked path. With blocks the plan has localized the loc
            and sent other ranks' tokens to the sink, so that the plain path of
            a rank without DCP is right.
            """,
        ),
    ),
    # Reads.
    on(
        _TRANSLATOR,
        "",
        add_import("sglang.srt.layers.dcp.layout", "collapse_dcp_indices"),
        add_import("sglang.srt.runtime_context", "dcp_interleave_size"),
    ),
    on(_TRITON, "", add_import("sglang.srt.runtime_context", "dcp_interleave_size")),
    on(
        _TRANSLATOR,
        "KVIndexTranslator.translate_dcp_read_ids",
        docstring(
            """
            Widened logical READ ids -> physical ids, for either pool.

            The one hook every DCP read-index production site calls; on a static
            pool collapsing the owners IS the whole virtual->physical translation.
            """
        ),
        substitute(
            assigns("widened_ids"),
            """
            widened_ids = collapse_dcp_indices(
                widened_ids, dcp_size, dcp_interleave_size()
            )
            """,
        ),
    ),
    on(
        _TRITON,
        "TritonAttnBackend._dcp_lens",
        add_argument("get_dcp_lens", "dcp_interleave_size()"),
    ),
    on(
        _TRITON,
        "TritonAttnBackend._dcp_kv_indices",
        add_argument("create_triton_kv_indices_for_dcp_triton", "dcp_interleave_size()"),
    ),
    on(
        _KERNELS,
        "",
        before(
            defines("create_triton_kv_indices_for_dcp_triton"),
            '''
            # ---------------------------------------------------------------------------
            # The layout of layers/dcp/layout.py, for ids >= 0.
            # ---------------------------------------------------------------------------
            @triton.jit
            def _dcp_len(
                length,
                dcp_size: tl.constexpr,
                dcp_rank: tl.constexpr,
                interleave_size: tl.constexpr,
            ):
                """This rank's share of the positions before `length`."""
                cycle: tl.constexpr = dcp_size * interleave_size
                rest = length % cycle - dcp_rank * interleave_size
                share = tl.minimum(tl.maximum(rest, 0), interleave_size)
                return length // cycle * interleave_size + share


            @triton.jit
            def _dcp_position(
                index,
                dcp_size: tl.constexpr,
                dcp_rank: tl.constexpr,
                interleave_size: tl.constexpr,
            ):
                """The position of this rank's token `index`, counted among its own."""
                cycle = index // interleave_size
                return (cycle * dcp_size + dcp_rank) * interleave_size + index % interleave_size


            @triton.jit
            def _dcp_row(slot, dcp_size: tl.constexpr, interleave_size: tl.constexpr):
                """The row of a slot on the rank that owns it."""
                cycle = slot // (dcp_size * interleave_size)
                return cycle * interleave_size + slot % interleave_size
            ''',
        ),
    ),
    on(
        _KERNELS,
        "create_triton_kv_indices_for_dcp_triton",
        add_parameter("interleave_size: tl.constexpr = 1"),
        drop(assigns("first")),
        substitute(
            assigns("kv_start_mod"),
            """
            # This rank's tokens before the range: its own index of the first one in it.
            first = _dcp_len(kv_start, dcp_size, dcp_rank, interleave_size)
            """,
        ),
        substitute(
            assigns("abs_pos"),
            "abs_pos = _dcp_position(first + offset, dcp_size, dcp_rank, interleave_size)",
        ),
        exchange(
            "the row that is stored",
            m.BinaryOperation(left=m.Name("data"), operator=m.FloorDivide()),
            "_dcp_row(data, dcp_size, interleave_size)",
        ),
    ),
)
