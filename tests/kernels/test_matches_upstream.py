"""Law: with blocks of one token, the index kernels give what upstream's token round-robin kernels give, bit by bit."""

import random

import batches
import pytest
import torch
from batches import SENTINEL, Batch
from sglang.kernels.ops.attention import dcp_kernels as upstream
from sglang.srt.layers.dcp.layout import get_dcp_lens

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.kernels.compact_indices import compact_kv_indices
from sglang_dcp_block.kernels.kv_indices import build_kv_indices

# Upstream's tiles are fixed at 512 and 128 indices: one request has several.
RANGES = [(0, 0), (0, 1), (3, 3), (2, 9), (7, 40), (1111, 2420)]


@pytest.mark.parametrize("with_starts", [False, True])
@pytest.mark.parametrize("dcp_size", [2, 3, 4, 8])
def test_build_kv_indices(dcp_size: int, with_starts: bool) -> None:
    rng = random.Random(dcp_size)
    batch = Batch.make(dcp_size, 1, [(start * with_starts, end) for start, end in RANGES], rng)
    pool_indices = torch.tensor(batch.pool_indices)
    starts = torch.tensor([start for start, _ in batch.ranges], dtype=torch.int32) if with_starts else None
    lens = torch.tensor([end - start for start, end in batch.ranges], dtype=torch.int32)
    for rank in batches.some_ranks(dcp_size):
        local_lens = get_dcp_lens(lens, dcp_size, rank, starts)
        indptr = torch.zeros(len(RANGES) + 1, dtype=torch.int32)
        indptr[1:] = local_lens.cumsum(0)
        theirs, ours = (torch.full((int(indptr[-1]) + 4,), SENTINEL) for _ in range(2))
        upstream.create_triton_kv_indices_for_dcp_triton[(len(RANGES),)](
            batch.req_to_token,
            pool_indices,
            local_lens,
            indptr,
            starts,
            theirs,
            batch.req_to_token.stride(0),
            dcp_size,
            rank,
        )
        layout = DcpLayout(dcp_size, 1)
        build_kv_indices(batch.req_to_token, pool_indices, local_lens, indptr, layout, rank, ours, starts)
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dcp_size", [1, 2, 3, 8])
def test_compact_kv_indices(dcp_size: int, dtype: torch.dtype) -> None:
    rng = random.Random(dcp_size)
    lens = torch.tensor([end for _, end in RANGES], dtype=torch.int32)
    indptr = torch.zeros(len(RANGES) + 1, dtype=torch.int32)
    indptr[1:] = lens.cumsum(0)
    stream = torch.tensor([rng.randrange(batches.MAX_SLOT) for _ in range(int(indptr[-1]))], dtype=dtype)
    for rank in batches.some_ranks(dcp_size):
        local_lens = get_dcp_lens(lens, dcp_size, rank)
        local_indptr = torch.zeros_like(indptr)
        local_indptr[1:] = local_lens.cumsum(0)
        theirs, ours = (torch.full((int(local_indptr[-1]) + 4,), SENTINEL, dtype=dtype) for _ in range(2))
        upstream.update_kv_lens_and_indices[(len(RANGES), -(-int(local_lens.max()) // 128))](
            lens,
            indptr,
            stream,
            local_lens,
            local_indptr,
            theirs,
            dcp_rank=rank,
            dcp_world_size=dcp_size,
            BLOCK_SIZE=128,
        )
        compact_kv_indices(stream, indptr, local_lens, local_indptr, DcpLayout(dcp_size, 1), rank, ours)
        assert torch.equal(ours, theirs)
