"""compact_kv_indices: kernel, torch twin and loop oracle agree bit by bit, and touch nothing else."""

import random

import batches
import pytest
import torch
from batches import SENTINEL, TILE, Batch

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.kernels.compact_indices import compact_kv_indices, compact_kv_indices_torch

DTYPES = [torch.int32, torch.int64]


def arguments(batch: Batch, rank: int, rng: random.Random) -> tuple[dict, torch.Tensor]:
    """Arguments of the kernel, and the buffer expected afterwards."""
    slots_type, indptr_type, lens_type, local_indptr_type = rng.choices(DTYPES, k=4)
    mine = batch.owned(rank)
    stream_begins, stream = batches.spread(batch.slots, rng)
    begins, expected = batches.spread(mine, rng)
    return {
        "kv_indices": torch.tensor(stream, dtype=slots_type),
        "kv_indptr": torch.tensor([*stream_begins, len(stream)], dtype=indptr_type),
        "local_lens": torch.tensor([len(slots) for slots in mine], dtype=lens_type),
        "local_indptr": torch.tensor(begins, dtype=local_indptr_type),
        "layout": DcpLayout(batch.P, batch.B),
        "rank": rank,
    }, torch.tensor(expected, dtype=slots_type)


@pytest.mark.parametrize(("P", "B"), batches.SIZES)
def test_kernel_twin_and_oracle_agree(P: int, B: int) -> None:
    rng = random.Random(f"{P} {B}")
    batch = Batch.make(P, B, [(0, end) for _, end in batches.request_ranges(P, B, rng)], rng)
    for rank in batches.some_ranks(P):
        kwargs, expected = arguments(batch, rank, rng)
        stream = kwargs["kv_indices"].clone()
        for compact, extra in (
            (compact_kv_indices, {"tile": TILE, "max_programs": 25}),
            (compact_kv_indices_torch, {}),
        ):
            out = torch.full_like(expected, SENTINEL)
            assert compact(out=out, **kwargs, **extra) is out
            assert torch.equal(out, expected)
        assert torch.equal(kwargs["kv_indices"], stream)


@pytest.mark.parametrize("max_local_len", [None, 0, 1, 40, 160, 100_000])
def test_the_bound_sizes_the_grid_only(max_local_len: int | None) -> None:
    rng = random.Random(max_local_len)
    batch = Batch.make(2, 8, [(0, 311), (0, 0), (0, 200)], rng)
    kwargs, expected = arguments(batch, 1, rng)
    out = torch.full_like(expected, SENTINEL)
    compact_kv_indices(out=out, **kwargs, max_local_len=max_local_len, tile=TILE)
    assert torch.equal(out, expected)


def test_no_requests() -> None:
    empty, out = torch.empty(0, dtype=torch.int64), torch.full((4,), SENTINEL)
    compact_kv_indices(empty, torch.tensor([0]), empty, torch.tensor([0]), DcpLayout(2, 4), 0, out)
    assert out.tolist() == [SENTINEL] * 4


@pytest.mark.parametrize("compact", [compact_kv_indices, compact_kv_indices_torch])
@pytest.mark.parametrize("value", [-1, 2**31 - 1, 2**62 + 1])
def test_values_pass_unchanged(compact, value: int) -> None:
    stream, zero = torch.tensor([7, 7, value, 7]), torch.tensor([0])
    out = torch.full((1,), SENTINEL)
    compact(stream, zero, torch.tensor([1]), zero, DcpLayout(2, 2), 1, out)
    assert out.tolist() == [value]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kv_indices": torch.zeros(8)}, TypeError, "kv_indices: expected torch.int32 or torch.int64, got torch.float"),
        ({"kv_indices": torch.zeros(8, dtype=torch.int64)[::2]}, ValueError, "kv_indices: expected stride 1"),
        ({"kv_indptr": torch.zeros(1, dtype=torch.int32)}, ValueError, "kv_indptr: expected at least 2 entries"),
        ({"local_lens": torch.zeros(2, 1, dtype=torch.int32)}, ValueError, "local_lens: expected 1 dimension"),
        ({"local_indptr": torch.zeros(1, dtype=torch.int32)}, ValueError, "local_indptr: expected at least 2 entries"),
        ({"out": torch.zeros(4, dtype=torch.int32)}, TypeError, "out: expected torch.int64, got torch.int32"),
        ({"rank": 2}, ValueError, "rank: expected 0 <= rank < 2, got 2"),
    ],
)
def test_what_does_not_fit_is_refused(change, error, message) -> None:
    fitting = {
        "kv_indices": torch.zeros(8, dtype=torch.int64),
        "kv_indptr": torch.zeros(3, dtype=torch.int32),
        "local_lens": torch.zeros(2, dtype=torch.int64),
        "local_indptr": torch.zeros(3, dtype=torch.int32),
        "layout": DcpLayout(2, 4),
        "rank": 0,
        "out": torch.zeros(4, dtype=torch.int64),
    }
    compact_kv_indices(**fitting)
    with pytest.raises(error, match=message):
        compact_kv_indices(**{**fitting, **change})
