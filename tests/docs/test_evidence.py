"""What the docs call tested is tested: the tests exist, of the right kind, and nothing that is allowed is left out."""

from __future__ import annotations

import re

import pytest

from pages import ROOT, Page
from references import exists
from sglang_dcp_block import evidence
from sglang_dcp_block.evidence import Evidence, State
from sglang_dcp_block.support import GQA_BACKENDS, HOST_STORAGE, HOST_TRANSFERS, MLA_BACKENDS

WHOLE = ("engine/", "transfer/")
PUBLIC_FAULTS = 18


@pytest.mark.parametrize("row", evidence.ROWS, ids=lambda row: row.what)
def test_a_state_has_tests_of_its_kind(row: Evidence) -> None:
    assert all(map(exists, row.tests)), [test for test in row.tests if not exists(test)]
    kinds = {test.startswith(WHOLE) for test in row.tests}
    assert {State.TESTED: True in kinds, State.METADATA: kinds == {False}, State.UNKNOWN: kinds == set()}[row.state]


def test_everything_that_is_allowed_has_a_row() -> None:
    named = " ".join(row.what for row in evidence.ROWS)
    for backend in {*GQA_BACKENDS, *MLA_BACKENDS}:
        assert backend in named
    for backend, layout in HOST_TRANSFERS:
        assert f"--hicache-io-backend {backend} --hicache-mem-layout {layout}" in named
    for storage in HOST_STORAGE:
        assert f"--hicache-storage-backend {storage}" in named


def test_no_row_stands_twice() -> None:
    assert len({(row.area, row.what) for row in evidence.ROWS}) == len(evidence.ROWS)


def test_every_public_fault_has_tests_that_exist() -> None:
    """The table of tests/README.md: FILE or FILE::TEST in code spans."""
    (table,) = [t for t in Page(ROOT / "tests" / "README.md").tables() if t[0] == ["#", "fault", "test"]]
    assert [row[0] for row in table[1:]] == [str(number) for number in range(1, PUBLIC_FAULTS + 1)]
    for number, _, tests in table[1:]:
        named = re.findall(r"`([^`]+)`", tests)
        assert any("::" in reference for reference in named), number
        assert all(map(exists, named)), (number, [reference for reference in named if not exists(reference)])


@pytest.mark.parametrize(
    ("reference", "there"),
    [
        ("docs/test_evidence.py::test_no_row_stands_twice", True),
        ("docs/test_evidence.py::test_gone", False),
        ("docs/test_gone.py", False),
        ("engine/test_refusals.py::TestTwoNodes::test_all_alike_serve", True),
        ("engine/test_refusals.py::TestTwoNodes::test_gone", False),
    ],
)
def test_references(reference: str, there: bool) -> None:
    assert exists(reference) is there
