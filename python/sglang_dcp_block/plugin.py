"""The plugin's entry point.  SGLang calls :func:`register` early in every one of its processes."""

from __future__ import annotations

import logging

from sglang_dcp_block.config import FLAG, KEYWORD

logger = logging.getLogger(__name__)


def register() -> None:
    """Teach SGLang the flag.  Everything else waits until a block size is asked for.

    The resolution steps go in first: should one of them be unknown to this SGLang, the exception leaves the flag
    unregistered, and SGLang refuses the flag instead of ignoring it.

    Raises:
        SystemExit: this SGLang has blocks built in.
    """
    refuse_built_in()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_dcp_block.patches import flag
    from sglang_dcp_block.patches.startup_points import LIGHT_POINTS

    flag.install_resolution()
    for point in LIGHT_POINTS:
        HookRegistry.register(point.target, point.hook, HookType(point.kind.value))
    flag.install_engine_keyword()


def refuse_built_in() -> None:
    """End the process where SGLang knows blocks itself: two layouts in one server would mean wrong tokens.

    SGLang swallows what a plugin raises and would serve on; ``SystemExit`` passes through its ``except Exception``.
    """
    try:
        from sglang.srt.arg_groups.fields.parallel import Parallel
    except ImportError:
        return
    if KEYWORD in Parallel.__struct_fields__:
        message = (
            f"sglang-dcp-block: expected an SGLang without DCP blocks, got one that has {FLAG} built in. Uninstall "
            "sglang-dcp-block (pip uninstall sglang-dcp-block), or leave it out with SGLANG_PLUGINS; the flag is the same."
        )
        logger.error(message)
        raise SystemExit(message)
