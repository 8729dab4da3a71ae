"""Blocks of tokens in MLA's prefix gather, index streams and backends."""

import os
import unittest
from types import SimpleNamespace
from unittest.mock import patch

import torch

from sglang.kernels.ops.attention.kv_indices import (
    create_chunked_prefix_cache_kv_indices,
)
from sglang.srt.layers.attention import cutedsl_mla_backend, flashinfer_mla_backend
from sglang.srt.layers.attention.cutedsl_mla_backend import CuteDslMLABackend
from sglang.srt.layers.attention.flashinfer_mla_backend import (
    FlashInferMLAAttnBackend,
)
from sglang.srt.layers.attention.trtllm_mla_backend import TRTLLMMLABackend
from sglang.srt.layers.dcp import planner
from sglang.srt.layers.dcp.comm import all_gather_kv_cache_for_dcp
from sglang.srt.layers.dcp.layout import (
    collapse_dcp_indices,
    filter_dcp_local_chunk_kv_indices,
    update_local_kv_lens_for_dcp,
)
from sglang.srt.layers.dcp.planner import plan_dcp_decode_metadata
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
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
        dcp_block_size=interleave_size,
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

    @unittest.skipUnless(RUNS_TRITON, "needs a GPU or TRITON_INTERPRET=1")
    def test_prefix_rows_of_this_rank(self):
        prefix_lens, extend_lens = [16, 0, 5], [3, 2, 4]
        table = torch.arange(3 * 64, dtype=torch.int32, device=DEVICE).view(3, 64)
        lens = torch.tensor([prefix_lens, extend_lens], device=DEVICE)
        # A prefix of single tokens ends at a cycle, one of blocks anywhere.
        for size, interleave_size, ends in ((2, 1, 16), (2, 4, 5), (4, 2, 5)):
            prefix_lens[2], lens[0, 2] = ends, ends
            for rank in range(size):
                translator = SimpleNamespace(
                    translate_dcp_read_ids=lambda ids: collapse_dcp_indices(
                        ids, size, interleave_size
                    )
                )
                with (
                    self.subTest(size=size, rank=rank, interleave_size=interleave_size),
                    dcp(size, rank, interleave_size),
                    patch.object(
                        planner,
                        "get_attn_backend",
                        lambda: SimpleNamespace(kv_index_translator=translator),
                    ),
                    patch.object(
                        planner, "get_device", lambda: SimpleNamespace(device=DEVICE)
                    ),
                ):
                    metadata = planner.prepare_decode_context_parallel_metadata(
                        seq_lens=lens.sum(0),
                        seq_lens_sum=int(lens.sum()),
                        extend_prefix_lens=lens[0],
                        extend_prefix_lens_cpu=prefix_lens,
                        extend_seq_lens=lens[1],
                        req_to_token=table,
                        req_pool_indices=torch.arange(3, device=DEVICE),
                        kv_buffer_shape=(1, 1, 2),
                        kv_cache_dtype=torch.float32,
                        kv_cache_device=DEVICE,
                        create_chunked_prefix_cache_kv_indices_fn=(
                            create_chunked_prefix_cache_kv_indices
                        ),
                    )
                    want = [
                        owner_and_row(64 * i + p, size, interleave_size)[1]
                        for i, length in enumerate(prefix_lens)
                        for p in range(length)
                        if owner_and_row(p, size, interleave_size)[0] == rank
                    ]
                    got = metadata.dcp_local_prefix_kv_indices
                    self.assertEqual(got.tolist(), want)

    def test_flashinfer_rows_without_kv_are_neutral(self):
        nan = float("nan")
        wrapper = SimpleNamespace(
            run=lambda *args, **kwargs: (
                torch.full((3, 2, 4), nan),
                torch.full((3, 2), nan),
            )
        )
        backend = SimpleNamespace(
            forward_metadata=SimpleNamespace(decode_wrapper=wrapper),
            token_to_kv_pool=SimpleNamespace(
                get_key_buffer=lambda layer_id: torch.zeros(1, 1, 6)
            ),
            # The first request of this batch has no KV on this rank.
            indices_updater_decode=SimpleNamespace(
                kv_indptr=torch.tensor([0, 0, 3, 4, 9], dtype=torch.int32)
            ),
            q_indptr_decode=torch.arange(9, dtype=torch.int32),
        )
        layer = SimpleNamespace(
            layer_id=0, tp_q_head_num=2, v_head_dim=4, head_dim=6, scaling=1.0
        )
        batch = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: True))
        for interleave_size, calls in ((4, 1), (1, 0)):
            with (
                dcp(2, 1, interleave_size),
                patch.object(flashinfer_mla_backend, "fixup_zero_kv_rows") as fixup,
            ):
                out, lse = FlashInferMLAAttnBackend.forward_decode(
                    backend, torch.zeros(3, 12), None, None, layer, batch
                )
            self.assertEqual(fixup.call_count, calls)
            if calls:
                _, fixed_lse, kv_lens, cum_seq_lens, longest = fixup.call_args.args
                self.assertIs(fixed_lse, lse)
                self.assertEqual(kv_lens.tolist(), [0, 3, 1])
                self.assertEqual(cum_seq_lens.tolist(), [0, 1, 2, 3])
                self.assertEqual(longest, 1)

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
                    owners = [
                        owner_and_row(position, size, interleave_size)[0]
                        for position in range(longest)
                    ]
                    self.assertEqual(bound, max(1, owners.count(rank)))

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
        for interleave_size, is_draft, resolved in (
            (1, False, False),
            (8, False, True),
            (8, True, False),
        ):
            pool = object.__new__(MLATokenToKVPool)
            pool.dcp_replicated = is_draft
            with dcp(4, 0, interleave_size):
                KVIndexTranslator(
                    req_to_token=torch.zeros(2, 8, dtype=torch.int32),
                    token_to_kv_pool_allocator=SimpleNamespace(),
                    token_to_kv_pool=pool,
                    page_size=8,
                    device="cpu",
                    is_draft_worker=is_draft,
                )
                self.assertEqual(pool.write_loc_is_dcp_resolved, resolved)
                is_local = resolved or is_draft
                self.assertEqual(pool._write_loc_dcp_span, 1 if is_local else 4)
                self.assertEqual(pool._slot_dcp_span, 1 if is_draft else 4)

    def test_rows_come_back_from_the_host(self):
        # The slots of three pages as a request of 29 tokens has them.
        pages = torch.tensor([2, 0, 4])[:, None]
        for size, interleave_size, replicated in (
            (2, 1, False),
            (2, 4, False),
            (4, 2, False),
            (4, 2, True),
        ):
            slots = (pages * 16 + torch.arange(16)).flatten()[:29]
            for rank in range(size):
                pool = object.__new__(MLATokenToKVPool)
                before = torch.rand(80, 1, 3)
                pool.__dict__.update(
                    dcp_replicated=replicated,
                    layer_num=1,
                    kv_buffer=[before.clone()],
                    cpu_offloading_chunk_size=4,
                )
                with (
                    self.subTest(size=size, rank=rank, interleave_size=interleave_size),
                    dcp(size, rank, interleave_size),
                    patch.object(memory_pool, "current_platform"),
                ):
                    copy = pool.get_cpu_copy(slots)
                    pool.kv_buffer[0].zero_()
                    pool.load_cpu_copy(copy, slots + 16)
                own = [
                    slot
                    for position, slot in enumerate(slots.tolist())
                    if owner_and_row(position, size, interleave_size)[0] == rank
                ]
                if replicated:
                    sources, targets = slots, slots + 16
                else:
                    sources, targets = (
                        [owner_and_row(s, size, interleave_size)[1] for s in moved]
                        for moved in (own, [slot + 16 for slot in own])
                    )
                want = torch.zeros_like(before)
                want[targets] = before[sources]
                self.assertTrue(torch.equal(pool.kv_buffer[0], want))


if __name__ == "__main__":
    unittest.main()
