"""The stand-ins for FlashInfer's MLA wrappers and for the merge of partial outputs, against attention written out."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_dcp_block.cpu.shims import flashinfer_mla, torch_merge


def softmax_loop(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> tuple[list, list]:
    """Attention written out: ``[T][H]`` outputs and natural log-sum-exps."""
    group = q.shape[1] // k.shape[1]
    outs, lses = [], []
    for t in range(q.shape[0]):
        seen = range(k.shape[0] if not causal else max(0, t + 1 + k.shape[0] - q.shape[0]))
        for h in range(q.shape[1]):
            weights = [math.exp(scale * float(q[t, h] @ k[s, h // group])) for s in seen]
            total = sum(weights)
            mixed = sum(
                (w / total * v[s, h // group] for s, w in zip(seen, weights, strict=True)), torch.zeros(v.shape[2])
            )
            outs.append(mixed)
            lses.append(math.log(total) if total else -math.inf)
    return outs, lses


class TestFlashInferWrappers:
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize(("queries", "keys", "kv_heads"), [(3, 7, 1), (4, 4, 2), (1, 5, 4), (5, 3, 4), (2, 0, 1)])
    def test_attention(self, queries: int, keys: int, kv_heads: int, causal: bool) -> None:
        torch.manual_seed(0)
        q, k, v = torch.randn(queries, 4, 6), torch.randn(keys, kv_heads, 6), torch.randn(keys, kv_heads, 5)
        out, lse = flashinfer_mla.attention(q, k, v, 0.4, causal)
        expected_out, expected_lse = softmax_loop(q, k, v, 0.4, causal)
        torch.testing.assert_close(out.reshape(-1, 5), torch.stack(expected_out))
        torch.testing.assert_close(lse.reshape(-1), torch.tensor(expected_lse))

    def test_paged_gathers_rows_and_returns_base_2(self) -> None:
        torch.manual_seed(0)
        latent, rope, rows = (
            torch.randn(20, 1, 8),
            torch.randn(20, 1, 2),
            torch.tensor([9, 3, 4, 17], dtype=torch.int32),
        )
        q_nope, q_pe = torch.randn(3, 4, 8), torch.randn(3, 4, 2)
        wrapper = flashinfer_mla.PagedMla(torch.empty(1), backend="auto")
        qo, kv = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 3, 3, 4])  # the second request has no key here
        float32 = torch.float32
        wrapper.plan(qo, kv, rows, torch.tensor([3, 0, 1]), 4, 8, 2, 1, False, 0.3, float32, float32)
        rows.zero_()  # the plan is a snapshot
        out, lse = wrapper.run(q_nope, q_pe, latent, rope, return_lse=True)
        for request, own in enumerate([[9, 3, 4], [], [17]]):
            q, k = torch.cat([q_nope, q_pe], -1)[request : request + 1], torch.cat([latent, rope], -1)[own]
            expected_out, expected_lse = softmax_loop(q, k, latent[own], 0.3, False)
            torch.testing.assert_close(out[request], torch.stack(expected_out))
            torch.testing.assert_close(lse[request] / math.log2(math.e), torch.tensor(expected_lse))
        assert wrapper.run(q_nope, q_pe, latent, rope, out=out) is out

    def test_paged_refuses_what_flashinfer_refuses(self) -> None:
        wrapper = flashinfer_mla.PagedMla(torch.empty(1))
        one = torch.tensor([0, 1])
        with pytest.raises(ValueError, match=r"expected kv_len_arr \[1\], got \[2\]"):
            wrapper.plan(one, one, one, torch.tensor([2]), 1, 8, 2, 1, False, 1.0, torch.float32, torch.float32)
        with pytest.raises(ValueError, match="expected page_size 1, got 4"):
            wrapper.plan(one, one, one, torch.tensor([1]), 1, 8, 2, 4, False, 1.0, torch.float32, torch.float32)

    @pytest.mark.parametrize(
        ("wrapper_class", "base"), [(flashinfer_mla.RaggedPrefill, 2.0), (flashinfer_mla.NaturalRaggedPrefill, math.e)]
    )
    def test_ragged_and_its_base(self, wrapper_class: type[flashinfer_mla.RaggedPrefill], base: float) -> None:
        torch.manual_seed(0)
        q, k, v = torch.randn(5, 2, 6), torch.randn(6, 2, 6), torch.randn(6, 2, 4)
        wrapper = wrapper_class(torch.empty(1), "NHD", backend="auto")
        wrapper.begin_forward(torch.tensor([0, 2, 5]), torch.tensor([0, 3, 6]), num_qo_heads=2)
        out, lse = wrapper.forward_return_lse(q, k, v, causal=True, sm_scale=0.5, logits_soft_cap=0.0)
        for queries, keys in ((slice(0, 2), slice(0, 3)), (slice(2, 5), slice(3, 6))):
            expected_out, expected_lse = softmax_loop(q[queries], k[keys], v[keys], 0.5, True)
            torch.testing.assert_close(out[queries].reshape(-1, 4), torch.stack(expected_out))
            torch.testing.assert_close(lse[queries].reshape(-1) * math.log(base), torch.tensor(expected_lse))
        torch.testing.assert_close(wrapper.forward(q, k, v, causal=True, sm_scale=0.5), out)


@pytest.mark.parametrize("natural", [True, False])
def test_torch_merge_adds_up_to_full_attention(natural: bool) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 6), torch.randn(9, 1, 6), torch.randn(9, 1, 5)
    shards = [[0, 3, 5], [], [1, 2, 4, 6, 7, 8]]  # the second rank holds nothing
    parts = [flashinfer_mla.attention(q, k[own], v[own], 0.4, False) for own in shards]
    lses = torch.stack([lse for _, lse in parts]) * (1 if natural else math.log2(math.e))
    merged = torch.zeros(4, 2, 5)
    for rank, (out, _) in enumerate(parts):
        scaled, total = torch_merge.corrected(out, lses, rank, None, torch.empty(4, 2, 5), natural)
        merged += scaled
    full, lse = flashinfer_mla.attention(q, k, v, 0.4, False)
    torch.testing.assert_close(merged.transpose(0, 1), full)
    torch.testing.assert_close(total, lse if natural else lse * math.log2(math.e))
