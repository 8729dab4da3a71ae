"""The last look at the loaded model, for what its configuration file does not say."""

from __future__ import annotations

from typing import Any

from sglang_dcp_block.config import FLAG, BlockSizeError


def require_full_attention(model: Any) -> None:
    """Refuse a model with attention layers that SGLang's DCP path raises on, but only at the first request, or gets wrong.

    Args:
        model: the loaded ``torch.nn.Module``.
    Raises:
        BlockSizeError: naming the layer, for sliding windows, attention sinks, and an attention temperature that follows
            the position: the Triton kernels take the rank's own token count for the position.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    for name, module in model.named_modules():
        if isinstance(module, RadixAttention) and module.sliding_window_size > 0:
            raise BlockSizeError(
                f"{name}: expected full attention in every layer, got a sliding window of "
                f"{module.sliding_window_size} tokens. Leave {FLAG} out for this model."
            )
        if isinstance(module, RadixAttention) and module.xai_temperature_len > 0:
            raise BlockSizeError(
                f"{name}: expected the same attention temperature at every position, got one that grows beyond "
                f"{module.xai_temperature_len} tokens. Leave {FLAG} out for this model."
            )
        if any(parameter.rpartition(".")[2] == "sinks" for parameter, _ in module.named_parameters(recurse=False)):
            raise BlockSizeError(
                f"{name}: expected attention without sinks, got learned sinks. Leave {FLAG} out for this model."
            )
