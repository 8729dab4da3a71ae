"""Decode server: notice a prefill server that was restarted between two heartbeats.

SGLang takes a prefill server for lost after two missed heartbeats, ten seconds.  One that is back sooner keeps the
addresses of its old ranks here, and whatever is sent there waits for minutes, one request after another.  The addresses
are those that the bootstrap server gave out, so asking it again tells.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from sglang_dcp_block.dcp import handshake
from sglang_dcp_block.patches import bounded_get

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 5


@dataclass(frozen=True, slots=True)
class Given:
    """Where a bootstrap server said that one of its ranks listens."""

    path: str  # what it was asked
    endpoint: tuple[Any, Any]  # IP address and port


_given: dict[str, Given] = {}  # bootstrap address -> the last one; the ranks of a server restart together


def remember_rank(
    result: dict[str, Any] | None,
    receiver: Any,
    prefill_dp_rank: int,
    prefill_cp_rank: int,
    target_tp_rank: int,
    target_pp_rank: int,
) -> dict[str, Any] | None:
    """AFTER ``CommonKVReceiver._get_bootstrap_info_from_server``: keep the question and the answer."""
    if result is not None:
        ranks = {
            "prefill_dp_rank": prefill_dp_rank,
            "prefill_cp_rank": prefill_cp_rank,
            "target_tp_rank": target_tp_rank,
            "target_pp_rank": target_pp_rank,
        }
        _given[receiver.bootstrap_addr] = Given(f"{handshake.TOPOLOGY_ROUTE}?{urlencode(ranks)}", _endpoint(result))
    return result


def drop_if_restarted(result: None, manager: Any, bootstrap_addr: str) -> None:
    """AFTER ``CommonKVManager._on_heartbeat_success``: another answer now means another server.

    Its requests end as SGLang ends those of a lost prefill server, and the next one asks it anew. A question that gets
    no answer changes nothing: whether the server lives is for the heartbeat to say.
    """
    given = _given.get(bootstrap_addr)
    if given is None:
        return
    try:
        status, body = bounded_get.get(
            bootstrap_addr, given.path, seconds=TIMEOUT_SECONDS, max_bytes=handshake.MAX_BYTES
        )
        now = _endpoint(json.loads(body)) if status == 200 else f"status {status}"
    except (*bounded_get.ERRORS, RecursionError) as error:
        logger.warning("prefill server %s: where its ranks listen could not be read: %s", bootstrap_addr, error)
        return
    if now != given.endpoint:
        logger.warning(
            "prefill server %s was restarted: expected a rank at %s, got %s. Requests under way there fail, later ones "
            "ask it anew.", bootstrap_addr, given.endpoint, now,
        )  # fmt: skip
        del _given[bootstrap_addr]
        manager._handle_node_failure(bootstrap_addr)


def _endpoint(rank: Any) -> tuple[Any, Any]:
    """Law: never raises for parsed JSON."""
    return (rank.get("rank_ip"), rank.get("rank_port")) if isinstance(rank, dict) else (None, None)
