"""HiCache: which storage its pages may go to, and the layout in the names that they get there.

A page of one rank holds other tokens at each block size, so pages of one layout must not be found by a server of another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dcp_block.config import BlockSizeError
from sglang_dcp_block.patches.active import layout
from sglang_dcp_block.support import HOST_STORAGE


def attach_tried_storage(
    original: Callable[..., None], controller: Any, storage_backend: str, *args: Any, **kwargs: Any
) -> None:
    """AROUND ``HiCacheController.attach_storage_backend``: at start, and when a running server is asked to.

    Raises:
        BlockSizeError: nobody has tried blocks with this storage.
    """
    if storage_backend not in HOST_STORAGE:
        raise BlockSizeError(
            f"expected {' or '.join(HOST_STORAGE)} as HiCache storage with DCP blocks, got {storage_backend}. "
            "Attach such a storage, or none."
        )
    original(controller, storage_backend, *args, **kwargs)


def name_layout(result: str | None, model_name: str | None, host_pool: Any) -> str | None:
    """AFTER ``cache_controller.storage_model_name``: the name under which pages are kept ends with the block size.

    Blocks of one token are SGLang's own layout and keep its names.
    """
    size = layout().block_size
    if size == 1:
        return result
    tag = f"dcp-block-{size}"
    return f"{result}-{tag}" if result else tag
