"""The check of patch points against another release: what it finds in small trees, and in the installed SGLang."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from sglang_dcp_block.patches import fingerprint
from sglang_dcp_block.patches.points import all_points
from sglang_dcp_block.patches.register import Kind, PatchPoint
from upstream import check, edit, wheel
from upstream.commit import Commit
from upstream.drift import PARTS, State, drifts, lost_anchors

WIDGET = """
class Widget:
    def grown(self, by):
        return self.size + by
"""
DOUBLE = """
def double(x):
    return 2 * x
"""


def point(name: str) -> PatchPoint:
    return PatchPoint(f"sglang.srt.tools.{name}", Kind.RELIES, "Why.", "nothing")


PARTS_OF_STUB = {"one": (point("Widget.grown"),), "two": (point("double"),)}


def tree(folder: Path, text: str, **files: str) -> Path:
    """A package folder with ``srt/tools.py`` and other files beside it."""
    (folder / "srt").mkdir(parents=True)
    for name, content in {"tools": text, **files}.items():
        (folder / "srt" / f"{name}.py").write_text(content)
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tree(tmp_path / "base", WIDGET + DOUBLE)


@pytest.fixture
def known(base: Path) -> list[dict[str, str]]:
    targets = [p.target for points in PARTS_OF_STUB.values() for p in points]
    return [{target: fingerprint.from_tree(target, base) for target in targets}]


def test_the_same_source_is_known(base: Path, known: list[dict[str, str]]) -> None:
    found = drifts(base, base, known, PARTS_OF_STUB)
    assert [(drift.part, drift.state, drift.lines) for drift in found] == [
        ("one", State.KNOWN, (0, 0)),
        ("two", State.KNOWN, (0, 0)),
    ]


def test_an_altered_definition_is_changed_and_the_others_are_not(
    base: Path, known: list[dict[str, str]], tmp_path: Path
) -> None:
    text = WIDGET.replace("self.size + by", "max(\n            self.size, by)") + "\n# moved\n" + DOUBLE
    widget, double = drifts(tree(tmp_path / "new", text), base, known, PARTS_OF_STUB)
    assert (widget.state, widget.lines, double.state) == (State.CHANGED, (2, 1), State.KNOWN)
    assert "-        return self.size + by" in widget.diff


def test_a_missing_definition_names_where_it_may_have_gone(
    base: Path, known: list[dict[str, str]], tmp_path: Path
) -> None:
    new = tree(tmp_path / "new", DOUBLE.replace("double", "twice"), base_widget=WIDGET.replace("Widget", "BaseWidget"))
    widget, double = drifts(new, base, known, PARTS_OF_STUB)
    assert (widget.state, widget.places) == (State.MISSING, ("srt/base_widget.py:3",))
    assert (double.state, double.places) == (State.MISSING, ())


def test_what_any_known_version_has_is_known(base: Path, known: list[dict[str, str]], tmp_path: Path) -> None:
    older = tree(tmp_path / "older", WIDGET + DOUBLE.replace("2 * x", "x + x"))
    target = "sglang.srt.tools.double"
    found = drifts(older, base, [*known, {target: fingerprint.from_tree(target, older)}], PARTS_OF_STUB)
    assert {drift.state for drift in found} == {State.KNOWN}


def test_every_patch_point_belongs_to_a_part() -> None:
    assert {p.target for points in PARTS.values() for p in points} == {p.target for p in all_points()}


LAYOUT = "sglang.srt.layers.dcp.layout"
TWO_OF_LAYOUT = {
    "KV cache": tuple(
        p for p in all_points() if p.target in (f"{LAYOUT}.get_dcp_lens", f"{LAYOUT}.maybe_dcp_kernel_indices")
    )
}


class TestCommand:
    """On files of the installed SGLang."""

    @pytest.fixture
    def copy(self, tmp_path: Path) -> Path:
        """A package folder with the module of two patch points."""
        file = tmp_path / "sglang" / "srt" / "layers" / "dcp" / "layout.py"
        file.parent.mkdir(parents=True)
        shutil.copy(fingerprint.installed_tree() / "srt" / "layers" / "dcp" / "layout.py", file)
        return tmp_path / "sglang"

    def run(self, copy: Path, capsys: pytest.CaptureFixture[str], *flags: str, version: str = "0.5.23") -> Any:
        status = check.main([version, "--tree", str(copy), *flags], TWO_OF_LAYOUT, commits=[])
        return status, capsys.readouterr().out

    def test_the_installed_release_has_everything(self, capsys: pytest.CaptureFixture[str]) -> None:
        status = check.main(["0.5.23", "--tree", str(fingerprint.installed_tree())])
        out = capsys.readouterr().out
        assert status == 0
        assert f"{len(all_points())} known, 0 changed, 0 missing. Supported." in out
        assert re.search(r"\n(\d+) of \1 edits of the patch series fit", out)

    def test_another_release_with_the_same_source_is_to_be_tested(
        self, copy: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        status, out = self.run(copy, capsys, version="0.5.99")
        assert status == 0
        assert "Nothing moved: run the tests on it" in out

    @pytest.mark.parametrize(
        ("old", "new", "state"),
        [
            ("def get_dcp_lens(", "def get_dcp_lens(  # altered\n", State.CHANGED),
            ("def get_dcp_lens(", "def get_dcp_lengths(", State.MISSING),
        ],
    )
    def test_an_altered_target_is_named(
        self, copy: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, state: State
    ) -> None:
        file = copy / "srt" / "layers" / "dcp" / "layout.py"
        assert file.read_text().count(old) == 1
        file.write_text(file.read_text().replace(old, new))
        status, out = self.run(copy, capsys)
        assert status == 1
        assert "get_dcp_lens" in out
        assert f"1 {state.value}" in out
        assert "Not supported." in out
        status, out = self.run(copy, capsys, "--json")
        data = json.loads(out)
        moved = [p for p in data["patch_points"] if p["state"] != "known"]
        assert (status, [(p["target"], p["state"]) for p in moved]) == (
            1,
            [("sglang.srt.layers.dcp.layout.get_dcp_lens", state.value)],
        )
        assert data["states"][state.value] == 1

    def test_the_difference_can_be_read(self, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = copy / "srt" / "layers" / "dcp" / "layout.py"
        file.write_text(file.read_text().replace("def get_dcp_lens(", "def get_dcp_lens(  # altered"))
        _, out = self.run(copy, capsys, "--diff")
        assert "+def get_dcp_lens(  # altered" in out


class TestAnchors:
    """Edits of a series that another release does not take."""

    def commits(self, *edits: edit.Edit) -> list[Commit]:
        return [Commit("c01", "Subject", "Body", edits, Path("none"))]

    def test_what_fits(self, base: Path) -> None:
        sglang = base.rename(base.with_name("sglang"))
        fits = edit.on("sglang.srt.tools", "double", edit.body("return x << 1"))
        assert lost_anchors(self.commits(fits), sglang) == []

    def test_each_that_does_not_is_named_and_the_others_go_on(self, base: Path) -> None:
        sglang = base.rename(base.with_name("sglang"))
        lost = lost_anchors(
            self.commits(
                edit.on("sglang.srt.gone", "f", edit.body("return 1")),
                edit.on("sglang.srt.tools", "double", edit.drop(edit.assigns("y"))),
                edit.on("sglang.srt.tools", "double", edit.before(edit.returns(), "y = 1")),
                edit.on("sglang.srt.tools", "double", edit.drop(edit.assigns("y"))),
            ),
            sglang,
        )
        assert [(one.module, one.reason) for one in lost] == [
            ("sglang.srt.gone", "no such module"),
            ("sglang.srt.tools", "expected an assignment to y 1 time(s), got 0"),
        ]


def test_a_release_that_the_registry_does_not_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(version: str) -> None:
        raise wheel.WheelError(f"pip could not download sglang=={version}")

    monkeypatch.setattr(wheel, "find", refuse)
    with pytest.raises(SystemExit) as status:
        check.main(["9.9.9"])
    assert status.value.code == 2
    assert "pip could not download sglang==9.9.9" in capsys.readouterr().err
