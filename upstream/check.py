"""``python -m upstream.check VERSION``: what of this project fits another release of SGLang, as a table."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sglang_dcp_block.patches import fingerprint, register
from sglang_dcp_block.patches.register import PatchPoint
from upstream import commit, wheel
from upstream.drift import PARTS, Drift, LostAnchor, State, drifts, lost_anchors

EPILOG = """\
exit status: 0 everything is known, 1 something has changed or is missing, 2 the release could not be read

examples:
  python -m upstream.check 0.5.22
  python -m upstream.check 0.5.22 --diff | less -R
  python -m upstream.check 0.5.22 --json
"""


def main(
    argv: list[str] | None = None,
    parts: dict[str, tuple[PatchPoint, ...]] = PARTS,
    commits: Sequence[commit.Commit] | None = None,
) -> int:
    """Command line entry point; returns the exit status.

    Args:
        parts: name -> patch points; all of them by default.
        commits: of the patch series; all of them by default.
    """
    parser = argparse.ArgumentParser(
        prog="python -m upstream.check",
        description="Look for every patch point, and every anchor of the patch series, in a release of SGLang. "
        "Its source is read, not imported.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("version", help="of SGLang, as the package registry names it")
    parser.add_argument("--tree", type=Path, metavar="DIR", help="its package folder, if it is unpacked already")
    parser.add_argument("--all", action="store_true", help="list what is known, too")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--diff", action="store_true", help="print the differences, to be read before they are learnt")
    form.add_argument("--json", action="store_true", help="print the result as JSON")
    args = parser.parse_args(argv)
    if commits is None:
        commits = [one for series in commit.ALL for one in commit.load(series)]
    try:
        with _package(args.version, args.tree) as tree, _package(newest := newest_known(), _installed(newest)) as base:
            found = drifts(tree, base, fingerprint.known().values(), parts)
            lost = lost_anchors(commits, tree)
    except (wheel.WheelError, OSError, SyntaxError, UnicodeDecodeError, LookupError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    if args.json:
        print(json.dumps(as_json(args.version, found, lost), indent=2))
    else:
        console = Console(highlight=False)
        if args.diff:
            print_diffs(console, found)
        if shown := [drift for drift in found if args.all or drift.state is not State.KNOWN]:
            console.print(table(args.version, shown))
        console.print(summary(args.version, found), soft_wrap=True)
        console.print(anchor_summary(lost, sum(len(one.edits) for one in commits)), soft_wrap=True)
    return 0 if not lost and all(drift.state is State.KNOWN for drift in found) else 1


def newest_known() -> str:
    """The newest release that the patch points are known to fit."""
    return max(fingerprint.known(), key=_as_numbers)


def _installed(version: str) -> Path | None:
    return fingerprint.installed_tree() if register.upstream_version() == version else None


@contextmanager
def _package(version: str, folder: Path | None = None) -> Iterator[Path]:
    """SGLang's package folder of a release: a given one, or the release's Python files in a folder of their own.

    Raises:
        WheelError: the release cannot be had.
    """
    if folder is not None:
        yield folder
        return
    release = wheel.find(version)
    with TemporaryDirectory(prefix="sglang-") as scratch:
        release.lay_out(Path(scratch), [path for path in release.hashes if path.endswith(".py")])
        yield Path(scratch) / "python" / wheel.PACKAGE


def table(version: str, found: Sequence[Drift]) -> Table:
    """One row a patch point, a section a part of the register."""
    result = Table(title=f"SGLang {version}", title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    result.add_column("definition", overflow="fold")
    for heading in ("kind", "state"):
        result.add_column(heading, no_wrap=True)
    result.add_column("lines", justify="right", no_wrap=True)
    for part, drifts_of_part in groupby(found, key=lambda drift: drift.part):
        result.add_row(f"[bold]{part}")
        for drift in drifts_of_part:
            added, removed = drift.lines
            lines = f"+{added} -{removed}" if drift.state is State.CHANGED else ""
            result.add_row(f" {_short(drift.target)}", drift.kind.value, drift.state.value, lines)
    return result


def summary(version: str, found: Sequence[Drift]) -> str:
    """Where missing names may have gone, the counts, and what they mean."""
    states = Counter(drift.state for drift in found)
    lines = [
        f"{_short(drift.target)}: missing; that name is defined in {', '.join(drift.places) or 'no file'}"
        for drift in found
        if drift.state is State.MISSING
    ]
    counts = ", ".join(f"{states[state]} {state.value}" for state in State)
    if states[State.KNOWN] < len(found):
        verdict = "Not supported."
    elif version in fingerprint.known():
        verdict = "Supported."
    else:
        verdict = "Nothing moved: run the tests on it, then record it."
    return "\n".join([*lines, f"{len(found)} patch points in SGLang {version}: {counts}. {verdict}"])


def anchor_summary(lost: Sequence[LostAnchor], num_edits: int) -> str:
    """The edits that do not fit, and how many do."""
    lines = [f"{one.commit}: {one.module}, {one.scope or 'module level'}: {one.reason}" for one in lost]
    return "\n".join([*lines, f"{num_edits - len(lost)} of {num_edits} edits of the patch series fit."])


def print_diffs(console: Console, found: Sequence[Drift]) -> None:
    """Each changed definition, from the known source to the one found."""
    for drift in found:
        if drift.state is State.CHANGED:
            console.rule(f"{drift.target} ({drift.kind.value})", align="left")
            console.print("\n".join(drift.diff), markup=False)


def as_json(version: str, found: Sequence[Drift], lost: Sequence[LostAnchor]) -> dict[str, Any]:
    """Plain data: the counts, every patch point, and the anchors that were not found."""
    states = Counter(drift.state for drift in found)
    points = []
    for drift in found:
        added, removed = drift.lines
        points.append(
            {
                "part": drift.part,
                "target": drift.target,
                "kind": drift.kind.value,
                "state": drift.state.value,
                "lines_added": added,
                "lines_removed": removed,
                "places": list(drift.places),
            }
        )
    return {
        "version": version,
        "states": {state.value: states[state] for state in State},
        "patch_points": points,
        "lost_anchors": [dataclasses.asdict(one) for one in lost],
    }


def _short(target: str) -> str:
    """A target without its module: ``Class.method``, or the function's name."""
    *_, owner, name = target.split(".")
    return f"{owner}.{name}" if owner[:1].isupper() else name


def _as_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


if __name__ == "__main__":
    raise SystemExit(main())
