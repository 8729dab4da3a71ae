"""The register: every place of SGLang that this plugin changes or counts on.  ``docs/patch-points.md`` is made from it."""

from __future__ import annotations

from sglang_dcp_block.patches.kv_points import KV_POINTS, RELIED_ON
from sglang_dcp_block.patches.register import PatchPoint
from sglang_dcp_block.patches.startup_points import CONTROLLER_POINTS, LAUNCHER_POINTS, LIGHT_POINTS, SCHEDULER_POINTS


def core_points() -> tuple[PatchPoint, ...]:
    """What a scheduler is armed with."""
    return SCHEDULER_POINTS + KV_POINTS + RELIED_ON


def all_points() -> tuple[PatchPoint, ...]:
    """Every patch point, in the order of the docs."""
    return LIGHT_POINTS + LAUNCHER_POINTS + CONTROLLER_POINTS + core_points()
