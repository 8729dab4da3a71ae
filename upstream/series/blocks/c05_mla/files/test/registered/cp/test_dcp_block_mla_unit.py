"""Blocks of tokens in MLA's prefix gather, index streams and backends."""

import os
import unittest
from types import SimpleNamespace
from unittest.mock import patch

import torch

from sglang.srt.layers.attention import cutedsl_mla_backend
from sglang.srt.layers.attention.cutedsl_mla_backend import CuteDslMLABackend
from sglang.srt.layers.attention.trtllm_mla_backend import TRTLLMMLABackend
from sglang.srt.layers.dcp.comm import all_gather_kv_cache_for_dcp
from sglang.srt.layers.dcp.layout import (
    filter_dcp_local_chunk_kv_indices,
    update_local_kv_lens_for_dcp,
)
from sglang.srt.layers.dcp.planner import plan_dcp_decode_metadata
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.runtime_context import get_parallel
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=20, stage="base-b", runner_config="1-gpu-small")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RUNS_TRITON = DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
SHAPES = [(2, 1), (2, 4), (4, 2), (4, 8), (8, 1)]
# Parts of requests as (start, length): empty, unaligned, within one run, long.
PARTS = [(0, 9), (3, 0), (5, 2), (0, 33), (17, 30), (8, 8)]


def dcp(size, rank, interleave_size, **kwargs):
    return get_parallel().override(
        dcp_enabled=True,
        dcp_size=size,
        attn_dcp_size=size,
        dcp_rank=rank,
        attn_dcp_rank=rank,
        dcp_interleave_size=interleave_size,
        **kwargs,
    )


def owner_and_row(token, size, interleave_size):
    """By dealing runs of tokens one after the other."""
    run, offset = divmod(token, interleave_size)
    return run % size, run // size * interleave_size + offset


def each_rank():
    for size, interleave_size in SHAPES:
        for rank in range(size):
            yield size, rank, interleave_size


class Exchange:
    """An all-gather whose ranks run one after the other: once to send, once to receive."""

    def __init__(self, size):
        self.sent = [None] * size

    def group(self, rank):
        def all_gather_into_tensor(received, sent):
            self.sent[rank] = sent.clone()
            if all(part is not None for part in self.sent):
                received.copy_(torch.cat(self.sent))

        return SimpleNamespace(all_gather_into_tensor=all_gather_into_tensor)


