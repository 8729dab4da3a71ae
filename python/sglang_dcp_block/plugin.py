"""The plugin's entry point.  SGLang calls :func:`register` early in every one of its processes."""

from __future__ import annotations


def register() -> None:
    """Teach SGLang the flag.  Everything else waits until a block size is asked for.

    The resolution steps go in first: should one of them be unknown to this SGLang, the exception leaves the flag
    unregistered, and SGLang refuses the flag instead of ignoring it.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_dcp_block.patches import flag
    from sglang_dcp_block.patches.startup_points import LIGHT_POINTS

    flag.install_resolution()
    for point in LIGHT_POINTS:
        HookRegistry.register(point.target, point.hook, HookType(point.kind.value))
    flag.install_engine_keyword()
