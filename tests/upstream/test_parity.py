"""The plugin's index math and the series': the same rows, lengths and index arrays, bit for bit.

Runs the patched modules of a small tree beside the installed ones, loaded under names of their own.
"""

from __future__ import annotations

import importlib.util
import sys
import types

import pytest
import torch

from sglang_dcp_block.dcp.gather import local_share, plan_gather
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.kernels.compact_indices import compact_kv_indices
from sglang_dcp_block.kernels.kv_indices import build_kv_indices
from upstream import tree

SHAPES = [(2, 1), (4, 4), (8, 8)]


@pytest.fixture(scope="module")
def native(built, series_context):
    """native(dotted module) -> that module of the patched tree; the modules it imports are the installed ones."""
    folder, _ = built

    def native(module: str) -> types.ModuleType:
        name = f"patched_{module.replace('.', '_')}"
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, folder / tree.source_path(module))
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        return sys.modules[name]

    yield native
    for name in [name for name in sys.modules if name.startswith("patched_")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def layout_module(native):
    return native("sglang.srt.layers.dcp.layout")


def each_rank():
    for size, block in SHAPES:
        for rank in range(size):
            yield DcpLayout(size, block), rank


def test_lengths_positions_and_rows(layout_module):
    tokens = torch.arange(500)
    for layout, rank in each_rank():
        size, block = layout.dcp_size, layout.block_size
        starts = tokens.flip(0) % 37
        assert torch.equal(
            layout_module.get_dcp_lens(tokens, size, rank, starts, block), layout.local_len(tokens, rank, starts)
        )
        assert torch.equal(layout_module.get_dcp_positions(tokens, size, rank, block), layout.position(rank, tokens))
        assert torch.equal(layout_module.collapse_dcp_indices(tokens, size, block), layout.row(tokens))


def test_each_token_is_written_to_the_row_of_the_plugins_door(layout_module):
    """The plugin's placed id names owner and row; the series' localized id is that row there, and the sink elsewhere."""
    slots = torch.arange(512)
    for layout, rank in each_rank():
        placed = layout.slot_to_placed(slots)
        local = layout_module.localize_dcp_indices(slots, layout.dcp_size, rank, layout.block_size, non_local=0)
        mine = placed % layout.dcp_size == rank
        assert torch.equal(local[mine], placed[mine] // layout.dcp_size)
        assert not local[~mine].any()


def test_rows_of_a_run(layout_module):
    for layout, rank in each_rank():
        page = layout.cycle * 2
        slots = torch.cat([torch.arange(page) + 3 * page, torch.arange(page) + page])
        for length in (page, page + 1, 2 * page - 1, 2 * page):
            owned = local_share([length], [0], rank, layout)
            got = layout_module.maybe_dcp_kernel_indices(slots[:length], layout.dcp_size, rank, layout.block_size)
            assert torch.equal(got, layout.row(slots[owned]))


def test_triton_index_arrays(native):
    kernels = native("sglang.kernels.ops.attention.dcp_kernels")
    table = torch.randperm(6 * 256).view(6, 256).int()
    pool_indices, lens = torch.tensor([5, 0, 2]), torch.tensor([200, 1, 77])
    for layout, rank in each_rank():
        for starts in (None, torch.tensor([3, 0, 64], dtype=torch.int32)):
            local = layout.local_len(lens, rank, 0 if starts is None else starts.long())
            indptr = torch.zeros(4, dtype=torch.int32)
            indptr[1:] = local.cumsum(0)
            got, want = (torch.full((int(local.sum()),), -7) for _ in range(2))
            kernels.create_triton_kv_indices_for_dcp_triton[(3,)](
                table,
                pool_indices,
                local,
                indptr,
                starts,
                got,
                table.stride(0),
                layout.dcp_size,
                rank,
                layout.block_size,
            )
            build_kv_indices(table, pool_indices, local, indptr, layout, rank, want, starts)
            assert torch.equal(got, want)


def test_mla_index_streams(native):
    kernels = native("sglang.kernels.ops.attention.dcp_kernels")
    lens = torch.tensor([300, 5, 64], dtype=torch.int32)
    indptr = torch.tensor([0, 300, 305, 369], dtype=torch.int32)
    stream = torch.randperm(369).int()
    for layout, rank in each_rank():
        local = layout.local_len(lens, rank)
        local_indptr = torch.zeros(4, dtype=torch.int32)
        local_indptr[1:] = local.cumsum(0)
        got, want = (torch.zeros(int(local.sum()), dtype=torch.int32) for _ in range(2))
        kernels.update_kv_lens_and_indices[(3, 3)](
            lens, indptr, stream, local, local_indptr, got,
            dcp_rank=rank, dcp_world_size=layout.dcp_size, BLOCK_SIZE=128, interleave_size=layout.block_size,
        )  # fmt: skip
        compact_kv_indices(stream, indptr, local, local_indptr, layout, rank, want)
        assert torch.equal(got, want)


def test_shares_of_chunks_and_their_gather(native, layout_module, monkeypatch):
    comm = native("sglang.srt.layers.dcp.comm")
    lens, starts = torch.tensor([9, 0, 33, 30, 2]), torch.tensor([0, 3, 0, 17, 5])
    tokens = torch.randn(int(lens.sum()), 1, 6)
    for size, block in SHAPES:
        layout = DcpLayout(size, block)
        sent = []
        for phase in ("send", "receive"):
            for rank in range(size):

                def exchange(received, own, phase=phase, sent=sent):
                    if phase == "send":
                        sent.append(own.clone())
                    else:
                        received.copy_(torch.cat(sent))

                parallel = types.SimpleNamespace(
                    dcp_enabled=True, dcp_size=size, dcp_rank=rank,
                    dcp_group=types.SimpleNamespace(all_gather_into_tensor=exchange),
                )  # fmt: skip
                for module in (comm, layout_module):
                    monkeypatch.setattr(module, "get_parallel", lambda parallel=parallel: parallel)
                    monkeypatch.setattr(module, "dcp_interleave_size", lambda block=block: block)
                # The installed layout is not the patched one that this module would have.
                monkeypatch.setattr(comm, "get_dcp_lens", layout_module.get_dcp_lens)
                own = layout_module.filter_dcp_local_chunk_kv_indices(torch.arange(len(tokens)), starts, lens)
                assert torch.equal(own, local_share(lens.tolist(), starts.tolist(), rank, layout))
                share = tokens[own]
                got = comm.all_gather_kv_cache_for_dcp(share[..., :4], share[..., 4:], lens, starts)
                if phase == "receive":
                    assert torch.equal(got, tokens)
        plan = plan_gather(lens.tolist(), starts.tolist(), layout)
        assert max(plan.sent) <= sent[0].shape[0], "the series pads to whole cycles, the plugin to the largest share"
