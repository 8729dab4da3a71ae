"""The configuration: a flag, the value that the code reads, and what it may be combined with."""

from upstream.edit import add_element, after, assigns, calls, defines, on, reads

MESSAGE = """
[DCP] Add --dcp-block-size

The number of consecutive tokens that one DCP rank holds. Unset is what
it was on every platform: single tokens, and runs of a page on NPU. The
code reads it through dcp_interleave_size(). That is no derived width of
the parallel context, since reads of those fail where nothing has been
published, and DCP code runs there without blocks, e.g. in unit tests.

An unset page size follows the block size, since blocks divide pages and
the default page of CUDA is one token. Combinations that have no path
for blocks are refused; no attention backend has one yet.
"""

EDITS = (
    on(
        "sglang.srt.arg_groups.fields.parallel",
        "Parallel",
        after(
            assigns("dcp_size"),
            """
            dcp_block_size: A[
                Optional[int],
                Arg(
                    help="Deal the KV cache over the decode context parallel ranks in "
                    "blocks of this many tokens: position t is on rank "
                    "(t // dcp_block_size) % dcp_size. Must divide --page-size, which "
                    "follows it where unset. Longer blocks make longer contiguous runs, "
                    "e.g. for KV transfer in PD disaggregation. Unset deals single "
                    "tokens (pages on NPU).",
                ),
            ] = None
            """,
        ),
    ),
    on("sglang.srt.arg_groups.field_order", "", add_element("POSITIONAL_FIELD_ORDER", '"dcp_block_size"')),
    on(
        "sglang.srt.runtime_context",
        "",
        after(
            defines("dcp_enabled_of"),
            '''
            def dcp_interleave_size() -> int:
                """Consecutive positions that one decode context-parallel rank holds.

                `dcp_block_size`; one where that is unset, or nothing is published.
                """
                try:
                    return get_parallel().dcp_block_size or 1
                except ValueError:
                    return 1
            ''',
        ),
    ),
    on(
        "sglang.srt.arg_groups.overrides",
        "_page_size_default",
        after(
            reads("view", "page_size"),
            """
            if view.dcp_block_size is not None:
                return {"page_size": view.dcp_block_size}
            """,
        ),
    ),
    on("sglang.srt.arg_groups.resolution_hooks", "", add_element("_OVERRIDABLE_HOOKS", '"validate_dcp_block_size"')),
    on(
        "sglang.srt.arg_groups.pipeline",
        "run_resolution_pipeline",
        after(
            calls("run_hook") & reads("handle_model_capability_adjustments"),
            """

            # Needs the final page size, attention backends and speculative settings.
            from sglang.srt.arg_groups.dcp_block_hook import validate_dcp_block_size

            run_hook(validate_dcp_block_size, server_args)
            """,
        ),
    ),
)
