"""What still fits another release of SGLang: the patch points, by the source of their targets, and the series' anchors."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import libcst as cst

from sglang_dcp_block.patches import fingerprint
from sglang_dcp_block.patches.fingerprint import TargetMissingError
from sglang_dcp_block.patches.group_points import DECODE_GROUP_POINTS, PREFILL_GROUP_POINTS
from sglang_dcp_block.patches.host_points import HOST_POINTS
from sglang_dcp_block.patches.kv_points import KV_POINTS, RELIED_ON
from sglang_dcp_block.patches.pd_points import BOOTSTRAP_POINTS, DECODE_POINTS, PREFILL_POINTS
from sglang_dcp_block.patches.register import Kind, PatchPoint
from sglang_dcp_block.patches.startup_points import CONTROLLER_POINTS, LAUNCHER_POINTS, LIGHT_POINTS, SCHEDULER_POINTS
from upstream import edit
from upstream.commit import Commit

PARTS: dict[str, tuple[PatchPoint, ...]] = {
    "start-up": LIGHT_POINTS + LAUNCHER_POINTS + CONTROLLER_POINTS + SCHEDULER_POINTS,
    "KV cache": KV_POINTS + RELIED_ON,
    "HiCache": HOST_POINTS,
    "prefill": BOOTSTRAP_POINTS + PREFILL_POINTS,
    "decode": DECODE_POINTS,
    "page order": tuple(dict.fromkeys(PREFILL_GROUP_POINTS + DECODE_GROUP_POINTS)),
}
MAX_PLACES = 3


class State(StrEnum):
    """What another release has for a target."""

    KNOWN = "known"  # the source that some known version has
    CHANGED = "changed"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Drift:
    """One patch point in another release."""

    part: str
    target: str
    kind: Kind
    state: State
    diff: tuple[str, ...] = ()  # unified, from the known source to the one found; CHANGED only
    places: tuple[str, ...] = ()  # file:line of definitions of that name elsewhere; MISSING only

    @property
    def lines(self) -> tuple[int, int]:
        """(lines added, lines removed)."""
        heads = Counter(line[:1] for line in self.diff)
        return heads["+"], heads["-"]


def drifts(
    tree: Path, base: Path, known: Iterable[dict[str, str]], parts: dict[str, tuple[PatchPoint, ...]] = PARTS
) -> list[Drift]:
    """Map every patch point to what ``tree`` has for it.

    Args:
        tree: package folder of the release in question.
        base: package folder of the release that the patch points were written for; differences are counted from it.
        known: target -> fingerprint, one mapping a known version.
        parts: name -> patch points.
    Raises:
        TargetMissingError: ``base`` lacks a target that changed, so it is another release.
    """
    fingerprints: dict[str, set[str]] = {}
    for version in known:
        for target, value in version.items():
            fingerprints.setdefault(target, set()).add(value)
    found = [(part, point, _source(point.target, tree)) for part, points in parts.items() for point in points]
    places = _places([point.target for _, point, source in found if source is None], tree)
    results = []
    for part, point, source in found:
        if source is None:
            drift = Drift(part, point.target, point.kind, State.MISSING, places=tuple(places[point.target]))
        elif fingerprint.of_source(source) in fingerprints.get(point.target, ()):
            drift = Drift(part, point.target, point.kind, State.KNOWN)
        else:
            diff = _diff(fingerprint.source_in(point.target, base), source)
            drift = Drift(part, point.target, point.kind, State.CHANGED, diff=tuple(diff))
        results.append(drift)
    return results


@dataclass(frozen=True, slots=True)
class LostAnchor:
    """An edit of the series that another release does not take."""

    commit: str
    module: str
    scope: str
    reason: str


def lost_anchors(commits: Iterable[Commit], tree: Path) -> list[LostAnchor]:
    """The edits whose anchors ``tree`` does not have exactly as often as expected.

    Each edit is tried on what the ones before it left; one that does not fit is left out, so that all are found at once.
    An edit of a place that an earlier one should have made counts, too.

    Args:
        commits: in order.
        tree: package folder of the release.
    """
    modules: dict[str, cst.Module | None] = {}
    lost = []
    for commit in commits:
        for one in commit.edits:
            if one.module not in modules:
                file = tree.parent / f"{one.module.replace('.', '/')}.py"
                modules[one.module] = cst.parse_module(file.read_text(encoding="utf-8")) if file.is_file() else None
            module = modules[one.module]
            if module is None:
                lost.append(LostAnchor(commit.name, one.module, one.scope, "no such module"))
                continue
            try:
                modules[one.module] = edit.apply_to(module, one)
            except edit.AnchorError as error:
                reason = f"expected {error.anchor} {error.expected} time(s), got {error.got}"
                lost.append(LostAnchor(commit.name, one.module, one.scope, reason))
        for path in commit.new_files():
            if path.startswith("python/") and path.endswith(".py"):
                name = path.removeprefix("python/").removesuffix(".py").replace("/", ".")
                modules[name] = cst.parse_module((commit.files / path).read_text(encoding="utf-8"))
    return lost


def _source(target: str, tree: Path) -> str | None:
    try:
        return fingerprint.source_in(target, tree)
    except TargetMissingError:
        return None


def _diff(before: str, after: str) -> Iterator[str]:
    """Unified diff without the two lines that name files."""
    lines = difflib.unified_diff(before.split("\n"), after.split("\n"), lineterm="")
    return (line for number, line in enumerate(lines) if number > 1)


def _places(targets: Sequence[str], tree: Path) -> dict[str, list[str]]:
    """Where a definition of each missing target's last name is now: where to look for what it became."""
    places: dict[str, list[str]] = {target: [] for target in targets}
    if not targets:
        return places
    names = {target.rpartition(".")[2] for target in targets}
    definition = re.compile(rf"^\s*(?:async def|def|class) ({'|'.join(map(re.escape, sorted(names)))})\b")
    for file in sorted(tree.rglob("*.py")):
        for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), start=1):
            if match := definition.match(line):
                for target, found in places.items():
                    if target.endswith(f".{match[1]}") and len(found) < MAX_PLACES:
                        found.append(f"{file.relative_to(tree).as_posix()}:{number}")
    return places
