"""Law: with blocks of one token, the plan is SGLang's own; and it costs blocks where SGLang's costs tokens."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.disaggregation.common.utils import build_dcp_token_transfer_plan, group_concurrent_contiguous

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.dcp.transfer import TransferRuns, plan_replicated_runs, plan_runs


def grouped(src: np.ndarray, dst: np.ndarray) -> list[tuple[int, int, int]]:
    """Upstream's rows, grouped by upstream."""
    return [(s[0], d[0], len(s)) for s, d in zip(*group_concurrent_contiguous(src, dst), strict=True)]


def triples(runs: TransferRuns) -> list[tuple[int, int, int]]:
    return list(zip(runs.src_rows.tolist(), runs.dst_rows.tolist(), runs.lengths.tolist(), strict=True))


@settings(deadline=None, max_examples=200)
@given(st.integers(2, 8), st.sampled_from([1, 2, 4, 16, 64]), st.integers(0, 3), st.integers(0, 9), st.data())
def test_blocks_of_one_token(P: int, page_size: int, prefix_pages: int, offset: int, data: st.DataObject) -> None:
    num_src = data.draw(st.integers(0, 9))
    tokens = data.draw(st.one_of(st.none(), st.integers(0, num_src * page_size)))
    src = np.array(data.draw(st.permutations(range(1, 15)))[:num_src], np.int32)
    num_dst = -(-(offset + num_src) // P)
    dst = np.array(data.draw(st.permutations(range(1, 25)))[:num_dst], np.int32)
    chunk = {"src_page_offset": offset, "num_kv_tokens": tokens}
    prefix = prefix_pages * P * page_size
    for rank in range(P):
        theirs = build_dcp_token_transfer_plan(
            src, dst, physical_page_size=page_size, dcp_size=P, dcp_rank=rank, decode_prefix_len=prefix, **chunk
        )
        ours = plan_runs(
            src, dst, page_size=page_size, layout=DcpLayout(P, 1), rank=rank, decode_prefix_len=prefix, **chunk
        )
        assert triples(ours) == grouped(theirs.target_src_token_indices, theirs.target_dst_token_indices)
        drafts = plan_replicated_runs(src, dst, page_size=page_size, dcp_size=P, **chunk)
        assert triples(drafts) == grouped(theirs.draft_src_token_indices, theirs.draft_dst_token_indices)


def fastest(plan, repeats: int) -> float:
    """Seconds of the fastest of several calls: other processes may have disturbed the rest."""
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        plan()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


@pytest.mark.parametrize("tokens", [65536, 131072])
def test_planning_costs_blocks_and_not_tokens(tokens: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Both plans for one rank of eight, B = 64, up to the address of each piece; measured in turns."""
    page_size, P, layout = 64, 8, DcpLayout(8, 64)
    rng = np.random.default_rng(0)
    src = rng.permutation(tokens // page_size).astype(np.int32)
    dst = rng.permutation(tokens // page_size // P).astype(np.int32)

    def theirs() -> None:
        plan = build_dcp_token_transfer_plan(src, dst, physical_page_size=page_size, dcp_size=P, dcp_rank=3)
        group_concurrent_contiguous(plan.target_src_token_indices, plan.target_dst_token_indices)

    def ours() -> None:
        plan_runs(src, dst, page_size=page_size, layout=layout, rank=3)

    ours_s, theirs_s = float("inf"), float("inf")
    for _ in range(5):
        theirs_s, ours_s = min(theirs_s, fastest(theirs, 1)), min(ours_s, fastest(ours, 20))
    with capsys.disabled():
        print(
            f"\nplan of {tokens} tokens: SGLang {theirs_s * 1e3:.2f} ms, blocks {ours_s * 1e3:.3f} ms, "
            f"{theirs_s / ours_s:.0f} times faster"
        )
    assert theirs_s > 20 * ours_s
