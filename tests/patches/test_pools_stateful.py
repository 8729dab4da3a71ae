"""Random histories of a decode server's pages, down to the rows of each rank's pool: for P ranks and every B at once.

Every token goes through the write door into one rank's pool, and comes back through the indices that each reader of the
product makes. The model deals token by token. A history of pages is the same for all block sizes, so each has pools of
its own beside the others'.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import itertools
import random
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

import reference
from page_histories import PageHistory, run
from paged_server import Request
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.kernels import launch
from sglang_dcp_block.patches import active, lengths, mla_decode, mla_gather, reads, triton_gqa, write_door

RANKS, PAGES = range(1, 9), (8, 6)  # pages: tokens of one rank
NOTHING, PADDING = -1, -2  # stamps of rows that nobody wrote, and of padded writes
KERNELS_EVERY = 50  # steps: kernels run interpreted then, which is slow, and as their twins otherwise
EVENTS = {
    "hits", "chunks", "batches without room", "decode steps", "evictions", "ends", "aborts", "retractions",
    "copies that came back",
}  # fmt: skip
here = SimpleNamespace(parallel=None)  # SGLang's parallel state of the rank that runs


class Pool:
    """One rank's KV: a stamp a row. Upstream's kernel writes where the mask says so."""

    def __init__(self, rows: int) -> None:
        self.kv = torch.full((rows,), NOTHING)

    def set_kv_buffer(self, layer, loc_info, k, v, *, dcp_kv_mask) -> None:
        assert torch.equal(k, v)
        self.kv[loc_info.loc[dcp_kv_mask]] = k[dcp_kv_mask]


class Ranks:
    """All ranks of a server whose blocks have one size, and what they should hold."""

    def __init__(self, size: int, block: int, page: int, num_pages: int, longest: int) -> None:
        self.size, self.page = size, page
        self.layout = DcpLayout(size, block)
        self.pools = [Pool((num_pages + 1) * page) for _ in range(size)]
        self.model = np.full((size, (num_pages + 1) * page), NOTHING)
        self.places = reference.deal(size * page, size, block)  # (owner, row in the page) by offset in a virtual page
        self.owners = np.array([owner for owner, _ in reference.deal(longest, size, block)])  # by position

    def store(self, slots: torch.Tensor, stamps: torch.Tensor, first: int) -> None:
        """Write positions from ``first`` on, with a padded token behind them, as an iteration of SGLang does."""
        slots, stamps = (
            torch.cat([slots, torch.zeros(1, dtype=slots.dtype)]),
            torch.cat([stamps, torch.tensor([PADDING])]),
        )
        batch = SimpleNamespace(out_cache_loc=write_door.write_ids(slots), out_cache_loc_is_physical=True)
        for rank, pool in enumerate(self.pools):
            backend = SimpleNamespace(dcp_size=self.size, dcp_rank=rank, token_to_kv_pool=pool)
            triton_gqa.write_kv(stock_write, backend, batch, None, None, stamps, stamps)
        self.expect(slots[:-1], stamps[:-1], first)
        self.model[0, 0] = PADDING

    def expect(self, slots: torch.Tensor, stamps: torch.Tensor, first: int) -> None:
        """What stored positions from ``first`` on should have changed."""
        for position, (slot, stamp) in enumerate(zip(slots.tolist(), stamps.tolist(), strict=True), start=first):
            virtual_page, offset = divmod(slot, self.size * self.page)
            owner, row = self.places[offset]
            assert owner == self.owners[position], "a slot's owner is not its position's"
            self.model[owner, virtual_page * self.page + row] = stamp

    def shares(self, rank: int, stamps: list[np.ndarray], starts: list[int]) -> list[int]:
        """What ``rank`` should read of several requests' parts, each from its start on."""
        parts = [s[first:][self.owners[first : len(s)] == rank] for s, first in zip(stamps, starts, strict=True)]
        return np.concatenate(parts).tolist()


def stock_write(backend, batch, layer, loc_info, k, v, *scales) -> None:
    """Upstream's path where there is one rank."""
    backend.token_to_kv_pool.kv[batch.out_cache_loc] = k


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """Every rank is in this process; kernels run as their twins, which is faster by far."""
    import sglang.srt.runtime_context as context

    torch.set_num_threads(1)
    monkeypatch.setattr(context, "get_parallel", lambda: here.parallel)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(active, "_layout", None)


def as_rank(ranks: Ranks, rank: int, group=None) -> None:
    here.parallel = SimpleNamespace(dcp_enabled=True, dcp_size=ranks.size, dcp_rank=rank, dcp_group=group)