class TestDcpBlockMla(unittest.TestCase):
    def test_share_of_chunks(self):
        starts = torch.tensor([start for start, _ in PARTS])
        lens = torch.tensor([length for _, length in PARTS])
        stream = [1000 * i + s + t for i, (s, n) in enumerate(PARTS) for t in range(n)]
        for size, rank, interleave_size in each_rank():
            with self.subTest(size=size, rank=rank, interleave_size=interleave_size):
                with dcp(size, rank, interleave_size):
                    got = filter_dcp_local_chunk_kv_indices(
                        torch.tensor(stream, device=DEVICE), starts, lens
                    )
                want = [
                    token
                    for token in stream
                    if owner_and_row(token % 1000, size, interleave_size)[0] == rank
                ]
                self.assertEqual(got.tolist(), want)

    def test_gathered_prefix_is_in_position_order(self):
        starts = torch.tensor([start for start, _ in PARTS])
        lens = torch.tensor([length for _, length in PARTS])
        want = torch.tensor(
            [1000.0 * i + s + t for i, (s, n) in enumerate(PARTS) for t in range(n)]
        ).to(DEVICE)
        for size, interleave_size in SHAPES:
            with self.subTest(size=size, interleave_size=interleave_size):
                exchange = Exchange(size)
                for _ in range(2):
                    for rank in range(size):
                        group = exchange.group(rank)
                        with dcp(size, rank, interleave_size, dcp_group=group):
                            own = filter_dcp_local_chunk_kv_indices(want, starts, lens)
                            got = all_gather_kv_cache_for_dcp(
                                own.view(-1, 1, 1), -own.view(-1, 1, 1), lens, starts
                            )
                        if all(part is not None for part in exchange.sent):
                            self.assertTrue(torch.equal(got[:, 0, 0], want))
                            self.assertTrue(torch.equal(got[:, 0, 1], -want))
                self.assertEqual(len({part.shape for part in exchange.sent}), 1)

    @unittest.skipUnless(RUNS_TRITON, "needs a GPU or TRITON_INTERPRET=1")
    def test_decode_index_stream(self):
        lens = torch.tensor([1, 40, 7, 300], dtype=torch.int32, device=DEVICE)
        indptr = torch.zeros(5, dtype=torch.int32, device=DEVICE)
        indptr[1:] = lens.cumsum(0)
        stream = torch.randperm(int(lens.sum()), device=DEVICE).int() + 8
        for size, rank, interleave_size in each_rank():
            for is_replay in (False, True):
                with self.subTest(
                    size=size, rank=rank, interleave_size=interleave_size
                ):
                    got_lens, got_indptr = lens.clone(), indptr.clone()
                    got = stream.clone()
                    with dcp(size, rank, interleave_size):
                        lens_cpu = lens.cpu().clone()
                        update_local_kv_lens_for_dcp(lens_cpu)
                        total = plan_dcp_decode_metadata(
                            got_lens,
                            got_indptr,
                            got,
                            is_replay,
                            {"kv_len_arr_cpu": lens_cpu} if is_replay else {},
                            len(lens),
                        )
                    want = []
                    for request, length in enumerate(lens.tolist()):
                        ids = stream[indptr[request] :].tolist()
                        want.append(
                            [
                                ids[position]
                                for position in range(length)
                                if owner_and_row(position, size, interleave_size)[0]
                                == rank
                            ]
                        )
                    flat = [one for ids in want for one in ids]
                    self.assertEqual(got[:total].tolist(), flat)
                    self.assertEqual(got_lens.tolist(), [len(ids) for ids in want])
                    self.assertEqual(got_indptr.diff().tolist(), got_lens.tolist())

    def test_graph_bound_covers_every_request(self):
        backend = SimpleNamespace()
        backend._get_dcp_local_seq_lens = lambda lens: (
            TRTLLMMLABackend._get_dcp_local_seq_lens(backend, lens)
        )
        for size, rank, interleave_size in each_rank():
            with dcp(size, rank, interleave_size):
                for longest in (1, 7, 64, 131):
                    bound = TRTLLMMLABackend._get_dcp_local_max_seq_len(
                        backend, longest
                    )
                    shares = TRTLLMMLABackend._get_dcp_local_seq_lens(
                        backend, torch.arange(longest + 1)
                    )
                    self.assertEqual(bound, max(1, int(shares.max())))

    def test_cutedsl_mask_hides_no_row(self):
        lens = torch.tensor([5, 0, 64], dtype=torch.int32)
        backend = SimpleNamespace(
            _compute_decode_bmm1_scale=lambda layer: 1.0,
            workspace_buffer=None,
            qk_nope_head_dim=1,
            kv_lora_rank=1,
            qk_rope_head_dim=1,
        )
        seen = {}

        def kernel(**kwargs):
            seen.update(kwargs)
            return None, None

        decode = SimpleNamespace(trtllm_batch_decode_with_kv_cache_mla=kernel)
        for interleave_size, bound in ((4, lens * 2), (1, lens + 100)):
            with (
                dcp(2, 1, interleave_size),
                patch.object(
                    cutedsl_mla_backend,
                    "flashinfer",
                    SimpleNamespace(decode=decode),
                    create=True,
                ),
            ):
                CuteDslMLABackend._run_decode_kernel(
                    backend,
                    query=torch.zeros(3, 1, 1, 2),
                    kv_cache=None,
                    block_tables=None,
                    seq_lens=lens,
                    max_seq_len=64,
                    layer=None,
                    causal_seqs=lens + 100,
                    cp_world=2,
                    cp_rank=1,
                    return_lse=True,
                )
            self.assertTrue(torch.equal(seen["causal_seqlens_kv_global"], bound))

    def test_pool_takes_the_localized_loc(self):
        pool = object.__new__(MLATokenToKVPool)
        for interleave_size, resolved, write_span in ((1, False, 4), (8, True, 1)):
            with dcp(4, 0, interleave_size):
                self.assertEqual(pool.write_loc_is_dcp_resolved, resolved)
                self.assertEqual(pool._write_loc_dcp_span, write_span)
                self.assertEqual(pool._slot_dcp_span, 4)
                pool.dcp_replicated = True
                self.assertFalse(pool.write_loc_is_dcp_resolved)
                self.assertEqual(pool._slot_dcp_span, 1)
                pool.dcp_replicated = False


if __name__ == "__main__":
    unittest.main()
