"""All ranks are armed alike, or none serves: within a node by their reports, across nodes through the job's store."""

from __future__ import annotations

import re
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore

from sglang_dcp_block.patches import agreement
from sglang_dcp_block.patches.agreement import REPORT_KEY, DisagreementError, Report

DIGEST = "00112233aabbccdd"
OTHER = "ffffffffffffffff"


def info(**changes: Any) -> dict[str, Any]:
    """A scheduler's start-up info."""
    report = Report(
        **{
            "block_size": 8,
            "dcp_size": 2,
            "page_size": 8,
            "digest": DIGEST,
            "plugin_digest": DIGEST,
            "capacity_tokens": 512,
            "rows_per_rank": 256,
            **changes,
        }
    )
    return {"status": "ready", "max_total_num_tokens": 512, REPORT_KEY: report.as_info()}


STOCK = {"status": "ready", "max_total_num_tokens": 512}


def refused(text: str) -> Any:
    return pytest.raises(DisagreementError, match=re.escape(text))


class TestGrouping:
    def test_all_alike(self) -> None:
        agreement.require_grouping([{**STOCK, "dcp_group_pages": 8}] * 3, 8)

    @pytest.mark.parametrize(("other", "got"), [({}, "None"), ({"dcp_group_pages": 4}, "4")])
    def test_another(self, other: dict[str, Any], got: str) -> None:
        infos = [{**STOCK, "dcp_group_pages": 8}, {**STOCK, **other}]
        with refused(
            f"expected all schedulers to group pages for 8 decode ranks, got {got} from scheduler 1. Give every"
        ):
            agreement.require_grouping(infos, 8)


class TestMerged:
    def test_one_report_for_all(self) -> None:
        merged = agreement.merged_report([info(), info(), info(num_ranks=2)])
        assert merged == {**info()[REPORT_KEY], "num_ranks": 4}

    @pytest.mark.parametrize("infos", [[], [STOCK], [STOCK, info()]])
    def test_the_first_reported_nothing(self, infos: list[dict[str, Any]]) -> None:
        with refused("scheduler 0 reported no block layout: the plugin is not loaded in it"):
            agreement.merged_report(infos)

    @pytest.mark.parametrize("missing", [1, 2, 3])
    def test_another_reported_nothing(self, missing: int) -> None:
        infos = [info() for _ in range(4)]
        infos[missing] = STOCK
        with refused(f"scheduler {missing} reported no block layout: the plugin is not loaded in it"):
            agreement.merged_report(infos)

    @pytest.mark.parametrize(
        ("change", "shown"),
        [
            ({"block_size": 16}, f"block size 16, dcp size 2, digest {DIGEST}"),
            ({"dcp_size": 4}, f"block size 8, dcp size 4, digest {DIGEST}"),
            ({"digest": OTHER}, f"block size 8, dcp size 2, digest {OTHER}"),
        ],
    )
    def test_one_is_armed_otherwise(self, change: dict[str, Any], shown: str) -> None:
        want = f"block size 8, dcp size 2, digest {DIGEST}"
        with refused(f"scheduler 2 is armed with {shown}, scheduler 0 with {want}"):
            agreement.merged_report([info(), info(), info(**change)])

    def test_the_reason_says_what_to_do(self) -> None:
        with refused("give every node the same --dcp-block-size, and look for a plugin error in that rank's log."):
            agreement.merged_report([STOCK])


class TestRequired:
    def test_agree(self) -> None:
        agreement.require_agreement([info(), info()], 8, DIGEST, 2)
        agreement.require_agreement([info(num_ranks=4)], 8, DIGEST, 4)

    @pytest.mark.parametrize(("block_size", "digest"), [(16, DIGEST), (8, OTHER), (1, DIGEST)])
    def test_all_are_armed_with_something_else(self, block_size: int, digest: str) -> None:
        with refused(
            f"expected block size {block_size} and digest {digest}, schedulers are armed with block size 8, dcp size 2, "
            f"digest {DIGEST}"
        ):
            agreement.require_agreement([info(), info()], block_size, digest, 2)

    @pytest.mark.parametrize("num_ranks", [1, 3])
    def test_too_few_or_too_many(self, num_ranks: int) -> None:
        with refused(f"expected reports of {num_ranks} schedulers on this node, got 2"):
            agreement.require_agreement([info(), info()], 8, DIGEST, num_ranks)

    @pytest.mark.parametrize("infos", [[], [STOCK], [info(), STOCK]])
    def test_silence(self, infos: list[dict[str, Any]]) -> None:
        with refused("reported no block layout"):
            agreement.require_agreement(infos, 8, DIGEST, 2)


def world(digests: list[str | None], timeout: float, delays: dict[int, float] | None = None) -> dict[int, Any]:
    """One thread a rank, each with a client of one store; None posts nothing. Rank -> (error or None, seconds)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    outcomes: dict[int, Any] = {}

    def rank_of(rank: int, digest: str) -> None:
        client = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
        store = PrefixStore("default_pg", PrefixStore("0", client))
        time.sleep((delays or {}).get(rank, 0))
        began = time.monotonic()
        try:
            agreement.require_world_agreement(store, rank, len(digests), digest, timedelta(seconds=timeout))
            error = None
        except DisagreementError as refusal:
            error = str(refusal)
        outcomes[rank] = (error, time.monotonic() - began)

    threads = [threading.Thread(target=rank_of, args=(r, d)) for r, d in enumerate(digests) if d is not None]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout + 30)
        assert not thread.is_alive(), "a rank waits for ever"
    del server
    return outcomes


class TestWorld:
    def test_agree(self) -> None:
        assert {rank: error for rank, (error, _) in world([DIGEST] * 3, 30).items()} == dict.fromkeys(range(3))

    def test_a_late_rank_is_waited_for(self) -> None:
        outcomes = world([DIGEST] * 3, 30, delays={2: 1.0})
        assert all(error is None for error, _ in outcomes.values())
        assert outcomes[0][1] >= 0.5

    def test_one_differs_and_every_rank_says_so(self) -> None:
        outcomes = world([DIGEST, OTHER, DIGEST], 30)
        errors = {rank: error for rank, (error, _) in outcomes.items()}
        assert f"rank 0 is armed with digest {DIGEST}, other ranks with {{1: '{OTHER}'}}" in errors[0]
        assert f"rank 1 is armed with digest {OTHER}, other ranks with {{0: '{DIGEST}', 2: '{DIGEST}'}}" in errors[1]
        assert f"other ranks with {{1: '{OTHER}'}}" in errors[2]
        assert all(seconds < 10 for _, seconds in outcomes.values())

    @pytest.mark.parametrize(
        ("digests", "missing"),
        [([DIGEST, None, DIGEST], "[1]"), ([DIGEST, None, None], "[1, 2]"), ([None, OTHER, DIGEST], "[0]")],
    )
    def test_missing_ranks_are_named_in_time(self, digests: list[str | None], missing: str) -> None:
        outcomes = world(digests, 1.5)
        assert len(outcomes) == 3 - digests.count(None)
        for error, seconds in outcomes.values():
            assert f"ranks {missing} reported no block layout within 2 s: expected all 3 ranks to be armed" in error
            assert 1.0 <= seconds < 6
