"""place_slots and slot_rows: kernels, torch twins and oracle agree bit by bit."""

import batches
import pytest
import torch
from batches import SENTINEL, TILE

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.kernels.slot_maps import place_slots, place_slots_torch, slot_rows, slot_rows_torch

DTYPES = [torch.int32, torch.int64]


def oracle(slots: torch.Tensor, P: int, B: int) -> torch.Tensor:
    dealt = batches.dealt_slots(P, B)
    placed = [-1 if slot < 0 else dealt[slot][1] * P + dealt[slot][0] for slot in slots.tolist()]
    return torch.tensor(placed, dtype=slots.dtype)


def random_slots(count: int, dtype: torch.dtype) -> torch.Tensor:
    slots = torch.randint(batches.MAX_SLOT, (count,), generator=torch.Generator().manual_seed(count), dtype=dtype)
    slots[::7] = -1
    return slots


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("P", "B"), batches.SIZES)
def test_every_slot_goes_to_its_owner_and_row(P: int, B: int, dtype: torch.dtype) -> None:
    slots = torch.arange(-3, batches.MAX_SLOT, dtype=dtype)
    guarded = torch.full((len(slots) + 2,), SENTINEL, dtype=dtype)
    placed = place_slots(slots, DcpLayout(P, B), guarded[1:-1])
    assert guarded[[0, -1]].tolist() == [SENTINEL] * 2
    assert torch.equal(placed, oracle(slots, P, B))
    assert torch.equal(place_slots_torch(slots, DcpLayout(P, B)), placed)
    owners_and_rows = list(zip((placed[3:] % P).tolist(), (placed[3:] // P).tolist(), strict=True))
    assert owners_and_rows == batches.dealt_slots(P, B)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, TILE - 1, TILE, TILE + 1, 3 * TILE, 5 * TILE - 3])
def test_any_count(count: int, dtype: torch.dtype) -> None:
    slots = random_slots(count, dtype)
    before = slots.clone()
    placed = place_slots(slots, DcpLayout(3, 8), tile=TILE)
    assert placed.dtype == dtype
    assert torch.equal(placed, oracle(slots, 3, 8))
    assert torch.equal(placed, place_slots_torch(slots, DcpLayout(3, 8)))
    assert torch.equal(slots, before)


@pytest.mark.parametrize("place", [place_slots, place_slots_torch])
@pytest.mark.parametrize(("slots_stride", "out_stride"), [(1, 1), (3, 1), (1, 2), (2, 3)])
def test_strided_windows_leave_the_rest_alone(place, slots_stride: int, out_stride: int) -> None:
    count = 2 * TILE + 5
    slots = torch.full((count + 4, slots_stride), SENTINEL)[2:-2, 0]
    slots.copy_(random_slots(count, torch.int64))
    buffer = torch.full((count + 4, out_stride), SENTINEL)
    out = buffer[2:-2, 0]
    expected = buffer.clone()
    expected[2:-2, 0] = oracle(slots, 4, 3)
    kwargs = {"tile": TILE} if place is place_slots else {}
    assert place(slots, DcpLayout(4, 3), out, **kwargs) is out
    assert torch.equal(buffer, expected)


@pytest.mark.parametrize("place", [place_slots, place_slots_torch])
def test_in_place(place) -> None:
    slots = random_slots(100, torch.int32)
    expected = oracle(slots, 2, 16)
    assert place(slots, DcpLayout(2, 16), slots) is slots
    assert torch.equal(slots, expected)


@pytest.mark.parametrize(("P", "B"), batches.SIZES)
@pytest.mark.parametrize(("dtype", "end"), [(torch.int32, 2**31), (torch.int64, 2**31 + 999), (torch.int64, 2**62)])
def test_last_whole_cycles_of_a_dtype(P: int, B: int, dtype: torch.dtype, end: int) -> None:
    last = end // (P * B) * (P * B)
    first = last - 2 * P * B
    slots = torch.arange(first, last, dtype=torch.int64).to(dtype)
    placed = place_slots(slots, DcpLayout(P, B))
    assert placed.tolist() == [DcpLayout(P, B).slot_to_placed(slot) for slot in range(first, last)]
    assert sorted(placed.tolist()) == list(range(first, last))


@pytest.mark.parametrize(("P", "B"), [(1, 64), (8, 1)])
def test_identity_without_blocks(P: int, B: int) -> None:
    slots = torch.arange(1000)
    assert torch.equal(place_slots(slots, DcpLayout(P, B)), slots)


@pytest.mark.parametrize("place", [place_slots, place_slots_torch])
@pytest.mark.parametrize(
    ("slots", "out", "error", "message"),
    [
        (torch.zeros(3), None, TypeError, "slots: expected int32 or int64, got torch.float32"),
        (torch.zeros(3, 1, dtype=torch.int64), None, ValueError, r"slots: expected 1 dimension, got shape \(3, 1\)"),
        (torch.arange(3), torch.empty(3, dtype=torch.int32), TypeError, "out: expected the slots' dtype torch.int64"),
        (
            torch.arange(3),
            torch.empty(4, dtype=torch.int64),
            ValueError,
            r"out: expected shape \(3,\) on cpu, got \(4,",
        ),
    ],
)
def test_what_does_not_fit_is_refused(place, slots, out, error, message) -> None:
    with pytest.raises(error, match=message):
        place(slots, DcpLayout(2, 2), out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("P", "B"), batches.SIZES)
def test_rows_of_every_slot(P: int, B: int, dtype: torch.dtype) -> None:
    slots = torch.arange(-3, batches.MAX_SLOT, dtype=dtype)
    guarded = torch.full((len(slots) + 2,), SENTINEL, dtype=dtype)
    rows = slot_rows(slots, DcpLayout(P, B), guarded[1:-1], tile=TILE)
    assert guarded[[0, -1]].tolist() == [SENTINEL] * 2
    assert rows.tolist() == [-1] * 3 + [row for _, row in batches.dealt_slots(P, B)]
    assert torch.equal(slot_rows_torch(slots, DcpLayout(P, B)), rows)
    assert torch.equal(slot_rows(slots, DcpLayout(P, B)), rows)
