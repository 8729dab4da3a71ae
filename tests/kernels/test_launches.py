"""What a CUDA graph needs: one launch, no other device work, no host sync, a grid that follows from shapes alone."""

from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor, interpreter_builder

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.kernels import launch
from sglang_dcp_block.kernels.compact_indices import compact_kv_indices
from sglang_dcp_block.kernels.kv_indices import build_kv_indices
from sglang_dcp_block.kernels.slot_maps import place_slots

LAYOUT = DcpLayout(4, 16)
HOST_READS = ["item", "tolist", "numpy", "cpu", "__int__", "__bool__", "__index__", "__float__"]


class Operators(TorchDispatchMode):
    """Records every torch operator that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The grid of every launch, none of which runs; reading a tensor on the host fails."""
    launched: list[tuple[int, ...]] = []
    monkeypatch.setattr(GridExecutor, "__call__", lambda self, *_, **__: launched.append(self.grid))

    def refuse(name: str) -> Callable[..., None]:
        def read(*_: object, **__: object) -> None:
            raise AssertionError(f"host sync: torch.Tensor.{name}")

        return read

    for name in HOST_READS:
        monkeypatch.setattr(torch.Tensor, name, refuse(name))
    return launched


def build(lens: list[int], max_context: int = 4096) -> None:
    lengths = torch.tensor(lens, dtype=torch.int64)
    build_kv_indices(
        req_to_token=torch.zeros(8, max_context, dtype=torch.int32),
        req_pool_indices=torch.zeros(len(lens), dtype=torch.int64),
        local_lens=lengths,
        kv_indptr=torch.zeros(len(lens) + 1, dtype=torch.int32),
        layout=LAYOUT,
        rank=3,
        out=torch.zeros(4096, dtype=torch.int64),
        starts=lengths,
    )


def compact(lens: list[int], max_local_len: int | None = None) -> None:
    compact_kv_indices(
        kv_indices=torch.zeros(8192, dtype=torch.int64),
        kv_indptr=torch.zeros(len(lens) + 1, dtype=torch.int32),
        local_lens=torch.tensor(lens, dtype=torch.int64),
        local_indptr=torch.zeros(len(lens) + 1, dtype=torch.int32),
        layout=LAYOUT,
        rank=3,
        out=torch.zeros(4096, dtype=torch.int64),
        max_local_len=max_local_len,
    )


def test_place_slots_is_one_launch(grids: list[tuple[int, ...]]) -> None:
    slots, longer = torch.arange(2 * launch.TILE), torch.arange(2 * launch.TILE + 1)
    out, none = torch.empty_like(slots), torch.empty(0, dtype=torch.int32)
    with Operators() as operators:
        place_slots(slots, LAYOUT, out)
        place_slots(longer, LAYOUT)
        place_slots(none, LAYOUT, none)
    assert grids == [(2,), (3,)]
    assert operators.names == ["aten.empty_like.default"]


@pytest.mark.parametrize("call", [build, compact])
def test_index_builders_are_one_launch(grids: list[tuple[int, ...]], call: Callable[[list[int]], None]) -> None:
    with Operators() as operators:
        call([5, 0, 700])
    assert len(grids) == 1
    # The arguments' own; nothing of the launcher's.
    assert set(operators.names) <= {"aten.zeros.default", "aten.lift_fresh.default", "aten.detach.default"}


@pytest.mark.parametrize("call", [build, compact])
def test_no_requests_is_no_launch(grids: list[tuple[int, ...]], call: Callable[[list[int]], None]) -> None:
    call([])
    assert grids == []


@pytest.mark.parametrize("call", [build, compact])
def test_grid_ignores_lengths(grids: list[tuple[int, ...]], call: Callable[[list[int]], None]) -> None:
    call([5, 0, 700])
    call([0, 0, 0])
    assert grids[0] == grids[1]
    assert grids[0][0] == 3


def test_long_requests_get_several_programs(grids: list[tuple[int, ...]]) -> None:
    build([1], max_context=4 * launch.TILE * 4)
    build([1] * 4, max_context=2**20)
    build([1] * 2000, max_context=2**16)
    compact([1])
    compact([1], max_local_len=1)
    assert grids == [(1, 4), (4, launch.MAX_PROGRAMS // 4), (2000, 1), (1, 4), (1, 1)]


@pytest.mark.parametrize("call", [build, compact])
def test_programs_share_the_tiles(monkeypatch: pytest.MonkeyPatch, call: Callable[[list[int]], None]) -> None:
    stores: list[object] = []
    store = interpreter_builder.create_masked_store

    def counted(*args: object) -> object:
        stores.append(args)
        return store(*args)

    monkeypatch.setattr(interpreter_builder, "create_masked_store", counted)
    call([1, 0, 2 * launch.TILE, 2 * launch.TILE + 1])
    assert len(stores) == 1 + 0 + 2 + 3


def test_the_twins_run_where_kernels_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[object] = []
    monkeypatch.setattr(GridExecutor, "__call__", lambda self, *_, **__: launched.append(self))
    monkeypatch.setattr(launch, "INTERPRETED", False)
    assert place_slots(torch.arange(8), DcpLayout(2, 2)).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    build([5, 0, 7])
    compact([5, 0, 7])
    assert launched == []
