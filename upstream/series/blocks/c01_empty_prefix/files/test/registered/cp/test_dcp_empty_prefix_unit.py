"""A DCP rank without rows of the prefix takes part in the prefix collectives.

The ranks are threads whose collectives meet at a barrier: one that leaves early
breaks it, where real ranks would wait forever.
"""

import threading
import unittest
from types import SimpleNamespace
from unittest.mock import patch

import torch

from sglang.srt.layers.attention import triton_backend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

HEAD_DIM = 4
TIMEOUT_SECONDS = 20


class ThreadGroup:
    """The collectives of one rank of a group of threads."""

    def __init__(self, rank, barrier, parts):
        self.rank_in_group = rank
        self.world_size = barrier.parties
        self._barrier = barrier
        self._parts = parts

    def _exchange(self, tensor):
        self._parts[self.rank_in_group] = tensor
        self._barrier.wait(TIMEOUT_SECONDS)
        parts = list(self._parts)
        self._barrier.wait(TIMEOUT_SECONDS)
        return parts

    def all_gather(self, tensor, dim):
        return torch.cat(self._exchange(tensor.clone()), dim=dim)

    def all_reduce(self, tensor):
        return torch.stack(self._exchange(tensor.clone())).sum(dim=0)


def extend_attention(q, k, v, out, *args, sm_scale, lse_extend, **flags):
    """The Triton kernel's arithmetic for one request and one KV head."""
    k_buffer, v_buffer, _, kv_indptr, kv_indices, _, is_causal = args[:7]
    rows = kv_indices[kv_indptr[0] : kv_indptr[1]]
    reads_prefix = flags.get("skip_extend", False)
    keys, values = (k_buffer[rows], v_buffer[rows]) if reads_prefix else (k, v)
    scores = torch.einsum("qhd,kd->qhk", q, keys[:, 0]) * sm_scale
    if is_causal:
        queries, tokens = scores.shape[0], scores.shape[2]
        hidden = torch.ones(queries, tokens, dtype=torch.bool).triu(1)
        scores.masked_fill_(hidden[:, None], -float("inf"))
    lse_extend.copy_(torch.logsumexp(scores, dim=-1))
    out.copy_(torch.einsum("qhk,kd->qhd", torch.softmax(scores, -1), values[:, 0]))


class TestDcpEmptyPrefix(unittest.TestCase):
    def _run(self, dcp_size, prefix_len, extend_len, prefix_lens_cpu):
        """Attend on every rank of token round-robin; how often the ranks met."""
        torch.manual_seed(0)
        q = torch.randn(extend_len, dcp_size, HEAD_DIM)
        k = torch.randn(prefix_len + extend_len, 1, HEAD_DIM)
        v = torch.randn(prefix_len + extend_len, 1, HEAD_DIM)
        meetings = []
        barrier = threading.Barrier(dcp_size, action=lambda: meetings.append(1))
        parts = [None] * dcp_size
        current = threading.local()
        outputs = [None] * dcp_size
        errors = []

        def run_rank(rank):
            current.group = ThreadGroup(rank, barrier, parts)
            owned = torch.arange(prefix_len)[rank::dcp_size]
            # Rows of other requests around the ones of this prefix.
            k_buffer = torch.randn(len(owned) + 3, 1, HEAD_DIM)
            v_buffer = torch.randn(len(owned) + 3, 1, HEAD_DIM)
            k_buffer[1 : 1 + len(owned)] = k[owned]
            v_buffer[1 : 1 + len(owned)] = v[owned]
            backend = SimpleNamespace(
                forward_metadata=SimpleNamespace(
                    custom_mask=None,
                    kv_indptr=torch.tensor([0, len(owned)]),
                    kv_indices=torch.arange(1, 1 + len(owned)),
                    qo_indptr=torch.tensor([0, extend_len]),
                    max_extend_len=extend_len,
                ),
                token_to_kv_pool=SimpleNamespace(
                    get_key_buffer=lambda layer_id: k_buffer,
                    get_value_buffer=lambda layer_id: v_buffer,
                ),
                extend_attention_fwd=extend_attention,
            )
            layer = SimpleNamespace(
                layer_id=0,
                tp_q_head_num=1,
                tp_k_head_num=1,
                qk_head_dim=HEAD_DIM,
                v_head_dim=HEAD_DIM,
                scaling=HEAD_DIM**-0.5,
                sliding_window_size=None,
                k_scale=None,
                v_scale=None,
                xai_temperature_len=-1,
            )
            try:
                outputs[rank] = TritonAttnBackend._forward_extend_dcp(
                    backend,
                    q[:, rank : rank + 1],
                    k[prefix_len:],
                    v[prefix_len:],
                    layer,
                    SimpleNamespace(extend_prefix_lens_cpu=prefix_lens_cpu),
                    True,
                    0.0,
                    None,
                )
            except Exception as error:
                errors.append(error)
                barrier.abort()

        with patch.object(
            triton_backend,
            "get_parallel",
            lambda: SimpleNamespace(dcp_group=current.group),
        ):
            threads = [
                threading.Thread(target=run_rank, args=(rank,))
                for rank in range(dcp_size)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.assertEqual(errors, [])

        scores = torch.einsum("qhd,kd->qhk", q, k[:, 0]) * HEAD_DIM**-0.5
        hidden = torch.ones(extend_len, prefix_len + extend_len).triu(1 + prefix_len)
        scores.masked_fill_(hidden.bool()[:, None], -float("inf"))
        want = torch.einsum("qhk,kd->qhd", torch.softmax(scores, -1), v[:, 0])
        for rank, output in enumerate(outputs):
            torch.testing.assert_close(output, want[:, rank])
        return len(meetings)

    def test_prefix_shorter_than_the_group(self):
        for dcp_size, prefix_len in ((2, 1), (4, 1), (4, 2), (4, 3)):
            with self.subTest(dcp_size=dcp_size, prefix_len=prefix_len):
                self._run(dcp_size, prefix_len, 3, [prefix_len])

    def test_prefix_lengths_unknown_on_the_host(self):
        self._run(4, 2, 3, None)

    def test_every_rank_has_rows(self):
        self._run(2, 5, 3, [5])

    def test_no_prefix_needs_no_collective(self):
        self.assertEqual(self._run(4, 0, 3, [0]), 0)


if __name__ == "__main__":
    unittest.main()
