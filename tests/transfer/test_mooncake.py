"""Real Mooncake over loopback TCP, between two processes: every row that must arrive does, and no other is touched."""

from __future__ import annotations

import math
import random
import threading
import time

import numpy as np
import pytest
from servers import ROOM, Pool, Registration, make_manager, send

import reference
from sglang_dcp_block.patches.mooncake_batches import TCP_SEGMENTS

pytestmark = pytest.mark.usefixtures("hooked")

PAGE = 16


def pages_and_pools(receiver, P, tokens, layers, row_bytes, seed=0, page=PAGE):
    """(source pages, source pool, destination pages, one blank pool a rank), pages scattered."""
    rng = random.Random(seed)
    num_src, num_dst = -(-tokens // page), -(-tokens // (page * P))
    source = Pool.random(layers, (num_src + 3) * page, row_bytes, seed)
    pools = [receiver.pool(layers, (num_dst + 3) * page, row_bytes) for _ in range(P)]
    return rng.sample(range(num_src + 3), num_src), source, rng.sample(range(num_dst + 3), num_dst), pools


@pytest.mark.parametrize(
    ("P", "B", "tokens", "prefix_pages", "pages_a_chunk"),
    [(2, 16, 331, 0, 99), (8, 16, 1205, 1, 9), (4, 4, 500, 2, 7), (8, 8, 3, 1, 1), (2, 1, 100, 1, 4)],
)
def test_all_ranks_and_chunks(P, B, tokens, prefix_pages, pages_a_chunk, engine, receiver):
    layers, row_bytes = 3, 72
    src_pages, source, dst_pages, pools = pages_and_pools(receiver, P, tokens, layers, row_bytes)
    manager, prefix = make_manager(source, PAGE, engine), prefix_pages * P * PAGE
    for rank, pool in enumerate(pools):
        registration = Registration(P, rank, B, pool.ptrs, mooncake_session_id=receiver.session)
        for first in range(0, len(src_pages), pages_a_chunk):
            pages = src_pages[first : first + pages_a_chunk]
            num_tokens, before = min(tokens - first * PAGE, len(pages) * PAGE), sum(engine.calls)
            chunk = {"num_tokens": num_tokens, "skipped_pages": first, "prefix": prefix}
            assert send(manager, registration, pages, dst_pages, **chunk) == 0
            # Counted where Mooncake is called.
            assert sum(engine.calls) - before <= layers * (math.ceil(num_tokens / (P * B)) + 2)
        expected = np.full_like(pool.memory, 255)
        for src, dst in reference.transfer_rows(src_pages, dst_pages, rank, P, B, PAGE, prefix, 0, tokens):
            expected[:, dst] = source.memory[:, src]
        np.testing.assert_array_equal(pool.memory, expected, err_msg=f"rank {rank}")


class Long:
    """A realistic prompt on eight ranks: 61 layers, 65,536 tokens, B = 64; rows are tiny, segments as many as ever."""

    P, B, PAGE, TOKENS, LAYERS, ROW_BYTES = 8, 64, 64, 65536, 61, 64
    SEGMENTS = 61 * 128  # of one rank: 7,808

    def __init__(self, receiver, num_ranks=1):
        rng = np.random.default_rng(0)
        self.receiver = receiver
        num_src, num_dst = self.TOKENS // self.PAGE, self.TOKENS // self.PAGE // self.P
        # Layers overlap, one row apart: each has rows of its own, and all of them are four megabytes.
        rows = rng.integers(0, 200, (self.TOKENS + self.LAYERS, self.ROW_BYTES), dtype=np.uint8)
        self.source = Pool(np.lib.stride_tricks.sliding_window_view(rows, self.TOKENS, axis=0).transpose(0, 2, 1)[:-1])
        self.src_pages, self.dst_pages = rng.permutation(num_src).tolist(), rng.permutation(num_dst).tolist()
        shape = (self.LAYERS, num_dst * self.PAGE, self.ROW_BYTES)
        pool = receiver.pool(*shape)
        # Several ranks of one session share the memory: each row is written equally by all that write it.
        self.pools = [pool] * num_ranks

    def registration(self, rank):
        return Registration(self.P, rank, self.B, self.pools[0].ptrs, mooncake_session_id=self.receiver.session)

    def send(self, manager, rank=0):
        return send(manager, self.registration(rank), self.src_pages, self.dst_pages, num_tokens=self.TOKENS)

    def check(self, rank=0):
        for layer in range(self.LAYERS):
            expected = np.empty_like(self.pools[0].memory[layer])
            for block in range(rank, self.TOKENS // self.B, self.P):
                src, dst = self.src_pages[block] * self.PAGE, self.dst_pages[block // self.P] * self.PAGE
                expected[dst : dst + self.B] = self.source.memory[layer, src : src + self.B]
            np.testing.assert_array_equal(self.pools[0].memory[layer], expected, err_msg=f"layer {layer}")


def test_a_long_prompt_passes_the_default_transport(engine, receiver):
    """7,808 segments, of which Mooncake takes about 2,048 at a time."""
    case = Long(receiver)
    manager = make_manager(case.source, Long.PAGE, engine)
    assert case.send(manager) == 0
    case.check()
    limit = TCP_SEGMENTS // len(manager.transfer_queues)
    assert sum(engine.calls) == Long.SEGMENTS
    assert max(engine.calls) == limit == 256
    assert len(engine.calls) == math.ceil(Long.SEGMENTS / limit)


def test_all_threads_together_pass_the_default_transport(engine, receiver):
    """Four transfer threads, one decode server, at once."""
    case = Long(receiver)
    manager = make_manager(case.source, Long.PAGE, engine)
    statuses = []
    threads = [threading.Thread(target=lambda: statuses.append(case.send(manager))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [0] * 4
    assert sum(engine.calls) == 4 * Long.SEGMENTS
    case.check()


def test_without_batches_it_fails(fresh_pair):
    """What the bound is for: as upstream hands it over, the same transfer fails."""
    engine, receiver = fresh_pair
    case = Long(receiver)
    manager = make_manager(case.source, Long.PAGE, engine, max_transfer_batch_indices=10**9)
    assert case.send(manager) == -1
    assert engine.calls == [Long.SEGMENTS]


def test_an_error_in_the_middle_ends_the_transfer(fresh_pair):
    """A layer whose destination nobody registered, behind thirty good ones."""
    engine, receiver = fresh_pair
    case = Long(receiver)
    registration = case.registration(0)
    registration.dst_kv_ptrs[30] = 4096
    manager = make_manager(case.source, Long.PAGE, engine)
    assert send(manager, registration, case.src_pages, case.dst_pages, num_tokens=Long.TOKENS) == -1
    assert engine.calls == [256] * 16, "of 31 batches, two layers in each"
    assert "the transfer engine returned -1 in batch 16, which ended the transfer" in manager.failure_records[ROOM]
    time.sleep(0.3)  # what was handed over may land late; what was not never does
    landed = (case.pools[0].memory != 255).any(axis=(1, 2))
    assert landed[:30].all()
    assert not landed[32:].any()


def test_a_decode_server_that_dies_is_noticed_within_a_second(fresh_pair):
    engine, receiver = fresh_pair
    case = Long(receiver)
    manager = make_manager(case.source, Long.PAGE, engine)
    ended = []

    def send_until_it_fails():
        while (status := case.send(manager)) == 0:
            pass
        ended.append((status, time.monotonic()))

    thread = threading.Thread(target=send_until_it_fails, daemon=True)
    thread.start()
    while sum(engine.calls) < Long.SEGMENTS // 2:  # well into the transfer
        time.sleep(0.001)
    killed = time.monotonic()
    receiver.kill()
    thread.join(20)
    (status, when), calls = ended[0], len(engine.calls)
    assert status == -1
    assert when - killed < 1
    time.sleep(0.2)
    assert len(engine.calls) == calls, "nothing is handed over after the error"
