"""What the layout refuses, and that the message says what was expected and what was got."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from sglang_dcp_block.dcp.layout import DcpLayout

LAYOUT = DcpLayout(4, 4)


def refused(error: type[Exception], message: str) -> Any:
    """Expects ``error`` with exactly this text."""
    return pytest.raises(error, match=f"^{re.escape(message)}$")


@pytest.mark.parametrize("bad", [0, -1, True, False, 2.0, "4", None, [4], np.bool_(True), np.float32(4), np.int64(0)])
@pytest.mark.parametrize("field", ["dcp_size", "block_size"])
def test_sizes_are_positive_integers(field: str, bad: Any) -> None:
    sizes = {"dcp_size": 4, "block_size": 4, field: bad}
    with refused(ValueError, f"{field}: expected a positive integer, got {bad!r}"):
        DcpLayout(**sizes)


def test_numpy_sizes_become_ints() -> None:
    layout = DcpLayout(np.int32(4), np.int64(64))
    assert (type(layout.dcp_size), type(layout.block_size)) == (int, int)
    assert layout == DcpLayout(4, 64)
    assert hash(layout) == hash(DcpLayout(4, 64))
    assert layout.cycle == 256


def test_layout_is_frozen_and_small() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LAYOUT.block_size = 8  # type: ignore[misc]
    assert not hasattr(LAYOUT, "__dict__")


@pytest.mark.parametrize("bad", [-1, 4, True, 1.0, None, "0", np.int64(4), torch.tensor(1)])
@pytest.mark.parametrize("call", ["position", "local_len", "runs"])
def test_rank_is_an_int_in_range(call: str, bad: Any) -> None:
    calls = {
        "position": lambda: LAYOUT.position(bad, 0),
        "local_len": lambda: LAYOUT.local_len(1, bad),
        "runs": lambda: LAYOUT.runs(0, 1, bad),
    }
    with refused(ValueError, f"rank: expected an integer in [0, 4), got {bad!r}"):
        calls[call]()


def test_numpy_rank_is_taken() -> None:
    assert LAYOUT.local_len(24, np.int64(1)) == 8
    assert LAYOUT.position(np.int32(1), 4) == 20
    assert LAYOUT.runs(np.int64(0), np.int32(24), np.int64(1))[2].tolist() == [4, 4]
    far = DcpLayout(4, 2**30).position(np.int32(3), 0)
    assert (type(far), far) == (int, 3 * 2**30)


NOT_IDS = [
    (True, "bool"),
    (1.0, "float"),
    ("1", "str"),
    (None, "NoneType"),
    ([1], "list"),
    (np.array([True]), "ndarray of bool"),
    (np.array([1.0]), "ndarray of float64"),
    (np.array([1], np.uint32), "ndarray of uint32"),
    (np.array([1], np.int16), "ndarray of int16"),
    (np.array([1], object), "ndarray of object"),
    (np.array([1], ">i4"), "ndarray of >i4"),
    (np.float32(1), "float32 of float32"),
    (np.bool_(True), "bool of bool"),
    (torch.tensor([True]), "Tensor of torch.bool"),
    (torch.tensor([1.0]), "Tensor of torch.float32"),
    (torch.tensor([1], dtype=torch.uint8), "Tensor of torch.uint8"),
]


@pytest.mark.parametrize(("bad", "got"), NOT_IDS, ids=[got for _, got in NOT_IDS])
def test_ids_are_ints_or_int32_or_int64(bad: Any, got: str) -> None:
    calls: dict[str, list[Callable[[Any], Any]]] = {
        "pos": [LAYOUT.owner, LAYOUT.local_index, LAYOUT.row],
        "slot": [LAYOUT.slot_to_placed],
        "placed": [LAYOUT.placed_to_slot],
        "local_index": [lambda ids: LAYOUT.position(0, ids)],
        "length": [lambda ids: LAYOUT.local_len(ids, 0), LAYOUT.max_local_len],
        "start": [lambda ids: LAYOUT.local_len(1, 0, ids)],
    }
    for name, maps in calls.items():
        for call in maps:
            with refused(TypeError, f"{name}: expected an int, or an int32 or int64 array or tensor, got {got}"):
                call(bad)


@pytest.mark.parametrize("bad", [-1, np.int64(-5)])
def test_negative_int_lengths_are_refused(bad: Any) -> None:
    calls: dict[str, list[Callable[[], Any]]] = {
        "length": [
            lambda: LAYOUT.local_len(bad, 0),
            lambda: LAYOUT.max_local_len(bad),
            lambda: LAYOUT.runs(0, bad, 0),
        ],
        "start": [lambda: LAYOUT.local_len(1, 0, bad), lambda: LAYOUT.runs(bad, 1, 0)],
    }
    for name, maps in calls.items():
        for call in maps:
            with refused(ValueError, f"{name}: expected 0 or more tokens, got {int(bad)}"):
                call()


@pytest.mark.parametrize(
    ("bad", "got"),
    [
        (True, "bool"),
        (1.0, "float"),
        (None, "NoneType"),
        (np.array([1]), "ndarray of int64"),
        (torch.tensor(1), "Tensor of torch.int64"),
    ],
    ids=str,
)
def test_runs_takes_ints_only(bad: Any, got: str) -> None:
    with refused(TypeError, f"start: expected an int, got {got}"):
        LAYOUT.runs(bad, 1, 0)
    with refused(TypeError, f"length: expected an int, got {got}"):
        LAYOUT.runs(0, bad, 0)


@pytest.mark.parametrize("make", [np.zeros, torch.zeros], ids=["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_a_dtype_without_room_for_any_position_of_the_rank_is_refused(make: Any, dtype: str) -> None:
    top = 2**31 - 1 if dtype == "int32" else 2**63 - 1
    ids = make(2, dtype=getattr(np if make is np.zeros else torch, dtype))
    assert DcpLayout(2, top).position(1, ids).tolist() == [top, top]
    with refused(OverflowError, f"local_index: expected a dtype that holds position {top + 1}, got {ids.dtype}"):
        DcpLayout(2, top + 1).position(1, ids)
    assert DcpLayout(2, top + 1).position(1, 0) == top + 1


def test_a_chunk_beyond_int64_is_refused() -> None:
    top = 2**63 - 1
    assert DcpLayout(4, 4).runs(top - 3, 3, 3)[2].sum() == 3
    with pytest.raises(OverflowError, match="within int64"):
        DcpLayout(4, 4).runs(top - 3, 4, 3)
