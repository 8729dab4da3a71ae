"""What arrives on each decode rank, byte by byte, through upstream's sender with the hooks on; memory for a network."""

from __future__ import annotations

import ctypes
import math
import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from servers import ROOM, MemoryEngine, Pool, Registration, make_manager, send
from sglang.srt.disaggregation.common import dcp_pack

import reference
from sglang_dcp_block.patches.mooncake_batches import FAILED
from sglang_dcp_block.patches.transfer_counts import DIRECT, FALLBACK, PACKED, TOKENS

pytestmark = pytest.mark.usefixtures("hooked")

PAGE = 16
PACK_BUFFER = SimpleNamespace()  # SGLang's packing is for CUDA; pack_on_host stands in for it


@pytest.fixture
def pack_on_host(monkeypatch):
    """SGLang's packing step on the host: gathers rows and gives their addresses. Returns the list of its calls."""
    calls, kept = [], []

    def pack(*, kv_data_ptrs, src_token_indices, token_item_lens, src_token_item_lens=None, **_):
        strides = src_token_item_lens or token_item_lens
        packed = []
        for ptr, width, stride in zip(kv_data_ptrs, token_item_lens, strides, strict=True):
            gathered = b"".join(ctypes.string_at(ptr + int(row) * stride, width) for row in src_token_indices)
            kept.append(np.frombuffer(gathered, np.uint8))
            packed.append(kept[-1].ctypes.data)
        calls.append(len(src_token_indices))
        return packed, np.arange(len(src_token_indices), dtype=np.int64)

    monkeypatch.setattr(dcp_pack, "try_pack_dcp_src", pack)
    return calls


