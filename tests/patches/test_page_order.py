"""The order of free pages, through SGLang's real allocator: runs, launches, syncs, and what stays as it was."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import random
from typing import NamedTuple

import numpy as np
import pytest
import torch

from counting import counted
from hooking import hook
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.dcp.transfer import plan_runs
from sglang_dcp_block.kernels import launch, long_runs
from sglang_dcp_block.kernels.free_runs import fewest_gaps_first
from sglang_dcp_block.patches import active
from sglang_dcp_block.patches.group_points import DECODE_GROUP_POINTS, PREFILL_GROUP_POINTS

P, PAGE = 4, 8


def make_allocator(num_pages: int, page_size: int = PAGE):
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

    return PagedTokenToKVPoolAllocator(
        num_pages * page_size, page_size, dtype=torch.float16, device="cpu", kvcache=None, need_sort=True
    )


def extend(allocator, *requests: tuple[int, int], last: int = -1) -> list[torch.Tensor] | None:
    """Slots of each request, which grows from so many tokens to so many."""
    starts, ends = torch.tensor(requests).T.contiguous()
    out = allocator.alloc_extend(starts, starts, ends, ends, torch.full_like(starts, last), int((ends - starts).sum()))
    return None if out is None else list(out.split((ends - starts).tolist()))


def num_runs(slots: torch.Tensor, start: int, end: int) -> list[int]:
    """Segments that each decode rank gets of a chunk [start, end), into pages that lie side by side there."""
    src = (slots[-start % PAGE :: PAGE] // PAGE).numpy()
    skipped, layout = -(-start // PAGE), DcpLayout(P, PAGE)
    chunk = {"page_size": PAGE, "layout": layout, "src_page_offset": skipped, "num_kv_tokens": end - skipped * PAGE}
    return [len(plan_runs(src, np.arange(-(-end // PAGE // P)), rank=rank, **chunk).lengths) for rank in range(P)]


@pytest.fixture
def prefill(monkeypatch):
    """This process as a prefill server that groups pages."""
    monkeypatch.setattr(active, "group_pages", P)
    monkeypatch.setattr(active, "_layout", None)
    hook(monkeypatch, PREFILL_GROUP_POINTS)


@pytest.fixture
def decode(monkeypatch):
    """This process as its decode server."""
    monkeypatch.setattr(active, "group_pages", P)
    monkeypatch.setattr(active, "_layout", DcpLayout(P, PAGE))
    hook(monkeypatch, DECODE_GROUP_POINTS)


@pytest.mark.parametrize(
    "chunk", [(0, 40 * PAGE), (0, 37 * PAGE + 3), (5 * PAGE, 41 * PAGE), (5 * PAGE - 2, 41 * PAGE - 1)]
)
def test_a_chunk_is_one_run_a_rank_in_an_unfragmented_pool(prefill, chunk: tuple[int, int]) -> None:
    (slots,) = extend(make_allocator(100), chunk, last=99 * PAGE + chunk[0] % PAGE - 1)
    assert num_runs(slots, *chunk) == [1] * P


def test_a_chunk_that_takes_all_pages_stays_grouped(prefill) -> None:
    """SGLang's bound then asks for a merge, although nothing was freed."""
    (slots,) = extend(make_allocator(40), (0, 40 * PAGE))
    assert num_runs(slots, 0, 40 * PAGE) == [1] * P


def test_without_it_each_page_is_a_run() -> None:
    (slots,) = extend(make_allocator(100), (0, 40 * PAGE))
    assert num_runs(slots, 0, 40 * PAGE) == [10] * P


def test_requests_of_a_batch_are_grouped_each(prefill) -> None:
    chunks = [(0, 9 * PAGE), (3 * PAGE, 3 * PAGE + 1), (2 * PAGE, 30 * PAGE)]
    for chunk, slots in zip(chunks, extend(make_allocator(100), *chunks), strict=True):
        assert max(num_runs(slots, *chunk)) == 1


