"""Numbers in Prometheus: made where SGLang exports metrics, nowhere else; refusals by one of a few reasons."""

from __future__ import annotations

import pytest
from children import run_script

from sglang_dcp_block.patches.peer_refusals import REASONS, Reason, RefusedBy


@pytest.mark.parametrize(
    ("enable_metrics", "folder", "names"),
    [(False, False, 0), (True, False, 9), (True, True, 9)],
    ids=["not exported", "exported by one process", "exported by several"],
)
def test_metrics_are_made_only_where_sglang_exports_any(tmp_path, enable_metrics, folder, names):
    environ = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)} if folder else {}
    seen = run_script("prometheus_cases.py", {"enable_metrics": enable_metrics}, **environ)
    assert seen["imported_before"] is False, "SGLang names the folder that its processes share first"
    assert seen["complaints"] == []
    assert len(seen["names"]) == names
    assert bool(list(tmp_path.glob("counter_*.db"))) == folder
    want = {"refusals": 2.0, "segments": 3.0, "bytes": 300.0} if enable_metrics else {}
    assert seen["samples"] == want, "read as SGLang's HTTP process reads them"
    at_zero = ["no pack buffer", "draft heads", "request", "transport", "cancelled", *REASONS[RefusedBy.DECODE]]
    assert seen["reasons"] == (sorted(at_zero) if enable_metrics else [])


def test_every_reason_is_shown_by_one_side_or_both():
    assert {reason for reasons in REASONS.values() for reason in reasons} == set(Reason)
    assert all(len(set(reasons)) == len(reasons) for reasons in REASONS.values())


def test_a_process_that_is_no_server_counts_nothing():
    assert run_script("prometheus_cases.py", {})["names"] == []
