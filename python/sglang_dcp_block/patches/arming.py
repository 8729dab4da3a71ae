"""When and where patch points are armed: hooks on SGLang's start-up, in each of its processes.

SGLang publishes its configuration once in every process, with the process's role.  Where blocks were asked for, that is
the moment to arm: schedulers get the KV patch points, the launcher and the data-parallel controller get the checks that
all schedulers agree.  Without blocks, nothing is armed, but for the transfer and the page order of a prefill server.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

from sglang_dcp_block.config import GROUP_KEYWORD
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.patches import active, agreement, peer_refusals, register, transfer_counts
from sglang_dcp_block.patches.agreement import REPORT_KEY, Report
from sglang_dcp_block.patches.flag import armed_block_size, armed_group_pages
from sglang_dcp_block.patches.peer_refusals import RefusedBy

logger = logging.getLogger(__name__)


def arm_process(result: Any, server_args: Any, *, role: str, **_: Any) -> None:
    """AFTER ``runtime_context.publish``: arm this process for its role, if blocks were asked for.

    Raises:
        PatchError: SGLang is not the one the patch points were written for; the process ends with it.
    """
    block_size = armed_block_size(server_args)
    mode = _resolved(server_args).disaggregation_mode
    if block_size is not None:
        from sglang_dcp_block.patches.startup_points import CONTROLLER_POINTS, LAUNCHER_POINTS

        if role == "scheduler":
            active.activate(DcpLayout(_resolved(server_args).dcp_size, block_size))
            active.group_pages = armed_group_pages(server_args)
            register.arm(_points_of_schedulers(server_args))
            if mode == "decode":
                peer_refusals.begin(RefusedBy.DECODE)
        elif role == "tokenizer":
            register.arm(LAUNCHER_POINTS)
        elif role == "dp_controller":
            register.arm(CONTROLLER_POINTS)
    if mode == "prefill":
        _arm_prefill(server_args, role)
        _arm_grouping(server_args, role)


def _points_of_schedulers(server_args: Any) -> tuple[register.PatchPoint, ...]:
    from sglang_dcp_block.patches.points import scheduler_points

    cfg = _resolved(server_args)
    return scheduler_points(
        cfg.disaggregation_mode, bool(cfg.enable_hierarchical_cache), armed_group_pages(server_args)
    )


def _arm_prefill(server_args: Any, role: str) -> None:
    """A prefill server serves decode servers with blocks without any flag; where it cannot, it serves as stock.

    Its capability is claimed only by ranks that are armed, so a decode server with blocks is refused, not misled.
    """
    from sglang_dcp_block.patches.pd_points import BOOTSTRAP_POINTS, PREFILL_POINTS

    if not _resolved(server_args).disaggregation_transfer_backend.startswith("mooncake"):
        return
    points = {"scheduler": PREFILL_POINTS, "tokenizer": BOOTSTRAP_POINTS}.get(role, ())
    try:
        register.arm(points)
    except register.PatchError as error:
        logger.error("This prefill server serves as stock SGLang does, not decode servers with DCP blocks: %s", error)
    else:
        if role == "scheduler":
            active.prefill_is_armed = True
            peer_refusals.begin(RefusedBy.PREFILL)
            transfer_counts.begin()


def _arm_grouping(server_args: Any, role: str) -> None:
    """On a prefill server, where the order of pages was asked for.

    Raises:
        PatchError: SGLang is not the one the patch points were written for.
    """
    ranks = armed_group_pages(server_args)
    if ranks and role == "dp_controller":
        from sglang_dcp_block.patches.startup_points import CONTROLLER_POINTS

        register.arm(CONTROLLER_POINTS)
    if ranks and role == "scheduler":
        from sglang_dcp_block.patches.points import grouping_points

        active.group_pages = ranks
        register.arm(grouping_points("prefill"))


def report(result: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    """AFTER ``Scheduler.get_init_info``: what this rank is armed with, for the log and ``/server_info``.

    Raises:
        BlockSizeError, DisagreementError: as of :func:`report_layout`.
    """
    if active.is_active():
        result = report_layout(result, scheduler)
    if active.group_pages:
        how = "A request takes pages with few gaps" if active.is_active() else "Pages of a chunk lie together by rank"
        logger.info("%s, for %d decode ranks.", how, active.group_pages)
        result = {**result, GROUP_KEYWORD: active.group_pages}
    return result


def report_layout(result: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    """Last checks of a rank with blocks, and its report.

    Raises:
        BlockSizeError: the loaded model has a layer that blocks cannot serve.
        DisagreementError: with several nodes, some rank is armed otherwise or not at all.
    """
    from sglang.srt.runtime_context import get_parallel, get_server_args

    from sglang_dcp_block.patches.model_check import require_full_attention

    require_full_attention(scheduler.tp_worker.model_runner.model)
    points = _points_of_schedulers(get_server_args())
    register.verify(points)
    layout, allocator = active.layout(), scheduler.token_to_kv_pool_allocator
    report = Report(
        block_size=layout.block_size,
        dcp_size=layout.dcp_size,
        page_size=allocator.page_size // layout.dcp_size,
        digest=register.digest(points, layout.block_size),
        plugin_digest=register.plugin_digest(),
        capacity_tokens=allocator.size,
        rows_per_rank=allocator.size // layout.dcp_size,
    )
    parallel = get_parallel()
    if parallel.nnodes > 1:
        from torch.distributed import distributed_c10d

        store = distributed_c10d._get_default_store()
        rank, world_size = distributed_c10d.get_rank(), distributed_c10d.get_world_size()
        agreement.require_world_agreement(store, rank, world_size, report.digest)
    logger.info(
        "KV in blocks of %d tokens over %d DCP ranks, page size %d: %d tokens, %d rows on each rank.",
        report.block_size, report.dcp_size, report.page_size, report.capacity_tokens, report.rows_per_rank,
    )  # fmt: skip
    return {**result, "dcp_block_size": report.block_size, REPORT_KEY: report.as_info()}


def require_ranks_agree(
    original: Callable[..., list[dict[str, Any]]], scheduler_pipe_readers: Sequence[Any], scheduler_procs: Sequence[Any]
) -> list[dict[str, Any]]:
    """AROUND ``_wait_for_scheduler_ready`` in the launcher: all schedulers of this node, or none.

    SGLang leaves the others running when one of them ends early, and a program that catches the error would keep them.

    Raises:
        DisagreementError: after ending the schedulers that were started, as for any other error of their start.
    """
    from sglang.srt.runtime_context import get_server_args

    server_args = get_server_args()
    points = _points_of_schedulers(server_args)
    block_size = armed_block_size(server_args)
    assert block_size is not None, "armed by arm_process, which read the same record"
    try:
        infos = original(scheduler_pipe_readers, scheduler_procs)
        merged = agreement.require_agreement(
            infos, block_size, register.digest(points, block_size), _schedulers_on_node(server_args)
        )
    except BaseException:
        _end(scheduler_procs)
        raise
    infos[0][REPORT_KEY] = merged  # the info that /server_info shows speaks for all schedulers
    return infos


def _end(processes: Sequence[Any]) -> None:
    """End schedulers, and what they started, at once.

    One that saw another one go would ask this process to quit (SIGQUIT), before the error has been told: so all are
    stopped first.
    """
    from sglang.srt.utils import kill_process_tree

    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGSTOP)
    for process in processes:
        kill_process_tree(process.pid)
    for process in processes:
        process.join(timeout=10)


def merge_controller_reports(result: dict[str, Any], controller: Any) -> dict[str, Any]:
    """AFTER ``DataParallelController.get_init_info``: one report for the schedulers behind this controller.

    Raises:
        DisagreementError: they do not report what this process was told.
    """
    from sglang.srt.runtime_context import get_server_args

    server_args, infos = get_server_args(), controller._scheduler_init_infos
    if armed_block_size(server_args) is not None:
        merged = agreement.merged_report(infos)
        result = {**result, "dcp_block_size": merged["block_size"], REPORT_KEY: merged}
    if ranks := armed_group_pages(server_args):
        agreement.require_grouping(infos, ranks)
        result = {**result, GROUP_KEYWORD: ranks}
    return result


def _resolved(server_args: Any) -> Any:
    from sglang.srt.arg_groups.overrides import resolving_view

    return resolving_view(server_args)


def _schedulers_on_node(server_args: Any) -> int:
    from sglang.srt.server_args import compute_world_size

    cfg = _resolved(server_args)
    world_size = compute_world_size(dp_size=cfg.dp_size, tp_size=cfg.tp_size, pp_size=cfg.pp_size)
    return int(world_size // cfg.nnodes)
