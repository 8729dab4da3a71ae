"""The register: every place of SGLang that this plugin changes or counts on.  ``docs/patch-points.md`` is made from it."""

from __future__ import annotations

from sglang_dcp_block.patches.host_points import HOST_POINTS
from sglang_dcp_block.patches.kv_points import KV_POINTS, RELIED_ON
from sglang_dcp_block.patches.pd_points import BOOTSTRAP_POINTS, DECODE_POINTS, PREFILL_POINTS
from sglang_dcp_block.patches.register import PatchPoint
from sglang_dcp_block.patches.startup_points import CONTROLLER_POINTS, LAUNCHER_POINTS, LIGHT_POINTS, SCHEDULER_POINTS


def scheduler_points(disaggregation_mode: str, hierarchical_cache: bool = False) -> tuple[PatchPoint, ...]:
    """What a scheduler with blocks is armed with.

    Args:
        disaggregation_mode: ``null``, ``prefill`` or ``decode``, as SGLang names it.
        hierarchical_cache: whether HiCache is on.
    """
    transfer = {"prefill": PREFILL_POINTS, "decode": DECODE_POINTS}.get(disaggregation_mode, ())
    host = HOST_POINTS if hierarchical_cache else ()
    return SCHEDULER_POINTS + KV_POINTS + RELIED_ON + host + transfer


def server_points(disaggregation_mode: str, hierarchical_cache: bool = False) -> tuple[PatchPoint, ...]:
    """What the processes of a server with blocks are armed with, all together."""
    startup = LIGHT_POINTS + LAUNCHER_POINTS + CONTROLLER_POINTS
    return startup + scheduler_points(disaggregation_mode, hierarchical_cache)


def all_points() -> tuple[PatchPoint, ...]:
    """Every patch point, in the order of the docs."""
    return server_points("null", hierarchical_cache=True) + BOOTSTRAP_POINTS + PREFILL_POINTS + DECODE_POINTS
