"""The benchmarks' plain parts: percentiles, turns, rows, checks, files, and the README's table."""

from __future__ import annotations

import csv
import doctest
import io
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import __main__ as cli
from benchmarks import headline, imbalance, timing, writing
from benchmarks.headline import BEGIN, Figure
from benchmarks.machine import machine, versions
from benchmarks.record import Check, Result, Row, Spread, find
from benchmarks.suite import BENCHMARKS
from benchmarks.timing import in_turns, spread
from benchmarks.writing import Provenance, as_csv, as_markdown, write
from sglang_dcp_block.made_tables import END

ROOT = Path(__file__).parents[2]
FROM = Provenance("python -m benchmarks", "python 3, sglang 0", "2 × processor", "load average 0.1")


def row(way: str, p50: float, baseline_p50: float = 8.0, **case: int) -> Row:
    return Row(way, case or {"tokens": 5}, Spread(p50 / 2, p50, p50 * 2), "stock", baseline_p50, 96, 3)


def result(*rows: Row, **more) -> Result:
    return Result("name", "Title", "s", "How to read.", rows, **more)


@pytest.mark.parametrize("module", [headline, imbalance, timing, writing], ids=lambda module: module.__name__)
def test_examples(module) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


class TestRecord:
    def test_ratio_is_the_gain(self) -> None:
        assert row("ours", 2.0).ratio == 4
        assert not row("ours", 2.0).loses
        assert row("ours", 16.0).ratio == 0.5
        assert row("ours", 16.0).loses

    def test_nothing_against_something_and_against_nothing(self) -> None:
        assert row("ours", 0.0).ratio == float("inf")
        assert row("ours", 0.0, 0.0).ratio == 1

    @pytest.mark.parametrize(("value", "at_most", "holds"), [
        (1.1, True, True), (1.11, True, False), (1.1, False, True), (1.09, False, False),
        (float("nan"), True, False), (float("nan"), False, False),
    ])  # fmt: skip
    def test_a_check_holds_up_to_its_limit(self, value: float, at_most: bool, holds: bool) -> None:
        check = Check("figure", value, 1.1, at_most)
        assert check.holds is holds
        assert ("DOES NOT HOLD" in str(check)) is not holds

    def test_one_row_is_found_or_none_is(self) -> None:
        rows = [row("ours", 1.0, tokens=1), row("ours", 2.0, tokens=2), row("stock", 8.0, tokens=1)]
        assert find(rows, "ours", tokens=2) is rows[1]
        with pytest.raises(LookupError, match=r"expected one row of 'ours' with \{\}, got 2"):
            find(rows, "ours")


class TestTiming:
    def test_percentiles(self) -> None:
        assert spread([5.0, 1.0, 3.0, 2.0, 4.0, 6.0]) == Spread(2.0, 3.5, 5.0)
        assert spread([7.0]) == Spread(7.0, 7.0, 7.0)
        with pytest.raises(ValueError, match="expected one or more"):
            spread([])

    def test_ways_take_turns_in_changing_orders(self) -> None:
        seen: list[str] = []
        in_turns({name: lambda name=name: seen.append(name) for name in "abcd"}, rounds=9)
        rounds = ["".join(seen[i : i + 4]) for i in range(0, len(seen), 4)]
        assert all("".join(sorted(names)) == "abcd" for names in rounds)
        assert len(rounds) == 10
        assert len(set(rounds)) > 5

    def test_slow_ways_sit_out(self) -> None:
        seconds = in_turns({"a": lambda: None, "b": lambda: None}, rounds=7, slow=["b"])
        assert {way: len(samples) for way, samples in seconds.items()} == {"a": 7, "b": 3}

    def test_what_is_around_is_not_timed_nor_is_the_first_round(self) -> None:
        now = 0.0

        def work(seconds: float) -> None:
            nonlocal now
            now += seconds

        @contextmanager
        def around(way: str, round_: int):
            work(100)
            yield
            work(1000 if round_ else 10000)

        ways = {"slow": lambda: work(3), "fast": lambda: work(1)}
        assert in_turns(ways, 2, around=around, clock=lambda: now) == {"slow": [3, 3], "fast": [1, 1]}

    def test_a_wrong_result_ends_it(self) -> None:
        @contextmanager
        def around(way: str, round_: int):
            yield
            raise AssertionError(f"{way}: wrong")

        with pytest.raises(AssertionError, match="a: wrong"):
            in_turns({"a": lambda: None}, 3, around=around)


