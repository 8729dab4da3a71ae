"""Random histories of a server's pages: requests come, grow, share, end and go, and a model knows what each slot holds.

SGLang's own allocator and radix tree do the work. A slot holds the KV of a token and everything before it, so the model
keeps a *stamp* for each such sequence: equal stamps, equal KV. After every step no page is lost, none has two owners, and
what a request or the cache reads is its own.
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import ClassVar

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

from paged_server import PagedServer, Request

CONVERSATIONS = 4


class PageHistory(RuleBasedStateMachine):
    """Histories of one server; subclasses give its sizes."""

    page_size: int  # slots of a page
    num_pages = 48
    longest = 160  # tokens of a prompt
    chunk_pages = 12  # of a chunk, at most
    taken = 0  # steps of all histories
    saw: ClassVar[Counter[str]] = Counter()  # what happened in them

    @initialize()
    def start(self) -> None:
        self.server = PagedServer(self.num_pages, self.page_size, max_context=2 * self.longest)
        self.stamps: dict[tuple[int, int], int] = {}  # (stamp of what is before, token) -> stamp
        self.written: dict[int, int] = {}  # slot -> stamp
        self.waiting: list[Request] = []  # prompts that lack slots
        self.running: list[Request] = []  # prompts that are complete
        self.names = 0
        self.steps = -1  # the start is none

    def requests(self) -> list[Request]:
        return [request for request in self.waiting + self.running if request.kv.holds_kv]

    def stamps_of(self, request: Request) -> list[int]:
        """By position of a request's tokens."""
        stamp, found = 0, []
        for token in request.full_untruncated_fill_ids:
            stamp = self.stamps.setdefault((stamp, token), len(self.stamps) + 1)
            found.append(stamp)
        return found

    def note(self, request: Request, start: int) -> None:
        """What a model would now have written for a request, from ``start`` on."""
        self.written.update(
            zip(self.server.slots(request).tolist()[start:], self.stamps_of(request)[start:], strict=False)
        )

    @precondition(lambda self: len(self.waiting) + len(self.running) < 8)
    @rule(conversation=st.integers(0, CONVERSATIONS - 1), share=st.floats(0, 1), own=st.integers(0, 9))
    def admit(self, conversation: int, share: float, own: int) -> None:
        """A prompt that shares all but its last tokens with others of its conversation."""
        self.names += 1
        length = max(1, int(share * self.longest))
        shared = max(0, length - own)
        prompt = [conversation * self.longest + i for i in range(shared)]
        prompt += [10**6 * self.names + i for i in range(length - shared)]
        self.enter(Request(self.names, array("q", prompt)))

    def enter(self, request: Request) -> None:
        """A request joins those that wait, with what the cache has of it."""
        hit = self.server.admit(request)
        assert hit < len(request.prompt), "the last token must be computed"
        path = self.server.tree.path_device_indices(request.last_node)[:hit].tolist()
        assert [self.written[slot] for slot in path] == self.stamps_of(request)[:hit], "the cache gave another's page"
        self.waiting.append(request)
        self.saw["hits"] += hit > 0

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), count=st.integers(1, 3))
    def extend(self, data: st.DataObject, count: int) -> None:
        """A batch of chunks: only whole pages, but at the end of a prompt."""
        batch = self.waiting[:count]
        chunks = []
        for request in batch:
            end = (request.length // self.page_size + data.draw(st.integers(1, self.chunk_pages))) * self.page_size
            chunks.append(min(request.rest, end - request.length))
        before = [request.length for request in batch]
        held = {request.rid: self.server.slots(request).tolist() for request in self.requests()}
        if not self.server.extend(batch, chunks):
            for request in batch:  # retract: its own pages go back, the cache keeps what it has
                self.drop(request)
            self.saw["batches without room"] += 1
            return
        self.saw["chunks"] += len(batch)
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
            assert slots[position] % self.page_size == position % self.page_size
            if position % self.page_size:
                assert slots[position] == slots[position - 1] + 1

    @precondition(lambda self: self.running)
    @rule(token=st.integers(0, 3))
    def decode(self, token: int) -> None:
        batch = [request for request in self.running if request.length < self.longest + 20]
        before = [request.length for request in batch]
        if not batch or not self.server.decode(batch, [token] * len(batch)):
            return
        self.saw["decode steps"] += 1
        for request, start in zip(batch, before, strict=True):
            self.in_page_order(self.server.slots(request).tolist(), start)
            self.note(request, start)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 7))
    def finish(self, index: int) -> None:
        request = self.running.pop(index % len(self.running))
        self.server.release(request, keep=True)
        self.saw["ends"] += 1

    @precondition(lambda self: len(self.waiting) + len(self.running) > 3)  # else hardly a request would get far
    @rule(index=st.integers(0, 7))
    def abort(self, index: int) -> None:
        everybody = self.waiting + self.running
        self.drop(everybody[index % len(everybody)])
        self.saw["aborts"] += 1

    def drop(self, request: Request) -> None:
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        self.server.release(request, keep=False)

    @rule(share=st.floats(0.02, 1))
    def evict(self, share: float) -> None:
        before = len(self.server.free_pages())
        self.server.evict(int(share * self.num_pages) * self.page_size)
        self.saw["evictions"] += len(self.server.free_pages()) > before

    @invariant()
    def count(self) -> None:
        if hasattr(self, "server"):
            self.steps += 1
            type(self).taken += self.steps > 0

    @invariant()
    def nobody_reads_what_another_wrote(self) -> None:
        if not hasattr(self, "server"):
            return
        for request in self.requests():
            slots = self.server.slots(request).tolist()
            assert [self.written[slot] for slot in slots] == self.stamps_of(request)[: len(slots)]

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
                slot // self.page_size for slot in self.server.slots(request).tolist()[request.kv.cache_protected_len :]
            }
        ]
        assert len(set(own)) == len(own), "a page has two requests"
        cached = {slot // self.page_size for slot in self.server.tree.all_values_flatten().tolist()}
        assert not cached & set(own)
        assert not set(free) & (cached | set(own)), "a page in use is free"
        assert sorted([*free, *own, *cached]) == list(range(1, self.num_pages + 1)), "a page is lost"


def run(history: type[PageHistory], steps: int, in_a_history: int) -> None:
    """Random histories of at most ``in_a_history`` steps each, until they have taken so many ``steps`` together.

    Hypothesis begins with the simplest ones it can think of, so it is asked for a few at least.
    """
    history.taken, history.saw = 0, Counter()
    while history.taken < steps:
        run_state_machine_as_test(
            history,
            settings=settings(
                stateful_step_count=in_a_history,
                max_examples=max(5, (steps - history.taken) // in_a_history),
                deadline=None,
                suppress_health_check=list(HealthCheck),
                database=None,
            ),
        )
