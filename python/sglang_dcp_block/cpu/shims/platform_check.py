"""Decode context parallelism is refused off CUDA, HIP, NPU and XPU, when the process groups are built.

The refusal is the only place of that module that asks ``is_cuda`` (a test says so), so there it answers yes.
Backends without DCP are then refused by :mod:`~sglang_dcp_block.cpu.shims.dcp_backends`.
"""

from __future__ import annotations

from sglang_dcp_block.cpu.shims.target import shadow_global

MODULE = "sglang.srt.distributed.parallel_state"


def install() -> None:
    """Let the process groups of DCP be built on CPUs."""
    shadow_global(MODULE, "is_cuda", lambda: True, readers=("initialize_model_parallel",))
