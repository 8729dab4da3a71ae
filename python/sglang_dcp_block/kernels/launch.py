"""What the launchers share: where a kernel can run, how many programs it gets, and checks of arguments.

Everything here looks at devices, shapes, strides and dtypes only, never at device data.
"""

from __future__ import annotations

import torch
import triton

from sglang_dcp_block.dcp.layout import DcpLayout

TILE = 512  # indices that one program handles at a time
MAX_PROGRAMS = 1024  # for a whole launch: several a multiprocessor on the largest GPUs

# Read once, as `@triton.jit` reads it when the kernels are defined: from then on they are interpreted or they are not.
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)

INTEGERS = (torch.int32, torch.int64)


def can_launch(tensor: torch.Tensor) -> bool:
    """Whether a kernel can work on this tensor: it is on CUDA, or kernels are interpreted (``TRITON_INTERPRET=1``)."""
    return tensor.is_cuda or INTERPRETED


def programs_per_request(num_requests: int, max_local_len: int, tile: int, max_programs: int) -> int:
    """How many programs share one request, so that few long requests still fill the GPU.

    A request's programs stride over its tiles, so any number >= 1 is right; this one is no more than the tiles of the
    longest possible share, and keeps the launch within ``max_programs`` (but for one program a request).
    """
    tiles = -(-max_local_len // tile)
    return max(1, min(tiles, max_programs // max(num_requests, 1)))


def check_tensor(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], ndim: int = 1) -> None:
    """Raise unless ``tensor`` has one of these dtypes and ``ndim`` dimensions, the last one dense."""
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: expected {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if tensor.ndim != ndim:
        raise ValueError(f"{name}: expected {ndim} dimension(s), got shape {tuple(tensor.shape)}")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: expected stride 1 in the last dimension, got strides {tensor.stride()}")


def check_per_request(name: str, tensor: torch.Tensor, num_requests: int) -> None:
    """Raise unless ``tensor`` is a dense integer vector with an entry for every request (more are ignored)."""
    check_tensor(name, tensor, INTEGERS)
    if tensor.shape[0] < num_requests:
        raise ValueError(f"{name}: expected at least {num_requests} entries, one a request, got {tensor.shape[0]}")


def check_rank(layout: DcpLayout, rank: int) -> None:
    """Raise unless ``rank`` is one of the layout's ranks."""
    if not 0 <= rank < layout.dcp_size:
        raise ValueError(f"rank: expected 0 <= rank < {layout.dcp_size}, got {rank}")