@dataclass
class Batch:
    """Requests that are read together, and a part of each."""

    table: torch.Tensor  # req_to_token
    rows: torch.Tensor  # of the table, by request
    slots: list[torch.Tensor]
    stamps: list[np.ndarray]
    lens: list[int]
    starts: list[int]
    ends: list[int]

    def joined(self, parts: list, starts: list[int]) -> list[int]:
        """Slots or stamps of all requests' parts from their starts to the batch's ends, one after another."""
        cut = [part[first:end] for part, first, end in zip(parts, starts, self.ends, strict=True)]
        return np.concatenate(cut).tolist()


def gqa(ranks: Ranks, batch: Batch) -> None:
    """The Triton backend: requests as a whole, and from their starts on."""
    from sglang.srt.layers.dcp.layout import get_dcp_lens

    def read(rank: int, lens: torch.Tensor, starts: torch.Tensor | None) -> list[int]:
        def count(lens, start=None):
            return lengths.count_by_blocks(get_dcp_lens, lens, ranks.size, rank, start)

        backend = SimpleNamespace(req_to_token=batch.table, dcp_rank=rank, device="cpu", _dcp_lens=count)
        indptr = torch.zeros(len(lens) + 1, dtype=torch.int32)
        indptr, indices, _ = triton_gqa.plan_kv_indices(backend, batch.rows, lens, indptr, None, starts)
        return ranks.pools[rank].kv[indices[: indptr[-1]]].tolist()

    lens, starts = torch.tensor(batch.lens), torch.tensor(batch.starts)
    for rank in range(ranks.size):
        assert read(rank, lens, None) == ranks.shares(rank, batch.stamps, [0] * len(lens))
        assert read(rank, lens - starts, starts) == ranks.shares(rank, batch.stamps, batch.starts)


def mla_step(ranks: Ranks, batch: Batch) -> None:
    """FlashInfer's decode: requests as a whole."""
    for rank in range(ranks.size):
        as_rank(ranks, rank)
        lens = torch.tensor(batch.lens, dtype=torch.int32)
        indptr = torch.tensor([0, *itertools.accumulate(batch.lens)], dtype=torch.int32)
        stream = torch.cat(batch.slots)
        num_owned = mla_decode.plan_decode(lens, indptr, stream, False, {}, len(lens))
        assert num_owned == indptr[-1]
        got = ranks.pools[rank].kv[reads.read_rows(None, None, stream[:num_owned])]
        assert got.tolist() == ranks.shares(rank, batch.stamps, [0] * len(lens))


def mla_prefixes(ranks: Ranks, batch: Batch) -> None:
    """MLA's extend: prefixes, gathered."""

    def rows(rank: int) -> torch.Tensor:
        sizes, lens = torch.tensor(batch.ends), torch.tensor(batch.lens)
        metadata = mla_gather.own_prefix_rows(
            lambda *args: SimpleNamespace(), lens, sizes, batch.ends, None, batch.rows, batch.table
        )
        return metadata.dcp_local_prefix_kv_indices

    zeros = [0] * len(batch.ends)
    assert gathered(ranks, rows, batch.ends, None) == batch.joined(batch.stamps, zeros)


def mla_chunks(ranks: Ranks, batch: Batch) -> None:
    """MLA's extend: parts of prefixes from anywhere to anywhere, gathered."""
    sizes = [end - first for first, end in zip(batch.starts, batch.ends, strict=True)]
    slots = torch.tensor(batch.joined(batch.slots, batch.starts), dtype=torch.int64)

    def rows(rank: int) -> torch.Tensor:
        own = mla_gather.own_chunk(slots, torch.tensor(batch.starts), torch.tensor(sizes))
        return reads.read_rows(None, None, own)

    assert gathered(ranks, rows, sizes, batch.starts) == batch.joined(batch.stamps, batch.starts)


READERS = (gqa, mla_step, mla_prefixes, mla_chunks)


