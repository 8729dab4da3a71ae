"""CUDA graph replay, on CPU tensors: upstream's own replay bodies fill buffers that a graph was captured with.

After each replay, lengths on the host and on the device, indptr, rows and the inputs of the split kernel are what dealing
the tokens one by one gives, in the same memory as before.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import reference
from counting import counted
from hooking import hooked
from sglang_dcp_block.dcp.layout import DcpLayout

MAX_CONTEXT, MAX_BATCH, PAGE = 300, 4, 32
REPLAYS = (
    [300, 40, 1],
    [3, 1, 2],
    [33, 255, 300],
    [64, 64, 64],
    [1, 300, 129],
)  # growing, shrinking, empty on most ranks
GARBAGE = -77
SIZES = [(2, 32), (4, 8), (3, 16), (8, 4)]  # DCP ranks, block


@pytest.fixture(params=SIZES, ids=str)
def sizes(request):
    return request.param


@pytest.fixture(params=[0, -1], ids=["first", "last"])
def rank(request, sizes):
    return request.param % sizes[0]


@pytest.fixture
def parallel(monkeypatch, sizes, rank):
    """SGLang's parallel state of one rank."""
    import sglang.srt.layers.attention.flashinfer_mla_backend as flashinfer
    import sglang.srt.layers.dcp.layout as layout
    import sglang.srt.layers.dcp.planner as planner
    import sglang.srt.mem_cache.kv_index_translator as translator
    import sglang.srt.runtime_context as context

    size = sizes[0]
    state = SimpleNamespace(dcp_enabled=True, dcp_size=size, dcp_rank=rank, attn_dcp_size=size, attn_dcp_rank=rank)
    for module in (flashinfer, layout, planner, translator, context):
        monkeypatch.setattr(module, "get_parallel", lambda: state)
    return state


