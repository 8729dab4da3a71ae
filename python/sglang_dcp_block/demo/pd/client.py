"""A router in small: each request goes to a prefill and a decode server at once, which meet by its bootstrap room."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass

from sglang_dcp_block.demo.client import Answer, generate
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
        RequestFailed: for the first request that one of the servers refused or did not answer in time.
        ServerFailed: a server ended meanwhile.
    """
    pool = ThreadPoolExecutor(2 * len(prompts))
    pairs = []
    try:
        for prompt in prompts:
            where = {"bootstrap_host": HOST, "bootstrap_port": bootstrap_port, "bootstrap_room": next(_rooms)}
            pairs.append(
                [pool.submit(generate, one.url, prompt, new_tokens, timeout, **where) for one in (prefill, decode)]
            )
        pending = {future for pair in pairs for future in pair}
        while pending:
            done, pending = wait(pending, WATCH_SECONDS, FIRST_EXCEPTION)
            # A server without its partner would wait for the partner's part: ask the processes first.
            prefill.check_alive()
            decode.check_alive()
            for future in done:
                future.result()
        return [Reply(decoded.result(), prefilled.result().cached_tokens) for prefilled, decoded in pairs]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # whoever interrupts us ends the servers, and so the requests
