"""Random histories of a server's pages, with and without ``--dcp-group-pages``, against a model of who owns which page.

SGLang's own allocator and radix tree do the work. The model keeps what was written to each slot and which pages each request
was given; after every step no page is lost, none has two owners, and what a request or the cache reads is its own.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from array import array

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hooking import hook
from paged_server import PagedServer, Request
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.kernels import launch
from sglang_dcp_block.patches import active
from sglang_dcp_block.patches.group_points import DECODE_GROUP_POINTS, PREFILL_GROUP_POINTS

P, PAGE, PAGES = 3, 4, 48
MODES = {"stock": (), "prefill": PREFILL_GROUP_POINTS, "decode": DECODE_GROUP_POINTS}
CONVERSATIONS, LONGEST = 4, 40 * PAGE


def machine(page_size: int) -> type[RuleBasedStateMachine]:
    """Histories of a server with pages of so many slots."""

    class Pages(RuleBasedStateMachine):
        @initialize()
        def start(self) -> None:
            self.server = PagedServer(PAGES, page_size, max_context=2 * LONGEST)
            self.written: dict[int, tuple[int, ...]] = {}  # slot -> the tokens up to and with the one in it
            self.waiting: list[Request] = []  # prompts that lack slots
            self.running: list[Request] = []  # prompts that are complete
            self.names = 0

        def requests(self) -> list[Request]:
            return [request for request in self.waiting + self.running if request.kv.holds_kv]

        def note(self, request: Request, start: int) -> None:
            """The tokens that a model would now have written for a request, from ``start`` on."""
            tokens = request.full_untruncated_fill_ids
            for position, slot in list(enumerate(self.server.slots(request).tolist()))[start:]:
                self.written[slot] = tuple(tokens[: position + 1])

        @precondition(lambda self: len(self.waiting) + len(self.running) < 8)
        @rule(conversation=st.integers(0, CONVERSATIONS - 1), length=st.integers(1, LONGEST), own=st.integers(0, 9))
        def admit(self, conversation: int, length: int, own: int) -> None:
            """A prompt that shares all but its last tokens with others of its conversation."""
            self.names += 1
            shared = max(0, length - own)
            prompt = [conversation * LONGEST + i for i in range(shared)]
            prompt += [10**6 * self.names + i for i in range(length - shared)]
            request = Request(self.names, array("q", prompt))
            hit = self.server.admit(request)
            assert hit < length, "the last token must be computed"
            path = self.server.tree.path_device_indices(request.last_node)[:hit].tolist()
            for position, slot in enumerate(path):
                assert self.written[slot] == tuple(prompt[: position + 1]), "the cache gave somebody else's page"
            self.waiting.append(request)

        @precondition(lambda self: self.waiting)
        @rule(data=st.data(), count=st.integers(1, 3))
        def extend(self, data: st.DataObject, count: int) -> None:
            """A batch of chunks: only whole pages, but at the end of a prompt."""
            batch = self.waiting[:count]
            chunks = []
            for request in batch:
                pages = data.draw(st.integers(1, 12))
                end = (request.length // page_size + pages) * page_size
                chunks.append(min(request.rest, end - request.length))
            before = [request.length for request in batch]
            held = {request.rid: self.server.slots(request).tolist() for request in self.requests()}
            if not self.server.extend(batch, chunks):
                for request in batch:  # retract: its own pages go back, the cache keeps what it has
                    self.drop(request)
                return
            for request, start, chunk in zip(batch, before, chunks, strict=True):
                slots = self.server.slots(request).tolist()
                assert slots[: len(held.get(request.rid, []))] == held.get(request.rid, [])
                assert len(slots) == start + chunk
                self.in_page_order(slots, start)
                self.note(request, start)
                self.server.checkpoint(request)
            self.waiting = [request for request in self.waiting if request.rest]
            self.running += [request for request in batch if not request.rest]

        def in_page_order(self, slots: list[int], start: int) -> None:
            """Slots of a page follow each other; a partial page is filled before a new one begins."""
            for position in range(start, len(slots)):
                assert slots[position] % page_size == position % page_size
                if position % page_size:
                    assert slots[position] == slots[position - 1] + 1

        @precondition(lambda self: self.running)
        @rule(token=st.integers(0, 3))
        def decode(self, token: int) -> None:
            batch = [request for request in self.running if request.length < LONGEST + 20]
            before = [request.length for request in batch]
            if not batch or not self.server.decode(batch, [token] * len(batch)):
                return
            for request, start in zip(batch, before, strict=True):
                self.in_page_order(self.server.slots(request).tolist(), start)
                self.note(request, start)

        @precondition(lambda self: self.running)
        @rule(index=st.integers(0, 7))
        def finish(self, index: int) -> None:
            request = self.running.pop(index % len(self.running))
            self.server.release(request, keep=True)

        @precondition(lambda self: self.waiting or self.running)
        @rule(index=st.integers(0, 7))
        def abort(self, index: int) -> None:
            everybody = self.waiting + self.running
            self.drop(everybody[index % len(everybody)])

        def drop(self, request: Request) -> None:
            for queue in (self.waiting, self.running):
                if request in queue:
                    queue.remove(request)
            self.server.release(request, keep=False)

        @rule(pages=st.integers(1, PAGES))
        def evict(self, pages: int) -> None:
            self.server.evict(pages * page_size)

        @invariant()
        def nobody_reads_what_another_wrote(self) -> None:
            if not hasattr(self, "server"):
                return
            for request in self.requests():
                tokens = request.full_untruncated_fill_ids
                for position, slot in enumerate(self.server.slots(request).tolist()):
                    assert self.written[slot][-1] == tokens[position]
                    assert len(self.written[slot]) == position + 1

        @invariant()
        def every_page_has_one_owner(self) -> None:
            if not hasattr(self, "server"):
                return
            free = self.server.free_pages().tolist()
            assert len(set(free)) == len(free), "a page is free twice"
            own = [
                page
                for request in self.requests()
                for page in {
                    slot // page_size for slot in self.server.slots(request).tolist()[request.kv.cache_protected_len :]
                }
            ]
            assert len(set(own)) == len(own), "a page has two requests"
            cached = {slot // page_size for slot in self.server.tree.all_values_flatten().tolist()}
            assert not cached & set(own)
            assert not set(free) & (cached | set(own)), "a page in use is free"
            assert sorted([*free, *own, *cached]) == list(range(1, PAGES + 1)), "a page is lost"

    return Pages


@pytest.fixture
def mode(request, monkeypatch):
    """The hooks of a mode on SGLang's allocator; kernels run as their twins, which is faster by far."""
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(active, "group_pages", 0 if request.param == "stock" else P)
    monkeypatch.setattr(active, "_layout", DcpLayout(P, PAGE) if request.param == "decode" else None)
    hook(monkeypatch, MODES[request.param])
    return request.param


def run(mode: str, steps: int, histories: int) -> None:
    run_state_machine_as_test(
        machine(PAGE * P if mode == "decode" else PAGE),
        settings=settings(
            stateful_step_count=steps,
            max_examples=histories,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
        ),
    )


@pytest.mark.parametrize("mode", MODES, indirect=True)
def test_no_page_is_lost_or_shared(mode: str) -> None:
    torch.set_num_threads(1)
    run(mode, steps=40, histories=6)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", MODES, indirect=True)
def test_no_page_is_lost_or_shared_in_ten_thousand_steps(mode: str) -> None:
    torch.set_num_threads(1)
    run(mode, steps=100, histories=100)
