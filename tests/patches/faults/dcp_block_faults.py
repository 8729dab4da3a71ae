"""A test-only SGLang plugin that breaks the real one on purpose, in all processes or in one rank alone.

``DCP_BLOCK_FAULT`` names the fault, ``DCP_BLOCK_FAULT_RANK`` the only TP rank that has it; without it, all processes do.
Its folder is on PYTHONPATH, so SGLang finds and runs it before the plugin under test.
"""

from __future__ import annotations

import multiprocessing
import os
from datetime import timedelta

FAULT, RANK = "DCP_BLOCK_FAULT", "DCP_BLOCK_FAULT_RANK"
TARGET = "sglang.srt.layers.dcp.layout.get_dcp_lens"


def register() -> None:
    fault = os.environ.get(FAULT)
    if fault is None:
        return
    only = os.environ.get(RANK)
    if only is None or tp_rank() == int(only):
        FAULTS[fault]()


def tp_rank() -> int | None:
    """The rank that this process was spawned for; None in any other process than a scheduler."""
    # SGLang's launcher: args=(server_args, port_args, gpu_id, tp_rank, pp_rank, ...).
    args = getattr(multiprocessing.current_process(), "_args", ())
    return args[3] if len(args) >= 7 else None


def altered_source() -> None:
    """SGLang's definition is not the one that the patch was written for."""
    from sglang_dcp_block.patches import fingerprint

    for targets in fingerprint.known().values():
        targets[TARGET] = "0123456789abcdef"


def unknown_version() -> None:
    from sglang_dcp_block.patches import register

    register.upstream_version = lambda: "0.5.99"


def broken_target() -> None:
    """Another plugin has hooked the target first; SGLang then skips our hook without an error."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, lambda result, *args, **kwargs: result, HookType.AFTER)


def cannot_load() -> None:
    """The plugin under test raises while it registers; SGLang logs that and goes on."""
    from sglang_dcp_block.patches import flag

    def fail() -> None:
        raise ImportError("this rank has a broken installation")

    flag.install_resolution = fail


def impatient() -> None:
    """Nodes wait for each other for seconds instead of minutes."""
    from sglang_dcp_block.patches import agreement

    wait = agreement.require_world_agreement
    agreement.require_world_agreement = lambda *args: wait(*args, timeout=timedelta(seconds=5))


FAULTS = {
    function.__name__: function for function in (altered_source, unknown_version, broken_target, cannot_load, impatient)
}
