"""The KV cache of a model as numbers: layers, heads, bytes of a row; from a preset or a Hugging Face ``config.json``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sglang_dcp_block.shown import shown

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
MAX_NUMBER = 2**31 - 1  # of anything in a configuration
# Entries that name a type for each layer, and the types that keep KV of every token.
_LAYER_LISTS = ("layer_types", "layers_block_type", "mixer_types", "attn_type_list")
_FULL = {"full_attention", "attention", "1", "1.0"}
_SLIDING = "sliding_attention"  # where there is a window, which a configuration may leave out
_WINDOWED = {"chunked_attention", "window_attention"}
# Entries that only models with linear attention or state space layers have.
_HYBRID = (
    "full_attention_interval",
    "full_attention_layers",
    "full_attn_idxs",
    "attn_layer_period",
    "hybrid_override_pattern",
    "linear_attn_config",
    "mamba_d_ssm",
)
_NESTED = ("text_config", "language_config", "llm_config")  # of multimodal models


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What one token leaves in the KV cache."""

    name: str
    num_layers: int  # that keep KV
    num_attention_heads: int
    num_kv_heads: int  # MLA: as the configuration names them; its latent is one head
    head_elements: int  # of one KV head: K and V together; MLA: the latent and its rotary part
    is_mla: bool
    element_bytes: int = 2
    unusual: tuple[str, ...] = ()  # fields of support.Facts that hold, such as "is_dsa"

    def kv_heads_of_a_rank(self, tp_size: int, dcp_size: int = 1) -> int:
        """KV heads that one GPU stores.

        Rule: SGLang deals heads over tp_size // dcp_size groups, and a rank keeps one at least; MLA's latent is one head.
        """
        return 1 if self.is_mla else max(1, self.num_kv_heads // max(1, tp_size // dcp_size))

    def row_bytes(self, tp_size: int = 1, dcp_size: int = 1) -> int:
        """Bytes of one token in one layer on one GPU.

        >>> PRESETS["deepseek-v3"].row_bytes(), PRESETS["llama-3.1-70b"].row_bytes(tp_size=8)
        (1152, 512)
        """
        return self.kv_heads_of_a_rank(tp_size, dcp_size) * self.head_elements * self.element_bytes

    def token_bytes(self, tp_size: int = 1, dcp_size: int = 1) -> int:
        """Bytes of one token in all layers on one GPU."""
        return self.num_layers * self.row_bytes(tp_size, dcp_size)

    def stored_as(self, dtype: str) -> ModelShape:
        """The same model with its KV in another type.

        Raises:
            ValueError: a type that is not in :data:`DTYPE_BYTES`.
        """
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"KV type: expected one of {', '.join(DTYPE_BYTES)}, got {dtype!r}")
        return replace(self, element_bytes=DTYPE_BYTES[dtype])


def _mla(name: str, num_layers: int, num_attention_heads: int) -> ModelShape:
    return ModelShape(name, num_layers, num_attention_heads, num_attention_heads, 512 + 64, is_mla=True)


def _gqa(name: str, num_layers: int, num_attention_heads: int, num_kv_heads: int) -> ModelShape:
    return ModelShape(name, num_layers, num_attention_heads, num_kv_heads, 2 * 128, is_mla=False)


# As the models' published config.json have it; KV in bfloat16.
PRESETS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _mla("deepseek-v3", 61, 128),
        _mla("kimi-k2", 61, 64),
        _mla("deepseek-v2-lite", 27, 16),
        _gqa("llama-3.1-8b", 32, 32, 8),
        _gqa("llama-3.1-70b", 80, 64, 8),
        _gqa("qwen3-235b-a22b", 94, 64, 4),
    )
}


def preset(name: str) -> ModelShape:
    """A preset by its name, in any case.

    Raises:
        ValueError: an unknown name; says which there are.
    """
    shape = PRESETS.get(name.lower())
    if shape is None:
        raise ValueError(f"expected one of {', '.join(PRESETS)}, got {shown(name)}")
    return shape


