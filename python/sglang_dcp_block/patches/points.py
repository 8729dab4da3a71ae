"""The register: every place of SGLang that this plugin changes or counts on.  ``docs/patch-points.md`` is made from it."""

from __future__ import annotations

from sglang_dcp_block.patches.group_points import DECODE_GROUP_POINTS, PREFILL_GROUP_POINTS
from sglang_dcp_block.patches.host_points import HOST_POINTS
from sglang_dcp_block.patches.kv_points import KV_POINTS, RELIED_ON
from sglang_dcp_block.patches.pd_points import BOOTSTRAP_POINTS, DECODE_POINTS, PREFILL_POINTS
from sglang_dcp_block.patches.register import PatchPoint
from sglang_dcp_block.patches.startup_points import CONTROLLER_POINTS, LAUNCHER_POINTS, LIGHT_POINTS, SCHEDULER_POINTS


def scheduler_points(
    disaggregation_mode: str, hierarchical_cache: bool = False, group_pages: int = 0
) -> tuple[PatchPoint, ...]:
    """What a scheduler with blocks is armed with.

    Args:
        disaggregation_mode: ``null``, ``prefill`` or ``decode``, as SGLang names it.
        hierarchical_cache: whether HiCache is on.
        group_pages: of ``--dcp-group-pages``; 0 without it.
    """
    transfer = {"prefill": PREFILL_POINTS, "decode": DECODE_POINTS}.get(disaggregation_mode, ())
    host = HOST_POINTS if hierarchical_cache else ()
    return SCHEDULER_POINTS + KV_POINTS + RELIED_ON + host + transfer + (DECODE_GROUP_POINTS if group_pages else ())


def grouping_points(disaggregation_mode: str) -> tuple[PatchPoint, ...]:
    """What a scheduler with ``--dcp-group-pages`` is armed with for that.

    Args:
        disaggregation_mode: ``prefill`` or ``decode``.
    """
    return SCHEDULER_POINTS + (PREFILL_GROUP_POINTS if disaggregation_mode == "prefill" else DECODE_GROUP_POINTS)


def server_points(disaggregation_mode: str, hierarchical_cache: bool = False) -> tuple[PatchPoint, ...]:
    """What the processes of a server with blocks are armed with, all together."""
    startup = LIGHT_POINTS + LAUNCHER_POINTS + CONTROLLER_POINTS
    return startup + scheduler_points(disaggregation_mode, hierarchical_cache)


def all_points() -> tuple[PatchPoint, ...]:
    """Every patch point, in the order of the docs."""
    ours = server_points("null", hierarchical_cache=True)
    return ours + BOOTSTRAP_POINTS + PREFILL_POINTS + PREFILL_GROUP_POINTS + DECODE_POINTS
