"""The register against the installed SGLang: it fits, looking changes nothing, and arming leaves no way around a hook.

Checking and arming happen in one process of their own (arm_real.py).
"""

from __future__ import annotations

from typing import Any

import pytest
from children import run_script

from sglang_dcp_block.patches.points import all_points
from sglang_dcp_block.patches.register import Kind

HOOKED = [pytest.param(p, id=p.target.rpartition("srt.")[2]) for p in all_points() if p.hook is not None]


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return run_script("arm_real.py", SGLANG_PLUGINS="dcp_block_cpu")


def test_checking_imports_nothing_of_sglang(report: dict[str, Any]) -> None:
    assert report["check"]["imported"] == []


def test_text_and_live_object_have_the_same_fingerprint(report: dict[str, Any]) -> None:
    assert len(report["fingerprints"]) == len(all_points())
    assert {target: pair for target, pair in report["fingerprints"].items() if len(set(pair)) != 1} == {}


@pytest.mark.parametrize("point", HOOKED)
def test_the_hook_takes_every_call_that_the_target_takes(report: dict[str, Any], point: Any) -> None:
    assert report["signatures"][point.target]["refused"] == []


@pytest.mark.parametrize("point", [p for p in HOOKED if p.values[0].kind is Kind.REPLACE])
def test_a_replacement_keeps_names_order_and_defaults(report: dict[str, Any], point: Any) -> None:
    signature = report["signatures"][point.target]
    assert signature["hook"] == signature["target"]


def test_armed_once_however_often(report: dict[str, Any]) -> None:
    depths = {(kind, report["wrappers"][target]) for target, kind in report["points"]}
    assert {depth for kind, depth in depths if kind != "relies"} == {1}
    assert {depth for kind, depth in depths if kind == "relies"} == {0}


def test_nothing_but_our_wrappers_holds_an_original(report: dict[str, Any]) -> None:
    """SGLang's registry rebinds what modules imported by name; a table or a class attribute would keep the original."""
    assert report["stale"] == {}
