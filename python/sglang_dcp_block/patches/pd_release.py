"""Decode server: pages of a failed transfer are kept until no prefill server can write them any more.

SGLang keeps them until every prefill rank has acknowledged the end of its transfer, or for a time that knows nothing of
Mooncake's.  The time is raised here; what acknowledges and what never does are SGLang's own, and relied on.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from sglang_dcp_block.dcp import quarantine
from sglang_dcp_block.dcp.quarantine import Hold
from sglang_dcp_block.patches.active import layout

logger = logging.getLogger(__name__)


def own_timeout() -> int:
    """Seconds after which Mooncake gives up in this environment."""
    return quarantine.mooncake_timeout(os.environ.get(quarantine.VARIABLE))


def why_not_here() -> str | None:
    """Why a decode server with blocks may not start in this environment, or None: its hold is long enough, or is raised.

    Prefill servers are taken to have the same environment; :func:`refusal_of` asks each one.
    """
    return _why_not(_hold(), own_timeout())


def tell_of_raised_hold() -> None:
    """Warn of what :func:`hold_long_enough` does, before a decode server with blocks starts."""
    seconds, timeout = _hold().seconds, own_timeout()
    if not seconds >= (needed := quarantine.needed_seconds(timeout)):
        logger.warning(
            "%s is unset: pages of a failed transfer are kept for %d s instead of %g s: Mooncake may write for %d s.",
            _variables()[1], needed, seconds, timeout,
        )  # fmt: skip


def hold_long_enough(result: None, transfer_queue: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER ``DecodeTransferQueue.__init__``: the seconds that :func:`tell_of_raised_hold` has told."""
    if layout().block_size > 1:
        _raise(transfer_queue, own_timeout())


def refusal_of(transfer_queue: Any, addr: str, timeout: int | None) -> str | None:
    """Why pages are released too early for the prefill server at ``addr``, or None, then for a hold that is long enough.

    Args:
        timeout: seconds after which that server's Mooncake gives up; None where it does not say.
    """
    if timeout is None:
        return None
    if reason := _why_not(_hold(), timeout):
        return reason
    if _raise(transfer_queue, timeout):
        logger.warning(
            "Pages of a failed transfer are kept for %g s from now on: Mooncake of prefill server %s may write for %d s.",
            transfer_queue.deferred_kv_release_timeout, addr, timeout,
        )  # fmt: skip
    return None


def _raise(transfer_queue: Any, timeout: int) -> bool:
    """Whether the hold had to be raised."""
    before, needed = transfer_queue.deferred_kv_release_timeout, float(quarantine.needed_seconds(timeout))
    if before >= needed:
        return False
    transfer_queue.deferred_kv_release_timeout = needed
    return True


def _variables() -> tuple[str, str]:
    """SGLang's environment variables: whether pages are kept, and for how many seconds."""
    from sglang.srt.environ import envs

    return (
        envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.name,
        envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT.name,
    )


def _hold() -> Hold:
    from sglang.srt.environ import envs

    seconds = envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT
    return Hold(envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.get(), seconds.get(), seconds.is_set())


def _why_not(hold: Hold, timeout: int) -> str | None:
    return hold.why_not(timeout, *_variables())
