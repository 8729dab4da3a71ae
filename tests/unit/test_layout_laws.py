"""Laws of the layout on random sizes, far beyond what the walked oracle can reach."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from sglang_dcp_block.dcp.layout import DcpLayout

laws = settings(max_examples=150)

LAYOUTS = st.builds(DcpLayout, st.integers(1, 72), st.one_of(st.integers(1, 300), st.integers(1, 2**40)))
SMALL_LAYOUTS = st.builds(DcpLayout, st.integers(1, 12), st.integers(1, 40))
TOKENS = st.one_of(st.integers(0, 5000), st.integers(0, 2**60))


def ranks(layout: DcpLayout) -> range:
    return range(layout.dcp_size)


@laws
@given(LAYOUTS, TOKENS)
def test_owner_and_local_index_are_a_bijection(layout: DcpLayout, pos: int) -> None:
    owner, index = layout.owner(pos), layout.local_index(pos)
    assert 0 <= owner < layout.dcp_size
    assert layout.position(owner, index) == pos


@laws
@given(LAYOUTS, TOKENS, st.data())
def test_position_is_owned_by_its_rank(layout: DcpLayout, index: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, layout.dcp_size - 1))
    pos = layout.position(rank, index)
    assert (layout.owner(pos), layout.local_index(pos)) == (rank, index)
    assert layout.position(rank, index + 1) > pos


@laws
@given(LAYOUTS, TOKENS)
def test_exactly_one_rank_holds_a_position(layout: DcpLayout, pos: int) -> None:
    assert [rank for rank in ranks(layout) if layout.local_len(1, rank, start=pos)] == [layout.owner(pos)]


@laws
@given(LAYOUTS, TOKENS, TOKENS)
def test_lengths_sum_over_ranks(layout: DcpLayout, length: int, start: int) -> None:
    assert sum(layout.local_len(length, rank, start) for rank in ranks(layout)) == length


@laws
@given(LAYOUTS, TOKENS, TOKENS, TOKENS)
def test_adjacent_chunks_add_up(layout: DcpLayout, start: int, first: int, second: int) -> None:
    for rank in ranks(layout):
        parts = layout.local_len(first, rank, start) + layout.local_len(second, rank, start + first)
        assert parts == layout.local_len(first + second, rank, start)


@laws
@given(LAYOUTS, TOKENS)
def test_appending_a_token_moves_nothing_and_fills_the_next_index(layout: DcpLayout, length: int) -> None:
    for rank in ranks(layout):
        grown = layout.local_len(length + 1, rank) - layout.local_len(length, rank)
        assert grown == (1 if rank == layout.owner(length) else 0)
    assert layout.local_index(length) == layout.local_len(length, layout.owner(length))


@laws
@given(LAYOUTS, TOKENS)
def test_ranks_differ_by_at_most_a_block_and_lower_ranks_hold_more(layout: DcpLayout, length: int) -> None:
    lengths = [layout.local_len(length, rank) for rank in ranks(layout)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= layout.block_size
    assert layout.max_local_len(length) == max(lengths)


@laws
@given(st.integers(1, 72), TOKENS, TOKENS)
def test_blocks_of_one_token_are_token_round_robin(dcp_size: int, pos: int, length: int) -> None:
    layout = DcpLayout(dcp_size, 1)
    assert (layout.owner(pos), layout.local_index(pos)) == (pos % dcp_size, pos // dcp_size)
    assert layout.slot_to_placed(pos) == pos
    for rank in ranks(layout):
        assert layout.local_len(length, rank) == (length + dcp_size - 1 - rank) // dcp_size


@laws
@given(LAYOUTS, TOKENS)
def test_placement_stays_in_its_cycle_and_inverts(layout: DcpLayout, slot: int) -> None:
    placed = layout.slot_to_placed(slot)
    assert placed // layout.cycle == slot // layout.cycle
    assert (placed % layout.dcp_size, placed // layout.dcp_size) == (layout.owner(slot), layout.row(slot))
    assert layout.placed_to_slot(placed) == slot
    assert layout.slot_to_placed(layout.placed_to_slot(slot)) == slot


@laws
@given(SMALL_LAYOUTS, st.integers(0, 1000), st.integers(0, 1000))
def test_chunks_agree_with_the_walk(layout: DcpLayout, start: int, length: int) -> None:
    P, B = layout.dcp_size, layout.block_size
    for rank in ranks(layout):
        assert layout.local_len(length, rank, start) == reference.local_len(length, rank, P, B, start)
        planned = zip(*(column.tolist() for column in layout.runs(start, length, rank)), strict=True)
        assert list(planned) == reference.runs(start, length, rank, P, B)


@laws
@given(LAYOUTS, st.integers(0, 2**40), st.data())
def test_runs_cover_the_chunk_and_cannot_be_joined(layout: DcpLayout, start: int, data: st.DataObject) -> None:
    length = data.draw(st.integers(0, 50 * layout.cycle))
    for rank in ranks(layout):
        positions, indices, lengths = (column.tolist() for column in layout.runs(start, length, rank))
        assert sum(lengths) == layout.local_len(length, rank, start)
        for position, index, tokens in zip(positions, indices, lengths, strict=True):
            assert tokens > 0
            for offset in (0, tokens - 1):
                assert start <= position + offset < start + length
                assert layout.owner(position + offset) == rank
                assert layout.local_index(position + offset) == index + offset
        for run in range(len(positions) - 1):
            assert indices[run] + lengths[run] == indices[run + 1]
            assert positions[run] + lengths[run] < positions[run + 1]


def test_work_of_runs_grows_with_blocks_never_with_tokens() -> None:
    began = time.perf_counter()
    positions, indices, lengths = DcpLayout(8, 2**36).runs(start=5, length=2**40, rank=0)
    assert time.perf_counter() - began < 1
    assert positions.tolist() == [5, 2**39, 2**40]
    assert indices.tolist() == [5, 2**36, 2**37]
    assert lengths.tolist() == [2**36 - 5, 2**36, 5]


def test_one_rank_owns_everything_in_one_run() -> None:
    for B in (1, 4, 2**70):
        assert [column.tolist() for column in DcpLayout(1, B).runs(3, 2**40, 0)] == [[3], [3], [2**40]]
        assert [column.tolist() for column in DcpLayout(1, B).runs(3, 0, 0)] == [[], [], []]


def test_a_block_beyond_int64_leaves_other_ranks_without_runs() -> None:
    layout = DcpLayout(2, 2**70)
    assert [column.tolist() for column in layout.runs(3, 10, 0)] == [[3], [3], [10]]
    empty = layout.runs(3, 10, 1)
    assert [column.tolist() for column in empty] == [[], [], []]
    assert all(column.dtype == np.int64 for column in empty)
