"""build_kv_indices: kernel, torch twin and loop oracle agree bit by bit, and touch nothing else."""

import random

import batches
import pytest
import torch
from batches import SENTINEL, TILE, Batch

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.kernels.kv_indices import build_kv_indices, build_kv_indices_torch

# (req_pool_indices, local_lens, kv_indptr, starts)
DTYPES = [
    (torch.int64, torch.int64, torch.int32, torch.int32),
    (torch.int32, torch.int32, torch.int32, torch.int64),
    (torch.int64, torch.int32, torch.int64, torch.int64),
]


def rows_of(batch: Batch, rank: int) -> list[list[int]]:
    """Oracle: the rows of each request's tokens that ``rank`` holds."""
    dealt = batches.dealt_slots(batch.P, batch.B)
    return [[dealt[slot][1] for slot in slots] for slots in batch.owned(rank)]


def arguments(batch: Batch, rank: int, rng: random.Random, *, with_starts: bool = True) -> tuple[dict, torch.Tensor]:
    """Arguments of the kernel, and the buffer expected afterwards."""
    pool_type, lens_type, indptr_type, starts_type = rng.choice(DTYPES)
    rows = rows_of(batch, rank)
    begins, expected = batches.spread(rows, rng)
    starts = torch.tensor([start for start, _ in batch.ranges], dtype=starts_type)
    return {
        "req_to_token": batch.req_to_token,
        "req_pool_indices": torch.tensor(batch.pool_indices, dtype=pool_type),
        "local_lens": torch.tensor([len(request) for request in rows], dtype=lens_type),
        "kv_indptr": torch.tensor([*begins, len(expected)], dtype=indptr_type),
        "layout": DcpLayout(batch.P, batch.B),
        "rank": rank,
        "starts": starts if with_starts else None,
    }, torch.tensor(expected)


@pytest.mark.parametrize(("P", "B"), batches.SIZES)
def test_kernel_twin_and_oracle_agree(P: int, B: int) -> None:
    rng = random.Random(f"{P} {B}")
    ranges = batches.request_ranges(P, B, rng)
    cut = Batch.make(P, B, ranges, rng)
    whole = Batch.make(P, B, [(0, end) for _, end in ranges], rng)
    for turn, rank in enumerate(batches.some_ranks(P), start=B):
        with_starts = turn % 2 == 0
        kwargs, expected = arguments(cut if with_starts else whole, rank, rng, with_starts=with_starts)
        for build, extra in ((build_kv_indices, {"tile": TILE, "max_programs": 25}), (build_kv_indices_torch, {})):
            out = torch.full_like(expected, SENTINEL)
            assert build(out=out, **kwargs, **extra) is out
            assert torch.equal(out, expected)


@pytest.mark.parametrize("max_programs", [1, 7, 1000])
def test_any_number_of_programs_and_tile(max_programs: int) -> None:
    rng = random.Random(max_programs)
    batch = Batch.make(2, 8, [(5, 311), (0, 0), (17, 200)], rng)
    kwargs, expected = arguments(batch, 1, rng)
    for tile in (8, 64):
        out = torch.full_like(expected, SENTINEL)
        build_kv_indices(out=out, **kwargs, tile=tile, max_programs=max_programs)
        assert torch.equal(out, expected)


@pytest.mark.parametrize(("P", "B"), [(2, 3), (4, 16), (8, 2)])
def test_ranks_together_read_each_token_once(P: int, B: int) -> None:
    # Slots as a pool hands them out, in whole cycles: then a row and its rank tell the slot.
    cycle = P * B
    max_context = 4 * cycle
    req_to_token = torch.arange(cycle, cycle + 3 * max_context, dtype=torch.int32).view(3, max_context)
    layout, starts, length = DcpLayout(P, B), torch.tensor([0, B + 1]), 2 * cycle + 3
    read = []
    for rank in range(P):
        lens = layout.local_len(length, rank, starts)
        out = torch.empty(int(lens.sum()), dtype=torch.int64)
        indptr = torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)])
        build_kv_indices(req_to_token, torch.tensor([2, 0]), lens, indptr, layout, rank, out, starts)
        read += layout.placed_to_slot(out * P + rank).tolist()
    wanted = req_to_token[2, :length].tolist() + req_to_token[0, B + 1 : B + 1 + length].tolist()
    assert sorted(read) == sorted(wanted)


