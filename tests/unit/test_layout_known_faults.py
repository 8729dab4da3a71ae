"""Faults that users of other context-parallel layouts met, as concrete values: none of them here."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_dcp_block.dcp.layout import DcpLayout


def lens(P: int, B: int, length: int, start: int = 0) -> list[int]:
    """Per-rank lengths of one chunk, by ints; arrays and tensors must say the same."""
    layout = DcpLayout(P, B)
    by_int = [layout.local_len(length, rank, start) for rank in range(P)]
    for make in (np.array, torch.tensor):
        assert [layout.local_len(make([length]), rank, make([start])).tolist() for rank in range(P)] == [
            [tokens] for tokens in by_int
        ]
    return by_int


@pytest.mark.parametrize(
    ("P", "B", "length", "expected"),
    [
        pytest.param(2, 4, 8, [4, 4], id="exact-multiple-of-the-block-is-not-padded"),
        pytest.param(4, 32, 33, [32, 1, 0, 0], id="two-ranks-without-kv"),
        pytest.param(8, 64, 1, [1, 0, 0, 0, 0, 0, 0, 0], id="one-token-leaves-seven-ranks-empty"),
        pytest.param(8, 64, 0, [0] * 8, id="empty-request"),
    ],
)
def test_lengths_of_a_request(P: int, B: int, length: int, expected: list[int]) -> None:
    assert lens(P, B, length) == expected
    layout = DcpLayout(P, B)
    for rank, tokens in enumerate(expected):
        assert layout.runs(0, length, rank)[2].tolist() == ([tokens] if tokens else [])


@pytest.mark.parametrize("P", [1, 2, 3, 8])
@pytest.mark.parametrize("B", [1, 4, 64])
def test_position_minus_one_is_padding_and_not_the_last_ranks(P: int, B: int) -> None:
    layout = DcpLayout(P, B)
    for padding in (-1, -2, -P * B, -(2**31)):
        assert layout.owner(padding) == -1
        assert layout.local_index(padding) == -1
        assert layout.row(padding) == -1
        assert layout.slot_to_placed(padding) == -1
        assert layout.placed_to_slot(padding) == -1
        assert [layout.position(rank, padding) for rank in range(P)] == [-1] * P


@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_padding_ids_are_unowned_on_every_rank(make: type) -> None:
    ids = make([-1, 0, 5])
    owners = DcpLayout(8, 1).owner(ids)
    assert owners.tolist() == [-1, 0, 5]
    assert [(owners == rank).tolist()[0] for rank in range(8)] == [False] * 8
    assert DcpLayout(8, 1).slot_to_placed(ids).tolist() == [-1, 0, 5]


def test_bound_of_an_earlier_query_comes_from_its_global_position() -> None:
    # Three draft tokens back, rank 1 has lost two tokens and rank 0 one: not three each.
    assert lens(2, 64, 66) == [64, 2]
    assert lens(2, 64, 66 - 3) == [63, 0]


def test_length_of_a_context_chunk_that_starts_inside_a_block() -> None:
    assert lens(2, 64, 64, start=96) == [32, 32]


@pytest.mark.parametrize("P", [2, 3, 8])
@pytest.mark.parametrize("end", [1, 127, 128, 129, 256, 300, 384, 1024, 1025])
def test_chunk_may_end_anywhere(P: int, end: int) -> None:
    layout = DcpLayout(P, 128)
    owned = [0] * P
    for t in range(128, 128 + end):
        owned[layout.owner(t)] += 1
    assert lens(P, 128, end, start=128) == owned
    for rank in range(P):
        assert sum(layout.runs(128, end, rank)[2].tolist()) == owned[rank]
