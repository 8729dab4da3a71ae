"""Every small layout against the walked oracle: all positions, chunks and ranks, and the tables of the docs."""

from __future__ import annotations

import doctest

import numpy as np
import pytest

import reference
from sglang_dcp_block.dcp import layout as layout_module
from sglang_dcp_block.dcp.layout import DcpLayout

SMALL = [pytest.param(P, B, id=f"P{P}-B{B}") for P in range(1, 9) for B in range(1, 10)]


@pytest.mark.parametrize(("P", "B"), SMALL)
def test_maps_of_every_position(P: int, B: int) -> None:
    layout = DcpLayout(P, B)
    owners, indices = (list(column) for column in zip(*reference.deal(4 * P * B, P, B), strict=True))
    positions = np.arange(4 * P * B)
    assert layout.owner(positions).tolist() == owners
    assert layout.local_index(positions).tolist() == indices
    assert layout.row(positions).tolist() == indices
    assert [layout.owner(t) for t in range(4 * P * B)] == owners
    assert [layout.local_index(t) for t in range(4 * P * B)] == indices
    for rank in range(P):
        tokens = reference.tokens_of(rank, 4 * P * B, P, B)
        assert layout.position(rank, np.arange(len(tokens))).tolist() == tokens
        assert [layout.position(rank, index) for index in range(len(tokens))] == tokens


@pytest.mark.parametrize(("P", "B"), SMALL)
def test_local_len_of_every_chunk(P: int, B: int) -> None:
    layout = DcpLayout(P, B)
    longest = 4 * P * B
    starts, lengths = np.meshgrid(np.arange(longest + 1), np.arange(longest + 1), indexing="ij")
    inside = starts + lengths <= longest
    starts, lengths = starts[inside], lengths[inside]
    dealt = reference.deal(longest, P, B)
    for rank in range(P):
        before = [0]  # tokens of this rank below each position, counted one by one
        for dealt_rank, _ in dealt:
            before.append(before[-1] + (1 if dealt_rank == rank else 0))
        held = np.array(before)
        np.testing.assert_array_equal(layout.local_len(lengths, rank, starts), held[starts + lengths] - held[starts])
        assert [layout.local_len(length, rank) for length in range(longest + 1)] == before
        for start in (0, 1, B, P * B - 1):
            chunk = [layout.local_len(length, rank, start) for length in range(P * B + 1)]
            assert chunk == [before[start + length] - before[start] for length in range(P * B + 1)]


@pytest.mark.parametrize(("P", "B"), SMALL)
def test_max_local_len_is_the_largest_over_ranks(P: int, B: int) -> None:
    layout = DcpLayout(P, B)
    lengths = np.arange(4 * P * B + 1)
    np.testing.assert_array_equal(
        layout.max_local_len(lengths), np.max([layout.local_len(lengths, rank) for rank in range(P)], axis=0)
    )


def walked_runs(layout: DcpLayout, start: int, length: int, rank: int) -> list[tuple[int, int, int]]:
    return reference.runs(start, length, rank, layout.dcp_size, layout.block_size)


def planned_runs(layout: DcpLayout, start: int, length: int, rank: int) -> list[tuple[int, int, int]]:
    columns = layout.runs(start, length, rank)
    assert all(column.dtype == np.int64 and column.ndim == 1 for column in columns)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@pytest.mark.parametrize(("P", "B"), [(P, B) for P in range(1, 5) for B in range(1, 5)])
def test_runs_of_every_chunk_of_two_cycles(P: int, B: int) -> None:
    layout = DcpLayout(P, B)
    for start in range(P * B + 1):
        for length in range(2 * P * B + 2 - start):
            for rank in range(P):
                chunk = (layout, start, length, rank)
                assert planned_runs(*chunk) == walked_runs(*chunk), chunk


@pytest.mark.parametrize(("P", "B"), SMALL)
def test_runs_around_block_and_cycle_edges(P: int, B: int) -> None:
    layout = DcpLayout(P, B)
    starts = {0, 1, B - 1, B, P * B - 1, P * B, P * B + 1}
    lengths = {0, 1, B, B + 1, P * B, 3 * P * B - 1}
    for start, length, rank in ((s, n, r) for s in starts for n in lengths for r in range(P)):
        chunk = (layout, start, length, rank)
        assert planned_runs(*chunk) == walked_runs(*chunk), chunk


@pytest.mark.parametrize(("P", "B"), SMALL)
def test_placement_of_every_slot(P: int, B: int) -> None:
    layout = DcpLayout(P, B)
    slots_by_placed = reference.placed_order(4, P, B)
    placed = np.arange(4 * P * B)
    assert layout.placed_to_slot(placed).tolist() == slots_by_placed
    assert layout.slot_to_placed(np.array(slots_by_placed)).tolist() == placed.tolist()
    assert [layout.slot_to_placed(slot) for slot in slots_by_placed] == placed.tolist()
    assert [layout.placed_to_slot(v) for v in placed.tolist()] == slots_by_placed
    assert layout.slot_to_placed(0) == 0
    # What stock write kernels make of a placed slot is what the layout says of the slot.
    np.testing.assert_array_equal(layout.slot_to_placed(placed) % P, layout.owner(placed))
    np.testing.assert_array_equal(layout.slot_to_placed(placed) // P, layout.row(placed))


@pytest.mark.parametrize("P", range(1, 9))
@pytest.mark.parametrize(("page_size", "B"), [(1, 1), (4, 1), (4, 2), (4, 4), (12, 3), (64, 16), (1, 4), (4, 12)])
def test_placement_permutes_every_virtual_page_within_itself(P: int, page_size: int, B: int) -> None:
    virtual_page = P * max(page_size, B)
    pages = np.arange(5 * virtual_page).reshape(5, virtual_page)
    placed = DcpLayout(P, B).slot_to_placed(pages)
    np.testing.assert_array_equal(np.sort(placed, axis=1), pages)


def test_table_of_four_ranks_with_blocks_of_four() -> None:
    layout = DcpLayout(4, 4)
    assert layout.cycle == 16
    assert [layout.owner(t) for t in range(20)] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4 + [0] * 4
    assert [layout.local_len(16, rank) for rank in range(4)] == [4, 4, 4, 4]
    assert [layout.local_len(24, rank) for rank in range(4)] == [8, 8, 4, 4]


def test_blocks_of_one_token_are_token_round_robin() -> None:
    layout = DcpLayout(8, 1)
    positions = np.arange(100)
    np.testing.assert_array_equal(layout.owner(positions), positions % 8)
    np.testing.assert_array_equal(layout.local_index(positions), positions // 8)
    np.testing.assert_array_equal(layout.slot_to_placed(positions), positions)


def test_docstring_examples_run() -> None:
    result = doctest.testmod(layout_module)
    assert result.attempted >= 10
    assert result.failed == 0


def test_reference_functions_agree_with_the_deal() -> None:
    # The oracles are walked separately; this guards them against each other.
    for P, B in ((1, 3), (3, 1), (2, 4), (5, 3)):
        dealt = reference.deal(3 * P * B, P, B)
        assert [(reference.owner(t, P, B), reference.local_index(t, P, B)) for t in range(3 * P * B)] == dealt
        assert [reference.placed(t, P, B) for t in range(3 * P * B)] == [index * P + rank for rank, index in dealt]
        assert sum(reference.local_len(7, rank, P, B, start=2) for rank in range(P)) == 7
    assert (reference.owner(-1, 2, 4), reference.local_index(-1, 2, 4), reference.placed(-1, 2, 4)) == (-1, -1, -1)
