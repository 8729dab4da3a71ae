"""Patch points, and arming them so that nothing is ever half patched.

Arming has two phases.  *Check*: every target must exist and carry the fingerprint of a known SGLang version; nothing is
changed before all of them do.  *Apply and verify*: the hooks go in through SGLang's own ``HookRegistry``, which only logs
what it could not do, so afterwards each target is looked up again and must really run our hook.  Any failure raises
:class:`PatchError` naming every target that failed, with the version found and the versions known.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sglang_dcp_block import __version__
from sglang_dcp_block.patches import fingerprint
from sglang_dcp_block.patches.fingerprint import TargetMissingError
from sglang_dcp_block.refused import StartRefused

Hook = Callable[..., Any]

_PACKAGE = Path(__file__).parents[1]


class Kind(Enum):
    """How a hook meets its target; the values are those of SGLang's ``HookType``, but for RELIES."""

    AFTER = "after"  # hook(result, *args, **kwargs) -> new result, or None to keep it
    AROUND = "around"  # hook(original, *args, **kwargs) -> result
    REPLACE = "replace"  # hook(*args, **kwargs) -> result
    RELIES = "relies"  # not touched: its text must be the known one, because a hook counts on what it does


@dataclass(frozen=True, slots=True)
class PatchPoint:
    """One place of SGLang that the plugin changes, or counts on."""

    target: str  # dotted path
    kind: Kind
    why: str  # what would be wrong without it
    removed_by: str  # the upstream change that makes it unnecessary
    hook: Hook | None = None  # None exactly when kind is RELIES

    def __post_init__(self) -> None:
        if (self.hook is None) != (self.kind is Kind.RELIES):
            raise ValueError(f"{self.target}: expected a hook unless kind is RELIES, got {self.kind} with {self.hook}")


class PatchError(StartRefused, RuntimeError):
    """SGLang is not the one that the patch points were written for, or a hook did not take."""


def upstream_version() -> str:
    """Version of the installed SGLang, or ``none``."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "none"


def check(points: Sequence[PatchPoint], tree: Path | None = None) -> None:
    """Phase one: every target is there and is the text we know.  Reads files; imports and changes nothing.

    Args:
        tree: SGLang's package folder; the installed one when None.
    Raises:
        PatchError: naming each target that is unknown, with the version found and the versions known.
    """
    tree = tree or fingerprint.installed_tree()
    _refuse(_mismatches(points, lambda target: fingerprint.from_tree(target, tree)))


def arm(points: Sequence[PatchPoint]) -> None:
    """Phase two: check the live objects, apply every hook, and verify that each one is in place.

    Raises:
        PatchError: naming each target whose live source is unknown (nothing was applied then), or that does not run
            our hook afterwards.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _refuse(_mismatches(points, fingerprint.from_live))
    for point in points:
        if point.hook is not None and not _runs(point):
            HookRegistry.register(point.target, point.hook, HookType(point.kind.value))
    HookRegistry.apply_hooks()
    verify(points)


def verify(points: Iterable[PatchPoint]) -> None:
    """Each target really runs our hook.

    Raises:
        PatchError: naming those that do not.
    """
    _refuse(
        [f"{p.target}: SGLang's HookRegistry did not apply our {p.kind.value} hook" for p in points if not _runs(p)]
    )


def digest(points: Iterable[PatchPoint], block_size: int) -> str:
    """What a rank is armed with, as 16 hex digits: equal digests mean equal plugin, hooks, upstream and block size.

    The plugin counts with the text of all its modules: hooks do most of their work in functions that they call.
    """
    parts = [plugin_digest(), upstream_version(), str(block_size)]
    for point in sorted(points, key=lambda p: p.target):
        hook = f"{point.hook.__module__}.{point.hook.__qualname__}" if point.hook else ""
        parts.append(f"{point.target} {point.kind.value} {hook} {_known_here().get(point.target)}")
    return _sha256("\n".join(parts).encode())[:16]


def plugin_digest() -> str:
    """The plugin's version and the text of all its modules, as 16 hex digits.

    A prefill and a decode server have it in common, though not :func:`digest`: they are armed with other points.
    """
    parts = [__version__]
    parts += [f"{path.relative_to(_PACKAGE)} {_sha256(path.read_bytes())}" for path in sorted(_PACKAGE.rglob("*.py"))]
    return _sha256("\n".join(parts).encode())[:16]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _mismatches(points: Iterable[PatchPoint], fingerprint_of: Callable[[str], str]) -> list[str]:
    known_here = _known_here()
    failures = []
    for point in points:
        expected = known_here.get(point.target)
        try:
            found = fingerprint_of(point.target)
        except TargetMissingError as error:
            failures.append(f"{point.target}: missing ({error})")
            continue
        if expected is None:
            failures.append(f"{point.target}: source {found}, no fingerprint known for this version")
        elif found != expected:
            failures.append(f"{point.target}: source {found}, expected {expected}")
    return failures


def _known_here() -> dict[str, str]:
    return fingerprint.known().get(upstream_version(), {})


def _runs(point: PatchPoint) -> bool:
    """Whether calling the target runs our hook: it sits in the closure of one of the target's wrappers."""
    if point.hook is None:
        return True
    try:
        found = fingerprint.resolve(point.target)
    except TargetMissingError:
        return False
    while found is not None:
        cells = getattr(found, "__closure__", None) or ()
        if any(cell.cell_contents is point.hook for cell in cells):
            return True
        found = getattr(found, "__wrapped__", None)
    return False


def _refuse(failures: list[str]) -> None:
    if failures:
        known = ", ".join(sorted(fingerprint.known())) or "none"
        raise PatchError(
            f"cannot place KV in blocks: {len(failures)} patch point(s) do not fit SGLang {upstream_version()} "
            f"(known versions: {known}).\n  " + "\n  ".join(failures) + "\n"
            "Install a known SGLang version, keep other plugins off these targets, or start without --dcp-block-size."
        )
