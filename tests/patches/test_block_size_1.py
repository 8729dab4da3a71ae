"""With B = 1 every adapter gives SGLang's own index tensors, bit for bit."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.patches import active, lengths, mla_decode, mla_gather, reads, triton_gqa, write_door

P = 4
SIZES = torch.tensor([100, 3, 37, 0, 8], dtype=torch.int32)


@pytest.fixture(autouse=True)
def token_round_robin(monkeypatch):
    monkeypatch.setattr(active, "_layout", DcpLayout(P, 1))


@pytest.fixture(params=range(P))
def rank(request, monkeypatch):
    """Each DCP rank in turn, as SGLang's modules see it."""
    import sglang.srt.layers.dcp.comm as comm
    import sglang.srt.layers.dcp.layout as layout
    import sglang.srt.layers.dcp.planner as planner
    import sglang.srt.runtime_context as context

    parallel = SimpleNamespace(dcp_enabled=True, dcp_size=P, attn_dcp_size=P, dcp_rank=request.param)
    for module in (comm, layout, planner, context):
        monkeypatch.setattr(module, "get_parallel", lambda: parallel)
    return request.param


def upstream(function):
    return inspect.unwrap(function)


def equal(ours, theirs) -> bool:
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    return ours == theirs


@pytest.fixture
def backend(rank):
    from sglang.srt.layers.dcp.layout import get_dcp_lens

    slots = torch.randperm(5 * 256, generator=torch.Generator().manual_seed(0)).to(torch.int32).view(5, 256)
    lens_of = upstream(get_dcp_lens)
    return SimpleNamespace(
        dcp_size=P, dcp_rank=rank, device="cpu", req_to_token=slots,
        _dcp_lens=lambda lens, start=None: lens_of(lens, P, rank, start),
    )  # fmt: skip


@pytest.mark.parametrize("with_starts", [False, True])
def test_triton_indices(backend, with_starts):
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    requests = torch.tensor([4, 0, 2, 1, 3])
    starts = torch.tensor([5, 0, 9, 2, 3], dtype=torch.int32) if with_starts else None
    results = []
    for plan in (triton_gqa.plan_kv_indices, upstream(TritonAttnBackend._dcp_kv_indices)):
        buffer = torch.full((200,), -7)
        results.append((*plan(backend, requests, SIZES, torch.zeros(9, dtype=torch.int32), buffer, starts), buffer))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_triton_writes(backend):
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    positions = torch.arange(20)
    slots = positions + 3 * P * 8  # a page's start
    writes = []
    original = upstream(TritonAttnBackend._set_kv_buffer)
    for write in (lambda *args: triton_gqa.write_kv(original, *args), original):
        backend.token_to_kv_pool = SimpleNamespace(set_kv_buffer=lambda *args, **kwargs: writes.append((args, kwargs)))
        batch = SimpleNamespace(
            out_cache_loc=write_door.write_ids(slots),
            out_cache_loc_is_physical=True,
            positions=positions,
            dcp_kv_mask=None,
        )
        write(backend, batch, "layer", None, torch.zeros(20, 1, 2), torch.zeros(20, 1, 2))
    (ours, our_mask), (theirs, their_mask) = writes
    assert torch.equal(ours[1].loc, theirs[1].loc)
    assert torch.equal(our_mask["dcp_kv_mask"], their_mask["dcp_kv_mask"])


def test_lengths(rank):
    from sglang.srt.layers.dcp.layout import get_dcp_lens

    original = upstream(get_dcp_lens)
    for start in (None, torch.tensor([1, 2, 3, 4, 5])):
        assert torch.equal(lengths.count_by_blocks(original, SIZES, P, rank, start), original(SIZES, P, rank, start))


def test_slots():
    slots = torch.arange(1000)
    assert torch.equal(write_door.write_ids(slots), slots)
    assert torch.equal(reads.read_rows(None, None, slots), slots // P)


@pytest.mark.parametrize("replay", [False, True])
def test_mla_decode_plan(rank, replay):
    from sglang.srt.layers.dcp.planner import plan_dcp_decode_metadata

    results = []
    for plan in (mla_decode.plan_decode, upstream(plan_dcp_decode_metadata)):
        lens, indptr = SIZES.clone(), torch.zeros(6, dtype=torch.int32)
        indptr[1:] = torch.cumsum(SIZES, 0)
        stream = torch.arange(7, 7 + int(SIZES.sum()), dtype=torch.int32)
        host = {"kv_len_arr_cpu": DcpLayout(P, 1).local_len(SIZES, rank)}
        owned = plan(lens, indptr, stream, replay, host, len(SIZES))
        results.append((owned, lens, indptr, stream[:owned]))
    for ours, theirs in zip(*results, strict=True):
        assert equal(ours, theirs)


def test_mla_chunks(rank):
    from sglang.srt.layers.dcp.layout import filter_dcp_local_chunk_kv_indices

    stream, lens, starts = torch.arange(150) * 3, torch.tensor([100, 3, 37, 10]), torch.tensor([0, 5, 7, 2])
    theirs = upstream(filter_dcp_local_chunk_kv_indices)(stream, starts, lens)
    assert torch.equal(mla_gather.own_chunk(stream, starts, lens), theirs)


@pytest.mark.parametrize("length", [0, 1, 5, 64, 67])
def test_host_copies(rank, length):
    from sglang.srt.layers.dcp.layout import maybe_dcp_kernel_indices

    slots = torch.arange(64, 64 + length)
    assert torch.equal(mla_gather.rows_of_run(slots, P, rank), upstream(maybe_dcp_kernel_indices)(slots, P, rank))


@pytest.mark.parametrize("lens", [[8, 4], [7, 0, 13], [1]])
def test_mla_gather(monkeypatch, lens):
    """All ranks in one process: the gathered prefix is upstream's."""
    import sglang.srt.layers.dcp.comm as comm
    import sglang.srt.runtime_context as context

    total, starts = sum(lens), torch.tensor([3, 0, 6][: len(lens)])
    whole, sizes = torch.randn(total, 1, 6), torch.tensor(lens)
    results = []
    for gather in (mla_gather.gather_prefix, upstream(comm.all_gather_kv_cache_for_dcp)):
        sent: list[torch.Tensor] = []

        class Group:
            def all_gather_into_tensor(self, out, own, sent=sent):
                sent.append(own.clone())
                if len(sent) == P:
                    out.copy_(torch.cat(sent))

        for rank in range(P):
            parallel = SimpleNamespace(dcp_enabled=True, dcp_size=P, dcp_rank=rank, dcp_group=Group())
            for module in (comm, context):
                monkeypatch.setattr(module, "get_parallel", lambda parallel=parallel: parallel)
            own = whole[mla_gather.local_share(lens, starts.tolist(), rank, DcpLayout(P, 1))]
            got = gather(own[..., :4], own[..., 4:], sizes, starts)
        results.append(got)
    assert torch.equal(*results)
    assert torch.equal(results[0], whole)
