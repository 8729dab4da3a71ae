"""HiCache, MLA, TP2 + DCP2: KV that the device gave up comes back to the rows that blocks give it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cases import (
    CACHED,
    LONG,
    TOLERANCE,
    Answers,
    assert_nothing_lost,
    assert_placed,
    assert_same,
    differences,
    token_list,
)
from session import EngineSession

PAGE = 8
VIRTUAL_PAGE = 2 * PAGE
OTHER = token_list(7, 100)
# Each of the first two fills most of the pool and drives the other one out; the last shares a part of the first.
TURNS = {"long": LONG, "other": OTHER, "long again": LONG, "other again": OTHER, "cached": CACHED}
# Whole virtual pages of the prompts, and of what the last one shares.
HELD, SHARED = 96, 80
# 160 slots in ten virtual pages, of which a prompt takes seven.
SMALL_POOL = {"max_total_tokens": 80, "hicache_ratio": 4.0, "enable_hierarchical_cache": True}
COLUMNS = ("attention_backend", "hicache_io_backend", "hicache_mem_layout", "hicache_write_policy")
FAMILIES = {
    "kernel page_first": ("flashinfer", "kernel", "page_first", "write_through"),
    "kernel layer_first": ("flashinfer", "kernel", "layer_first", "write_back"),
    "direct page_first_direct": ("flashinfer", "direct", "page_first_direct", "write_through"),
    "direct layer_first": ("flashinfer", "direct", "layer_first", "write_through_selective"),
    "kernel page_first, triton": ("triton", "kernel", "page_first", "write_through"),
}


@dataclass
class Served:
    """What an engine answered to the prompts of TURNS, and what its ranks held then."""

    answers: Answers
    states: list[dict[str, Any]]


def serve(engine: EngineSession, **order: Any) -> Served:
    engine.flush(record=True, **order)
    answers: Answers = {}
    for name, prompt in TURNS.items():
        # The selective policy writes what was asked for twice; the first answer says where the prompt came from.
        times = 2 if engine.kwargs["hicache_write_policy"] == "write_through_selective" else 1
        answers[name], *_ = [engine.generate([prompt], 7)[0] for _ in range(times)]
    states = engine.flush()
    for state in states:  # OTHER has no counterpart without DCP
        state["released"] = [r for r in state["released"] if r["tokens"][: len(OTHER)] != OTHER]
    return Served(answers, states)


def wanted(want: Answers, served: Answers) -> Answers:
    """By name of a turn: without DCP; of OTHER, what was answered before it ever left the device."""
    return {"long": want["long"], "long again": want["long"], "cached": want["cached"], "other again": served["other"]}


@pytest.fixture(scope="module")
def want(expected):
    """Without DCP and without HiCache, in a pool that holds everything."""
    return expected("mla")


@pytest.fixture(scope="module")
def family(request):
    return request.param


@pytest.fixture(scope="module")
def engine(start, want, family):
    """One engine a family; the one that ``want`` asked has ended by then."""
    arguments = {**SMALL_POOL, **dict(zip(COLUMNS, FAMILIES[family], strict=True))}
    with start(model="mla", tp=2, dcp=2, block=PAGE, mutants=True, **arguments) as engine:
        yield engine


one_family = pytest.mark.parametrize("family", ["kernel page_first"], indirect=True, scope="module")
# The default run takes SGLang's default transfer and one block size.
EVERY_PAIR = [
    pytest.param(family, block, marks=() if (family, block) == ("kernel page_first", PAGE) else pytest.mark.slow)
    for family in FAMILIES
    for block in (8, 4, 2, 1)
]


@pytest.mark.parametrize(("family", "block"), EVERY_PAIR, indirect=["family"], scope="module")
def test_evicted_rows_come_back(engine, want, block):
    """Log-probabilities equal DCP1's, each row lies where dealing one by one puts it, and neither tier loses a page."""
    served = serve(engine, block_size=block, mutant=None)
    for name, tokens in (("long again", HELD), ("other again", HELD), ("cached", SHARED)):
        answer = served.answers[name]
        assert answer.from_host == answer.cached == tokens, f"{name}: the device still held some of it: {answer}"
    assert_same(served.answers, wanted(want.answers, served.answers))
    assert_placed(served.states, want.keys, block)
    assert_nothing_lost(served.states)


@pytest.mark.slow
@one_family
@pytest.mark.parametrize("mutant", ["host:rows-swapped", "host:not-loaded"])
def test_faults_on_the_way_back_are_seen(engine, want, mutant):
    """Attention to a whole prefix does not see the order of its rows, the rows themselves do; what never came, both."""
    served = serve(engine, block_size=4, mutant=mutant)
    engine.flush(mutant=None)
    with pytest.raises(AssertionError):
        assert_placed(served.states, want.keys, 4)
    worst = differences(served.answers, wanted(want.answers, served.answers))
    assert worst["long"] <= TOLERANCE, "the mutant touched more than the way back"
    if mutant == "host:not-loaded":
        assert worst["long again"] > 1e-2, worst


@pytest.mark.slow
@one_family
def test_lost_host_memory_is_seen(engine):
    """The check itself: a host pool that forgets a page at each release does not pass it."""
    served = serve(engine, block_size=PAGE, mutant="host:leak")
    engine.flush(mutant=None)
    with pytest.raises(AssertionError):
        assert_nothing_lost(served.states)


def wait_for_pages(folder: Path, count: int) -> None:
    """Pages are written to storage behind the answers' backs."""
    deadline = time.monotonic() + 60
    while len(list(folder.glob("*.bin"))) < count:
        assert time.monotonic() < deadline, f"expected {count} pages in storage, got {sorted(folder.iterdir())}"
        time.sleep(0.1)
    time.sleep(1)  # until the schedulers have heard of it, too


@pytest.mark.slow
def test_pages_in_storage_are_of_one_layout(start, want, tmp_path):
    """A server finds the pages of its own layout again and none of another's, whose rows would lie elsewhere."""
    arguments = {
        **SMALL_POOL,
        **dict(zip(COLUMNS, FAMILIES["kernel page_first"], strict=True)),
        "hicache_storage_backend": "file",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": json.dumps({"prefetch_threshold": VIRTUAL_PAGE}),
    }
    environ = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path)}
    pages = 2 * HELD // VIRTUAL_PAGE  # of both ranks

    def tokens_found(engine: EngineSession, block: int, written: int) -> int:
        """How much of a prompt came out of storage; log-probabilities and rows are compared, and nothing is lost."""
        engine.flush(record=True, block_size=block)
        (answer,) = engine.generate([LONG], 7)
        wait_for_pages(tmp_path, written)
        states = engine.flush()
        assert_nothing_lost(states)
        assert_same({"long": answer}, {"long": want.answers["long"]})
        assert_placed(states, want.keys, block)
        return answer.from_storage

    with start(model="mla", tp=2, dcp=2, block=8, mutants=True, environ=environ, **arguments) as engine:
        assert [tokens_found(engine, 8, pages), tokens_found(engine, 8, pages)] == [0, HELD]
        # The names were made for blocks of 8; blocks of 4 find these pages as they would without the size in the name.
        with pytest.raises(AssertionError, match="Tensor-likes are not close"):
            tokens_found(engine, 4, pages)
    with start(model="mla", tp=2, dcp=2, block=4, mutants=True, environ=environ, **arguments) as engine:
        assert [tokens_found(engine, 4, 2 * pages), tokens_found(engine, 4, 2 * pages)] == [0, HELD]
