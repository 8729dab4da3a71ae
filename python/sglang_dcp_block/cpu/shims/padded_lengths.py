"""On CPUs SGLang asks the attention backend for the length of padded requests under a name that GPU backends lack.

Groups of ranks that attend for themselves (``--attn-dp-size``) pad their batches to a common size.
"""

from __future__ import annotations

from typing import Any

from sglang_dcp_block.cpu.shims.target import ShimError, find

BACKEND = "sglang.srt.layers.attention.base_attn_backend:AttentionBackend"
ON_CPU = "get_cpu_graph_seq_len_fill_value"


def as_on_gpu(backend: Any) -> int:
    """Tokens of a padded request, 0 or 1: the backend's own number."""
    return int(backend.get_cuda_graph_seq_len_fill_value())


def install() -> None:
    """Give all backends the name; those that have an answer of their own keep it.

    Raises:
        ShimError: SGLang's base class knows the name by now.
    """
    base, _, _ = find(f"{BACKEND}.get_cuda_graph_seq_len_fill_value")
    if ON_CPU in vars(base) and getattr(base, ON_CPU) is not as_on_gpu:
        raise ShimError(f"{BACKEND}.{ON_CPU}: expected nothing of that name: this stand-in is no longer needed")
    setattr(base, ON_CPU, as_on_gpu)
