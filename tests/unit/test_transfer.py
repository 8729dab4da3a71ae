"""Transfer runs against a walk over every token, and the laws that runs, segments and batches obey."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.dcp.transfer import (
    TransferRuns,
    batches,
    join,
    plan_replicated_runs,
    plan_runs,
    prefers_direct,
    segments,
)

laws = settings(max_examples=200)


@dataclass(frozen=True)
class Request:
    """A request that goes from random pages to random pages."""

    P: int
    B: int
    page_size: int
    prefix: int  # tokens that the decode server has
    tokens: int  # behind the prefix
    src_pages: list[int]
    dst_pages: list[int]
    cuts: list[int]  # source pages at which a chunk begins, from 0 on

    def chunks(self) -> list[tuple[list[int], int, int]]:
        """(source pages, pages before them, tokens) of each chunk."""
        edges = [*self.cuts, len(self.src_pages)]
        return [
            (self.src_pages[a:b], a, min(self.tokens - a * self.page_size, (b - a) * self.page_size))
            for a, b in itertools.pairwise(edges)
        ]

    def plan(self, rank: int, src_pages: list[int], offset: int, tokens: int) -> TransferRuns:
        return plan_runs(
            np.array(src_pages, np.int32),
            np.array(self.dst_pages, np.int32),
            page_size=self.page_size,
            layout=DcpLayout(self.P, self.B),
            rank=rank,
            src_page_offset=offset,
            decode_prefix_len=self.prefix,
            num_kv_tokens=tokens,
        )


def page_table(draw: st.DrawFn, num_pages: int) -> list[int]:
    """Distinct pages: now scattered, now in stretches that follow each other."""
    pool = range(1, 2 * num_pages + 2)
    if draw(st.booleans()):
        return draw(st.permutations(pool))[:num_pages]
    first = draw(st.integers(1, num_pages + 1))
    return list(range(first, first + num_pages))


@st.composite
def requests(draw: st.DrawFn, blocks_divide_pages: bool = True) -> Request:
    P, page_size = draw(st.integers(1, 8)), draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]))
    if blocks_divide_pages:
        B = draw(st.sampled_from([b for b in range(1, page_size + 1) if page_size % b == 0]))
    else:
        B = draw(st.integers(1, 20))
    virtual_page = P * math.lcm(page_size, B)
    prefix = virtual_page * draw(st.integers(0, 2))
    tokens = draw(st.one_of(st.integers(0, 3 * page_size), st.integers(0, 5 * P * page_size)))
    num_src = -(-tokens // page_size)
    # A rank's rows behind the prefix, at most whole cycles of blocks.
    num_dst = -(-(-(-tokens // (P * B)) * B) // page_size)
    cuts = sorted({0, *draw(st.lists(st.integers(0, max(num_src - 1, 0)), max_size=3))})
    return Request(P, B, page_size, prefix, tokens, page_table(draw, num_src), page_table(draw, num_dst), cuts)


def triples(runs: TransferRuns) -> list[tuple[int, int, int]]:
    return list(zip(runs.src_rows.tolist(), runs.dst_rows.tolist(), runs.lengths.tolist(), strict=True))


def check_against_the_walk(request: Request) -> None:
    """Runs are the walked rows, joined wherever they can be; over ranks and chunks each token goes out once."""
    received: Counter[tuple[int, int]] = Counter()
    sent: Counter[int] = Counter()
    for rank in range(request.P):
        for src_pages, offset, tokens in request.chunks():
            runs = request.plan(rank, src_pages, offset, tokens)
            walked = reference.transfer_rows(
                src_pages,
                request.dst_pages,
                rank,
                request.P,
                request.B,
                request.page_size,
                request.prefix,
                offset,
                tokens,
            )
            assert triples(runs) == reference.joined_rows(walked)
            assert runs.num_rows == len(walked)
            src, dst = (rows.tolist() for rows in runs.rows())
            assert list(zip(src, dst, strict=True)) == walked
            sent.update(src)
            received.update((rank, row) for row in dst)
    every_row = [page * request.page_size + i for page in request.src_pages for i in range(request.page_size)]
    assert sent == Counter(every_row[: request.tokens])
    assert set(received.values()) <= {1}, "no destination row is written twice"


@laws
@given(requests())
def test_runs_are_the_walked_rows(request: Request) -> None:
    check_against_the_walk(request)


@laws
@given(requests(blocks_divide_pages=False))
def test_runs_of_blocks_that_straddle_pages(request: Request) -> None:
    check_against_the_walk(request)


@laws
@given(requests())
def test_few_runs_on_any_page_table(request: Request) -> None:
    for rank in range(request.P):
        for src_pages, offset, tokens in request.chunks():
            if request.P > 1:
                num_runs = len(request.plan(rank, src_pages, offset, tokens).lengths)
                assert num_runs <= -(-tokens // (request.P * request.B))


@laws
@given(requests())
def test_replicated_runs_are_the_walked_rows(request: Request) -> None:
    """The draft pool: every rank, every token."""
    for src_pages, offset, tokens in request.chunks():
        virtual_page = request.page_size * request.P
        num_dst = -(-(offset * request.page_size + tokens) // virtual_page)
        dst_pages = [3, 4, 1, 9, 8, 2, 7, 12, 13, 14, 5, 11, 20, 21, 22, 23, 30][:num_dst]
        runs = plan_replicated_runs(
            src_pages,
            dst_pages,
            page_size=request.page_size,
            dcp_size=request.P,
            src_page_offset=offset,
            num_kv_tokens=tokens,
        )
        walked = reference.replicated_rows(src_pages, dst_pages, request.P, request.page_size, offset, tokens)
        assert len(walked) == tokens
        assert triples(runs) == reference.joined_rows(walked)


@laws
@given(requests(), st.integers(1, 3), st.integers(1, 4), st.integers(-1, 6))
def test_segments_and_batches_are_the_runs_in_every_layer(
    request: Request, layers: int, width: int, limit: int
) -> None:
    runs = request.plan(0, *request.chunks()[0])
    src_ptrs = [2**63 + (layer << 40) for layer in range(layers)]  # addresses use all 64 bits
    dst_ptrs = [7 + (layer << 50) for layer in range(layers)]
    widths = [width + layer for layer in range(layers)]
    expected = [
        (s + src * w, d + dst * w, n * w)
        for s, d, w in zip(src_ptrs, dst_ptrs, widths, strict=True)
        for src, dst, n in triples(runs)
    ]
    whole = segments(runs, src_ptrs, dst_ptrs, widths)
    assert whole.blocks() == expected
    assert join([segments(runs, *one) for one in zip(src_ptrs, dst_ptrs, widths, strict=True)]).blocks() == expected
    cut = list(batches(whole, limit))
    assert [block for batch in cut for block in batch.blocks()] == expected
    assert all(len(batch) > 0 for batch in cut)
    if limit > 0:
        assert all(len(batch) == limit for batch in cut[:-1])
        assert all(len(batch) <= limit for batch in cut)
    else:
        assert len(cut) == bool(expected)


class TestOwnerGroupedPages:
    """Where all pages of one rank lie side by side on the prefill server, one chunk is one run a layer."""

    def test_blocks_of_a_page(self) -> None:
        # Logical pages 0, 1, 2, ... belong to ranks 0, 1, 0, 1, ...: rank 0's in pages 10-13, rank 1's in 14-17.
        src_pages = [10, 14, 11, 15, 12, 16, 13, 17]
        for rank, first in ((0, 10), (1, 14)):
            runs = plan_runs(src_pages, [3, 4, 5, 6], page_size=8, layout=DcpLayout(2, 8), rank=rank)
            assert triples(runs) == [(first * 8, 24, 32)]

    def test_a_border_on_the_decode_side_alone_cuts(self) -> None:
        runs = plan_runs([10, 14, 11, 15], [3, 5], page_size=8, layout=DcpLayout(2, 8), rank=0)
        assert triples(runs) == [(80, 24, 8), (88, 40, 8)]


class TestZeroTokens:
    def test_a_rank_that_owns_nothing(self) -> None:
        runs = plan_runs([4], [9], page_size=16, layout=DcpLayout(8, 16), rank=3, num_kv_tokens=5)
        assert triples(runs) == []
        assert runs.num_rows == 0
        assert [len(part) for part in (*runs.rows(), *batches(segments(runs, [1, 2], [3, 4], 8), 4))] == [0, 0]

    def test_needs_no_pages(self) -> None:
        assert triples(plan_runs([4], [], page_size=16, layout=DcpLayout(8, 16), rank=3, num_kv_tokens=5)) == []
        assert triples(plan_runs([], [], page_size=16, layout=DcpLayout(8, 16), rank=0)) == []
        assert triples(plan_replicated_runs([], [], page_size=16, dcp_size=8, src_page_offset=3)) == []


class TestKnownFaults:
    """Faults that others met, as concrete values."""

    def test_a_tail_behind_a_cached_prefix_is_dealt_out(self) -> None:
        """Page 64, P = 8, the decode server holds 512 tokens, 137 more come in two chunks."""
        layout, seen = DcpLayout(8, 64), Counter[int]()
        for rank in range(8):
            for src_pages, offset, tokens in (([20, 31], 0, 128), ([22], 2, 9)):
                runs = plan_runs(
                    src_pages, [5], page_size=64, layout=layout, rank=rank, src_page_offset=offset, decode_prefix_len=512,
                    num_kv_tokens=tokens,
                )  # fmt: skip
                seen.update(runs.rows()[0].tolist())
                expected = {(0, 0): [(1280, 320, 64)], (1, 0): [(1984, 320, 64)], (2, 2): [(1408, 320, 9)]}
                assert triples(runs) == expected.get((rank, offset), [])
        assert seen == Counter([*range(1280, 1344), *range(1984, 2048), *range(1408, 1417)])

    def test_a_request_shorter_than_a_block(self) -> None:
        layout = DcpLayout(8, 64)
        lens = [plan_runs([1], [1], page_size=64, layout=layout, rank=r, num_kv_tokens=1).num_rows for r in range(8)]
        assert lens == [1, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"decode_prefix_len": 100},
            r"decode_prefix_len: expected a multiple of 64 tokens \(a page of 16 on each of 4",
        ),
        ({"decode_prefix_len": -64}, r"decode_prefix_len: expected a multiple of 64 tokens .* got -64"),
        ({"decode_prefix_len": 16}, r"decode_prefix_len: .* blocks of 8\), got 16"),
        ({"num_kv_tokens": 65}, "src_pages: expected 5 pages or more for 65 tokens, got 4"),
        ({"num_kv_tokens": -1}, "num_kv_tokens: expected 0 tokens or more, got -1"),
        ({"src_page_offset": -1}, "src_page_offset: expected 0 pages or more, got -1"),
        ({"src_page_offset": 4}, "dst_pages: expected 2 pages or more for 32 rows, got 1"),
        ({"dst_pages": []}, "dst_pages: expected 1 pages or more for 16 rows, got 0"),
        ({"src_pages": [5, -1, 6, 7]}, "src_pages: expected page ids of 0 or more, got -1"),
        ({"dst_pages": [-2]}, "dst_pages: expected page ids of 0 or more, got -2"),
        ({"page_size": 0}, "page_size: expected 1 row or more, got 0"),
        ({"rank": 4}, r"rank: expected an integer in \[0, 4\), got 4"),
    ],
)
def test_errors_say_what_was_expected(change: dict, message: str) -> None:
    good = {
        "src_pages": [5, 3, 6, 7], "dst_pages": [2], "page_size": 16, "layout": DcpLayout(4, 8), "rank": 1
    }  # fmt: skip
    assert plan_runs(**good).num_rows == 16
    with pytest.raises(ValueError, match=message):
        plan_runs(**{**good, **change})


def test_a_prefix_holds_whole_cycles_of_blocks_that_straddle_pages_too() -> None:
    pages = {"src_pages": [1], "dst_pages": [2], "page_size": 16, "layout": DcpLayout(4, 24), "rank": 0}
    assert plan_runs(**pages, decode_prefix_len=192).num_rows == 16
    with pytest.raises(ValueError, match="decode_prefix_len: expected a multiple of 192 tokens"):
        plan_runs(**pages, decode_prefix_len=64)


def test_a_draft_pool_needs_pages_for_every_token() -> None:
    with pytest.raises(ValueError, match="dst_pages: expected 2 pages or more for 80 slots, got 1"):
        plan_replicated_runs([5, 3, 6, 7], [2], page_size=16, dcp_size=4, src_page_offset=1)


def test_layers_must_pair_up() -> None:
    runs = TransferRuns(np.arange(1), np.arange(1), np.ones(1, np.int64))
    with pytest.raises(ValueError, match="expected one for each of the 2 sources, got 1 and 1"):
        segments(runs, [1, 2], [3], 8)
    with pytest.raises(ValueError, match="expected one for each of the 3 sources, got 3 and 2"):
        segments(runs, [1, 2, 3], [3, 4, 5], [8, 8])


@pytest.mark.parametrize(
    ("P", "B", "token_bytes", "direct"),
    [(8, 64, 128, True), (8, 64, 127, False), (8, 1, 8192, True), (2, 8, 1023.5, False), (1, 1, 1, True)],
)
def test_long_blocks_go_directly(P: int, B: int, token_bytes: float, direct: bool) -> None:
    assert prefers_direct(DcpLayout(P, B), token_bytes, threshold=8192) is direct
