"""Whether SGLang would find and load the plugin."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points

from sglang_dcp_block import config
from sglang_dcp_block.doctor.findings import Finding, note, ok, problem

PART = "plugin"
GROUP = "sglang.srt.plugins"
NAME = "dcp_block"
VALUE = "sglang_dcp_block.plugin:register"
ALLOWED = "SGLANG_PLUGINS"


def check(
    environ: Mapping[str, str] = os.environ, found: Iterable[EntryPoint] | None = None, *, has_flags: bool = False
) -> list[Finding]:
    """The entry point, SGLang's list of allowed plugins, other plugins, and the block size of the environment.

    Args:
        found: entry points of SGLang's plugin group; those of this environment when None.
        has_flags: a server's flags are judged beside this, and the variable with them: a flag may win over it.
    """
    points = list(entry_points(group=GROUP) if found is None else found)
    findings = [_entry_point(points), _allowed(environ.get(ALLOWED, ""))]
    others = sorted({point.name for point in points if not point.value.startswith("sglang_dcp_block.")})
    if others:
        findings.append(
            note(
                PART,
                "other plugins",
                ", ".join(others),
                "None of them may patch the same places of SGLang; a server that finds so does not start.",
            )
        )
    return findings + _variable(environ, has_flags)


def _entry_point(points: list[EntryPoint]) -> Finding:
    ours = [point for point in points if point.name == NAME]
    if not ours:
        return problem(
            PART,
            "entry point",
            f"no {NAME} in the group {GROUP}",
            "Install the package into the environment that SGLang runs from: pip install . in a checkout.",
        )
    if {point.value for point in ours} != {VALUE}:
        values = ", ".join(sorted({point.value for point in ours}))
        return problem(PART, "entry point", f"expected {VALUE}, got {values}", "Uninstall what brings the other one.")
    return ok(PART, "entry point", f"{NAME} -> {VALUE}")


def _allowed(text: str) -> Finding:
    allowed = [name for name in map(str.strip, text.split(",")) if name]
    if not allowed:
        return ok(PART, ALLOWED, "unset: all plugins are loaded")
    if NAME in allowed:
        return ok(PART, ALLOWED, text)
    return problem(
        PART, ALLOWED, f"expected {NAME} in the list, got {text}", f"Add {NAME} to the list, or unset {ALLOWED}."
    )


def _variable(environ: Mapping[str, str], has_flags: bool) -> list[Finding]:
    try:
        request = config.from_environment(environ)
    except config.BlockSizeError as error:
        got = str(error).removeprefix(f"{config.ENVIRONMENT}: ")
        advice = f"Set {config.ENVIRONMENT} to a number or to auto, or unset it."
        if has_flags:
            return [note(PART, config.ENVIRONMENT, got, f"{advice} Not used where {config.FLAG} is given.")]
        return [problem(PART, config.ENVIRONMENT, got, advice)]
    if request is None:
        return []
    return [note(PART, config.ENVIRONMENT, f"{request.value}: asks for blocks where no flag does")]
