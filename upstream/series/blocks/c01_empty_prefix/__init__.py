"""The hang of stock SGLang: a rank without rows of the prefix leaves before a collective."""

from upstream.edit import condition, on, reads

MESSAGE = """
[DCP] Fix hang when a chunked prefix leaves a rank without KV

TritonAttnBackend._forward_extend_dcp returns early where this rank
holds no row of any prefix, but other ranks of the group may hold some:
they wait in the all-gather of Q forever. It takes a chunked prefix
shorter than dcp_size, e.g. --tp 4 --dcp-size 4 --page-size 2
--chunked-prefill-size 2 and any prompt of three tokens or more.

Decide from the prefix lengths, which all ranks of the group share. A
rank without rows then contributes LSE = -inf, which the merge already
treats as neutral. Where the lengths are not known on the host, every
rank takes part.
"""

EDITS = (
    on(
        "sglang.srt.layers.attention.triton_backend",
        "TritonAttnBackend._forward_extend_dcp",
        condition(
            reads("kv_indices", "numel"),
            """
            forward_batch.extend_prefix_lens_cpu is not None and not any(
                forward_batch.extend_prefix_lens_cpu
            )
            """,
        ),
    ),
)