class Tables:
    """Slots of requests, as the engine keeps them, and this rank's rows by walking."""

    def __init__(self, size: int, block: int, rank: int) -> None:
        self.size, self.block, self.rank = size, block, rank
        self.virtual = size * PAGE
        self.where = reference.deal(self.virtual, size, block)
        pages = -(-MAX_CONTEXT // self.virtual)
        ids = torch.randperm(MAX_BATCH * pages, generator=torch.Generator().manual_seed(size)) + 1
        t = torch.arange(MAX_CONTEXT)
        self.req_to_token = torch.stack(
            [own[t // self.virtual] * self.virtual + t % self.virtual for own in ids.view(MAX_BATCH, pages)]
        ).int()

    def shares(self, lens):
        return [reference.local_len(n, self.rank, self.size, self.block) for n in lens]

    def rows(self, requests, lens):
        """This rank's rows of each request, one request after another."""
        rows = []
        for request, length in zip(requests, lens, strict=True):
            for t in reference.tokens_of(self.rank, length, self.size, self.block):
                page, offset = divmod(int(self.req_to_token[request, t]), self.virtual)
                rows.append(page * PAGE + self.where[offset][1])
        return rows


@pytest.fixture
def tables(sizes, rank):
    return Tables(*sizes, rank)


REQUESTS = torch.tensor([2, 0, 3])  # rows of req_to_token


def addresses(*tensors):
    return [tensor.data_ptr() for tensor in tensors]


class Wrapper:
    """Keeps what FlashInfer's plan is given."""

    def plan(self, qo_indptr, kv_indptr, kv_indices, kv_lens, *rest):
        self.planned = SimpleNamespace(qo=qo_indptr, indptr=kv_indptr, rows=kv_indices, lens=kv_lens)


def flashinfer_backend(tables):
    """The FlashInfer MLA backend around its replay body."""
    from sglang.srt.layers.attention import flashinfer_mla_backend as module
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
    from sglang.srt.mem_cache.kv_loc_plan import IdSpace, IdSpaceKind

    translator = object.__new__(KVIndexTranslator)
    translator.__dict__.update(
        req_to_token=tables.req_to_token, page_size=PAGE, is_translating=False, defer_read_translate=False,
        _spaces={IdSpaceKind.FULL: IdSpace(key=(IdSpaceKind.FULL, None))},
    )  # fmt: skip
    backend = object.__new__(module.FlashInferMLAAttnBackend)
    backend.__dict__.update(
        device="cpu",
        max_context_len=MAX_CONTEXT,
        kv_indptr=torch.zeros(MAX_BATCH + 1, dtype=torch.int32),
        q_indptr_decode=torch.arange(MAX_BATCH + 1, dtype=torch.int32),
        kv_index_translator=translator,
        decode_cuda_graph_metadata={len(REQUESTS): Wrapper()},
    )
    updater = object.__new__(module.FlashInferMLAIndicesUpdaterDecode)
    updater.__dict__.update(
        attn_backend=backend, kv_indptr=backend.kv_indptr, q_indptr=backend.q_indptr_decode, scaling=1.0, num_local_heads=1,
        kv_lora_rank=16, qk_rope_head_dim=8, data_type=torch.float32,
    )  # fmt: skip
    backend.indices_updater_decode = updater
    indices = torch.full((MAX_BATCH * MAX_CONTEXT,), GARBAGE, dtype=torch.int32)
    backend.init_cuda_graph_state(MAX_BATCH, MAX_BATCH, kv_indices_buf=indices)
    return backend


def replay_flashinfer(backend, lens):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    lens = torch.tensor(lens)
    backend._apply_cuda_graph_metadata(
        plan=None, bs=len(REQUESTS), req_pool_indices=REQUESTS, seq_lens=lens, seq_lens_sum=int(lens.sum()),
        forward_mode=ForwardMode.DECODE, spec_info=None, seq_lens_cpu=lens.clone(),
    )  # fmt: skip


def assert_flashinfer_replay(backend, tables, lens):
    backend.cuda_graph_kv_indices.fill_(GARBAGE)
    replay_flashinfer(backend, lens)
    planned = backend.decode_cuda_graph_metadata[len(lens)].planned
    shares, rows = tables.shares(lens), tables.rows(REQUESTS.tolist(), lens)
    indptr = [sum(shares[:b]) for b in range(len(lens) + 1)]
    assert planned.lens.tolist() == shares, "the host's lengths"
    assert planned.indptr.tolist() == indptr, "the host's indptr"
    assert planned.indptr.device.type == planned.lens.device.type == "cpu"
    assert backend.kv_indptr[: len(indptr)].tolist() == indptr, "the device's indptr, which empty requests are known by"
    assert planned.rows[: len(rows)].tolist() == rows
    assert planned.qo.tolist() == list(range(len(lens) + 1))


WANTED = ("get_dcp_lens", "plan_dcp_decode_metadata", "translate_dcp_read_ids")


def of(*names):
    return lambda point: point.target.rpartition(".")[2] in names


def test_flashinfer_mla(parallel, sizes, tables):
    """Lengths on host and device agree, and the wrapper that a graph captured plans over the same memory."""
    with hooked(DcpLayout(*sizes), of(*WANTED)):
        backend = flashinfer_backend(tables)
        before = addresses(backend.cuda_graph_kv_indices, backend.kv_indptr)
        for lens in REPLAYS:
            assert_flashinfer_replay(backend, tables, lens)
            rows = backend.decode_cuda_graph_metadata[len(lens)].planned.rows
            assert addresses(rows, backend.indices_updater_decode.kv_indptr) == before


@pytest.mark.parametrize(
    ("left_out", "sizes", "rank", "lens"),
    [
        # Lengths that differ between host and device write past buffers, unless the host's are the longer ones, as here.
        ("get_dcp_lens", (4, 8), 3, [4, 4, 4]),
        ("plan_dcp_decode_metadata", (4, 8), 0, [33, 255, 300]),
        ("translate_dcp_read_ids", (4, 8), 0, [33, 255, 300]),
    ],
)
def test_flashinfer_mla_needs_each_hook(parallel, sizes, tables, left_out, lens):
    with hooked(DcpLayout(*sizes), of(*(name for name in WANTED if name != left_out))):
        backend = flashinfer_backend(tables)
        with pytest.raises(AssertionError):
            assert_flashinfer_replay(backend, tables, lens)


@pytest.mark.parametrize(("sizes", "rank"), [((4, 8), 1)])
def test_flashinfer_mla_replay_costs_what_stock_costs(parallel, sizes, tables):
    def cost(layout, wanted):
        with hooked(layout, wanted):
            backend = flashinfer_backend(tables)
            with counted() as seen:
                replay_flashinfer(backend, [300, 40, 1])
        return seen

    stock, ours = cost(DcpLayout(4, 1), lambda point: False), cost(DcpLayout(*sizes), of(*WANTED))
    assert stock.total > 0
    assert ours.total <= stock.total, (ours.launches, stock.launches)
    assert ours.syncs <= stock.syncs


def triton_backend(tables, splits):
    """The Triton backend around its replay body; ``splits`` keeps what the split kernel is given."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    backend = object.__new__(TritonAttnBackend)
    backend.__dict__.update(
        device="cpu",
        dcp_size=tables.size,
        dcp_rank=tables.rank,
        req_to_token=tables.req_to_token,
        max_context_len=MAX_CONTEXT,
        kv_indptr=torch.zeros(MAX_BATCH + 1, dtype=torch.int32),
        window_kv_indptr=None,
        sliding_window_size=None,
        cuda_graph_kv_indices=torch.full((MAX_BATCH * MAX_CONTEXT,), GARBAGE, dtype=torch.int64),
        cuda_graph_num_kv_splits=torch.zeros(MAX_BATCH, dtype=torch.int32),
        cuda_graph_uneven_batch=torch.zeros(1, dtype=torch.int32),
        get_num_kv_splits=lambda out, lens, uneven: splits.append((out, lens.tolist())),
    )
    return backend


def replay_triton(backend, lens):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    backend._apply_cuda_graph_metadata(None, len(lens), REQUESTS, torch.tensor(lens), ForwardMode.DECODE, None)


def assert_triton_replay(backend, tables, splits, lens):
    backend.cuda_graph_kv_indices.fill_(GARBAGE)
    replay_triton(backend, lens)
    shares, rows = tables.shares(lens), tables.rows(REQUESTS.tolist(), lens)
    assert backend.kv_indptr[: len(lens) + 1].tolist() == [sum(shares[:b]) for b in range(len(lens) + 1)]
    assert backend.cuda_graph_kv_indices[: len(rows)].tolist() == rows
    assert (backend.cuda_graph_kv_indices[len(rows) :] == GARBAGE).all(), "wrote behind this rank's rows"
    out, given = splits[-1]
    assert out.data_ptr() == backend.cuda_graph_num_kv_splits.data_ptr()
    assert given == [max(1, share) for share in shares], "the split kernel's lengths; at least 1"


def test_triton(parallel, sizes, tables):
    """Rows, indptr and the split kernel's lengths, in the buffers that the graph reads."""
    splits: list = []
    with hooked(DcpLayout(*sizes), of("get_dcp_lens", "_dcp_kv_indices")):
        backend = triton_backend(tables, splits)
        before = addresses(backend.cuda_graph_kv_indices, backend.kv_indptr)
        for lens in REPLAYS:
            assert_triton_replay(backend, tables, splits, lens)
            assert addresses(backend.cuda_graph_kv_indices, backend.kv_indptr) == before


@pytest.mark.parametrize("left_out", ["get_dcp_lens", "_dcp_kv_indices"])
@pytest.mark.parametrize(("sizes", "rank"), [((4, 8), 0)])
def test_triton_needs_each_hook(parallel, sizes, tables, left_out):
    kept = {"get_dcp_lens", "_dcp_kv_indices"} - {left_out}
    with hooked(DcpLayout(*sizes), of(*kept)):
        splits: list = []
        backend = triton_backend(tables, splits)
        with pytest.raises(AssertionError):
            assert_triton_replay(backend, tables, splits, [33, 255, 300])


@pytest.mark.parametrize(("sizes", "rank"), [((4, 8), 1)])
def test_triton_replay_does_not_sync(parallel, sizes, tables):
    with hooked(DcpLayout(*sizes), of("get_dcp_lens", "_dcp_kv_indices")):
        backend = triton_backend(tables, [])
        backend.get_num_kv_splits = lambda *args: None
        with counted() as seen:
            backend._update_decode_kv_buffers(None, 3, torch.tensor([300, 40, 1]), REQUESTS)
    assert seen.syncs == 0
    assert seen.total > 0
