"""Prefill server, capability: each armed rank reports to the bootstrap server, which answers for all of them.

The bootstrap server lives in the process that started the schedulers, so it cannot know by itself whether they are armed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any
from urllib.parse import urlsplit

from sglang_dcp_block.dcp import handshake
from sglang_dcp_block.dcp.handshake import Capability, HandshakeError
from sglang_dcp_block.patches import active, pd_release, register

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 5
PATIENCE_SECONDS = 3  # below the time that a decode server waits for an answer


def add_route(result: None, server: Any) -> None:
    """AFTER ``CommonKVBootstrapServer._setup_routes``: PUT takes a rank's report, GET answers for the server.

    GET: 200 with the capability; 503 until every rank has reported; 409 where ranks disagree. A server without this
    route answers 404. A decode server with blocks built in asks SGLang's own route, and gets the same statuses there.

    A rank reports just after its registration, and decode servers with waiting requests ask as soon as all ranks have
    registered: the first ones wait for the reports, a few seconds in a server's life.
    """
    from aiohttp import web

    reports: dict[str, Capability] = {}
    first_asked: list[float] = []

    async def put(request: web.Request) -> web.Response:
        try:
            data = json.loads(await request.read())
            rank, capability = handshake.rank_from(data["rank"]), handshake.capability_from(data["capability"])
            if rank not in reports and len(reports) == handshake.MAX_RANKS:
                raise HandshakeError(f"expected at most {handshake.MAX_RANKS} ranks")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            return web.json_response({"error": f"not a layout report: {error}"}, status=400)
        reports[rank] = capability
        return web.json_response({})

    async def answer() -> web.Response | Capability:
        """The server's capability, or why there is none."""
        ranks = (server.dp_size, server.attn_cp_size, server.attn_tp_size, server.pp_size)
        expected = 0 if None in ranks else ranks[0] * ranks[1] * ranks[2] * ranks[3]
        if not first_asked:
            first_asked.append(time.monotonic())
        try:
            while (capability := handshake.agreed(reports, expected)) is None:
                if time.monotonic() > first_asked[0] + PATIENCE_SECONDS:
                    return web.json_response({"error": f"{len(reports)} of {expected} ranks have reported"}, status=503)
                await asyncio.sleep(0.05)
        except HandshakeError as error:
            return web.json_response({"error": str(error)}, status=409)
        return capability

    async def get(request: web.Request) -> web.Response:
        found = await answer()
        return web.json_response(found.as_json()) if isinstance(found, Capability) else found

    @web.middleware
    async def with_topology(request: web.Request, handler: Any) -> web.StreamResponse:
        """For a decode server with blocks built in: our block size beside SGLang's topology, where it asks for it."""
        response: web.StreamResponse = await handler(request)
        asks = request.method == "GET" and request.path == handshake.TOPOLOGY_ROUTE and handshake.FIELD in request.query
        if not asks or response.status != 200 or not isinstance(response, web.Response):
            return response
        found = await answer()
        if not isinstance(found, Capability):
            return found  # it asks again
        return web.json_response({**json.loads(response.text or "{}"), handshake.FIELD: found.block_size})

    server.app.router.add_put(handshake.ROUTE, put)
    server.app.router.add_get(handshake.ROUTE, get)
    server.app.middlewares.append(with_topology)


def report_rank(result: None, manager: Any, url: str, payload: dict[str, Any]) -> None:
    """AFTER ``CommonKVManager._register_topology_row``: this rank's report follows its registration.

    A report that does not get through withholds the server's capability; stock decode servers are served all the same.
    """
    import requests

    from sglang_dcp_block.patches.pd_points import PREFILL_POINTS

    if not active.prefill_is_armed:
        return
    layout = active.layout_or_stock(manager.dcp_size)
    capability = Capability(
        protocol=handshake.PROTOCOL,
        dcp_size=layout.dcp_size,
        block_size=layout.block_size,
        page_size=payload["page_size"],
        digest=register.digest(PREFILL_POINTS, layout.block_size),
        transfer_timeout_seconds=pd_release.own_timeout(),
        plugin_digest=register.plugin_digest(),
    )
    ranks = ("system_dp_rank", "attn_dp_rank", "attn_cp_rank", "attn_tp_rank", "pp_rank")
    target = urlsplit(url)._replace(path=handshake.ROUTE, query="").geturl()
    body: dict[str, Any] = {"rank": "-".join(str(payload[name]) for name in ranks), "capability": capability.as_json()}
    try:
        response = requests.put(target, json=body, timeout=TIMEOUT_SECONDS)
        response.raise_for_status()
    except requests.RequestException as error:
        logger.error("DCP block capability withheld: the bootstrap server did not take this rank's report: %s", error)