def test_a_pool_with_gaps_gives_at_most_a_run_more_for_each(prefill) -> None:
    rng = random.Random(0)
    for _ in range(20):
        allocator = make_allocator(400)
        held = allocator.alloc(400 * PAGE)
        for page in rng.sample(range(400), 200):
            allocator.free(held[page * PAGE : (page + 1) * PAGE])
        allocator.merge_and_sort_free()
        taken = allocator.free_pages[:64]
        fragments = 1 + int((taken[1:] != taken[:-1] + 1).sum())
        (slots,) = extend(allocator, (0, 64 * PAGE))
        runs = num_runs(slots, 0, 64 * PAGE)
        assert sum(runs) <= P + fragments - 1
        assert sorted((slots[::PAGE] // PAGE).tolist()) == sorted(taken.tolist())


def test_the_pages_taken_and_the_pages_left_are_those_of_stock(monkeypatch) -> None:
    """As long as nothing is merged; a merge hands out others, on purpose."""
    batches = [[(0, 13 * PAGE), (8, 9 * PAGE + 5)], [(0, 3)], [(5 * PAGE, 21 * PAGE)]]
    stock = make_allocator(100)
    expected = [[sorted(set((slots // PAGE).tolist())) for slots in extend(stock, *batch)] for batch in batches]
    monkeypatch.setattr(active, "group_pages", P)
    hook(monkeypatch, PREFILL_GROUP_POINTS)
    grouped = make_allocator(100)
    assert [
        [sorted(set((slots // PAGE).tolist())) for slots in extend(grouped, *batch)] for batch in batches
    ] == expected
    assert grouped.free_pages.tolist() == stock.free_pages.tolist()


def test_a_merge_happens_when_stock_would_merge_and_before_grouping(prefill) -> None:
    allocator = make_allocator(40)
    (held,) = extend(allocator, (0, 30 * PAGE))
    allocator.free(held)
    assert extend(allocator, (0, 2 * PAGE)) is not None
    assert allocator.num_staged_pages == 30, "merged although the list was long enough"
    (slots,) = extend(allocator, (0, 30 * PAGE))  # more than the 8 pages that are left
    assert num_runs(slots, 0, 30 * PAGE) == [1] * P


def test_too_few_pages_change_nothing(prefill) -> None:
    allocator = make_allocator(20)
    before = allocator.free_pages.tolist()
    assert extend(allocator, (0, 21 * PAGE)) is None
    assert allocator.free_pages.tolist() == before


class Allocation(NamedTuple):
    merged: bool
    pages: int
    launches: int
    syncs: int
    slots: list[int]


def history(steps: int) -> list[Allocation]:
    """Of a server whose pool is nearly full: batches come, and some of their requests go."""
    rng, allocator, held, found = random.Random(0), make_allocator(52), [], []
    for _ in range(steps):
        while len(held) > 2:
            allocator.free(held.pop(rng.randrange(len(held))))
        longest = rng.choice([1, 10]) * PAGE
        chunks = [(0, rng.randint(1, longest)) for _ in range(rng.randint(1, 3))]
        staged = bool(allocator.staged_pages)
        with counted() as count:
            taken = extend(allocator, *chunks)
        assert taken is not None
        held += taken
        pages, merged = sum(-(-end // PAGE) for _, end in chunks), staged and not allocator.staged_pages
        found.append(Allocation(merged, pages, count.total, count.syncs, torch.cat(taken).tolist()))
    return found


@pytest.mark.parametrize(("longest", "merge"), [(long_runs.MAX_PAGES, 1), (3, 7)])
def test_cost_on_a_prefill_server(monkeypatch, longest: int, merge: int) -> None:
    """Counted against SGLang's own, the same history: a launch more where a batch takes more than P pages, one more
    where it merges freed pages, so at most two, but for very many pages; no host sync."""
    monkeypatch.setattr(long_runs, "MAX_PAGES", longest)
    stock = history(80)
    monkeypatch.setattr(active, "group_pages", P)
    hook(monkeypatch, PREFILL_GROUP_POINTS)
    added: dict[tuple[bool, bool], set[int]] = {}
    for own, ours in zip(stock, history(80), strict=True):
        assert (own.merged, own.pages, own.syncs) == (ours.merged, ours.pages, ours.syncs)
        added.setdefault((own.merged, own.pages > P), set()).add(ours.launches - own.launches)
    assert added == {(False, False): {0}, (False, True): {1}, (True, False): {merge}, (True, True): {1 + merge}}
    assert min(own.launches for own in stock) > 0, "the counter sees nothing"


def test_kernels_and_their_twins_hand_out_the_same_pages(prefill, monkeypatch) -> None:
    by_kernels = [allocation.slots for allocation in history(80)]
    monkeypatch.setattr(launch, "INTERPRETED", False)
    assert [allocation.slots for allocation in history(80)] == by_kernels


def test_cost_on_a_decode_server() -> None:
    pages = torch.tensor([2, 3, 9])
    with counted() as count:
        fewest_gaps_first(pages, 2)
    assert count.syncs == 0
    assert count.total <= 18, count.launches


def runs_of(pages: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for page in pages:
        if runs and runs[-1][-1] + 1 == page:
            runs[-1].append(page)
        else:
            runs.append([page])
    return runs


@pytest.mark.parametrize("seed", range(20))
def test_fewest_gaps_first(seed: int) -> None:
    rng = random.Random(seed)
    pages = sorted(rng.sample(range(60), rng.randrange(1, 50)))
    taken = rng.randrange(1, len(pages) + 1)
    windows = [pages[i : i + taken] for i in range(len(pages) - taken + 1)]
    best = min(windows, key=lambda window: len(runs_of(window)))
    out = fewest_gaps_first(torch.tensor(pages), taken).tolist()
    assert out == best + [page for page in pages if page not in best]
    for wrong in (0, len(pages) + 1):
        with pytest.raises(ValueError, match="num_taken: expected 1 to"):
            fewest_gaps_first(torch.tensor(pages), wrong)


def test_a_decode_server_hands_out_ascending_pages_without_the_flag() -> None:
    """SGLang's own order: rows ascend in a request, however pages were freed."""
    rng, allocator = random.Random(1), make_allocator(64, PAGE * P)
    held = [extend(allocator, (0, tokens))[0] for tokens in (300, 700, 100, 500, 200)]
    rng.shuffle(held)
    for slots in held[:4]:
        allocator.free(slots)
    (slots,) = extend(allocator, (0, 40 * PAGE * P))
    pages = (slots[:: PAGE * P] // (PAGE * P)).tolist()
    assert pages == sorted(pages)


def test_a_decode_server_takes_the_run_that_holds_a_request(decode) -> None:
    size = PAGE * P
    allocator = make_allocator(30, size)
    held = allocator.alloc(30 * size)
    for page in (1, 4, 5, 9, 10, 11, 12, 20):
        allocator.free(held[(page - 1) * size : page * size])
    (slots,) = extend(allocator, (0, 4 * size))
    assert (slots[::size] // size).tolist() == [9, 10, 11, 12]
    assert allocator.free_pages.tolist() == [1, 4, 5, 20]
    lens = torch.tensor([4 * size + 1])
    allocator.alloc_decode(lens, lens, slots[-1:])  # SGLang's own
    assert allocator.free_pages.tolist() == [4, 5, 20]
