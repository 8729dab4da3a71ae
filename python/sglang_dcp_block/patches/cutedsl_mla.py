"""CuTe DSL MLA decode: a causal bound for a kernel that takes every rank's tokens to be dealt one by one.

With DCP the kernel hides row ``i`` of rank ``r`` unless ``i * dcp_size + r < bound``, where upstream passes a request's
length over all ranks.  In a layout of blocks that is not the row's position, and rows that a rank owns would be hidden.
One query token a request sees all of the share, so the bound that is right for any layout is ``share * dcp_size``: true
for all rows of the share, and for none behind it.  Several query tokens a request (speculative decoding) would need each
row's real position; they are refused.
"""

from __future__ import annotations

from typing import Any

import torch

_BACKEND = "cute-dsl"  # this backend's name in the class that it shares with TensorRT-LLM MLA


def bound_in_graph(
    result: None, self: Any, bs: int, req_pool_indices: Any, seq_lens: Any, forward_mode: Any, metadata: Any
) -> None:
    """AFTER ``TRTLLMMLABackend._apply_dcp_cuda_graph_metadata``: the bound of each request, in the graph's own buffer.

    ``metadata.global_seq_lens_k``, which nothing else reads in decode, then holds bounds. One launch a step.
    """
    if self.backend == _BACKEND and forward_mode.is_decode_or_idle():
        torch.mul(metadata.seq_lens_k, _dcp_size(), out=metadata.global_seq_lens_k)


def bound_in_eager(result: None, self: Any, forward_batch: Any) -> None:
    """AFTER ``TRTLLMMLABackend.init_forward_metadata``: the same for a step outside CUDA graphs."""
    if self.backend == _BACKEND and forward_batch.forward_mode.is_decode_or_idle() and _dcp_size() > 1:
        metadata = self.forward_decode_metadata
        metadata.global_seq_lens_k = metadata.seq_lens_k * _dcp_size()


def one_query_a_request(original: Any, self: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """AROUND ``CuteDslMLABackend._run_decode_kernel``: refuse what the bounds above cannot serve.

    Args:
        query: [num_requests, query tokens a request, heads, width], or without the second dimension for one token.
    Raises:
        NotImplementedError: more than one query token a request, under DCP.
    """
    num_queries = query.shape[1] if query.dim() == 4 else 1
    if kwargs.get("cp_world", 1) > 1 and num_queries > 1:
        raise NotImplementedError(
            f"cutedsl_mla with DCP blocks: expected 1 query token a request, got {num_queries}. Its kernel masks by "
            "token round-robin positions; leave speculative decoding or --dcp-block-size out."
        )
    return original(self, query, *args, **kwargs)


def _dcp_size() -> int:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().dcp_size)
