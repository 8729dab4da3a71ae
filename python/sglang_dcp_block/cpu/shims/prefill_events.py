"""A disaggregated prefill server pins the page numbers of a transfer and records CUDA events for transfer threads."""

from __future__ import annotations

from sglang_dcp_block.cpu.shims.target import shadow_global
from sglang_dcp_block.cpu.shims.torch_on_cpu import TorchOnCpu

MODULE = "sglang.srt.disaggregation.prefill"
MIXIN = "SchedulerDisaggregationPrefillMixin"


def install() -> None:
    """Give the prefill scheduler CPU memory and events that are always ready."""
    readers = (f"{MIXIN}._send_kv_chunk", f"{MIXIN}.maybe_send_cached_prefix_chunk")
    shadow_global(MODULE, "torch", TorchOnCpu(), readers=readers)
