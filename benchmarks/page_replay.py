"""Replays a mix of requests through the pages of a prefill server and of its decode server, and counts segments.

Both servers are SGLang's own allocator and radix tree (``tests/paged_server.py``). To be quick, a replayed page has fewer
tokens than the page it stands for, and all lengths shrink with it: allocator, tree and plan deal in pages.
"""

from __future__ import annotations

import math
import random
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from paged_server import PagedServer, Request, pages_of
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.dcp.transfer import plan_runs


@dataclass(frozen=True, slots=True)
class Transfer:
    """One chunk of one request, to all decode ranks."""

    batch: int  # when, in batches of the prefill server
    pages: int
    segments: int  # of all ranks, a layer
    segments_into_adjacent_pages: int  # were the decode server's pages side by side


class Trace:
    """A seeded stream of (prompt, tokens of the answer), in replayed tokens.

    A request opens a conversation (a system prompt, the same ones again and again, and a text of its own), or goes on
    with one: the whole of it, the answer, and a new text.
    """

    def __init__(self, parameters: dict[str, Any]) -> None:
        self.parameters = parameters
        self.scale = parameters["page_tokens"] // parameters["replayed_page_tokens"]
        self.rng = random.Random(parameters["seed"])
        self.texts = 0

    def size(self, name: str) -> int:
        """Log-uniform between the two lengths of a parameter."""
        low, high = self.parameters[name]
        return max(1, int(math.exp(self.rng.uniform(math.log(low), math.log(high)))) // int(self.scale))

    def text(self, length: int) -> array[int]:
        """Tokens that no other text has."""
        self.texts += 1
        return array("q", range(self.texts << 32, (self.texts << 32) + length))

    def __iter__(self) -> Iterator[tuple[array[int], int]]:
        parameters, rng = self.parameters, self.rng
        longest = parameters["prompt_tokens"][1] // self.scale
        systems = [self.text(self.size("system_prompt_tokens")) for _ in range(parameters["system_prompts"])]
        conversations: list[array[int]] = []
        for _ in range(parameters["requests"]):
            if conversations and rng.random() < parameters["follow_up_probability"]:
                at = rng.randrange(len(conversations))
                prompt = (
                    conversations[at] + self.text(self.size("answer_tokens")) + self.text(self.size("follow_up_tokens"))
                )
            else:
                at = len(conversations)
                conversations.append(array("q"))
                system = systems[min(int(rng.expovariate(0.7)), len(systems) - 1)]
                prompt = system + self.text(self.size("prompt_tokens"))
            conversations[at] = prompt = prompt[:longest]
            if len(conversations) > parameters["live_conversations"]:
                conversations.pop(rng.randrange(len(conversations)))
            yield prompt, self.size("answer_tokens")


class DecodeServer:
    """Holds each request from before its first chunk until its last token."""

    def __init__(self, parameters: dict[str, Any], fill: float) -> None:
        self.page_size = parameters["replayed_page_tokens"] * parameters["dcp_size"]
        longest = 2 * parameters["prompt_tokens"][1] * parameters["replayed_page_tokens"] // parameters["page_tokens"]
        self.server = PagedServer(parameters["decode_pages"], self.page_size, longest, max_requests=512)
        self.reserve = int((1 - fill) * parameters["decode_pages"])
        self.running: dict[Request, int] = {}  # -> tokens still to come

    def admit(self, prompt: array[int], answer: int) -> Any:
        """The pages of a prompt, once there is room for it and for all requests to grow."""
        pages = -(-len(prompt) // self.page_size)
        while len(self.server.free_pages()) < pages + max(self.reserve, len(self.running) + 4):
            self.step()
        request = Request(0, array("q"))
        request.last_node = self.server.tree.root_node_handle()
        request.lock = self.server.tree.lock(request.last_node)
        if not self.server.extend([request], [len(prompt)]):
            raise RuntimeError(f"decode server: expected room for {pages} pages")
        self.running[request] = answer
        return pages_of(self.server.slots(request), self.page_size)

    def step(self) -> None:
        """A token for each request that is running."""
        if not self.running:
            raise RuntimeError("decode server: expected a pool that holds a request")
        self.server.decode(list(self.running), [0] * len(self.running))
        for request in list(self.running):
            self.running[request] -= 1
            if not self.running[request]:
                del self.running[request]
                self.server.release(request, keep=False)


def replay(parameters: dict[str, Any], fill: float) -> list[Transfer]:
    """Serve the whole trace.

    Args:
        parameters: of ``fragmentation.json``.
        fill: the share of both pools in use (requests and cache) beyond which older pages are evicted.
    """
    page, dcp_size = parameters["replayed_page_tokens"], parameters["dcp_size"]
    trace = Trace(parameters)
    chunk, layout = parameters["chunk_tokens"] // trace.scale, DcpLayout(dcp_size, page)
    prefill = PagedServer(parameters["prefill_pages"], page, parameters["prompt_tokens"][1] // trace.scale + chunk)
    decode = DecodeServer(parameters, fill)
    reserve = int((1 - fill) * parameters["prefill_pages"]) * page
    arriving = iter(trace)
    sending: deque[tuple[int, Request]] = deque()
    begun: Request | None = None
    targets: dict[Request, Any] = {}
    done: list[Transfer] = []
    batch_number = 0
    while True:
        budget, batch, lengths = chunk, [], []
        while budget >= page:
            request, begun = begun, None
            if request is None:
                prompt, answer = next(arriving, (None, 0))
                if prompt is None:
                    break
                request = Request(len(done), prompt)
                prefill.admit(request)
                targets[request] = decode.admit(prompt, answer)
            length = request.rest if request.rest <= budget else budget // page * page
            budget -= length
            batch.append(request)
            lengths.append(length)
            if length < request.rest:
                break
        if not batch:
            return done
        batch_number += 1
        sent = [0 if not request.kv.holds_kv else request.length for request in batch]
        if not prefill.extend(batch, lengths, reserve):
            raise RuntimeError("prefill server: expected room for a chunk")
        for request, start in zip(batch, sent, strict=True):
            where = {"page_size": page, "layout": layout, "src_page_offset": start // page}
            where["num_kv_tokens"] = request.length - start
            src, dst = pages_of(prefill.slots(request)[start:], page), targets[request]
            segments, adjacent = (
                sum(len(plan_runs(src, pages, rank=rank, **where).lengths) for rank in range(dcp_size))
                for pages in (dst, np.arange(len(dst)))
            )
            done.append(Transfer(batch_number, len(src), segments, adjacent))
            if request.rest:
                prefill.checkpoint(request)
                begun = request
            else:
                del targets[request]
                sending.append((batch_number, request))
        while sending and sending[0][0] + parameters["batches_until_released"] <= batch_number:
            prefill.release(sending.popleft()[1], keep=True)
        for _ in range(parameters["decode_tokens_a_batch"] // trace.scale):
            if decode.running:
                decode.step()
