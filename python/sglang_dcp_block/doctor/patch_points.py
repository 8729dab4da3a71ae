"""Whether SGLang's source is the one that each patch point was written for.  Reads files; imports no SGLang."""

from __future__ import annotations

from pathlib import Path

from sglang_dcp_block.doctor.findings import Finding, ok, problem
from sglang_dcp_block.patches import fingerprint, register
from sglang_dcp_block.patches.fingerprint import TargetMissingError

PART = "patch points"
ADVICE = "Install a known SGLang version (--force-reinstall undoes edits), or leave --dcp-block-size out."


def check(tree: Path | None = None, version: str | None = None) -> list[Finding]:
    """A finding for each target: its source is the known one, another one, or missing.

    Args:
        tree: SGLang's package folder; the installed one when None.
        version: of that SGLang; the installed one's when None.
    """
    version = version or register.upstream_version()
    try:
        tree = tree or fingerprint.installed_tree()
    except (TargetMissingError, ImportError, ValueError) as error:
        return [problem(PART, "SGLang's source", str(error), "Install SGLang first.")]
    known = fingerprint.known()
    expected = known.get(version)
    if expected is None:
        versions = " or ".join(sorted(known))
        targets = sorted({target for table in known.values() for target in table})
        missing = [target for target in targets if isinstance(_state(target, tree), TargetMissingError)]
        got = f"{len(targets)} of an unknown SGLang, {version}; {len(missing)} of their targets are missing"
        return [
            problem(PART, "fingerprints", got, f"Install SGLang {versions}, which this release of the plugin knows.")
        ]
    return [_finding(target, _state(target, tree), fingerprint_here) for target, fingerprint_here in expected.items()]


def _state(target: str, tree: Path) -> str | TargetMissingError:
    try:
        return fingerprint.from_tree(target, tree)
    except TargetMissingError as error:
        return error
    except (OSError, SyntaxError, ValueError) as error:  # an unreadable or half-written file
        return TargetMissingError(f"{type(error).__name__}: {error}")


def _finding(target: str, found: str | TargetMissingError, expected: str) -> Finding:
    if isinstance(found, TargetMissingError):
        return problem(PART, target, f"missing: {found}", ADVICE)
    if found != expected:
        return problem(PART, target, f"source {found}, expected {expected}", ADVICE)
    return ok(PART, target, f"source {found}, as known")
