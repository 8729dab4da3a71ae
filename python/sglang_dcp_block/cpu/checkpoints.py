"""Tiny random checkpoints whose logits depend on the KV cache.

SGLang's ``load_format="dummy"`` makes weights so small that attention hardly matters: tokens come out equal even when
the cache is wrong.  Here weights have a standard deviation of ``1.6 / sqrt(fan_in)``, so that each token of the context
moves the logits by far more than rounding does.  There is no tokenizer: use ``skip_tokenizer_init=True`` and token ids.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

Kind = Literal["gqa", "mla"]

MARKER = "sglang-dcp-block.json"
"""File that says what a checkpoint was made of: "unfinished" while it is being written."""

WEIGHTS = "model.safetensors"
RECIPE = 1  # raise when the same configuration starts to give other weights
GAIN = 1.6

COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}

CONFIGS: dict[str, dict[str, Any]] = {
    # Llama with one KV head: fits any tp_size == dcp_size up to 8.
    "gqa": COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": 1,
        "head_dim": 32,
    },
    # DeepSeek-V3 without experts.  SGLang's MLA wants YaRN scaling; Triton's interpreter runs the decode kernel at
    # latent widths of 256 + 32 and 512 + 64, but not at 64 + 16.
    "mla": COMMON
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": 8,
        "kv_lora_rank": 256,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4,
            "original_max_position_embeddings": 512,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        # Dense layers only: the first routed one would come after the last.
        "first_k_dense_replace": 2,
        "moe_layer_freq": 1,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
}


def tiny_config(kind: Kind, **overrides: Any) -> dict[str, Any]:
    """Map a kind and changes to the ``config.json`` of a tiny model.

    Args:
        kind: ``"gqa"`` (Llama) or ``"mla"`` (DeepSeek-V3, all layers dense).
        overrides: entries of ``CONFIGS[kind]`` to change, such as ``num_attention_heads=16, num_key_value_heads=4``.

    Returns:
        A new dict.  For ``"mla"``, ``num_key_value_heads`` and ``first_k_dense_replace`` follow the numbers of heads
        and layers unless they are given.

    Raises:
        ValueError: an unknown kind or entry, or query heads that KV heads do not divide.

    Example:
        >>> tiny_config("gqa", num_key_value_heads=2)["num_key_value_heads"]
        2
        >>> tiny_config("mla", num_hidden_layers=3)["first_k_dense_replace"]
        3
    """
    if kind not in CONFIGS:
        raise ValueError(f"kind: expected one of {', '.join(CONFIGS)}, got {kind!r}")
    unknown = sorted(set(overrides) - set(CONFIGS[kind]))
    if unknown:
        raise ValueError(f"overrides of {kind!r}: expected entries among {', '.join(CONFIGS[kind])}; got {unknown}")
    config = json.loads(json.dumps(CONFIGS[kind] | overrides))
    if kind == "mla":
        config["num_key_value_heads"] = overrides.get("num_key_value_heads", config["num_attention_heads"])
        config["first_k_dense_replace"] = overrides.get("first_k_dense_replace", config["num_hidden_layers"])
        if config["first_k_dense_replace"] < config["num_hidden_layers"]:
            raise ValueError(
                f"first_k_dense_replace: expected at least num_hidden_layers = {config['num_hidden_layers']}"
                f" (experts have no weights here), got {config['first_k_dense_replace']}"
            )
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"num_key_value_heads: expected a divisor of num_attention_heads = {heads}, got {kv_heads}")
    return dict(config)


def _attention_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if config["model_type"] == "llama":
        kv_heads, width = config["num_key_value_heads"], config["head_dim"]
        yield "q_proj", (heads * width, hidden)
        yield "k_proj", (kv_heads * width, hidden)
        yield "v_proj", (kv_heads * width, hidden)
        yield "o_proj", (hidden, heads * width)
        return
    rank, q_rank = config["kv_lora_rank"], config["q_lora_rank"]
    rope, nope, value = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
    yield "kv_a_proj_with_mqa", (rank + rope, hidden)
    yield "kv_a_layernorm", (rank,)
    yield "kv_b_proj", (heads * (nope + value), rank)
    yield "o_proj", (hidden, heads * value)
    if q_rank:
        yield "q_a_proj", (q_rank, hidden)
        yield "q_a_layernorm", (q_rank,)
        yield "q_b_proj", (heads * (nope + rope), q_rank)
    else:
        yield "q_proj", (heads * (nope + rope), hidden)


def weight_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Map a configuration to the shapes of its tensors by name: ``(out, in)``, or one dimension for norms."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.{name}.weight": shape for name, shape in _attention_shapes(config)}
        shapes |= {
            f"{prefix}mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}mlp.up_proj.weight": (inner, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, inner),
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
        }
    return shapes


def write_tiny(kind: Kind, folder: Path, *, seed: int = 1, **overrides: Any) -> Path:
    """Write a tiny random checkpoint that SGLang and transformers load, unless it is there already.

    The same arguments give the same bytes: every tensor has a generator of its own, seeded by ``seed`` and its name.

    Args:
        kind: ``"gqa"`` or ``"mla"``.
        folder: where to; created.  A checkpoint of other arguments that this function wrote is replaced.
        seed: of the weights.
        overrides: as in :func:`tiny_config`.

    Returns:
        ``folder``.

    Raises:
        ValueError: as :func:`tiny_config`.
        FileExistsError: the folder holds files that this function did not write.

    Example:
        >>> import tempfile
        >>> folder = write_tiny("gqa", Path(tempfile.mkdtemp()), num_key_value_heads=2)
        >>> sorted(file.name for file in folder.iterdir())
        ['config.json', 'model.safetensors', 'sglang-dcp-block.json']
    """
    config = tiny_config(kind, **overrides)
    description = {"recipe": RECIPE, "seed": seed, "config": config}
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()
    marker = folder / MARKER
    if marker.exists():
        if json.loads(marker.read_text())["sha256"] == digest:
            return folder
    elif folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder}: expected an empty folder or one with {MARKER}, got other files")

    import torch
    from safetensors.torch import save_file

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape)
        own_seed = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(own_seed[:7], "big"))
        scale = 1.0 if name == "model.embed_tokens.weight" else GAIN / float(shape[1]) ** 0.5
        return torch.randn(shape, generator=generator) * scale

    folder.mkdir(parents=True, exist_ok=True)
    marker.write_text(json.dumps({"sha256": "unfinished"}) + "\n")
    tensors = {name: draw(name, shape) for name, shape in weight_shapes(config).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    marker.write_text(json.dumps({"sha256": digest, **description}, indent=1) + "\n")
    return folder
