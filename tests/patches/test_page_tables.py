"""trtllm_mla and cutedsl_mla: their metadata, read by the contract of their kernel, reproduces dense attention.

Their kernels need a Blackwell GPU and are not run here.
"""

from __future__ import annotations

import inspect
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from page_tables import BACKENDS, LATENT, MODULES, ROPE, Deck, as_rank, backend_of, decode, layer_of, merged

import reference
from counting import counted
from hooking import hooked
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.patches import write_door
from sglang_dcp_block.patches.register import PatchPoint

HEADS = 3
SIZES = [(2, 64, 64), (2, 4, 32), (4, 32, 32), (4, 1, 32), (3, 16, 32)]  # DCP ranks, block, page


def needed(point: PatchPoint, left_out: str = "") -> bool:
    """The hooks that these backends meet, but for one."""
    touched = point.target.startswith(tuple(f"{module.__name__}." for module in MODULES))
    return (touched or point.target.endswith(".get_dcp_lens")) and not (left_out and point.target.endswith(left_out))


def lens_for(size: int, block: int, max_context: int) -> list[int]:
    """As long as can be, less than a block, one token more than a cycle."""
    return [max_context, max(1, block - 1), size * block + 1, 1]


def max_context_for(size: int, block: int, page: int) -> int:
    """Rank 0 holds the whole last block, so upstream's bound is as short as can be."""
    return size * page + block


def eager(backend, deck, queries):
    batch = deck.batch()
    backend.init_forward_metadata(batch)
    return decode(backend, deck, batch, queries)


def replayed(backend, deck, queries):
    """Captured with what CUDA graphs capture with, then replayed with the batch; one padded row."""
    batch = deck.batch(padded=1)
    capture(backend, batch)
    backend.init_forward_metadata_out_graph(batch)
    return decode(backend, deck, batch, queries)


def capture(backend, batch):
    fill = backend.get_cuda_graph_seq_len_fill_value()
    backend.init_cuda_graph_state(batch.batch_size, batch.batch_size, kv_indices_buf=torch.zeros(1, dtype=torch.int32))
    first = type(batch)(**{**vars(batch), "seq_lens": torch.full_like(batch.seq_lens, fill)})
    first.req_pool_indices = torch.zeros_like(batch.req_pool_indices)
    backend.init_forward_metadata_out_graph(first, in_capture=True)


@pytest.fixture(autouse=True)
def without_parent_state(monkeypatch):
    """CUDA graph state of the parent class, which decode does not use, wants CUDA memory."""
    parent = MODULES[0].FlashInferMLAAttnBackend
    monkeypatch.setattr(parent, "init_cuda_graph_state", lambda *args, **kwargs: None)


def assert_dense(name: str, step, size: int, block: int, page: int, left_out: str = "") -> None:
    max_context = max_context_for(size, block, page)
    with hooked(DcpLayout(size, block), lambda point: needed(point, left_out)):
        deck = Deck.make(size, block, page, lens_for(size, block, max_context), max_context, seed=size)
        queries, parts = deck.queries(HEADS), []
        for rank in range(size):
            with as_rank(rank, size):
                parts.append(step(backend_of(name, deck, rank), deck, queries))
    got = merged(parts, natural=name == "cutedsl_mla")
    torch.testing.assert_close(got, deck.dense(queries), atol=1e-5, rtol=0)
    held = torch.stack([lse > -torch.inf for _, lse in parts])
    assert held.any(0).all()
    assert not held.all(), "no rank is empty"


@pytest.mark.parametrize("step", [eager, replayed])
@pytest.mark.parametrize(("size", "block", "page"), SIZES)
@pytest.mark.parametrize("name", BACKENDS)
def test_decode_equals_dense_attention(name, size, block, page, step):
    """Written through the write door, read through the page table, merged over all ranks."""
    assert_dense(name, step, size, block, page)


@pytest.mark.parametrize(
    ("name", "step", "left_out"),
    [
        *[(name, step, ".get_dcp_lens") for name in BACKENDS for step in (eager, replayed)],
        *[(name, step, "._get_dcp_local_max_seq_len") for name in BACKENDS for step in (eager, replayed)],
        ("cutedsl_mla", eager, ".init_forward_metadata"),
        ("cutedsl_mla", replayed, "._apply_dcp_cuda_graph_metadata"),
    ],
)
def test_each_hook_is_needed(name, step, left_out):
    with pytest.raises(AssertionError):
        assert_dense(name, step, 4, 32, 32, left_out)


