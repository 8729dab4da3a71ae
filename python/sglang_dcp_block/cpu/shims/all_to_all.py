"""The all-to-all exchange of a process group is registered as an operator for CUDA alone.

The group's own implementation under it, ``torch.distributed.all_to_all_single``, works on CPUs too; the all-gather beside
it is called past its operator off CUDA in the same way by SGLang itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_dcp_block.cpu.shims.target import find, replace_function

if TYPE_CHECKING:
    import torch

GROUP = "sglang.srt.distributed.parallel_state:GroupCoordinator"


def exchange(self: Any, output: torch.Tensor, input: torch.Tensor) -> None:
    """Send the n-th of equal parts of ``input`` to rank n; ``output`` gets what the others sent here, by rank."""
    self._all_to_all_single(output, input)


def install() -> None:
    """Exchange without the operator."""
    find(f"{GROUP}._all_to_all_single")
    replace_function(f"{GROUP}.all_to_all_single", exchange)
