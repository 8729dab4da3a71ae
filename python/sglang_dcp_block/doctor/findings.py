"""What a check says, as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"  # worth knowing; nothing has to be done
    PROBLEM = "problem"  # a server with blocks would not start, or not do what was asked for


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's answer."""

    part: str  # which heading it stands under
    what: str  # was looked at
    level: Level
    got: str  # was found
    advice: str = ""  # what to do; empty where nothing has to be done


def ok(part: str, what: str, got: str) -> Finding:
    """All well."""
    return Finding(part, what, Level.OK, got)


def note(part: str, what: str, got: str, advice: str = "") -> Finding:
    """Worth knowing."""
    return Finding(part, what, Level.NOTE, got, advice)


def problem(part: str, what: str, got: str, advice: str) -> Finding:
    """To be changed; always with what to do."""
    return Finding(part, what, Level.PROBLEM, got, advice)


def exit_status(findings: Iterable[Finding]) -> int:
    """The exit status for scripts: 1 if there is a problem, else 0."""
    return int(any(finding.level is Level.PROBLEM for finding in findings))