class Case:
    """A request from a prefill server to every rank of a decode server, in chunks."""

    def __init__(
        self, P: int, B: int, tokens: int, prefix_pages: int = 0, layers: int = 3, row_bytes: int = 24
    ) -> None:
        rng = random.Random(f"{P} {B} {tokens} {prefix_pages}")
        self.P, self.B, self.tokens, self.prefix = P, B, tokens, prefix_pages * P * PAGE
        num_src, num_dst = -(-tokens // PAGE), -(-tokens // (PAGE * P))
        self.src_pages = rng.sample(range(1, 2 * num_src + 2), num_src)
        self.dst_pages = rng.sample(range(1, 2 * num_dst + 2), num_dst)
        self.source = Pool.random(layers, (2 * num_src + 2) * PAGE, row_bytes)
        self.ranks = [Pool.blank(layers, (2 * num_dst + 2) * PAGE, row_bytes) for _ in range(P)]
        self.engine = MemoryEngine()

    def registration(self, rank: int, **changes) -> Registration:
        return Registration(self.P, rank, self.B, **{"dst_kv_ptrs": self.ranks[rank].ptrs, **changes})

    def send(self, manager, pages_a_chunk: int, **options) -> None:
        for rank in range(self.P):
            registration = self.registration(rank, **options.pop("registration", {}))
            for first in range(0, len(self.src_pages), pages_a_chunk):
                pages = self.src_pages[first : first + pages_a_chunk]
                tokens = min(self.tokens - first * PAGE, len(pages) * PAGE)
                status = send(
                    manager,
                    registration,
                    pages,
                    self.dst_pages,
                    num_tokens=tokens,
                    skipped_pages=first,
                    prefix=self.prefix,
                    **options,
                )
                assert status == 0

    def expected(self, rank: int) -> np.ndarray:
        """This rank's pool after the transfer, found token by token."""
        pool = np.full_like(self.ranks[rank].memory, 255)
        for src, dst in reference.transfer_rows(
            self.src_pages, self.dst_pages, rank, self.P, self.B, PAGE, self.prefix, 0, self.tokens
        ):
            pool[:, dst] = self.source.memory[:, src]
        return pool

    def check(self) -> None:
        for rank, pool in enumerate(self.ranks):
            np.testing.assert_array_equal(pool.memory, self.expected(rank), err_msg=f"rank {rank}")


@pytest.mark.parametrize("pages_a_chunk", [1, 3, 99])
@pytest.mark.parametrize(
    ("P", "B", "tokens", "prefix_pages"),
    [
        (2, 16, 200, 0),
        (8, 16, 16 * 40 + 5, 1),
        (3, 4, 117, 2),
        (8, 2, 333, 0),
        (4, 16, 1, 1),
        (8, 16, 16, 0),
        (2, 1, 50, 1),
    ],
)
def test_every_row_arrives_where_its_rank_reads_it(P, B, tokens, prefix_pages, pages_a_chunk, counts):
    case = Case(P, B, tokens, prefix_pages)
    case.send(make_manager(case.source, PAGE, case.engine), pages_a_chunk)
    case.check()
    chunks = math.ceil(len(case.src_pages) / pages_a_chunk)
    totals = counts.by_path[TOKENS if B == 1 else DIRECT]
    assert totals.transfers == P * chunks
    assert (totals.segments, totals.batches) == (sum(case.engine.calls), len(case.engine.calls))
    assert totals.num_bytes == tokens * 3 * 24
    if B > 1:
        # Adjacent pages can only make it fewer.
        layers, last = 3, tokens - (chunks - 1) * pages_a_chunk * PAGE
        bound = (chunks - 1) * math.ceil(pages_a_chunk * PAGE / (P * B)) + math.ceil(last / (P * B))
        assert totals.segments <= layers * P * bound


class TestStockPeer:
    """A decode server that names no block size gets exactly what SGLang sends it."""

    def test_same_calls_with_and_without_hooks(self, monkeypatch):
        handed_over = []
        case = Case(4, 1, 100)
        monkeypatch.setattr(case.engine, "batch_transfer_sync", lambda *args: handed_over.append(args) or 0)
        manager = make_manager(case.source, PAGE, case.engine)
        registration = case.registration(1)
        del registration.dcp_block_size
        assert send(manager, registration, case.src_pages, case.dst_pages, num_tokens=100) == 0
        while hasattr(type(manager).send_kvcache_dcp, "__wrapped__"):
            monkeypatch.setattr(type(manager), "send_kvcache_dcp", type(manager).send_kvcache_dcp.__wrapped__)
        monkeypatch.setattr(type(manager), "_transfer_data", type(manager)._transfer_data.__wrapped__)
        assert send(manager, registration, case.src_pages, case.dst_pages, num_tokens=100) == 0
        assert handed_over[0] == handed_over[1]
        assert len(handed_over) == 2

    def test_what_upstream_raises_is_upstreams(self, counts):
        """A worker that SGLang ends for a stock peer ends as before."""
        case = Case(4, 1, 100)
        manager = make_manager(case.source, PAGE, case.engine)
        with pytest.raises(ValueError, match="requires num_kv_tokens"):
            send(manager, case.registration(0), case.src_pages, case.dst_pages, num_tokens=None)
        assert counts.by_path[TOKENS].failures == 1


class TestPackedOrDirect:
    @pytest.mark.parametrize(
        ("B", "threshold", "path"),
        [(4, 97, PACKED), (4, 96, DIRECT), (16, 384, DIRECT), (1, 1, TOKENS), (2, 49, PACKED)],
    )
    def test_by_the_bytes_of_a_block(self, B, threshold, path, pack_on_host, counts, monkeypatch):
        """Rows of 24 bytes, on average: the threshold is compared with 24 * B."""
        monkeypatch.setenv("SGLANG_DCP_BLOCK_DIRECT_BYTES", str(threshold))
        case = Case(4, B, 219, 1)
        case.send(make_manager(case.source, PAGE, case.engine), 5, pack_buffer=PACK_BUFFER)
        case.check()
        assert list(counts.by_path) == [path]
        assert counts.by_path[path].fallbacks == 0
        assert bool(pack_on_host) == (path != DIRECT)

    def test_short_blocks_without_a_buffer_go_directly_and_are_counted(self, counts):
        case = Case(4, 2, 219, 1)
        case.send(make_manager(case.source, PAGE, case.engine), 5)
        case.check()
        assert counts.by_path[DIRECT].fallbacks == counts.by_path[DIRECT].transfers

    def test_two_peers_side_by_side(self, pack_on_host, counts, monkeypatch):
        """One prefill server, a stock decode server that wants packing and one with blocks that does not."""
        monkeypatch.setenv("SGLANG_DCP_BLOCK_DIRECT_BYTES", "384")
        stock, blocks = Case(2, 1, 77), Case(2, 16, 77)
        blocks.source = stock.source
        blocks.src_pages = stock.src_pages
        manager = make_manager(stock.source, PAGE, MemoryEngine())
        for rank in range(2):
            for case, name in ((stock, "stock"), (blocks, "blocks")):
                registration = case.registration(rank, mooncake_session_id=name)
                chunk = {"num_tokens": 77, "pack_buffer": PACK_BUFFER}
                assert send(manager, registration, case.src_pages, case.dst_pages, **chunk) == 0
        stock.check()
        blocks.check()
        assert {name: totals.transfers for name, totals in counts.by_peer.items()} == {"stock": 2, "blocks": 2}
        assert pack_on_host == [39, 38]  # tokens of the stock ranks


class TestDrafts:
    """A draft model's pool is replicated: each rank gets all rows."""

    P, TOKENS, PREFIX = 3, 100, 96

    def transfer(self, B, draft_bytes=40, dst_draft_bytes=40, lens=True, **options):
        case = Case(self.P, B, self.TOKENS, 2)
        drafts = Pool.random(2, case.source.memory.shape[1], draft_bytes, seed=1)
        manager = make_manager(case.source, PAGE, case.engine, drafts, **options)
        received = []
        for rank in range(self.P):
            pool = Pool.blank(2, case.ranks[rank].memory.shape[1] * self.P, dst_draft_bytes)
            received.append(pool.memory)
            slots = PAGE * self.P
            registration = case.registration(
                rank,
                dst_kv_ptrs=case.ranks[rank].ptrs + pool.ptrs,
                dst_kv_item_lens=[24 * PAGE] * 3 + [dst_draft_bytes * slots] * 2 if lens else [],
                dst_attn_tp_size=draft_bytes // dst_draft_bytes,
                dst_tp_rank=rank % (draft_bytes // dst_draft_bytes),
            )
            for first, pages in ((0, case.src_pages[:2]), (2, case.src_pages[2:])):
                tokens = min(self.TOKENS - first * PAGE, len(pages) * PAGE)
                chunk = {"num_tokens": tokens, "skipped_pages": first, "prefix": case.prefix}
                assert send(manager, registration, pages, case.dst_pages, **chunk) == 0
        case.check()
        return case, drafts.memory, received

    def check(self, case, drafts, received):
        for pool in received:
            expected = np.full_like(pool, 255)
            for src, dst in reference.replicated_rows(case.src_pages, case.dst_pages, self.P, PAGE, 0, self.TOKENS):
                expected[:, dst] = drafts[:, src]
            np.testing.assert_array_equal(pool, expected)

    @pytest.mark.parametrize("lens", [True, False])
    def test_rows_as_wide_as_ours_go_directly(self, lens, counts):
        self.check(*self.transfer(16, lens=lens))
        assert list(counts.by_path) == [DIRECT]

    def test_narrower_rows_are_upstreams_to_slice(self, counts):
        case, drafts, received = self.transfer(16, draft_bytes=40, dst_draft_bytes=20)
        for rank, pool in enumerate(received):
            half = slice(20 * (rank % 2), 20 * (rank % 2) + 20)
            for src, dst in reference.replicated_rows(case.src_pages, case.dst_pages, self.P, PAGE, 0, self.TOKENS):
                np.testing.assert_array_equal(pool[:, dst], drafts[:, src, half])
        assert list(counts.by_path) == [FALLBACK]
        assert counts.by_path[FALLBACK].fallbacks == counts.by_path[FALLBACK].transfers


class TestPairing:
    """Which buffer goes to which."""

    def test_by_layer_ids(self):
        """A decode server that has other layers, in another order."""
        case = Case(2, 16, 100, layers=3)
        manager = make_manager(case.source, PAGE, case.engine)
        manager.kv_args.kv_layer_ids = [4, 5, 6]
        ids = [6, 9, 4, 5]
        pools = [Pool.blank(4, case.ranks[0].memory.shape[1], 24) for _ in range(2)]
        for rank, pool in enumerate(pools):
            registration = case.registration(rank, dst_kv_ptrs=pool.ptrs, dst_kv_layer_ids=ids)
            assert send(manager, registration, case.src_pages, case.dst_pages, num_tokens=100) == 0
            case.ranks[rank] = Pool(pool.memory[[ids.index(layer) for layer in (4, 5, 6)]])
            assert (pool.memory[ids.index(9)] == 255).all()
        case.check()

    def test_by_the_pipeline_stage(self):
        case = Case(2, 16, 100, layers=2)
        manager = make_manager(case.source, PAGE, case.engine)
        manager.kv_args.prefill_start_layer = 3
        pools = [Pool.blank(6, case.ranks[0].memory.shape[1], 24) for _ in range(2)]
        for rank, pool in enumerate(pools):
            registration = case.registration(rank, dst_kv_ptrs=pool.ptrs)
            assert send(manager, registration, case.src_pages, case.dst_pages, num_tokens=100) == 0
            case.ranks[rank] = Pool(pool.memory[3:5])
            assert (pool.memory[[0, 1, 2, 5]] == 255).all()
        case.check()

    def test_layers_that_differ_in_width(self):
        """Two pools of one model, as with an index cache beside the latent one."""
        case, wide = Case(2, 8, 100, layers=1), Pool.random(1, 400, 56, seed=2)
        manager = make_manager(case.source, PAGE, case.engine, wide)
        manager.kv_args.num_draft_entries = 0
        for rank in range(2):
            there = Pool.blank(1, 400, 56)
            registration = case.registration(rank, dst_kv_ptrs=case.ranks[rank].ptrs + there.ptrs)
            assert send(manager, registration, case.src_pages, case.dst_pages, num_tokens=100) == 0
            rows = reference.transfer_rows(case.src_pages, case.dst_pages, rank, 2, 8, PAGE, 0, 0, 100)
            for src, dst in rows:
                np.testing.assert_array_equal(there.memory[:, dst], wide.memory[:, src])
        case.check()


class TestThreadsForLayers:
    """Custom memory pools: SGLang sends each layer from a thread of its own, so do we."""

    def test_all_arrive_and_count(self, counts):
        case = Case(4, 16, 300)
        with ThreadPoolExecutor(2) as executor:
            manager = make_manager(case.source, PAGE, case.engine, enable_custom_mem_pool=True, executors=[executor])
            case.send(manager, 99, executor=executor)
        case.check()
        assert counts.by_path[DIRECT].segments == sum(case.engine.calls)
        assert len(case.engine.calls) == 4 * 3  # a call a rank and layer

    def test_an_error_in_one_stops_the_others(self):
        case = Case(2, 2, 16 * 64)
        engine = MemoryEngine(fail_call=3)
        with ThreadPoolExecutor(1) as executor:
            manager = make_manager(case.source, PAGE, engine, enable_custom_mem_pool=True, executors=[executor])
            manager.max_transfer_batch_indices = 32
            manager.enable_deferred_decode_kv_release = True
            registration = case.registration(0)
            pages = (case.src_pages, case.dst_pages)
            assert send(manager, registration, *pages, num_tokens=case.tokens, executor=executor) == -1
        assert engine.calls == [32] * 4  # of 3 layers * 8


@pytest.mark.parametrize("threshold", ["1", "9999999"], ids=["direct", "packed"])
def test_a_prefix_that_ends_inside_a_virtual_page_is_refused(threshold, pack_on_host, monkeypatch):
    monkeypatch.setenv("SGLANG_DCP_BLOCK_DIRECT_BYTES", threshold)
    case = Case(2, 4, 77)
    manager = make_manager(case.source, PAGE, case.engine)
    chunk = {"num_tokens": 77, "prefix": PAGE, "pack_buffer": PACK_BUFFER}
    assert send(manager, case.registration(0), case.src_pages, case.dst_pages, **chunk) == FAILED
    assert "decode_prefix_len: expected a multiple of 32 tokens" in manager.failure_records[ROOM]
    assert case.engine.calls == []


def test_a_rank_that_owns_nothing_gets_a_finished_transfer(counts):
    case = Case(8, 16, 5)
    manager = make_manager(case.source, PAGE, case.engine)
    for rank in range(8):
        assert send(manager, case.registration(rank), case.src_pages, case.dst_pages, num_tokens=5) == 0
    case.check()
    assert case.engine.calls == [3]  # rank 0's layers
    assert counts.by_path[DIRECT].transfers == 8


def test_planning_blocks_ends_with_its_transfer(pack_on_host, monkeypatch):
    """A packed transfer leaves nothing behind for the next peer of the same thread, also where it fails."""
    monkeypatch.setenv("SGLANG_DCP_BLOCK_DIRECT_BYTES", "9999999")
    blocks, stock = Case(2, 4, 77), Case(2, 1, 77)
    manager = make_manager(blocks.source, PAGE, blocks.engine)
    chunk = {"num_tokens": 77, "pack_buffer": PACK_BUFFER}
    assert send(manager, blocks.registration(0), blocks.src_pages, [], **chunk) == FAILED
    stock.send(make_manager(stock.source, PAGE, stock.engine), 99, pack_buffer=PACK_BUFFER)
    stock.check()
