"""Stand-in for the wheel ``sgl_kernel``, whose native library needs CUDA.

On CPUs, SGLang imports names from it at module level and uses one of them on the paths that run here.  That one is
implemented; any other name is a function that raises when it is called, so that a missing kernel is never silent.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch

__version__ = "0+sglang.dcp.block.stub"


def assign_req_to_token_pool_cpu(
    req_pool_indices: "torch.Tensor",
    req_to_token: "torch.Tensor",
    start_offset: "torch.Tensor",
    end_offset: "torch.Tensor",
    out_cache_loc: "torch.Tensor",
    pool_len: int,
) -> None:
    """Write newly allocated slots into the table of requests, in place.

    Request ``i`` takes the next ``end_offset[i] - start_offset[i]`` slots of ``out_cache_loc``.

    Args:
        req_pool_indices: ``[num_requests] int``, rows of the table.
        req_to_token: ``[num_rows, pool_len] int``, the table.
        start_offset: ``[num_requests] int``, first position to write.
        end_offset: ``[num_requests] int``, position after the last one.
        out_cache_loc: ``[num_slots] int``, slots in the order of requests.
        pool_len: width of the table; unused.
    """
    taken = 0
    rows, starts, ends = req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist()
    for row, start, end in zip(rows, starts, ends, strict=True):
        count = end - start
        req_to_token[row, start:end] = out_cache_loc[taken : taken + count].to(req_to_token.dtype)
        taken += count


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def unavailable(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} needs CUDA: no stand-in in the CPU environment of sglang-dcp-block"
        )

    unavailable.__name__ = name
    return unavailable
