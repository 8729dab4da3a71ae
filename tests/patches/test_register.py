"""Arming: all targets are known, all hooks are in place, or nothing is changed and the error names each that is not."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sglang_dcp_block.patches import fingerprint, register
from sglang_dcp_block.patches.points import all_points, scheduler_points
from sglang_dcp_block.patches.register import Kind, PatchError, PatchPoint

hook_registry = pytest.importorskip("sglang.srt.plugins.hook_registry")
HookRegistry, HookType = hook_registry.HookRegistry, hook_registry.HookType

VERSION = "0.5.23"
STUB = """
import functools

def double(x, y=0):
    return 2 * x + y

def watched():
    return "watched"

class Widget:
    def __init__(self, size):
        self.size = size

    def grown(self, by):
        return self.size + by

    @staticmethod
    def unit():
        return "kg"

    @classmethod
    def of(cls, size):
        return cls(size)
"""


def after(result: Any, *args: Any, **kwargs: Any) -> Any:
    return ("after", result)


def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return ("around", original(*args, **kwargs))


def replace(x: Any, y: int = 0) -> Any:
    return ("replaced", x, y)


def note_size(result: None, self: Any, size: int) -> None:
    self.noted = size


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module that stands for SGLang, known to the register; and a hook registry of its own."""
    (tmp_path / "stub_upstream.py").write_text(STUB)
    (tmp_path / "stub_caller.py").write_text("from stub_upstream import double\ndef call(x):\n    return double(x)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(register, "upstream_version", lambda: VERSION)
    module = importlib.import_module("stub_upstream")
    names = ("double", "watched", "Widget", "Widget.__init__", "Widget.grown", "Widget.unit", "Widget.of")
    known = {VERSION: {f"stub_upstream.{n}": fingerprint.from_live(f"stub_upstream.{n}") for n in names}}
    monkeypatch.setattr(fingerprint, "known", lambda: known)
    yield module
    for name in ("stub_upstream", "stub_caller"):
        sys.modules.pop(name, None)


def point(name: str, kind: Kind, hook: Any = None) -> PatchPoint:
    return PatchPoint(f"stub_upstream.{name}", kind, "why", "never", hook)


GOOD = (
    point("double", Kind.REPLACE, replace),
    point("watched", Kind.RELIES),
    point("Widget.__init__", Kind.AFTER, note_size),
    point("Widget.grown", Kind.AROUND, around),
    point("Widget.unit", Kind.AFTER, after),
    point("Widget.of", Kind.AROUND, around),
)


class TestArm:
    def test_every_kind_on_every_sort_of_target(self, stub: ModuleType) -> None:
        register.arm(GOOD)
        assert stub.double(1, 2) == ("replaced", 1, 2)
        assert stub.watched() == "watched"
        assert stub.Widget(3).noted == 3
        assert stub.Widget(3).grown(4) == ("around", 7)
        assert stub.Widget.unit() == ("after", "kg")
        assert stub.Widget.of(5)[1].size == 5
        register.verify(GOOD)

    def test_names_imported_before_are_rebound(self, stub: ModuleType) -> None:
        caller = importlib.import_module("stub_caller")
        register.arm(GOOD)
        assert caller.call(1) == ("replaced", 1, 0)

    def test_twice_is_once(self, stub: ModuleType) -> None:
        register.arm(GOOD)
        first = [fingerprint.resolve(p.target) for p in GOOD]
        register.arm(GOOD)
        assert [fingerprint.resolve(p.target) for p in GOOD] == first
        assert {target: len(hooks) for target, hooks in HookRegistry._hooks.items()} == {
            p.target: 1 for p in GOOD if p.hook is not None
        }
        assert stub.Widget(3).grown(4) == ("around", 7)

    def test_beside_a_hook_of_another_plugin_that_came_at_the_same_time(self, stub: ModuleType) -> None:
        """SGLang wraps one target for all plugins that registered before it applies."""
        HookRegistry.register("stub_upstream.Widget.grown", after, HookType.AFTER)
        register.arm(GOOD)
        assert stub.Widget(3).grown(4) == ("around", ("after", 7))

    def test_over_a_wrapper_of_somebody_else(self, stub: ModuleType) -> None:
        original = stub.double

        @functools.wraps(original)
        def logged(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

        stub.double = logged
        register.arm([point("double", Kind.AROUND, around)])
        assert stub.double(2) == ("around", 4)


class TestArmRefuses:
    def refused(self, points: tuple[PatchPoint, ...], *texts: str) -> str:
        with pytest.raises(PatchError) as error:
            register.arm(points)
        text = str(error.value)
        for expected in (*texts, f"SGLang {VERSION} (known versions: {VERSION})"):
            assert expected in text
        return text

    def untouched(self, stub: ModuleType) -> bool:
        return (stub.double(1), stub.Widget(3).grown(4), stub.Widget.unit()) == (2, 7, "kg")

    def test_altered_source_before_anything_is_changed(self, stub: ModuleType) -> None:
        known = fingerprint.known()[VERSION]
        known["stub_upstream.watched"] = "0123456789abcdef"
        text = self.refused(GOOD, "1 patch point(s)", "stub_upstream.watched: source ", "expected 0123456789abcdef")
        assert "stub_upstream.double" not in text
        assert self.untouched(stub)

    def test_a_definition_that_somebody_replaced(self, stub: ModuleType) -> None:
        stub.Widget.grown = lambda self, by: by
        self.refused(GOOD, "stub_upstream.Widget.grown: source ")
        assert stub.double(1) == 2

    def test_a_definition_without_source(self, stub: ModuleType) -> None:
        stub.double = len
        self.refused(GOOD, "stub_upstream.double: missing (no Python source behind it")
        assert stub.Widget(3).grown(4) == 7

    def test_a_missing_target_and_an_altered_one_together(self, stub: ModuleType) -> None:
        del stub.double
        stub.Widget.unit = staticmethod(lambda: "lb")
        self.refused(GOOD, "2 patch point(s)", "stub_upstream.double: missing", "stub_upstream.Widget.unit: source")

    def test_a_target_unknown_for_this_version(self, stub: ModuleType) -> None:
        del fingerprint.known()[VERSION]["stub_upstream.double"]
        self.refused(GOOD, "stub_upstream.double: source ", "no fingerprint known for this version")
        assert self.untouched(stub)

    def test_a_target_that_sglang_skips_because_it_is_patched_already(self, stub: ModuleType) -> None:
        HookRegistry.register("stub_upstream.double", after, HookType.AFTER)
        HookRegistry.apply_hooks()
        text = self.refused(GOOD, "stub_upstream.double: SGLang's HookRegistry did not apply our replace hook")
        assert "stub_upstream.Widget" not in text

    def test_a_target_that_sglang_cannot_wrap(self, stub: ModuleType) -> None:
        """The registry logs the exception and goes on."""
        points = (point("Widget", Kind.AROUND, around), point("double", Kind.AROUND, around))
        text = self.refused(points, "stub_upstream.Widget: SGLang's HookRegistry did not apply our around hook")
        assert "stub_upstream.double" not in text

    def test_a_registry_that_does_nothing(self, stub: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(HookRegistry, "apply_hooks", lambda: None)
        self.refused(GOOD, "5 patch point(s)", "stub_upstream.Widget.of: SGLang's HookRegistry did not apply")

    def test_a_hook_that_is_overwritten_later(self, stub: ModuleType) -> None:
        register.arm(GOOD)
        stub.Widget.grown = lambda self, by: by
        with pytest.raises(PatchError, match=r"stub_upstream\.Widget\.grown: SGLang's HookRegistry did not apply"):
            register.verify(GOOD)

    def test_a_target_that_disappears_later(self, stub: ModuleType) -> None:
        register.arm(GOOD)
        del stub.Widget.grown
        with pytest.raises(PatchError, match=r"stub_upstream\.Widget\.grown"):
            register.verify(GOOD)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the files that the real targets are in."""
    installed, copy = fingerprint.installed_tree(), tmp_path / "sglang"
    for target in {p.target for p in all_points()}:
        file, _ = fingerprint._split(target, installed)
        destination = copy / file.relative_to(installed)
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, destination)
    return copy


class TestCheck:
    def alter(self, tree: Path, name: str, old: str, new: str) -> None:
        file = tree / "srt" / name
        text = file.read_text()
        assert text.count(old) == 1
        file.write_text(text.replace(old, new))

    def test_installed_sglang_fits(self) -> None:
        assert register.upstream_version() in fingerprint.known()
        register.check(all_points())

    def test_an_equal_tree_fits(self, tree: Path) -> None:
        register.check(all_points(), tree)

    @pytest.mark.parametrize(
        ("file", "old", "new", "target"),
        [
            ("layers/dcp/layout.py", "def get_dcp_lens(", "def get_dcp_lengths(",
             "sglang.srt.layers.dcp.layout.get_dcp_lens"),
            ("runtime_context.py", "return _configure_context(_CONTEXT, server_args, role=role, ranks=ranks)",
             "return _configure_context(_CONTEXT, server_args, role=role)", "sglang.srt.runtime_context.publish"),
            ("mem_cache/kv_loc_plan.py", "class KVLocPlan", "class KVLocationPlan",
             "sglang.srt.mem_cache.kv_loc_plan.KVLocPlan"),
        ],
    )  # fmt: skip
    def test_one_change_is_named(self, tree: Path, file: str, old: str, new: str, target: str) -> None:
        self.alter(tree, file, old, new)
        with pytest.raises(PatchError, match=re.escape(target)) as error:
            register.check(all_points(), tree)
        assert "1 patch point(s) do not fit SGLang 0.5.23 (known versions: 0.5.23)" in str(error.value)

    def test_a_missing_file_is_named(self, tree: Path) -> None:
        (tree / "srt" / "layers" / "dcp" / "layout.py").unlink()
        with pytest.raises(PatchError, match=r"sglang\.srt\.layers\.dcp\.layout\.get_dcp_lens: missing"):
            register.check(scheduler_points("null"), tree)

    def test_an_unknown_version_refuses_every_target(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(register, "upstream_version", lambda: "0.5.99")
        with pytest.raises(PatchError) as error:
            register.check(all_points())
        text = str(error.value)
        assert f"{len(all_points())} patch point(s) do not fit SGLang 0.5.99 (known versions: 0.5.23)" in text
        assert all(p.target in text for p in all_points())
        assert "start without --dcp-block-size" in text

    def test_no_sglang_at_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fingerprint.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(LookupError, match="SGLang is not installed"):
            register.check(all_points())


class TestDigest:
    def test_same_for_the_same(self, stub: ModuleType) -> None:
        assert register.digest(GOOD, 8) == register.digest(tuple(reversed(GOOD)), 8)
        assert re.fullmatch("[0-9a-f]{16}", register.digest(GOOD, 8))

    def test_block_size(self, stub: ModuleType) -> None:
        assert register.digest(GOOD, 8) != register.digest(GOOD, 16)

    def test_another_hook(self, stub: ModuleType) -> None:
        def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return ("another", original(*args, **kwargs))

        changed = (*GOOD[:-1], dataclasses.replace(GOOD[-1], hook=around))
        assert register.digest(changed, 8) != register.digest(GOOD, 8)

    def test_text_of_any_module_of_the_plugin(
        self, stub: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        copy = Path(shutil.copytree(register._PACKAGE, tmp_path / "plugin"))
        monkeypatch.setattr(register, "_PACKAGE", copy)
        before, plugin = register.digest(GOOD, 8), register.plugin_digest()
        for module in ("dcp/layout.py", "kernels/kv_indices.py", "patches/reads.py"):
            text = (copy / module).read_text()
            (copy / module).write_text(text + "\n")
            assert register.digest(GOOD, 8) != before, module
            assert register.plugin_digest() != plugin, module
            (copy / module).write_text(text)
        assert (register.digest(GOOD, 8), register.plugin_digest()) == (before, plugin)

    def test_kind_and_number_of_points(self, stub: ModuleType) -> None:
        changed = tuple(dataclasses.replace(p, kind=Kind.AFTER) if p.kind is Kind.AROUND else p for p in GOOD)
        assert len({register.digest(points, 8) for points in (GOOD, changed, GOOD[1:], GOOD[:-1])}) == 4

    def test_plugin_version(self, stub: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        before, plugin = register.digest(GOOD, 8), register.plugin_digest()
        monkeypatch.setattr(register, "__version__", "9.9.9")
        assert register.digest(GOOD, 8) != before
        assert register.plugin_digest() != plugin

    def test_upstream_version(self, stub: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        before = register.digest(GOOD, 8)
        fingerprint.known()["0.5.24"] = fingerprint.known()[VERSION]
        monkeypatch.setattr(register, "upstream_version", lambda: "0.5.24")
        assert register.digest(GOOD, 8) != before

    def test_fingerprint_of_a_target(self, stub: ModuleType) -> None:
        before = register.digest(GOOD, 8)
        fingerprint.known()[VERSION]["stub_upstream.watched"] = "0123456789abcdef"
        assert register.digest(GOOD, 8) != before


class TestPoints:
    def test_targets_are_unique(self) -> None:
        targets = [p.target for p in all_points()]
        assert len(set(targets)) == len(targets)

    @pytest.mark.parametrize("p", all_points(), ids=lambda p: p.target.rpartition("srt.")[2])
    def test_each_says_why_and_what_ends_it(self, p: PatchPoint) -> None:
        assert p.target.startswith("sglang.")
        assert p.why.endswith(".")
        assert p.removed_by

    def test_a_hook_exactly_where_something_is_touched(self) -> None:
        with pytest.raises(ValueError, match="expected a hook unless kind is RELIES"):
            point("double", Kind.AFTER)
        with pytest.raises(ValueError, match="expected a hook unless kind is RELIES"):
            point("double", Kind.RELIES, after)

    def test_kinds_are_those_of_sglang(self) -> None:
        assert {HookType(kind.value) for kind in Kind if kind is not Kind.RELIES} <= set(HookType)
