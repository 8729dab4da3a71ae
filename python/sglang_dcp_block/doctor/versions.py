"""Versions of what a server with blocks is made of."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Collection, Sequence
from importlib import metadata

from sglang_dcp_block import __version__
from sglang_dcp_block.doctor.findings import Finding, note, ok, problem
from sglang_dcp_block.patches import fingerprint

PART = "versions"
# Distributions that bring the same module; the first one found counts.
MOONCAKE = (
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-non-cuda",
)
FLASHINFER = ("flashinfer-python",)

Version = Callable[[str], str | None]


def installed(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def check(version: Version = installed, needed: Collection[str] = ()) -> list[Finding]:
    """Python, this plugin, SGLang and what it computes and transfers with.

    Args:
        version: distribution name -> version, None where it is not installed.
        needed: of ``flashinfer`` and ``mooncake``, what the server to be started cannot do without.
    """
    findings = [ok(PART, "Python", f"{platform.python_version()} ({sys.executable})")]
    if version("sglang-dcp-block") in (__version__, None):
        findings.append(ok(PART, "sglang-dcp-block", __version__))
    else:
        findings.append(
            problem(
                PART,
                "sglang-dcp-block",
                f"{__version__} runs, {version('sglang-dcp-block')} is installed",
                "Install it anew (pip install .), and look for a second copy on PYTHONPATH.",
            )
        )
    findings.append(_sglang(version("sglang")))
    for name in ("torch", "triton"):
        findings.append(
            ok(PART, name, found)
            if (found := version(name))
            else problem(PART, name, "not installed", "Install SGLang, which brings it.")
        )
    for what, names, carries in (
        ("flashinfer", FLASHINFER, "the attention backends flashinfer, trtllm_mla and cutedsl_mla"),
        ("mooncake", MOONCAKE, "KV from prefill to decode servers"),
    ):
        findings.append(_optional(what, names, version, carries, what in needed))
    return findings


def _sglang(found: str | None) -> Finding:
    known = sorted(fingerprint.known())
    expected = " or ".join(known)
    if found is None:
        return problem(
            PART, "sglang", "not installed", f"Install it beside this plugin: pip install sglang=={known[-1]}"
        )
    if found not in known:
        return problem(PART, "sglang", f"{found}, expected {expected}", f"Install a known version: {expected}.")
    return ok(PART, "sglang", found)


def _optional(what: str, distributions: Sequence[str], version: Version, carries: str, needed: bool) -> Finding:
    for name in distributions:
        if found := version(name):
            return ok(PART, what, found if name == distributions[0] else f"{found} ({name})")
    if needed:
        return problem(
            PART, what, "not installed", f"pip install {distributions[0]}: these flags need it, for {carries}."
        )
    return note(PART, what, "not installed", f"Needed for {carries} only.")
