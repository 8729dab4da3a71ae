"""Fingerprints: the same from the text of a tree and from the live object, and different when the code is."""

from __future__ import annotations

import importlib
import sys
import textwrap
from pathlib import Path

import pytest

from sglang_dcp_block.patches import fingerprint
from sglang_dcp_block.patches.fingerprint import TargetMissingError, from_live, from_tree, of_source

ODD = '''
import functools
# A form feed, and in a string a Unicode line separator, are no line ends to the parser.
\f
TEXT = "one\u2028two"


def plain(a, b=1):
    """Doc."""
    if a:
        return b
    # A comment after the last statement.


def shadowed():
    return "first"


def shadowed():
    return "the one that Python keeps"


async def waits():
    return 1


@functools.cache
def decorated(
    a,
):
    return a   \t


class Outer:
    limit = 3

    def method(self):
        def nested():
            return 1
        return nested()

    @staticmethod
    def static(x): return x

    @classmethod
    def made(cls):
        text = """
unindented text
"""
        return cls, text

    class Inner:
        def deep(self):
            return 2
'''
TARGETS = (
    "plain", "shadowed", "waits", "decorated", "Outer", "Outer.method", "Outer.static", "Outer.made", "Outer.Inner",
    "Outer.Inner.deep",
)  # fmt: skip


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package folder ``odd_upstream`` with a module ``odd``, importable."""
    package = tmp_path / "odd_upstream"
    (package / "sub" / "space").mkdir(parents=True)
    (package / "__init__.py").write_text("def top():\n    return 0\n")
    (package / "sub" / "odd.py").write_text(ODD)
    (package / "sub" / "space" / "leaf.py").write_text("def f():\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == "odd_upstream"]:
        del sys.modules[name]


@pytest.mark.parametrize("name", TARGETS)
def test_text_and_live_object_agree(tree: Path, name: str) -> None:
    assert from_tree(f"sglang.sub.odd.{name}", tree) == from_live(f"odd_upstream.sub.odd.{name}")


def test_the_last_definition_counts(tree: Path) -> None:
    assert importlib.import_module("odd_upstream.sub.odd").shadowed() == "the one that Python keeps"
    assert from_tree("sglang.sub.odd.shadowed", tree) == of_source(
        'def shadowed():\n    return "the one that Python keeps"'
    )


def test_folders_without_init_and_init_itself(tree: Path) -> None:
    assert from_tree("sglang.sub.space.leaf.f", tree) == of_source("def f():\n    return 1")
    assert from_tree("sglang.top", tree) == of_source("def top():\n    return 0")


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("sglang.sub.odd.gone", "sub/odd.py defines no gone"),
        ("sglang.sub.odd.Outer.gone", "sub/odd.py defines no Outer.gone"),
        ("sglang.sub.odd.TEXT", "defines no TEXT"),
        ("sglang.sub.odd.plain.gone", "defines no plain.gone"),
        ("sglang.sub.gone.f", "no module for it under"),
        ("sglang.gone", "defines no gone"),
        ("torch.nn.Module", "not a path inside sglang"),
        ("sglang.sub.odd", "sub/odd.py is a module, not a definition"),
    ],
)
def test_what_is_not_there_is_missing(tree: Path, target: str, reason: str) -> None:
    with pytest.raises(TargetMissingError, match=reason):
        from_tree(target, tree)


@pytest.mark.parametrize(
    "target", ["odd_upstream.sub.odd.gone", "odd_upstream.gone.f", "odd_upstream.sub.odd.Outer.limit", "builtins.len"]
)
def test_what_does_not_resolve_is_missing(tree: Path, target: str) -> None:
    with pytest.raises(TargetMissingError):
        from_live(target)


def test_resolve_gives_plain_functions(tree: Path) -> None:
    odd = importlib.import_module("odd_upstream.sub.odd")
    assert fingerprint.resolve("odd_upstream.sub.odd.Outer.static") is odd.Outer.__dict__["static"].__func__
    assert fingerprint.resolve("odd_upstream.sub.odd.Outer.made") is odd.Outer.__dict__["made"].__func__


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return b", "return a"),
        ("(a, b=1)", "(a, b=2)"),
        ('"""Doc."""', '"""Other."""'),
        ("    if a:", "    if a:  # why"),
    ],
)
def test_any_change_of_the_code_is_seen(tree: Path, old: str, new: str) -> None:
    before = from_tree("sglang.sub.odd.plain", tree)
    text = (tree / "sub" / "odd.py").read_text()
    assert old in text
    changed = tree / "sub" / "changed.py"
    changed.write_text(text.replace(old, new))
    assert from_tree("sglang.sub.changed.plain", tree) != before


def test_a_changed_decorator_is_seen(tree: Path) -> None:
    changed = tree / "sub" / "changed.py"
    changed.write_text(ODD.replace("@functools.cache", "@functools.lru_cache"))
    assert from_tree("sglang.sub.changed.decorated", tree) != from_tree("sglang.sub.odd.decorated", tree)


def test_place_and_blanks_do_not_matter() -> None:
    source = "def f():\n    return 1\n"
    same = [
        textwrap.indent(source, "        "),
        f"\n\n{source}\n\n",
        source.replace("1", "1   "),
        f"{source}    # a last word\n\n",
    ]
    assert {of_source(text) for text in same} == {of_source(source)}
    assert of_source(source) != of_source(source.replace("    return", "  return"))


def test_known_versions_are_complete() -> None:
    """Every version of the file knows every target, and nothing else."""
    points = importlib.import_module("sglang_dcp_block.patches.points")
    targets = {point.target for point in points.all_points()}
    assert {version: set(known) ^ targets for version, known in fingerprint.known().items()} == {
        version: set() for version in fingerprint.known()
    }