def from_config(config: Mapping[str, Any], name: str, kv_dtype: str | None = None) -> ModelShape:
    """Map a Hugging Face configuration to a shape.

    Rule: MLA is known by ``kv_lora_rank`` and ``qk_rope_head_dim``: a row is both together. Else a KV head is ``head_dim``
    (hidden_size // num_attention_heads where it is missing) of K and as much of V.
    Args:
        config: what stands in ``config.json``; that of the language model may be nested.
        name: for tables.
        kv_dtype: what KV is stored in, of :data:`DTYPE_BYTES`; None for the model's own type.
    Raises:
        ValueError: an entry is missing, or is not what it must be.

    >>> tiny = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}
    >>> from_config(tiny, "tiny").row_bytes()
    64
    """
    text = next((config[key] for key in _NESTED if isinstance(config.get(key), Mapping)), config)
    layers, heads = (_positive(text, key) for key in ("num_hidden_layers", "num_attention_heads"))
    is_mla = bool(text.get("kv_lora_rank")) and bool(text.get("qk_rope_head_dim"))
    kv_heads = _positive(text, "num_key_value_heads") if text.get("num_key_value_heads") is not None else heads
    if is_mla:
        elements = _positive(text, "kv_lora_rank") + _positive(text, "qk_rope_head_dim")
    elif text.get("head_dim") is not None:
        elements = 2 * _positive(text, "head_dim")
    else:
        elements = 2 * (_positive(text, "hidden_size") // heads)
    if not elements:
        raise ValueError(
            f"hidden_size: expected num_attention_heads, {heads}, or more, got {shown(text['hidden_size'])}"
        )
    shape = ModelShape(name, layers, heads, kv_heads, elements, is_mla, unusual=_unusual(config, text))
    return shape.stored_as(kv_dtype or _own_dtype(config, text))


def _own_dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """The model's type, bfloat16 where none is named.  One that is not known is an error: a guess may be off by a factor."""
    named = ((key, each[key]) for each in (text, config) for key in ("torch_dtype", "dtype") if each.get(key))
    key, found = next(named, ("", "bfloat16"))
    dtype = found.removeprefix("torch.") if isinstance(found, str) else found
    if dtype not in tuple(DTYPE_BYTES):
        expected = ", ".join(DTYPE_BYTES)
        raise ValueError(
            f"{key}: expected one of {expected}, got {shown(found)}. Pass --kv-dtype, the type of the KV cache."
        )
    return str(dtype)


def _positive(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key}: expected a positive integer, got {'nothing' if value is None else shown(value)}")
    if value > MAX_NUMBER:
        raise ValueError(f"{key}: expected at most {MAX_NUMBER}, got {shown(value)}")
    return value


def _unusual(config: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[str, ...]:
    """What DCP with blocks is refused with, as far as a configuration tells; the server asks SGLang itself."""
    kinds = {str(kind) for key in _LAYER_LISTS for kind in _listed(text, key)}
    sparse = {kind for kind in kinds if re.search("sparse|indexed|compressed", kind)}
    windowed = bool(text.get("sliding_window")) and text.get("use_sliding_window", True) is not False
    found = {
        "is_dsa": text.get("index_topk") is not None,
        "has_sliding_window": (windowed and (_SLIDING in kinds or not text.get("layer_types")))
        or bool(kinds & _WINDOWED)
        or bool(text.get("attention_chunk_size")),
        "has_sparse_layers": bool(sparse) or text.get("sparse_attention_config") is not None,
        "is_hybrid_linear": bool(kinds - _FULL - _WINDOWED - {_SLIDING} - sparse)
        or any(text.get(key) is not None for key in _HYBRID)
        or text.get("layer_group_size") not in (None, 0, 1),
        "is_encoder_decoder": bool(config.get("is_encoder_decoder")),
    }
    return tuple(field for field, holds in found.items() if holds)


def _listed(text: Mapping[str, Any], key: str) -> list[Any]:
    named = text.get(key) or []
    if not isinstance(named, list | tuple):
        raise ValueError(f"{key}: expected a list, a type a layer, got {shown(named)}")
    return list(named)
