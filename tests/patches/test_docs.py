"""Pages made from the code: they are up to date, and their makers say so when they are not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_dcp_block import compatibility, evidence
from sglang_dcp_block.compatibility import BEGIN, TABLES
from sglang_dcp_block.made_tables import END
from sglang_dcp_block.patches import __main__ as patches_cli
from sglang_dcp_block.patches import fingerprint, register
from sglang_dcp_block.patches.points import all_points
from sglang_dcp_block.support import RULES

DOCS = Path(__file__).parents[2] / "docs"


class TestPatchPoints:
    def test_page_is_up_to_date(self) -> None:
        page = (DOCS / "patch-points.md").read_text(encoding="utf-8")
        assert page == patches_cli.as_markdown(), "run: python -m sglang_dcp_block.patches --docs docs/patch-points.md"

    def test_every_point_has_a_row(self) -> None:
        rows = [line for line in patches_cli.as_markdown().splitlines() if line.startswith("| `")]
        assert [row.split("`")[1] for row in rows] == [p.target for p in all_points()]
        assert all(row.count(" | ") == 3 for row in rows)

    def test_command_writes_it_and_says_whether_they_fit(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert patches_cli.main(["--docs", str(tmp_path / "page.md")]) == 0
        assert (tmp_path / "page.md").read_text() == patches_cli.as_markdown()
        assert f"{len(all_points())} patch points fit SGLang 0.5.23." in capsys.readouterr().out
        monkeypatch.setattr(register, "upstream_version", lambda: "0.5.99")
        assert patches_cli.main([]) == 1
        assert "do not fit SGLang 0.5.99" in capsys.readouterr().out

    @pytest.mark.parametrize("missing", ["torch", "triton"])
    def test_without_torch_it_helps_and_says_what_is_missing(self, missing: str) -> None:
        script = f"import runpy, sys; sys.modules[{missing!r}] = None; runpy.run_module('{patches_cli.__package__}')"
        script = script.replace("')", "', run_name='__main__', alter_sys=True)")
        helped, refused = (
            subprocess.run([sys.executable, "-c", script, *argv], capture_output=True, text=True, timeout=120)
            for argv in (["--help"], [])
        )
        assert helped.returncode == 0, helped.stderr
        assert "--docs FILE" in helped.stdout
        assert refused.returncode == 2
        assert refused.stderr.splitlines()[-1] == (
            f"python -m sglang_dcp_block.patches: error: expected {missing} in this Python, got none: run it in the "
            "environment that SGLang is installed in"
        )

    def test_a_new_version_can_be_learned(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """For maintainers, after they have read the new sources."""
        file = tmp_path / "fingerprints.json"
        file.write_text(fingerprint.KNOWN_FILE.read_text())
        monkeypatch.setattr(fingerprint, "KNOWN_FILE", file)
        monkeypatch.setattr(register, "upstream_version", lambda: "0.5.99")
        fingerprint.known.cache_clear()
        try:
            assert patches_cli.main(["--learn"]) == 0
            known = fingerprint.known()
            assert set(known) == {"0.5.23", "0.5.99"}
            assert known["0.5.99"] == known["0.5.23"]
            register.check(all_points())
        finally:
            fingerprint.known.cache_clear()

    def test_it_names_the_files_that_entries_live_in(self) -> None:
        (named,) = re.findall(r"from `(.*)`; do not edit", patches_cli.as_markdown())
        entries = "".join(file.read_text(encoding="utf-8") for file in DOCS.parent.glob(named))
        names = [p.target.rpartition(".")[2] for p in all_points()]
        assert [name for name in names if not re.search(rf'[."]{name}"', entries)] == []


def test_every_shared_module_of_the_tests_is_named() -> None:
    tests = DOCS.parent / "tests"
    listed = re.findall(r"^    (\w+\.py) ", (tests / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted({file.name for file in tests.glob("*.py")} - {"conftest.py"})


class TestCompatibility:
    def test_page_is_up_to_date(self) -> None:
        file = str(DOCS / "compatibility.md")
        assert compatibility.main(["--check", file]) == 0, f"run: python -m sglang_dcp_block.compatibility {file}"

    def test_every_rule_has_a_row(self) -> None:
        _, _, *rows = compatibility.refused().splitlines()
        assert [row.split(" | ")[0] for row in rows] == [f"| {rule.feature}" for rule in RULES]
        assert all(row.count(" | ") == 2 for row in rows)

    def test_every_piece_of_evidence_has_a_row(self) -> None:
        _, _, *rows = compatibility.tried().splitlines()
        assert [row.split(" | ")[1:3] for row in rows] == [[row.what, row.state.value] for row in evidence.ROWS]
        assert all(row.count(" | ") == 4 for row in rows)

    def test_check_finds_drift_and_writing_ends_it(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        page = tmp_path / "page.md"
        page.write_text("# Title\n" + "".join(f"{BEGIN.format(name)}\n| old |\n{END}\nText.\n" for name in TABLES))
        assert compatibility.main(["--check", str(page)]) == 1
        assert "out of date. Run: python -m sglang_dcp_block.compatibility" in capsys.readouterr().out
        assert "| old |" in page.read_text()
        assert compatibility.main([str(page)]) == 0
        assert compatibility.main(["--check", str(page)]) == 0
        made = "".join(f"{BEGIN.format(name)}\n{table()}{END}\nText.\n" for name, table in TABLES.items())
        assert page.read_text() == f"# Title\n{made}"

    @pytest.mark.parametrize("page", ["", "{0}\n{2}\n", "{0}\n{1}\n", "{2}\n{0}\n{1}\n", "{0}\n{0}\n{2}\n{1}\n{2}\n"])
    def test_a_page_without_its_markers_is_an_error(
        self, page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file, text = tmp_path / "page.md", page.format(*map(BEGIN.format, TABLES), END)
        file.write_text(text)
        assert compatibility.main([str(file)]) == 2
        assert "expected one" in capsys.readouterr().err
        assert file.read_text() == text

    def test_a_file_that_is_not_there(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert compatibility.main([str(tmp_path / "gone.md")]) == 2
        assert "No such file" in capsys.readouterr().err
