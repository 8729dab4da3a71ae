"""Stand-ins for what SGLang cannot do without a GPU, one file a subsystem; each says why it is needed.

They are plain assignments, made before SGLang applies the hooks of its plugins.  None goes in unless what it replaces
still looks as it did.  :data:`SHIMS` is the list of them all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from sglang_dcp_block.cpu.environment import REQUIRED, TORCH_MERGE
from sglang_dcp_block.cpu.shims import (
    all_to_all,
    dcp_backends,
    flashinfer_mla,
    head_padding,
    host_cache,
    mla_writer,
    neutral_rows,
    padded_lengths,
    platform_check,
    prefill_events,
    torch_merge,
)
from sglang_dcp_block.cpu.shims.target import ShimError

__all__ = ["SHIMS", "Shim", "ShimError", "install_all"]


@dataclass(frozen=True, slots=True)
class Shim:
    """One stand-in."""

    name: str
    why: str  # what goes wrong without it
    install: Callable[[], None]
    switch: str | None = None  # environment variable that must be 1, for an optional one


SHIMS: tuple[Shim, ...] = (
    Shim("platform check", "SGLang refuses --dcp-size above 1 off CUDA, HIP, NPU and XPU", platform_check.install),
    Shim("DCP backends", "a backend without a DCP path would start and serve wrong tokens", dcp_backends.install),
    Shim("head padding", "padded KV heads make GQA with DCP silently wrong", head_padding.install),
    Shim("MLA cache writer", "the writer used off CUDA ignores which rank owns a token", mla_writer.install),
    Shim("neutral rows", "MLA backends clear rows without KV by a CUDA kernel under DCP", neutral_rows.install),
    Shim("FlashInfer MLA", "FlashInfer has no CPU kernels", flashinfer_mla.install),
    Shim("all-to-all", "--dcp-comm-backend a2a exchanges through an operator for CUDA alone", all_to_all.install),
    Shim(
        "padded lengths",
        "GPU backends lack get_cpu_graph_seq_len_fill_value, which SGLang calls on CPUs",
        padded_lengths.install,
    ),
    Shim("host cache", "HiCache moves and pins KV with CUDA kernels and calls", host_cache.install),
    Shim("prefill events", "disaggregated prefill records CUDA events and pins memory", prefill_events.install),
    Shim(
        "torch merge", "optional: the interpreter runs a program per request and head", torch_merge.install, TORCH_MERGE
    ),
)


def install_all() -> None:
    """Install every shim of :data:`SHIMS`; optional ones if their switch is ``1``.

    Raises:
        ShimError: the environment lacks a variable of ``cpu_environment()``, or a target in SGLang is not as expected.
    """
    for name in ("TRITON_INTERPRET", "SGLANG_USE_CPU_ENGINE"):
        if os.environ.get(name) != REQUIRED[name]:
            raise ShimError(
                f"expected {name}={REQUIRED[name]} in the environment, got {os.environ.get(name)!r};"
                " start the command with: python -m sglang_dcp_block.cpu --ranks N -- COMMAND"
            )
    for shim in SHIMS:
        if shim.switch is None or os.environ.get(shim.switch) == "1":
            shim.install()