def test_no_requests() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    out = torch.full((4,), SENTINEL)
    build_kv_indices(
        torch.zeros(2, 8, dtype=torch.int32), empty, empty, torch.tensor([0]), DcpLayout(2, 4), 0, out, empty
    )
    assert out.tolist() == [SENTINEL] * 4


@pytest.mark.parametrize("build", [build_kv_indices, build_kv_indices_torch])
def test_slots_up_to_the_last_int32(build) -> None:
    P, B, rank = 3, 16, 2
    slots = torch.arange(2**31 - 96, 2**31, dtype=torch.int64).to(torch.int32).view(1, -1)
    mine = batches.positions(rank, 0, 96, P, B)
    out = torch.full((len(mine) + 1,), SENTINEL)
    lens = torch.tensor([len(mine)])
    build(slots, torch.tensor([0]), lens, torch.tensor([0]), DcpLayout(P, B), rank, out)
    assert out.tolist() == [DcpLayout(P, B).row(2**31 - 96 + t) for t in mine] + [SENTINEL]


@pytest.mark.parametrize("build", [build_kv_indices, build_kv_indices_torch])
def test_padding_slots_stay_padding(build) -> None:
    slots = torch.tensor([[-1, 5, -1, 6]], dtype=torch.int32)
    out = torch.full((2,), SENTINEL)
    build(slots, torch.tensor([0]), torch.tensor([2]), torch.tensor([0]), DcpLayout(2, 2), 1, out)
    assert out.tolist() == [-1, 2]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"req_to_token": torch.zeros(2, 8)}, TypeError, "req_to_token: expected torch.int32, got torch.float32"),
        ({"req_to_token": torch.zeros(8, dtype=torch.int32)}, ValueError, "req_to_token: expected 2 dimension"),
        ({"req_to_token": torch.zeros(8, 2, dtype=torch.int32).T}, ValueError, "req_to_token: expected stride 1"),
        ({"req_pool_indices": torch.zeros(2)}, TypeError, "req_pool_indices: expected torch.int32 or torch.int64"),
        ({"local_lens": torch.zeros(1, dtype=torch.int32)}, ValueError, "local_lens: expected at least 2 entries"),
        ({"kv_indptr": torch.zeros(1, dtype=torch.int32)}, ValueError, "kv_indptr: expected at least 2 entries"),
        ({"kv_indptr": torch.zeros(6, dtype=torch.int32)[::2]}, ValueError, "kv_indptr: expected stride 1"),
        ({"starts": torch.zeros(1, dtype=torch.int32)}, ValueError, "starts: expected at least 2 entries"),
        ({"out": torch.zeros(4, dtype=torch.int32)}, TypeError, "out: expected torch.int64, got torch.int32"),
        ({"rank": 2}, ValueError, "rank: expected 0 <= rank < 2, got 2"),
        ({"rank": -1}, ValueError, "rank: expected 0 <= rank < 2, got -1"),
    ],
)
def test_what_does_not_fit_is_refused(change, error, message) -> None:
    fitting = {
        "req_to_token": torch.zeros(2, 8, dtype=torch.int32),
        "req_pool_indices": torch.zeros(2, dtype=torch.int64),
        "local_lens": torch.zeros(2, dtype=torch.int64),
        "kv_indptr": torch.zeros(3, dtype=torch.int32),
        "layout": DcpLayout(2, 4),
        "rank": 0,
        "out": torch.zeros(4, dtype=torch.int64),
    }
    build_kv_indices(**fitting)
    with pytest.raises(error, match=message):
        build_kv_indices(**{**fitting, **change})
