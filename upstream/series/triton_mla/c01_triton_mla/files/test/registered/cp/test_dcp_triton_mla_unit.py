"""MLA under DCP in the Triton backend: writes, and the gathered prefix of extend."""

import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch

from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.attention import triton_backend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla import (
    is_mla_dcp_lse_base_on_e,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

LATENT, ROPE, HEADS = 4, 2, 3


class TestDcpTritonMla(unittest.TestCase):
    def test_writes_take_the_mla_door(self):
        written = []
        backend = SimpleNamespace(
            use_mla=True,
            dcp_size=2,
            token_to_kv_pool=SimpleNamespace(
                set_mla_kv_buffer=lambda *args: written.append(args)
            ),
        )
        k = torch.randn(5, 1, LATENT + ROPE)
        layer = SimpleNamespace(v_head_dim=LATENT)
        TritonAttnBackend._set_kv_buffer(
            backend, None, layer, "loc", k, k[..., :LATENT]
        )
        ((_, loc, latent, rope),) = written
        self.assertEqual(loc, "loc")
        self.assertTrue(torch.equal(torch.cat([latent, rope], -1), k))

    def test_extend_of_an_fp8_checkpoint_takes_it_too(self):
        # Its layers carry scales with any KV cache.
        written = []
        backend = SimpleNamespace(
            use_mla=True,
            dcp_size=2,
            forward_metadata=SimpleNamespace(swa_out_cache_loc=None),
            _can_run_dense_fp8_chunked_mha=lambda *args: False,
            _set_kv_buffer=lambda *args: written.append(args[3:]),
            _forward_extend_dcp_mla=lambda *args: "out",
        )
        scales = dict.fromkeys(("k_scale", "v_scale"), torch.tensor(2.0))
        layer = RadixAttention(HEADS, LATENT + ROPE, 1.0, 1, 0, v_head_dim=LATENT)
        layer.__dict__.update(scales)
        forward_batch = SimpleNamespace(
            out_cache_loc=torch.arange(2),
            out_cache_loc_is_physical=True,
            swa_out_cache_loc=None,
            mha_one_shot=False,
            kv_loc_plan=None,
        )
        k = torch.randn(2, 1, LATENT + ROPE)
        q = torch.randn(2, HEADS * (LATENT + ROPE))
        out = TritonAttnBackend.forward_extend(
            backend, q, k, k[..., :LATENT], layer, forward_batch
        )
        self.assertEqual(out, "out")
        ((key, value),) = written
        self.assertIs(key, k)
        self.assertTrue(torch.equal(value, k[..., :LATENT]))

    def test_extend_reads_the_gathered_prefix(self):
        torch.manual_seed(0)
        prefix_lens, extend_lens = [5, 0, 3], [2, 4, 1]
        num_prefix, num_extend = sum(prefix_lens), sum(extend_lens)
        q = torch.randn(num_extend, HEADS * (LATENT + ROPE))
        k = torch.randn(num_extend, 1, LATENT + ROPE)
        buffer = torch.cat([torch.randn(num_prefix, 1, LATENT + ROPE), k])
        scale = 0.5

        def extend_attention(*, q_extend, k_extend, v_extend, o_extend, **args):
            qo_indptr, kv_indptr = args["qo_indptr"], args["kv_indptr"]
            for request in range(len(qo_indptr) - 1):
                new = slice(qo_indptr[request], qo_indptr[request + 1])
                rows = args["kv_indices"][kv_indptr[request] : kv_indptr[request + 1]]
                keys = torch.cat([args["k_buffer"][rows], k_extend[new]])[:, 0]
                values = torch.cat([args["v_buffer"][rows], v_extend[new]])[:, 0]
                scores = torch.einsum("qhd,kd->qhk", q_extend[new], keys)
                scores *= args["sm_scale"]
                hidden = torch.ones(scores.shape[0], len(keys)).triu(1 + len(rows))
                scores.masked_fill_(hidden.bool()[:, None], -float("inf"))
                o_extend[new] = torch.einsum("qhk,kd->qhd", scores.softmax(-1), values)

        indptr = torch.tensor([0, *extend_lens]).cumsum(0)
        backend = SimpleNamespace(
            forward_metadata=SimpleNamespace(
                kv_indptr=torch.full((4,), 99), qo_indptr=indptr, max_extend_len=4
            ),
            extend_attention_fwd=extend_attention,
        )
        layer = SimpleNamespace(
            tp_q_head_num=HEADS,
            qk_head_dim=LATENT + ROPE,
            v_head_dim=LATENT,
            scaling=scale,
            xai_temperature_len=-1,
        )
        forward_batch = SimpleNamespace(
            extend_prefix_lens=torch.tensor(prefix_lens),
            attn_dcp_metadata=SimpleNamespace(
                dcp_kv_buffer=buffer, dcp_extend_prefix_lens_sum=num_prefix
            ),
        )
        got = TritonAttnBackend._forward_extend_dcp_mla(
            backend,
            layer,
            forward_batch,
            q,
            k,
            k[..., :LATENT],
            torch.empty(num_extend, HEADS * LATENT),
            0.0,
            None,
        )

        begin = 0
        for request, prefix_len in enumerate(prefix_lens):
            new = slice(indptr[request], indptr[request + 1])
            whole = torch.cat([buffer[begin : begin + prefix_len], k[new]])[:, 0]
            begin += prefix_len
            queries = q[new].view(-1, HEADS, LATENT + ROPE)
            for i, query in enumerate(queries):
                seen = whole[: prefix_len + i + 1]
                weights = torch.softmax(query @ seen.T * scale, dim=-1)
                want = weights @ seen[:, :LATENT]
                torch.testing.assert_close(
                    got[indptr[request] + i].view(HEADS, LATENT), want
                )

    def test_decode_hands_its_part_to_the_merge_of_the_model(self):
        # The second row has no KV on this rank, and the layer is of an FP8 checkpoint.
        written, scales = [], []

        def decode_attention(q, keys, values, out, *args, **kwargs):
            lse, k_scale, v_scale = args[3], args[7], args[8]
            scales.append((k_scale, v_scale))
            out.fill_(float("nan"))
            out[0] = 1.5
            lse[0, :, 0], lse[0, :, 1] = 0.25, 1.0

        metadata = SimpleNamespace(
            swa_out_cache_loc=None,
            kv_indptr=None,
            kv_indices=None,
            attn_logits=None,
            swa_attn_logits=None,
            attn_lse=torch.zeros(4, HEADS, 2),
            num_kv_splits=None,
            lean_Mp=None,
            lean_Lp=None,
            lean_Op=None,
            lean_locks=None,
            uneven_batch=False,
        )
        backend = SimpleNamespace(
            use_mla=True,
            dcp_size=2,
            is_draft_runner=False,
            enable_deterministic=True,
            max_kv_splits=2,
            forward_metadata=metadata,
            token_to_kv_pool=MagicMock(),
            decode_attention_fwd=decode_attention,
            _set_kv_buffer=lambda *args: written.append(args[3:5]),
        )
        layer = RadixAttention(HEADS, LATENT + ROPE, 1.0, 1, 0, v_head_dim=LATENT)
        scale = torch.tensor(2.0)
        layer.__dict__.update(k_scale=scale, v_scale=scale)
        layer.__dict__.update(k_scale_float=2.0, v_scale_float=2.0)
        forward_batch = SimpleNamespace(
            out_cache_loc=torch.arange(2),
            out_cache_loc_is_physical=True,
            kv_loc_plan=None,
            spec_info=None,
            batch_size=2,
            seq_lens_sum=9,
        )
        k = torch.randn(2, 1, LATENT + ROPE)
        before = k.clone()
        parallel = MagicMock()
        with (
            patch.object(triton_backend, "get_parallel", lambda: parallel),
            patch.object(triton_backend, "use_symmetric_memory", MagicMock()),
        ):
            out, lse = TritonAttnBackend.forward_decode(
                backend,
                torch.randn(2, HEADS * (LATENT + ROPE)),
                k,
                k[..., :LATENT],
                layer,
                forward_batch,
            )
        ((key, value),) = written
        self.assertTrue(torch.equal(key, before))
        self.assertTrue(torch.equal(value, before[..., :LATENT]))
        self.assertEqual(scales, [(1.0, 1.0)])
        parallel.dcp_group.all_gather.assert_not_called()
        want = torch.tensor([[1.5], [0.0]]).expand(2, HEADS * LATENT)
        torch.testing.assert_close(out, want)
        parts = torch.tensor([[0.25, 1.0], [-float("inf")] * 2])
        want = torch.logsumexp(parts, -1)[:, None].expand(2, HEADS)
        torch.testing.assert_close(lse, want)

    def test_fp8_kv_caches_and_rocm_are_refused(self):
        for dtype, is_hip, text in (
            (torch.float8_e4m3fn, False, "no FP8 KV cache"),
            (torch.bfloat16, True, "on ROCm"),
        ):
            with (
                self.subTest(text),
                patch.object(triton_backend, "_is_hip", is_hip),
                self.assertRaisesRegex(ValueError, text),
            ):
                self._start(dtype)

    def _start(self, dtype):
        model_runner = MagicMock(kv_cache_dtype=dtype, is_draft_worker=False)
        model_runner.model_config.attention_arch = AttentionArch.MLA
        parallel = MagicMock(attn_dcp_size=2, attn_tp_size=2)
        with (
            patch.object(triton_backend, "get_parallel", lambda: parallel),
            patch.object(triton_backend, "get_exec", MagicMock()),
            patch.object(triton_backend, "get_spec", MagicMock()),
        ):
            TritonAttnBackend(model_runner)

    def test_lse_is_natural(self):
        self.assertTrue(is_mla_dcp_lse_base_on_e("triton"))
        self.assertFalse(is_mla_dcp_lse_base_on_e("flashinfer"))


if __name__ == "__main__":
    unittest.main()