class Gather:
    """The all-gather of ranks that come one after another: what the last one gets is whole."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def all_gather_into_tensor(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        self.sent.append(tensor.clone())
        if len(self.sent) * len(tensor) == len(output):
            output.copy_(torch.cat(self.sent))


def gathered(ranks: Ranks, own_rows, lens: list[int], starts: list[int] | None) -> list[int]:
    """What MLA's extend has of requests' parts after the all-gather."""
    group, first = Gather(), None if starts is None else torch.tensor(starts)
    for rank, pool in enumerate(ranks.pools):
        as_rank(ranks, rank, group)
        own = pool.kv[own_rows(rank)][:, None, None]
        both = mla_gather.gather_prefix(own, own, torch.tensor(lens), first)
    assert torch.equal(both[..., 0], both[..., 1])
    return both[:, 0, 0].tolist()


class PoolHistory(PageHistory):
    """Histories of a decode server of ``size`` ranks."""

    size: int
    page: int  # tokens of one rank
    num_pages = 10
    chunk_pages = 3

    @initialize()
    def start(self) -> None:
        super().start()
        self.of = {
            block: Ranks(self.size, block, self.page, self.num_pages, 2 * self.longest)
            for block in range(1, self.page + 1)
            if self.page % block == 0
        }
        self.turn = itertools.cycle(itertools.product(self.of, READERS))
        self.copies: list[tuple[Request, dict[int, list[torch.Tensor]]]] = []  # retracted; by block, of each rank

    def with_layouts(self):
        """Each block size, as the one that this process is armed with."""
        for block, ranks in self.of.items():
            active.activate(ranks.layout)
            yield block, ranks

    def note(self, request: Request, start: int) -> None:
        super().note(request, start)
        slots = self.server.slots(request)[start:]
        stamps = torch.tensor(self.stamps_of(request)[start : request.length])
        for _, ranks in self.with_layouts():
            ranks.store(slots, stamps, start)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 7))
    def retract(self, index: int) -> None:
        """A request's KV is copied out, its pages go to others."""
        request = self.running.pop(index % len(self.running))
        slots, copies = self.server.slots(request), {}
        for block, ranks in self.with_layouts():
            rows = [mla_gather.rows_of_run(slots, self.size, rank) for rank in range(self.size)]
            copies[block] = [pool.kv[own].clone() for pool, own in zip(ranks.pools, rows, strict=True)]
        tokens = request.full_untruncated_fill_ids
        self.server.release(request, keep=False)
        self.names += 1
        self.copies.append((Request(self.names, tokens), copies))
        self.saw["retractions"] += 1

    @precondition(lambda self: self.copies)
    @rule()
    def resume(self) -> None:
        """The copy comes back to other pages, behind what the cache has of it."""
        request, copies = self.copies.pop(0)
        hit = self.server.admit(request)
        if not self.server.extend([request], [request.rest]):
            self.server.release(request, keep=False)
            return
        slots, stamps = self.server.slots(request)[hit:], torch.tensor(self.stamps_of(request)[hit:])
        super().note(request, hit)
        for block, ranks in self.with_layouts():
            for rank, pool in enumerate(ranks.pools):
                rows = mla_gather.rows_of_run(slots, self.size, rank)
                pool.kv[rows] = copies[block][rank][ranks.layout.local_len(hit, rank) :]
            ranks.expect(slots, stamps, hit)
        self.running.append(request)
        self.saw["copies that came back"] += 1

    @invariant()
    def every_row_holds_what_it_should(self) -> None:
        """Of every block size."""
        if not hasattr(self, "of"):
            return
        for block, ranks in self.of.items():
            np.testing.assert_array_equal(
                torch.stack([pool.kv for pool in ranks.pools]).numpy(), ranks.model, str(block)
            )

    @invariant()
    def every_reader_reads_its_requests(self) -> None:
        """One reader of one block size after another: on all ranks, all requests."""
        if not hasattr(self, "of") or not (requests := self.requests()):
            return
        block, reader = next(self.turn)
        active.activate(self.of[block].layout)
        launch.INTERPRETED = self.steps % KERNELS_EVERY == 0
        lens = [request.length for request in requests]
        rng = random.Random(self.steps)
        starts = [rng.randint(0, length) for length in lens]
        reader(
            self.of[block],
            Batch(
                table=self.server.table.req_to_token,
                rows=torch.tensor([request.kv.req_pool_idx for request in requests]),
                slots=[self.server.slots(request) for request in requests],
                stamps=[np.array(self.stamps_of(request)[: request.length]) for request in requests],
                lens=lens,
                starts=starts,
                ends=[rng.randint(first, length) for first, length in zip(starts, lens, strict=True)],
            ),
        )


def history(size: int, page: int) -> type[PoolHistory]:
    """Four virtual pages and a part hold the longest prompt, ten not all requests."""
    sizes = {"size": size, "page": page, "page_size": size * page, "longest": 4 * size * page + page // 2}
    return type(f"Pools{size}x{page}", (PoolHistory,), sizes)


@pytest.mark.parametrize("size", [3, 8])
def test_every_row_is_where_dealing_puts_it(size: int) -> None:
    run(history(size, PAGES[0]), steps=40, in_a_history=40)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("size", RANKS)
def test_every_row_is_where_dealing_puts_it_for_ten_thousand_steps(size: int, page: int) -> None:
    found = history(size, page)
    run(found, steps=10_000, in_a_history=100)
    print(f"\nP = {size}, page {page}: {found.taken} steps, {dict(found.saw)}")
    assert set(found.saw) == EVENTS
    assert min(found.saw.values()) > 0
