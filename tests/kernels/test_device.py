"""Law: the layout's device functions equal ``dcp/layout.py``, and so the oracles, on every input."""

import batches
import pytest
import torch
import triton
import triton.language as tl

import reference
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.kernels import device

NUM_IDS = 2048


@triton.jit
def every_map(ids_ptr, out_ptr, NUM: tl.constexpr, RANK: tl.constexpr, P: tl.constexpr, B: tl.constexpr):
    """out[k] = the k-th map of ids."""
    lane = tl.arange(0, NUM)
    ids = tl.load(ids_ptr + lane)
    tl.store(out_ptr + lane, device.owner(ids, P, B))
    tl.store(out_ptr + NUM + lane, device.local_index(ids, P, B))
    tl.store(out_ptr + 2 * NUM + lane, device.position_of(ids, RANK, P, B))
    tl.store(out_ptr + 3 * NUM + lane, device.local_len(ids, RANK, P, B))
    tl.store(out_ptr + 4 * NUM + lane, device.placed_slot(ids, P, B))


def on_device(ids: torch.Tensor, rank: int, P: int, B: int) -> torch.Tensor:
    out = torch.empty(5, NUM_IDS, dtype=ids.dtype)
    every_map[(1,)](ids, out, NUM=NUM_IDS, RANK=rank, P=P, B=B)
    return out


def of_layout(ids: torch.Tensor, rank: int, layout: DcpLayout) -> torch.Tensor:
    return torch.stack(
        [
            layout.owner(ids),
            layout.local_index(ids),
            layout.position(rank, ids),
            layout.local_len(ids, rank),
            layout.slot_to_placed(ids),
        ]
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("P", "B"), batches.SIZES)
def test_small_ids_equal_the_layout(P: int, B: int, dtype: torch.dtype) -> None:
    ids = torch.arange(NUM_IDS, dtype=dtype)
    for rank in batches.some_ranks(P):
        assert torch.equal(on_device(ids, rank, P, B), of_layout(ids, rank, DcpLayout(P, B)))


@pytest.mark.parametrize(("P", "B"), batches.SIZES)
def test_large_ids_equal_the_layout(P: int, B: int) -> None:
    # Down from the last id whose position, P times as far, still fits int64; up to that, around 2**31 and 2**32.
    edges = [2**31, 2**32, 2**63 // (P * B) - 2]
    ids = torch.cat([torch.arange(edge - NUM_IDS // 4, edge, dtype=torch.int64) for edge in edges])
    ids = torch.cat([ids, torch.randint(2**40, (NUM_IDS - len(ids),), generator=torch.Generator().manual_seed(P * B))])
    assert torch.equal(on_device(ids, P - 1, P, B), of_layout(ids, P - 1, DcpLayout(P, B)))


@pytest.mark.parametrize(("P", "B"), [(2, 3), (8, 1), (3, 16)])
def test_small_ids_equal_the_oracle(P: int, B: int) -> None:
    rank = P - 1
    owner, row, position, length, placed = on_device(torch.arange(NUM_IDS), rank, P, B).tolist()
    assert list(zip(owner, row, strict=True)) == reference.deal(NUM_IDS, P, B)
    mine = reference.tokens_of(rank, NUM_IDS, P, B)
    assert position[: len(mine)] == mine
    assert length[:300] == [reference.local_len(n, rank, P, B) for n in range(300)]
    assert placed[:300] == [reference.placed(slot, P, B) for slot in range(300)]
