"""A router in small: each request goes to a prefill and a decode server at once, which meet by its bootstrap room."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from sglang_dcp_block.demo.client import Answer, RequestFailed, generate
from sglang_dcp_block.demo.servers import Server

HOST = "127.0.0.1"
WATCH_SECONDS = 1.0

_rooms = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Reply:
    """What the two servers said to one request."""

    answer: Answer  # of the decode server
    cached_tokens: int  # of the prompt, in the prefix cache of the prefill server


def ask_pair(
    prefill: Server,
    decode: Server,
    bootstrap_port: int,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    timeout: float,
) -> list[Reply]:
    """Send all prompts at once, each to both servers; replies in the order of the prompts.

    Raises:
        ServerFailed: a server ended meanwhile; or the first one that refused a request, or did not answer in time.
    """
    pool = ThreadPoolExecutor(2 * len(prompts))
    pairs: list[list[Future[Answer]]] = []
    servers: dict[Future[Answer], Server] = {}
    try:
        for prompt in prompts:
            where = {"bootstrap_host": HOST, "bootstrap_port": bootstrap_port, "bootstrap_room": next(_rooms)}
            pairs.append([])
            for server in (prefill, decode):
                future = pool.submit(generate, server.url, prompt, new_tokens, timeout, **where)
                servers[future] = server
                pairs[-1].append(future)
        pending = set(servers)
        while pending:
            done, pending = wait(pending, WATCH_SECONDS, FIRST_EXCEPTION)
            errors = [(future, error) for future in done if (error := future.exception())]
            if errors:
                time.sleep(WATCH_SECONDS)  # a connection breaks before its process has ended
            # Not only after an error: a server whose partner has died would wait for the partner's part.
            prefill.check_alive()
            decode.check_alive()
            for future, error in errors:
                raise servers[future].failed(error) if isinstance(error, RequestFailed) else error
        return [Reply(decoded.result(), prefilled.result().cached_tokens) for prefilled, decoded in pairs]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # whoever interrupts us ends the servers, and so the requests
