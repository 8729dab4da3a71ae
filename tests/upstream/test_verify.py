"""Verification counts what ran: nothing at all is no success."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from upstream import verify


@pytest.mark.parametrize(
    ("attributes", "want", "good"),
    [
        ('tests="5" failures="0" errors="0" skipped="1"', verify.Count(4, 0, 1), True),
        ('tests="5" failures="1" errors="1" skipped="0"', verify.Count(3, 2, 0), False),
        ('tests="0" failures="0" errors="0" skipped="0"', verify.Count(0, 0, 0), False),
        ('tests="2" failures="0" errors="0" skipped="2"', verify.Count(0, 0, 2), False),
    ],
)
def test_counts(tmp_path, attributes, want, good):
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite {attributes}/></testsuites>")
    assert verify.count(report) == want
    assert want.is_good is good


def test_the_trees_package_comes_first_and_the_plugin_stays_out(tmp_path):
    environ = verify.environment(tmp_path, {"PYTHONPATH": "/kept", "SGLANG_PLUGINS": "dcp_block"})
    path = environ["PYTHONPATH"].split(os.pathsep)
    assert path.index(str(tmp_path / "python")) < path.index("/kept")
    assert environ["SGLANG_PLUGINS"] == "dcp_block_cpu"


def test_a_run_tells_its_counts(tmp_path):
    (tmp_path / "test_two.py").write_text("def test_a(): pass\n\n\ndef test_b(): assert False\n")
    tests = [tmp_path / "test_two.py"]
    assert verify.run(tmp_path, tmp_path, tests, tmp_path / "reports" / "r.xml") == verify.Count(1, 1, 0)
    missing = verify.run(tmp_path, tmp_path, [tmp_path / "gone.py"], tmp_path / "reports" / "r.xml")
    assert not missing.is_good


def test_what_it_runs_is_there():
    root = Path(__file__).parents[2]
    assert [path for path in (verify.KITS, *verify.ENGINE) if not (root / path).exists()] == []
