"""``make upstream-patch``: the series as patches in ``dist/upstream``, shown to apply to a fresh copy of the release."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from upstream import commit, cover, edit, tree, wheel

PATCH_FORMAT = ("--zero-commit", "--no-signature", "--numbered")
BUDGET = 1200  # changed lines outside tests and docs, of the whole blocks series


@dataclass(frozen=True)
class Built:
    """A series that was built."""

    name: str
    patches: tuple[Path, ...]
    changed: int  # lines added and removed outside tests and docs


def build(work: Path, out: Path, release: wheel.Release) -> list[Built]:
    """Commit every series to a tree in ``work/tree``, write patches below ``out``, and apply them to ``work/fresh``.

    Raises:
        AnchorError, TreeError: an edit or a patch does not fit, or the series grew over its budget.
    """
    series = {name: commits for name in commit.ALL if (commits := commit.load(name))}
    base = work / "tree"
    with _step(f"laying out {release.origin}"):
        tree.start(base, release)
    shutil.rmtree(out, ignore_errors=True)
    built = []
    for name, commits in series.items():
        first = tree.git(base, "rev-parse", "HEAD").strip()
        for one in commits:
            with _step(f"{name}/{one.name}: {one.subject}"):
                tree.add(base, one)
        tree.git(base, "format-patch", "--quiet", *PATCH_FORMAT, "-o", str(out / name), first)
        found = tuple(sorted((out / name).glob("*.patch")))
        built.append(Built(name, found, changed_lines(base, first)))
        if name == commit.BLOCKS:
            (out / name / "0000-cover-letter.md").write_text(cover.render(commits))
    with _step("applying the patches to a fresh copy of the release"):
        apply_fresh(base, work / "fresh", [patch for result in built for patch in result.patches])
    changed = next(result.changed for result in built if result.name == commit.BLOCKS)
    if changed > BUDGET:
        raise tree.TreeError(f"{commit.BLOCKS}: expected at most {BUDGET} changed lines outside tests, got {changed}")
    return built


def changed_lines(folder: Path, since: str) -> int:
    """Lines added and removed in the package since a commit; tests and docs lie elsewhere in upstream's repository."""
    rows = tree.git(folder, "diff", "--numstat", since, "HEAD", "--", "python").splitlines()
    return sum(int(added) + int(removed) for added, removed, _ in (row.split("\t", 2) for row in rows))


def apply_fresh(base: Path, fresh: Path, patches: list[Path]) -> None:
    """``git am`` onto the first commit of ``base``, in a clone of its own; git itself allows no fuzz.

    Raises:
        TreeError: a patch does not apply, or the result is another tree.
    """
    tree.clone(base, fresh, tree.RELEASED)
    tree.git(fresh, "am", "--quiet", *map(str, patches))
    want, got = (tree.git(folder, "rev-parse", "HEAD^{tree}").strip() for folder in (base, fresh))
    if want != got:
        raise tree.TreeError(f"the patches give tree {got}, the series {want}")


@contextmanager
def _step(text: str) -> Iterator[None]:
    began = time.monotonic()
    print(f"{text} ...", end=" ", flush=True)
    yield
    print(f"{time.monotonic() - began:.1f} s", flush=True)


def main(root: Path, version: str = wheel.VERSION) -> int:
    """Build everything below ``root``; returns an exit status."""
    try:
        built = build(root / "build" / "upstream", root / "dist" / "upstream", wheel.find(version))
    except (wheel.WheelError, tree.TreeError, edit.AnchorError) as error:
        print(f"\nupstream-patch: {error}", file=sys.stderr)
        return 1
    for result in built:
        print(f"{result.name}: {len(result.patches)} patches, {result.changed} changed lines outside tests and docs")
        for patch in result.patches:
            print(f"    {patch.relative_to(root)}")
    return 0
