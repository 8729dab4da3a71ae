"""Off CUDA, the MLA prefill writes its latent cache by a path that knows nothing of DCP: every rank stores every token.

The pool's own writer, taken on CUDA, stores the tokens that the rank owns.  It works on CPUs too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_dcp_block.cpu.shims.target import find, replace_function

if TYPE_CHECKING:
    import torch

MODULE = "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mha"


def install() -> None:
    """Write MLA latents through the KV pool."""
    find(f"{MODULE}:get_token_to_kv_pool")
    find(f"{MODULE}:KVWriteLoc.for_batch")
    forward_mha = find(f"{MODULE}:DeepseekMHAForwardMixin")[0]

    def write_owned(
        self: Any, latent_cache: torch.Tensor, kv_a: torch.Tensor, k_pe: torch.Tensor, forward_batch: Any
    ) -> None:
        location = forward_mha.KVWriteLoc.for_batch(forward_batch)
        pool = forward_mha.get_token_to_kv_pool()
        pool.set_mla_kv_buffer(self.attn_mha, location, kv_a.unsqueeze(1), k_pe)

    replace_function(f"{MODULE}:DeepseekMHAForwardMixin._set_mla_kv_buffer", write_owned)