@pytest.mark.parametrize("name", BACKENDS)
def test_upstream_makes_empty_rows_neutral(name, monkeypatch):
    """Without ``fixup_zero_kv_rows`` what the kernel leaves undefined would get into the merge."""
    monkeypatch.setattr("page_tables.fixup", lambda *args: None)
    with pytest.raises(AssertionError, match="nan"):
        assert_dense(name, eager, 4, 32, 32)


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_page_table_is_right_for_every_token(data):
    """Upstream's kernel, unchanged: each local token lies in the page that the table says, at its place in it."""
    page = data.draw(st.sampled_from([32, 64]), label="page")
    block = data.draw(st.sampled_from([b for b in range(1, page + 1) if page % b == 0]), label="block")
    size = data.draw(st.integers(2, 8), label="ranks")
    virtual = size * page
    lens = data.draw(st.lists(st.integers(1, 3 * virtual), min_size=1, max_size=3), label="lens")
    seed = data.draw(st.integers(0, 2**31), label="seed")
    rank = data.draw(st.integers(0, size - 1), label="rank")
    pages = [random.Random(seed + b).sample(range(1, 50), 4) for b in range(len(lens))]
    table = torch.full((len(lens), 4 * virtual), -(2**30), dtype=torch.int32)  # behind a request: nonsense
    for b, length in enumerate(lens):
        t = torch.arange(length)
        table[b, :length] = torch.tensor(pages[b])[t // virtual] * virtual + t % virtual
    deck = Deck(size, block, page, lens, [], table, [torch.empty(0)] * size)
    backend = backend_of("trtllm_mla", deck, rank)
    local = [reference.tokens_of(rank, length, size, block) for length in lens]
    out = torch.full((len(lens), backend._calc_padded_blocks(table.shape[1])), -77, dtype=torch.int32)
    with as_rank(rank, size):
        backend._fill_dcp_block_kv_indices(
            out, torch.arange(len(lens)), torch.tensor([len(tokens) for tokens in local], dtype=torch.int32)
        )
    where = reference.deal(virtual, size, block)
    for b, tokens in enumerate(local):
        for i, t in enumerate(tokens):
            assert where[t % virtual] == (rank, i % page)
            assert int(out[b, i // page]) == pages[b][t // virtual]
        assert (out[b, -(-len(tokens) // page) :] == -77).all(), "wrote behind the share"


@pytest.mark.parametrize(("size", "block"), [(2, 8), (4, 4), (8, 64), (3, 5)])
def test_captured_length_bounds_every_share(size, block):
    backend = object.__new__(MODULES[0].TRTLLMMLABackend)
    short = 0
    with hooked(DcpLayout(size, block), lambda point: "max_seq_len" in point.target):
        ours = backend._get_dcp_local_max_seq_len
        upstream = inspect.unwrap(MODULES[0].TRTLLMMLABackend._get_dcp_local_max_seq_len)
        for rank in range(size):
            largest = 0
            with as_rank(rank, size):
                for length in range(1, 3 * size * block):
                    largest = max(largest, reference.local_len(length, rank, size, block))
                    assert ours(length) == max(1, largest)
                    short = max(short, largest - upstream(backend, length))
    assert 0 < short <= block - 1, "upstream's formula would do"


@pytest.mark.parametrize("name", BACKENDS)
def test_replay_keeps_addresses_and_follows_lengths(name):
    """Capture once; replay at growing, shrinking and empty shares: same tensors, right lengths, tables and bounds."""
    size, block, page, rank, max_context = 4, 16, 32, 2, 300
    with hooked(DcpLayout(size, block), needed), as_rank(rank, size):
        deck = Deck.make(size, block, page, [200, 1], max_context)
        backend = backend_of(name, deck, rank)
        capture(backend, deck.batch())
        captured = backend.forward_decode_metadata
        tensors = [captured.seq_lens_k, captured.global_seq_lens_k, captured.block_kv_indices]
        addresses = [tensor.data_ptr() for tensor in tensors]
        baked = captured.max_seq_len_k
        for lens in ([300, 40], [3, 1], [33, 255], [64, 300]):
            deck = Deck.make(size, block, page, lens, max_context, seed=sum(lens))
            backend.req_to_token.copy_(deck.req_to_token)
            backend.init_forward_metadata_out_graph(deck.batch())
            assert backend.decode_cuda_graph_metadata[2] is captured
            assert [tensor.data_ptr() for tensor in tensors] == addresses
            shares = [reference.local_len(length, rank, size, block) for length in lens]
            assert captured.seq_lens_k.tolist() == shares
            assert captured.max_seq_len_k == baked >= max(shares)
            if name == "cutedsl_mla":
                bounds = captured.global_seq_lens_k.tolist()
                for share, bound in zip(shares, bounds, strict=True):
                    assert all((i * size + rank < bound) == (i < share) for i in range(baked + 1))
            for b, share in enumerate(shares):
                for i in range(share):
                    t = reference.tokens_of(rank, lens[b], size, block)[i]
                    assert captured.block_kv_indices[b, i // page] == deck.req_to_token[b + 1, t] // (size * page)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("graph", [False, True])
def test_a_step_costs_what_stock_costs(name, graph):
    """Launches and host syncs of the metadata; cutedsl_mla's bounds are one launch a step more, and none a layer."""

    def count(block: int, wanted) -> tuple[int, int]:
        with hooked(DcpLayout(4, block), wanted), as_rank(1, 4):
            deck = Deck.make(4, block, 32, [200, 1, 37], 256)
            backend, batch = backend_of(name, deck, 1), deck.batch()
            capture(backend, batch)
            with counted() as seen:
                backend.init_forward_metadata_out_graph(batch) if graph else backend.init_forward_metadata(batch)
        return seen.total, seen.syncs

    launches, syncs = count(1, lambda point: False)
    assert launches > 0
    assert count(16, needed) == (launches + (name == "cutedsl_mla"), syncs)


def test_cutedsl_refuses_several_queries_a_request():
    deck = Deck.make(2, 8, 32, [20], 64)
    query = torch.zeros(1, 2, HEADS, LATENT + ROPE)
    with (
        hooked(DcpLayout(2, 8), needed),
        as_rank(0, 2),
        pytest.raises(NotImplementedError, match="expected 1 query token a request, got 2"),
    ):
        backend_of("cutedsl_mla", deck, 0)._run_decode_kernel(
            query, None, None, None, 1, layer_of(HEADS), causal_seqs=torch.tensor([20]), cp_world=2, return_lse=True
        )


@pytest.mark.parametrize("name", BACKENDS)
def test_fused_fp8_write_gets_placed_ids(name, monkeypatch):
    """The fused kernel takes (ids, ranks, rank) and writes id // ranks on rank id % ranks: blocks, with placed ids."""
    size, block, page, calls = 4, 8, 32, []
    slots = torch.arange(page * size, 3 * page * size)
    monkeypatch.setattr(MODULES[0], "set_mla_kv_concat_q_fp8_covered", lambda **kwargs: True)
    monkeypatch.setattr(MODULES[0], "set_mla_kv_concat_q_fp8", lambda **kwargs: calls.append(kwargs))
    where = reference.deal(page * size, size, block)
    with hooked(DcpLayout(size, block), needed):
        deck = Deck.make(size, block, page, [5], 64)
        ids = write_door.write_ids(slots)
        for rank in range(size):
            with as_rank(rank, size):
                backend_of(name, deck, rank)._set_kv_and_concat_q_fp8_fused(
                    layer_of(HEADS), ids, torch.zeros(len(ids), HEADS * LATENT), torch.zeros(len(ids), HEADS * ROPE),
                    torch.zeros(len(ids), 1, LATENT), torch.zeros(len(ids), 1, ROPE),
                )  # fmt: skip
    for rank, call in enumerate(calls):
        assert (call["dcp_world_size"], call["dcp_rank"]) == (size, rank)
        written = {int(v): int(i) // size for v, i in zip(slots, call["loc"], strict=True) if int(i) % size == rank}
        assert written == {
            v: v // (page * size) * page + where[v % (page * size)][1]
            for v in slots.tolist()
            if where[v % (page * size)][0] == rank
        }
    assert len(calls) == size
