"""The cost of a decode step: no more launches and host syncs than stock token round-robin, but for one write map."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

from counting import counted
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.patches import active, mla_decode, reads, triton_gqa, write_door

P, RANK, B, BATCH = 4, 1, 8, 3


@pytest.fixture(autouse=True)
def armed(monkeypatch):
    monkeypatch.setattr(active, "_layout", DcpLayout(P, B))


@pytest.fixture
def backend():
    """What the functions under test use of a Triton backend."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.layers.dcp.layout import get_dcp_lens

    upstream_lens = inspect.unwrap(get_dcp_lens)
    self = SimpleNamespace(
        dcp_size=P,
        dcp_rank=RANK,
        device="cpu",
        req_to_token=torch.arange(5 * 256, dtype=torch.int32).view(5, 256),
        stock=TritonAttnBackend,
        block_size=1,
    )
    self._dcp_lens = lambda lens, start=None: upstream_lens(lens, P, RANK, start, self.block_size)
    return self


def run_plan(plan, backend, kv_indices):
    requests, lens = torch.tensor([4, 0, 2]), torch.tensor([100, 3, 37])
    indptr = torch.zeros(BATCH + 1, dtype=torch.int32)
    with counted() as count:
        plan(backend, requests, lens, indptr, kv_indices)
    return count


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph-buffers"])
def test_triton_index_plan(backend, graph):
    buffer = torch.zeros(1000, dtype=torch.int64) if graph else None
    stock = run_plan(inspect.unwrap(backend.stock._dcp_kv_indices), backend, buffer)
    backend.block_size = B
    ours = run_plan(triton_gqa.plan_kv_indices, backend, buffer)
    assert ours.total <= stock.total, (ours.launches, stock.launches)
    assert ours.syncs <= stock.syncs
    assert not graph or ours.syncs == 0, "a captured graph must not sync"
    assert stock.total > 0, "the counter sees nothing"


def run_write(write, backend):
    backend.token_to_kv_pool = SimpleNamespace(set_kv_buffer=lambda *args, **kwargs: None)
    loc = torch.tensor([0, 5, 9, 700])
    batch = SimpleNamespace(out_cache_loc=loc, out_cache_loc_is_physical=True, positions=loc.clone(), dcp_kv_mask=None)
    layer, k = SimpleNamespace(layer_id=0), torch.zeros(4, 1, 2)
    with counted() as count:
        write(backend, batch, layer, None, k, k)
    return count


def test_kv_write_of_a_layer(backend):
    upstream = inspect.unwrap(backend.stock._set_kv_buffer)
    stock = run_write(upstream, backend)
    ours = run_write(lambda *args: triton_gqa.write_kv(upstream, *args), backend)
    assert ours.total <= stock.total, (ours.launches, stock.launches)
    assert ours.syncs == stock.syncs == 0


def test_write_door_is_one_launch_an_iteration():
    with counted() as count:
        write_door.write_ids(torch.tensor([0, 3, 9, 40]))
    assert dict(count.launches) == {"triton:_map_slots_kernel": 1}
    assert count.syncs == 0


def run_mla_plan(plan, replay, monkeypatch, block):
    import sglang.srt.layers.dcp.layout as upstream_layout
    import sglang.srt.layers.dcp.planner as upstream_planner
    import sglang.srt.runtime_context as context

    parallel = SimpleNamespace(dcp_enabled=True, dcp_size=P, dcp_rank=RANK)
    for module in (upstream_layout, upstream_planner, context):
        monkeypatch.setattr(module, "get_parallel", lambda: parallel)
    lens = torch.tensor([100, 3, 37], dtype=torch.int32)
    indptr = torch.tensor([0, 100, 103, 140], dtype=torch.int32)
    host = {"kv_len_arr_cpu": DcpLayout(P, block).local_len(lens, RANK)}
    with counted() as count:
        plan(lens, indptr, torch.arange(140, dtype=torch.int32), replay, host, BATCH)
    return count


@pytest.mark.parametrize("replay", [False, True])
def test_mla_decode_plan(monkeypatch, replay):
    from sglang.srt.layers.dcp.planner import plan_dcp_decode_metadata

    stock = run_mla_plan(inspect.unwrap(plan_dcp_decode_metadata), replay, monkeypatch, 1)
    ours = run_mla_plan(mla_decode.plan_decode, replay, monkeypatch, B)
    assert ours.total <= stock.total, (ours.launches, stock.launches)
    assert ours.syncs <= stock.syncs


def test_read_map():
    ids = torch.arange(50, dtype=torch.int32)
    with counted() as count:
        reads.read_rows(None, None, ids)
    assert count.total == 1, count.launches
