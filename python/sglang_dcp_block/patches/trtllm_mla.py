"""TensorRT-LLM MLA decode: the one length of the backend that does not go through ``get_dcp_lens``.

Everything else of the backend is right as it stands.  Lengths count through ``get_dcp_lens``.  The page table of a rank
holds the physical page of each of its virtual pages, which is the same for every block size that divides the page.  Rows
without KV are made neutral by upstream's own ``fixup_zero_kv_rows``.
"""

from __future__ import annotations

from typing import Any

from sglang_dcp_block.patches.active import layout


def local_max_seq_len(self: Any, max_seq_len: int) -> int:
    """REPLACE ``TRTLLMMLABackend._get_dcp_local_max_seq_len``: a bound of this rank's share of any request.

    CUDA graphs are captured with it.  Upstream's formula deals single tokens and is up to ``block_size - 1`` short, so
    the kernel would leave out the last tokens of a long request.

    Args:
        max_seq_len: tokens of the longest request there can be, over all ranks; a host int.
    Returns:
        At least 1, as a launch needs it. Shares grow with length, so the longest request's bounds all others.
    """
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if not parallel.dcp_enabled:
        return max_seq_len
    return max(1, layout().local_len(int(max_seq_len), parallel.dcp_rank))
