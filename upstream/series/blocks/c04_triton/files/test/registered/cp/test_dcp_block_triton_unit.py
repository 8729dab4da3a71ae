"""Blocks of tokens in the KV writes and the Triton backend's index arrays."""

import os
import unittest
from types import SimpleNamespace
from unittest.mock import patch

import torch

from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.mem_cache import kv_index_translator
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.kv_loc_plan import IdSpaceKind
from sglang.srt.runtime_context import get_parallel
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=20, stage="base-b", runner_config="1-gpu-small")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RUNS_TRITON = DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
PAGE_SIZE = 8


def dcp(size, rank, interleave_size):
    return get_parallel().override(
        dcp_enabled=True,
        dcp_size=size,
        attn_dcp_size=size,
        dcp_rank=rank,
        attn_dcp_rank=rank,
        dcp_block_size=interleave_size,
    )


def owner_and_row(token, size, interleave_size):
    """By dealing runs of tokens one after the other."""
    run, offset = divmod(token, interleave_size)
    return run % size, run // size * interleave_size + offset


def translator(req_to_token, **kwargs):
    return KVIndexTranslator(
        req_to_token=req_to_token,
        token_to_kv_pool_allocator=SimpleNamespace(),
        token_to_kv_pool=SimpleNamespace(),
        page_size=PAGE_SIZE,
        device=DEVICE,
        **kwargs,
    )


class TestDcpBlockIndices(unittest.TestCase):
    def test_writes_are_localized_and_reads_find_them(self):
        slots = torch.arange(64, device=DEVICE)
        for size, interleave_size in ((2, 2), (4, 4), (2, 8)):
            for rank in range(size):
                with dcp(size, rank, interleave_size):
                    spaces = translator(slots[None])
                    written = spaces.space(IdSpaceKind.FULL).write(slots)
                    read = spaces.translate_dcp_read_ids(slots)
                want = [owner_and_row(s, size, interleave_size) for s in range(64)]
                self.assertEqual(read.tolist(), [row for _, row in want])
                self.assertEqual(
                    written.tolist(), [row if o == rank else 0 for o, row in want]
                )

    def test_single_tokens_and_draft_pools_are_written_as_before(self):
        slots = torch.arange(64, device=DEVICE)
        for interleave_size, is_draft in ((1, False), (4, True)):
            with dcp(2, 1, interleave_size):
                spaces = translator(slots[None], is_draft_worker=is_draft)
            self.assertIsNone(spaces.space(IdSpaceKind.FULL).write)
        with dcp(2, 1, 1):
            read = translator(slots[None]).translate_dcp_read_ids(slots)
        self.assertTrue(torch.equal(read, slots // 2))

    def test_npu_keeps_its_runs_of_a_page(self):
        slots = torch.arange(64, device=DEVICE)
        with dcp(2, 1, 1), patch.object(kv_index_translator, "_is_npu", True):
            written = translator(slots[None]).space(IdSpaceKind.FULL).write(slots)
        want = [owner_and_row(slot, 2, PAGE_SIZE) for slot in range(64)]
        self.assertEqual(written.tolist(), [row if o == 1 else -1 for o, row in want])

    def test_only_single_tokens_are_masked_at_the_write(self):
        taken = []
        pool = SimpleNamespace(
            set_kv_buffer=lambda layer, loc, k, v, **kwargs: taken.append((loc, kwargs))
        )
        backend = SimpleNamespace(
            use_mla=False, dcp_size=2, dcp_rank=1, token_to_kv_pool=pool
        )
        slots = torch.tensor([12, 13], device=DEVICE)
        batch = SimpleNamespace(
            out_cache_loc=slots, out_cache_loc_is_physical=False, positions=slots
        )
        planned = object()
        for interleave_size in (4, 1):
            with dcp(2, 1, interleave_size):
                TritonAttnBackend._set_kv_buffer(
                    backend, batch, None, planned, None, None
                )
        self.assertEqual(taken[0], (planned, {}))
        loc, kwargs = taken[1]
        self.assertEqual(loc.loc.tolist(), [6, 6])
        self.assertEqual(kwargs["dcp_kv_mask"].tolist(), [False, True])

    @unittest.skipUnless(RUNS_TRITON, "needs a GPU or TRITON_INTERPRET=1")
    def test_index_arrays(self):
        torch.manual_seed(0)
        starts = torch.tensor([0, 3, 8, 17], device=DEVICE, dtype=torch.int32)
        lens = torch.tensor([37, 0, 5, 60], device=DEVICE, dtype=torch.int32)
        pool_indices = torch.tensor([4, 0, 1, 3], device=DEVICE)
        for size, interleave_size in ((2, 1), (2, 8), (4, 2), (8, 4)):
            width = size * PAGE_SIZE
            pages = torch.randperm(5 * 6, device=DEVICE).view(5, 6)
            offsets = torch.arange(width, device=DEVICE)
            table = (pages[..., None] * width + offsets).view(5, -1).int()
            for rank in range(size):
                for begins in (None, starts):
                    with self.subTest(size=size, interleave_size=interleave_size):
                        self._check_arrays(
                            table,
                            pool_indices,
                            lens,
                            begins,
                            size,
                            rank,
                            interleave_size,
                        )

    def _check_arrays(
        self, table, pool_indices, lens, starts, size, rank, interleave_size
    ):
        backend = SimpleNamespace(
            req_to_token=table, device=DEVICE, dcp_size=size, dcp_rank=rank
        )
        backend._dcp_lens = lambda *args: TritonAttnBackend._dcp_lens(backend, *args)
        if starts is None:
            lens = lens.clamp(max=table.shape[1])
        else:
            lens = torch.minimum(lens, table.shape[1] - starts)
        with dcp(size, rank, interleave_size):
            indptr, indices, local_lens = TritonAttnBackend._dcp_kv_indices(
                backend,
                pool_indices,
                lens,
                torch.zeros(9, dtype=torch.int32, device=DEVICE),
                kv_start_idx=starts,
            )
        want, want_lens = [], []
        for request, pool_index in enumerate(pool_indices.tolist()):
            start = 0 if starts is None else int(starts[request])
            positions = range(start, start + int(lens[request]))
            owned = [
                p
                for p in positions
                if owner_and_row(p, size, interleave_size)[0] == rank
            ]
            want_lens.append(len(owned))
            slots = [int(table[pool_index, position]) for position in owned]
            want += [owner_and_row(slot, size, interleave_size)[1] for slot in slots]
        self.assertEqual(local_lens.tolist(), want_lens)
        self.assertEqual(indptr.diff().tolist(), want_lens)
        self.assertEqual(indices.tolist(), want)


if __name__ == "__main__":
    unittest.main()
