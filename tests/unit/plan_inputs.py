"""What the plan is asked for, with little to say where it does not matter."""

from __future__ import annotations

from dataclasses import replace

from sglang_dcp_block.plan.inputs import Inputs, default_backend
from sglang_dcp_block.plan.mix import Mix, read
from sglang_dcp_block.transfer_model.links import presets
from sglang_dcp_block.transfer_model.shapes import preset


def inputs(model: str = "deepseek-v3", requests: str | Mix = "agent", **changes) -> Inputs:
    shape = preset(model)
    mix = read(requests) if isinstance(requests, str) else requests
    basic = Inputs(shape, 8, 8, mix, presets()["rdma-400"], default_backend(shape))
    return replace(basic, **changes)
