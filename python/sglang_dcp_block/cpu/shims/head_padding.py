"""On CPUs SGLang pads query and KV heads up to a multiple of ``tp_size``.

With DCP, KV heads must stay replicated within a DCP group, as they are on CUDA; padded ones silently give wrong tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_dcp_block.cpu.shims.target import replace_function

if TYPE_CHECKING:
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig

TARGET = "sglang.srt.model_executor.model_runner:adjust_config_with_unaligned_cpu_tp"


def unpadded(model_config: ModelConfig, load_config: LoadConfig, tp_size: int) -> ModelConfig:
    """Map a model's configuration to itself."""
    return model_config


def install() -> None:
    """Keep head counts as the checkpoint has them."""
    replace_function(TARGET, unpadded)
