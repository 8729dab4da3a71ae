"""What a loaded model is refused for, that its configuration file need not say."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from sglang_dcp_block.config import BlockSizeError
from sglang_dcp_block.patches.model_check import require_full_attention

RadixAttention = pytest.importorskip("sglang.srt.layers.radix_attention").RadixAttention


class Layer(torch.nn.Module):
    """An attention layer as SGLang's models build them."""

    def __init__(self, *, temperature: int = -1, sinks: bool = False, other: bool = False, **attention: Any) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(2, 2)
        self.attn = RadixAttention(num_heads=2, head_dim=4, scaling=1.0, num_kv_heads=1, layer_id=0, **attention)
        self.attn.xai_temperature_len = temperature
        if sinks:
            self.sinks = torch.nn.Parameter(torch.zeros(2))
        if other:
            self.kitchen_sinks = torch.nn.Parameter(torch.zeros(2))


def model_of(*layers: Layer) -> torch.nn.Module:
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(layers)
    return model


@pytest.mark.parametrize("attention", [{}, {"sliding_window_size": None}, {"sliding_window_size": 0}, {"other": True}])
def test_full_attention_passes(attention: dict[str, Any]) -> None:
    require_full_attention(model_of(Layer(), Layer(**attention)))


@pytest.mark.parametrize(
    ("attention", "text"),
    [
        ({"sliding_window_size": 127}, "layers.1.attn: expected full attention in every layer, got a sliding window of "
         "127 tokens. Leave --dcp-block-size out for this model."),
        ({"sinks": True}, "layers.1: expected attention without sinks, got learned sinks."),
        ({"temperature": 1024}, "layers.1.attn: expected the same attention temperature at every position, got one that "
         "grows beyond 1024 tokens."),
    ],
)  # fmt: skip
def test_one_layer_is_enough_to_be_refused(attention: dict[str, Any], text: str) -> None:
    with pytest.raises(BlockSizeError, match=re.escape(text)):
        require_full_attention(model_of(Layer(), Layer(**attention), Layer()))
