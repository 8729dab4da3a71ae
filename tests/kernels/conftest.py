"""Kernels run in Triton's interpreter: the switch must be set before they are first imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"

from sglang_dcp_block.kernels import launch

if not launch.INTERPRETED:
    raise RuntimeError("TRITON_INTERPRET=1 came too late: sglang_dcp_block.kernels was imported before")
