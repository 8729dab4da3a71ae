"""Patch points of SGLang's start-up: the flag, and arming.  Importing this imports neither torch nor Triton."""

from __future__ import annotations

from sglang_dcp_block.patches import arming, flag
from sglang_dcp_block.patches.register import Kind, PatchPoint

_FLAG_UPSTREAM = "a field for the block size in upstream's Parallel arguments"
_AGREE_UPSTREAM = "native blocks: there is no plugin that could be missing in one process"

# In every process that loads plugins, with or without blocks; they change nothing until blocks are asked for.
LIGHT_POINTS: tuple[PatchPoint, ...] = (
    PatchPoint(
        "sglang.srt.server_args.ServerArgs.add_cli_args", Kind.AFTER,
        "The command line knows --dcp-block-size and --dcp-group-pages.",
        _FLAG_UPSTREAM, flag.add_flag,
    ),
    PatchPoint(
        "sglang.srt.server_args.ServerArgs.from_cli_args", Kind.AFTER,
        "What was parsed reaches the record that schedulers get.",
        _FLAG_UPSTREAM, flag.carry_flag,
    ),
    PatchPoint(
        "sglang.srt.runtime_context.publish", Kind.AFTER,
        "The moment at which a process knows its role and configuration, and is armed.",
        "native blocks: nothing to arm", arming.arm_process,
    ),
)  # fmt: skip

# In the process that starts the schedulers.
LAUNCHER_POINTS: tuple[PatchPoint, ...] = (
    PatchPoint(
        "sglang.srt.entrypoints.engine._wait_for_scheduler_ready", Kind.AROUND,
        "Refuse to serve unless all schedulers of the node report the same block size and patch points; end them if not.",
        _AGREE_UPSTREAM, arming.require_ranks_agree,
    ),
)  # fmt: skip

# In the data-parallel controller, which stands between schedulers and launcher.
CONTROLLER_POINTS: tuple[PatchPoint, ...] = (
    PatchPoint(
        "sglang.srt.managers.data_parallel_controller.DataParallelController.get_init_info", Kind.AFTER,
        "Merge the schedulers' reports; upstream forwards a fixed set of keys.",
        _AGREE_UPSTREAM, arming.merge_controller_reports,
    ),
)  # fmt: skip

# In every scheduler: its report.
SCHEDULER_POINTS: tuple[PatchPoint, ...] = (
    PatchPoint(
        "sglang.srt.managers.scheduler.Scheduler.get_init_info", Kind.AFTER,
        "Report block size, digest, capacity and grouping with the start-up info; check the loaded model.",
        _AGREE_UPSTREAM, arming.report,
    ),
)  # fmt: skip
