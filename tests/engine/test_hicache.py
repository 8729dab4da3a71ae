"""HiCache, MLA, TP2 + DCP2: KV that only the host still holds comes back to the rows that blocks give it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from cases import (
    CACHED,
    LONG,
    Answers,
    Expected,
    assert_nothing_lost,
    assert_placed,
    assert_same,
    differences,
    keys_by_position,
    token_list,
)
from session import EngineSession

PAGE = 8
BLOCKS = (8, 4, 2, 1)
OTHER = token_list(7, 100)
# Each of the first two fills most of the pool, so it drives the other one out; the last shares a part of what is left.
TURNS = {"long": LONG, "other": OTHER, "long again": LONG, "other again": OTHER, "cached": CACHED}
# Rows on each rank: 160 slots in ten virtual pages, of which a prompt takes seven.
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
        for _ in range(2 if engine.kwargs.get("hicache_write_policy") == "write_through_selective" else 1):
            (answers[name],) = engine.generate([prompt], 7)  # the selective policy writes what was asked for twice
    return Served(answers, engine.flush())


@pytest.fixture(scope="module")
def want(start) -> Expected:
    """Without DCP and without HiCache, in a pool that holds everything."""
    with start(model="mla", attention_backend="flashinfer") as engine:
        served = serve(engine)
        (state,) = served.states
        return Expected(served.answers, keys_by_position(state))


@pytest.fixture(scope="module")
def family(request):
    return request.param


@pytest.fixture(scope="module")
def engine(start, want, family):
    """One engine a family; ``want`` has ended its own by then."""
    arguments = {**SMALL_POOL, **dict(zip(COLUMNS, FAMILIES[family], strict=True))}
    with start(model="mla", tp=2, dcp=2, block=PAGE, mutants=True, **arguments) as engine:
        yield engine


every_family = pytest.mark.parametrize("family", FAMILIES, indirect=True, scope="module")
one_family = pytest.mark.parametrize("family", ["kernel page_first"], indirect=True, scope="module")


@pytest.mark.slow
@every_family
@pytest.mark.parametrize("block", BLOCKS)
def test_evicted_rows_come_back(engine, want, block):
    """Log-probabilities equal DCP1's, each row lies where dealing one by one puts it, and neither tier loses a page."""
    served = serve(engine, block_size=block, mutant=None)
    for name in ("long again", "other again"):
        answer = served.answers[name]
        assert answer.from_host == answer.cached == 96, f"{name}: the device still held some of it: {answer}"
    # Of the shared prefix of 90 tokens, whole virtual pages.
    assert served.answers["cached"].from_host == served.answers["cached"].cached == 80
    assert_same(served.answers, want.answers)
    assert_placed(served.states, want.keys, block)
    assert_nothing_lost(served.states)


@pytest.mark.slow
@one_family
@pytest.mark.parametrize("mutant", ["host:rows-swapped", "door:rows-swapped"])
def test_swapped_rows_are_seen(engine, want, mutant):
    """Rows that change places on their way back, or at the write door: the answers are wrong, and so are the rows."""
    served = serve(engine, block_size=4, mutant=mutant)
    engine.flush(mutant=None)
    worst = differences(served.answers, want.answers)
    assert worst["long again"] > 1e-2, worst
    if mutant.startswith("host"):
        assert worst["long"] <= 1e-4, "the mutant touched more than the way back"
    with pytest.raises(AssertionError):
        assert_placed(served.states, want.keys, 4)


@pytest.mark.slow
@one_family
def test_lost_host_memory_is_seen(engine):
    """The check itself: a host pool that forgets a page at each release does not pass it."""
    served = serve(engine, block_size=PAGE, mutant="host:leak")
    engine.flush(mutant=None)
    with pytest.raises(AssertionError):
        assert_nothing_lost(served.states)
