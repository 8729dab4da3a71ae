"""The docs: no dead link, no name that does not exist, no snippet that does not run, no made file out of date."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from links import dead_links
from names import FLAG, METRIC, metrics, own_metrics, unknown_names
from pages import ROOT, Page, page_of, pages
from sglang_dcp_block import cli
from snippets import failure, runnable

PAGES = [pytest.param(page, id=page.name) for page in pages()]
SNIPPETS = [pytest.param(code, id=f"{page.name}:{code.line}") for page in pages() for code in runnable(page)]


@pytest.mark.parametrize("page", PAGES)
def test_no_link_is_dead(page: Page) -> None:
    assert list(dead_links(page)) == []


@pytest.mark.parametrize("page", PAGES)
def test_every_name_exists(page: Page) -> None:
    assert list(unknown_names(page)) == []


@pytest.mark.parametrize("code", SNIPPETS)
def test_what_is_marked_runs(code, tmp_path: Path) -> None:
    assert (failure(code, tmp_path)) is None


class TestMetrics:
    def test_every_one_is_in_the_table_of_operations(self) -> None:
        tables = Page(ROOT / "docs" / "operations.md").tables()
        (table,) = [table for table in tables if "sglang:dcp_block_..." in table[0][0]]
        named = {f"sglang:dcp_block_{row[0].strip('`')}" for row in table[1:]}
        assert named == own_metrics()

    def test_every_reason_of_a_refusal_is_in_the_table_of_its_side(self) -> None:
        from sglang_dcp_block.patches.peer_refusals import REASONS

        tables = Page(ROOT / "docs" / "operations.md").tables()
        (table,) = [table for table in tables if table[0][:2] == ["`side`", "`reason`"]]
        named = [
            (side.strip("`"), reason) for side, reasons, *_ in table[1:] for reason in re.findall(r"`(\w+)`", reasons)
        ]
        assert sorted(named) == sorted((side.value, reason.value) for side in REASONS for reason in REASONS[side])

    def test_every_one_is_in_the_dashboard_and_no_other(self) -> None:
        panels = json.loads((ROOT / "docs" / "grafana" / "dcp-block.json").read_text())["panels"]
        named = {name for panel in panels for target in panel["targets"] for name in METRIC.findall(target["expr"])}
        assert named <= metrics()
        shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in named}
        # Batches are calls of Mooncake; the mean size of segments comes from bytes and segments.
        assert own_metrics() - shown == {"sglang:dcp_block_batches_total", "sglang:dcp_block_segment_bytes"}

    def test_labels_are_real(self) -> None:
        from sglang_dcp_block.patches import prometheus

        labels = {f"sglang:dcp_block_{name}": set(m._labelnames) for name, m in _by_name(prometheus._metrics()).items()}
        for expr in _queries():
            for name in METRIC.findall(expr):
                base = re.sub(r"_(bucket|sum|count|total)$", "", name)
                if base in labels:
                    by = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", expr))))
                    assert by - {"instance", "le"} <= labels[base], expr

    def test_alerts_name_real_metrics(self) -> None:
        found = {name for expr in _alerts() for name in METRIC.findall(expr)}
        assert found
        assert found <= metrics()


def _by_name(found: dict) -> dict:
    return {metric._name.removeprefix("sglang:dcp_block_"): metric for metric in found.values()}


def _alerts() -> list[str]:
    groups = yaml.safe_load((ROOT / "docs" / "grafana" / "alerts.yml").read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def _queries() -> list[str]:
    panels = json.loads((ROOT / "docs" / "grafana" / "dcp-block.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]] + _alerts()


def test_the_doctor_s_answer_in_the_docs_counts_all_patch_points() -> None:
    from sglang_dcp_block.patches.points import all_points

    number = len(all_points())
    assert f"{number} of {number}: as known" in (ROOT / "docs" / "operations.md").read_text()


@pytest.mark.parametrize(("command", "page"), [("plan", "plan.md"), ("doctor", "operations.md")])
def test_every_option_of_a_command_is_on_its_page(command: str, page: str) -> None:
    text = "\n".join(code.text for code in Page(ROOT / "docs" / page).code())
    named = set(FLAG.findall(text))
    assert [option for option in _options(command) if option not in named] == []


def _options(command: str) -> list[str]:
    (commands,) = [action.choices for action in cli.parser(command)._actions if action.dest == "command"]
    return [
        option
        for action in commands[command]._actions
        for option in action.option_strings
        if option not in ("-h", "--help")
    ]


def test_every_figure_of_a_link_is_in_the_table_of_the_plan() -> None:
    from sglang_dcp_block.transfer_model.links import GPU, UNITS

    (table,) = [table for table in Page(ROOT / "docs" / "plan.md").tables() if table[0][0] == "figure"]
    rows = {row[0].strip("`"): row[1] for row in table[1:]}
    assert list(rows) == list(UNITS)
    for name, (field, unit) in UNITS.items():
        if field in GPU:
            assert f"({GPU[field] / unit:g})" in rows[name]


def test_times_are_the_same_wherever_they_stand() -> None:
    from sglang_dcp_block.demo.plan import tiny_part, trained_part

    (table,) = [t for t in Page(ROOT / "tests" / "README.md").tables() if t[0][1:] == ["minutes on two idle cores"]]
    minutes = {row[0].strip("`"): row[1] for row in table[1:]}
    for name, of in {
        "README.md": ("make venv", "make demo", "make test"),
        "CONTRIBUTING.md": ("make test",),
        "docs/demos.md": ("make venv", "make demo"),
        "upstream/__main__.py": ("make upstream-verify ARGS=--engine",),
        "Makefile": ("make venv", "make demo", "make test", "make upstream-verify ARGS=--engine"),
    }.items():
        page = (ROOT / name).read_text(encoding="utf-8")
        assert {what for what in of if f"{minutes[what]} minutes" not in page} == set(), name
    first_hour = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for what in ("make venv", 'make demo ARGS="--part tiny"'):
        assert f"| {minutes[what]} | `{what}` |" in first_hour
    least, most = map(float, minutes["make demo"].split(" to "))
    assert least <= trained_part().minutes + tiny_part().minutes <= most
    assert tiny_part().minutes == float(minutes['make demo ARGS="--part tiny"'])


@pytest.mark.parametrize("script", ["docs/pictures/draw.py", "docs/grafana/dashboard.py"])
def test_made_files_are_up_to_date(script: str) -> None:
    child = subprocess.run([sys.executable, str(ROOT / script), "--check"], capture_output=True, text=True, timeout=120)
    assert child.returncode == 0, child.stdout + child.stderr


def test_the_merge_in_the_picture_is_exact() -> None:
    sys.path.insert(0, str(ROOT / "docs" / "pictures"))
    try:
        import merge
    finally:
        sys.path.pop(0)
    got = merge.numbers()
    assert got["merged"] == pytest.approx(got["exact"])
    assert got["average"] != pytest.approx(got["exact"])


class TestTheChecksThemselves:
    """Each check finds what it is for."""

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("[a](gone.md)", "no such file"),
            ("[a](#gone)", "no such heading"),
            ("# One two\n[a](page.md#one-tow)", "no such heading"),
            ("![a](gone.svg)", "no such file"),
            ("[a](ftp://x.y)", "expected a path, http or https"),
            ("[a](http://nohost)", "no host in it"),
            ("[a](page.txt#x)", "an anchor in a file that has none"),
            ("| a |\n|---|\n| [b](gone.md) |", "no such file"),
        ],
    )
    def test_dead_links(self, text: str, reason: str, tmp_path: Path) -> None:
        (tmp_path / "page.txt").touch()
        (found,) = dead_links(page_of(text, tmp_path))
        assert reason in found

    def test_live_links(self, tmp_path: Path) -> None:
        text = "# One `two`, three!\n## A\n## A\n[a](#one-two-three) [b](page.md#a-1) [c](https://example.org/x)"
        assert list(dead_links(page_of(text, tmp_path))) == []

    @pytest.mark.parametrize(
        ("code", "kind"),
        [
            ("--dcp-blocks 8", "flag --dcp-blocks"),
            ("SGLANG_DCP_BLOCKS=8", "environment variable SGLANG_DCP_BLOCKS"),
            ("sglang:dcp_block_transfer_total", "metric sglang:dcp_block_transfer_total"),
            ("make tests", "make target tests"),
            ("python -m sglang_dcp_block.cpus", "module sglang_dcp_block.cpus"),
            ("sglang-dcp-block doktor", "command sglang-dcp-block doktor"),
            ("python benchmarks/gone.py", "script benchmarks/gone.py"),
            ("tests/unit/test_gone.py", "path tests/unit/test_gone.py"),
        ],
    )
    def test_unknown_names(self, code: str, kind: str, tmp_path: Path) -> None:
        (found,) = unknown_names(page_of(f"Text.\n\n| a | b |\n|---|---|\n| c | `{code}` |\n", tmp_path))
        assert f"{kind} does not exist" in found
        assert list(unknown_names(page_of(f"    {code}\n", tmp_path))) or kind.startswith("path")

    def test_known_names(self, tmp_path: Path) -> None:
        text = "`--dcp-block-size 8` `SGLANG_PLUGINS` `make test` `sglang:dcp_block_bytes_total` `tests/unit/`"
        assert list(unknown_names(page_of(text, tmp_path))) == []

    @pytest.mark.parametrize(
        "text",
        [
            "```python\n>>> 1 + 1\n3\n```",
            "<!-- runnable -->\n\n```python\nraise SystemExit(1)\n```",
            "<!-- runnable -->\n\n    sglang-dcp-block doktor\n",
            "<!-- runnable -->\n\n```sh\nfalse | true\n```",
        ],
    )
    def test_snippets_that_fail(self, text: str, tmp_path: Path) -> None:
        (code,) = runnable(page_of(text, tmp_path))
        assert failure(code, tmp_path)

    def test_snippets_that_run_and_that_are_not_marked(self, tmp_path: Path) -> None:
        text = "```sh\nfalse\n```\n\n<!-- runnable -->\n\n```sh\nsglang-dcp-block --version\n```\n"
        (code,) = runnable(page_of(text, tmp_path))
        assert failure(code, tmp_path) is None
