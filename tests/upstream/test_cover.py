"""The cover letter: what it names is in the series, and what it measures in the results."""

from __future__ import annotations

import csv
import re

from upstream import commit, cover


def test_it_lists_every_commit_and_leaves_no_field_open():
    commits = commit.load(commit.BLOCKS)
    letter = cover.render(commits)
    assert re.findall(r"(?m)^\d+\. \*\*(.*)\*\*$", letter) == [one.subject for one in commits]
    assert not re.search(r"[{}]", letter)


def test_every_figure_is_a_row_of_the_results():
    with cover.RESULTS.open() as file:
        rows = [row for row in csv.DictReader(file) if (row["layers"], row["tokens"]) == ("61", "16384")]
    figures = cover.figures(cover.RESULTS)
    assert "61 layers x 16,384 tokens" in figures
    found = re.findall(r"(?m)^\| ([a-z].*?) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", figures)
    assert [way for way, *_ in found] == list(cover.WAYS)
    for way, segments, staged, milliseconds in found:
        (row,) = [row for row in rows if row["way"] == way]
        assert (segments, staged) == (f"{int(row['segments']):,}", f"{int(row['staged']):,}")
        assert milliseconds == f"{float(row['p50_s']) * 1000:,.0f}"


def test_without_results_it_says_so(tmp_path):
    assert cover.figures(tmp_path / "none.csv") == "Not measured in this checkout."
    (tmp_path / "empty.csv").write_text("way,layers,tokens\n")
    assert cover.figures(tmp_path / "empty.csv") == "Not measured in this checkout."
