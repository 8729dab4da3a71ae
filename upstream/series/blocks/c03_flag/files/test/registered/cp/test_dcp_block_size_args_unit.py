"""--dcp-block-size: what it resolves to, and what is refused."""

import json
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from sglang.srt.arg_groups import dcp_block_hook
from sglang.srt.arg_groups.overrides import _page_size_default
from sglang.srt.runtime_context import dcp_interleave_size, get_parallel
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

OTHERS = dict.fromkeys(("is_hip", "is_npu", "is_xpu", "is_musa"), False)
PLATFORM = SimpleNamespace(**OTHERS)
CONFIG = SimpleNamespace(
    dcp_block_size=16,
    dcp_size=4,
    page_size=64,
    kv_cache_dtype="auto",
    speculative_algorithm=None,
    enable_unified_memory=False,
    enable_hierarchical_cache=False,
    disaggregation_decode_enable_offload_kvcache=False,
    disaggregation_mode="null",
    attention_backend="good",
    prefill_attention_backend=None,
    decode_attention_backend=None,
)
MODEL = SimpleNamespace(
    hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
    is_hybrid_swa=False,
    attention_chunk_size=None,
)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}


class TestDcpBlockSizeArgs(unittest.TestCase):
    def _validate(
        self, platform=PLATFORM, is_mla=False, model=MODEL, mamba=None, **changes
    ):
        config = SimpleNamespace(**{**vars(CONFIG), **changes})
        with (
            patch.multiple(
                dcp_block_hook,
                MHA_BACKENDS=frozenset({"good"}),
                MLA_BACKENDS=frozenset({"good"}),
                resolving_view=lambda _: config,
                resolved_view=lambda _: config,
                use_mla_backend=lambda _: is_mla,
                model_config_of=lambda _: model,
                get_platform=lambda: platform,
            ),
            patch("sglang.srt.configs.hybrid_arch.mambaish_config", lambda _: mamba),
        ):
            dcp_block_hook.validate_dcp_block_size(None)

    def test_accepted(self):
        for block_size in (None, 1, 16, 64):
            with self.subTest(block_size=block_size):
                self._validate(dcp_block_size=block_size)
        self._validate(is_mla=True)

    def test_refused(self):
        for text, changes in (
            ("at least 1", {"dcp_block_size": 0}),
            ("--dcp-size", {"dcp_size": 1}),
            ("must divide --page-size 64", {"dcp_block_size": 48}),
            ("must divide", {"page_size": 1}),
            ("attention backends", {"attention_backend": "bad"}),
            ("attention backends", {"decode_attention_backend": "bad"}),
            ("FP4", {"kv_cache_dtype": "fp4_e2m1"}),
            ("speculative", {"speculative_algorithm": "EAGLE"}),
            ("--enable-unified-memory", {"enable_unified_memory": True}),
            ("--enable-hierarchical-cache", {"enable_hierarchical_cache": True}),
            (
                "enable-offload-kvcache",
                {"disaggregation_decode_enable_offload_kvcache": True},
            ),
        ):
            with self.subTest(**changes), self.assertRaisesRegex(ValueError, text):
                self._validate(**changes)

    def test_refused_models(self):
        sparse = SimpleNamespace(
            architectures=["DeepseekV32ForCausalLM"], index_topk=2048
        )
        for text, changes in (
            ("sparse attention", {"hf_config": sparse}),
            ("sliding-window", {"is_hybrid_swa": True}),
            ("chunked attention", {"attention_chunk_size": 8192}),
        ):
            model = SimpleNamespace(**{**vars(MODEL), **changes})
            self._validate(model=model, dcp_block_size=1)
            with self.subTest(text), self.assertRaisesRegex(ValueError, text):
                self._validate(model=model)
        with self.assertRaisesRegex(ValueError, "linear attention"):
            self._validate(mamba=object())

    def test_validated_when_arguments_are_resolved(self):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(LLAMA))
            args = ServerArgs(model_path=folder, dcp_block_size=16)
            with self.assertRaisesRegex(ValueError, "requires --dcp-size"):
                args.resolve_once()

    def test_other_platforms_keep_their_own_layout(self):
        for name in OTHERS:
            other = SimpleNamespace(**{**OTHERS, name: True})
            self._validate(platform=other, dcp_block_size=None)
            with (
                self.subTest(name),
                self.assertRaisesRegex(ValueError, "not supported on ROCm"),
            ):
                self._validate(platform=other)

    def test_page_size_follows(self):
        view = SimpleNamespace(page_size=None, dcp_block_size=16)
        self.assertEqual(_page_size_default(view), {"page_size": 16})
        view = SimpleNamespace(page_size=64, dcp_block_size=16)
        self.assertEqual(_page_size_default(view), {})

    def test_interleave_size(self):
        self.assertIsNone(ServerArgs(model_path="dummy").dcp_block_size)
        self.assertEqual(dcp_interleave_size(), 1)
        for block_size, interleave_size in ((None, 1), (16, 16)):
            with get_parallel().override(dcp_block_size=block_size):
                self.assertEqual(dcp_interleave_size(), interleave_size)


if __name__ == "__main__":
    unittest.main()