class TestWriting:
    def test_csv(self) -> None:
        (line,) = csv.DictReader(io.StringIO(as_csv(result(row("ours", 2.0)), FROM)))
        assert line == {
            "way": "ours", "tokens": "5", "bytes": "96", "segments": "3", "p20_s": "1", "p50_s": "2", "p80_s": "4",
            "baseline": "stock", "baseline_p50_s": "8", "ratio": "4", "versions": FROM.versions, "command": FROM.command,
        }  # fmt: skip

    def test_rows_of_other_columns_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"expected columns \['tokens'\], got \['layers'\]"):
            as_csv(result(row("ours", 2.0), row("ours", 2.0, layers=3)), FROM)

    def test_a_page_says_what_holds_and_what_loses(self) -> None:
        checks = (Check("one", 1, 2, at_most=True), Check("two", 3, 2, at_most=True))
        page = as_markdown(result(row("stock", 8.0), row("ours", 16.0), checks=checks), FROM, has_plot=True)
        assert "- one: 1 (≤ 2: holds)\n- two: 3 (≤ 2: DOES NOT HOLD)" in page
        assert "| way | tokens | bytes | segments | p20 / p50 / p80, ms | baseline | ratio |" in page
        assert "| stock | 5 | 96 | 3 | 4,000 / 8,000 / 16,000 | stock | 1 |" in page
        assert "| ours | 5 | 96 | 3 | 8,000 / 16,000 / 32,000 | stock | 0.50 (loses) |" in page
        assert all(text in page for text in (FROM.command, FROM.versions, FROM.machine, FROM.load, "(name.png)"))

    def test_files(self, tmp_path: Path) -> None:
        """Without a plot, that of an earlier run does not stay: it shows other numbers."""
        (tmp_path / "name.png").write_bytes(b"old")
        assert not write(result(row("ours", 2.0)), FROM, tmp_path)
        assert sorted(file.name for file in tmp_path.iterdir()) == ["name.csv", "name.md"]
        assert "png" not in (tmp_path / "name.md").read_text()


class TestMachine:
    def test_it_is_described_and_not_named(self) -> None:
        import platform

        text = f"{machine()} {versions()}"
        assert platform.node() not in text.split()
        assert "load average before" in text
        assert "sglang 0.5.23" in text


class TestCommandLine:
    def test_quick_is_the_default_and_names_come_in_order(self) -> None:
        quick, full = cli.chosen(False, None), cli.chosen(True, None)
        assert full == list(BENCHMARKS)
        assert set(full) - set(quick) == {"segment_sizes", "fragmentation"}
        assert cli.chosen(False, ["fragmentation", "transfer"]) == ["transfer", "fragmentation"]

    def test_each_benchmark_is_a_module(self) -> None:
        for name in BENCHMARKS:
            assert "def measure(full: bool) -> Result:" in (ROOT / "benchmarks" / f"{name}.py").read_text()

    def test_command_in_results(self) -> None:
        assert cli.command_of(False, None) == "python -m benchmarks"
        assert cli.command_of(True, ["memory"]) == "python -m benchmarks --full --only memory"

    @pytest.mark.parametrize(("value", "status"), [(1.0, 0), (3.0, 1)])
    def test_exit_status(
        self, value: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
    ) -> None:
        found = result(row("ours", 2.0), checks=(Check("a figure", value, 2, at_most=True),))
        monkeypatch.setattr(type(BENCHMARKS["memory"]), "measure", lambda self, full: found)
        assert cli.main(["--only", "memory", "--into", str(tmp_path)]) == status
        assert ("FAILED:" in capsys.readouterr().out) is bool(status)
        assert (tmp_path / "name.md").exists()


class TestHeadline:
    def test_the_readme_agrees_with_the_results(self) -> None:
        assert headline.main(["--check", str(ROOT / "README.md")]) == 0, "run: make readme-table"

    def test_a_figure_is_taken_from_two_rows(self) -> None:
        figure = Figure("a chunk", "name", {"tokens": "5"}, "stock", "ours", "p50_s", "ms")
        rows = [row("stock", 0.008, 0.008), row("ours", 0.002, 0.008), row("ours", 1.0, tokens=6)]
        records = list(csv.DictReader(io.StringIO(as_csv(result(*rows), FROM))))
        assert figure.line(records) == "| [a chunk](benchmarks/results/name.md) | 8 ms | 2 ms | ÷ 4 |"
        with pytest.raises(LookupError, match=r"name.csv: expected one row of 'stock' with {'tokens': '5'}, got 0"):
            figure.line(records[1:])

    def test_drift_is_seen_and_mended(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        page = tmp_path / "page.md"
        page.write_text(f"# Title\n{BEGIN}\n| old |\n{END}\nThe end.\n")
        assert headline.main(["--check", str(page)]) == 1
        assert "out of date. Run: python -m benchmarks.headline" in capsys.readouterr().out
        assert headline.main([str(page)]) == 0
        assert page.read_text() == f"# Title\n{BEGIN}\n{headline.table()}{END}\nThe end.\n"
        assert headline.main(["--check", str(page)]) == 0

    @pytest.mark.parametrize("page", ["", f"{BEGIN}\n", f"{END}\n{BEGIN}\n", f"{BEGIN}\n{BEGIN}\n{END}\n"])
    def test_a_page_without_its_markers_is_an_error(self, page: str, tmp_path: Path) -> None:
        file = tmp_path / "page.md"
        file.write_text(page)
        assert headline.main([str(file)]) == 2
        assert file.read_text() == page


class TestImbalance:
    def test_ranks_are_counted_as_dealing_fills_them(self) -> None:
        import reference
        from benchmarks.imbalance import dealt, split, unevenness
        from sglang_dcp_block.dcp.layout import DcpLayout

        lengths = [(5, 0), (17, 9), (1, 1)]
        for block in (1, 4):
            want = [sum(reference.local_len(sum(pair), rank, 4, block) for pair in lengths) for rank in range(4)]
            assert dealt(lengths, DcpLayout(4, block)).tolist() == want
        assert split([(10, 3)], 4).tolist() == [2, 3, 2, 3 + 3]
        assert unevenness(split([(10, 3)], 4)) == 6 / 3.25
