"""A soak: random traffic for minutes on a served TP2 + DCP2 with a small pool, in blocks. Nothing hangs, nothing is lost.

``DCP_BLOCK_SOAK_MINUTES`` says for how long (3). A few requests follow under faults put in on purpose, which the
same checks must see. What was answered is then scored by an engine without DCP.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import time
import urllib.error
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

import lab_folder
from cases import BASE, TOLERANCE, assert_nothing_lost
from pd import HOST, free_port
from served import Served
from traffic import ENDS, Outcome, Shape, Way, demands, send, traffic

MINUTES = float(os.environ.get("DCP_BLOCK_SOAK_MINUTES", "3"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(60 * MINUTES + 3000)]

FAMILIES = {"gqa": "triton", "mla": "flashinfer"}
RANKS, PAGE, BLOCK = 2, 8, 4
SCORED = 120  # answers that are compared, at most
# SGLang admits a request where its prompt and whole answer fit, and counts on little growth of those that run. Ten virtual
# pages of 16 tokens so let in five or six short prompts, whose answers of 36 tokens then need fifteen pages or more.
ROOM = {
    "page_size": PAGE,
    "max_total_tokens": 80,
    "chunked_prefill_size": 32,
    "schedule_conservativeness": 0.1,
    "context_length": 128,
}
FAULTS = {"leak": 2, "door:owner+1": 5}  # put in on purpose, and for how many requests; a leak soon takes every page
IDLE = 120  # seconds until a server has noticed that all clients are gone


@dataclass
class Soak:
    """What the server did, and what an engine without DCP says to it."""

    outcomes: list[Outcome]
    states: list[list[dict[str, Any]]]  # of each round: each rank's, at its end
    metrics: Counter[str]  # SGLang's own, over label values
    faulty: dict[str, tuple[list[Outcome], list[dict[str, Any]]]]  # by fault
    worst: dict[str, float]  # largest difference in log-probability, by fault; "" without one


@pytest.fixture(scope="module", params=FAMILIES)
def soak(request, start, checkpoints, flavour, tmp_path_factory):
    folder = tmp_path_factory.mktemp("soak")
    arguments = {
        **BASE,
        **ROOM,
        "model_path": str(checkpoints(request.param)),
        "attention_backend": FAMILIES[request.param],
        "host": HOST,
        "port": free_port(),
        "tp_size": RANKS,
        "dcp_size": RANKS,
        "dcp_block_size": BLOCK,
        "enable_metrics": True,
        "skip_server_warmup": True,
    }
    lab = lab_folder.environ_of(folder, {**os.environ, **flavour.environ}, mutants=True)
    server = Served(arguments, folder / "server.log", RANKS, **lab)
    with contextlib.closing(server):
        server.wait()
        outcomes, states = run(server, folder)
        metrics = Counter()
        for (name, _), value in server.metrics().items():
            metrics[name] += value
        faulty = {fault: under_fault(server, folder, fault) for fault in FAULTS}
    with start(tp=1, model=request.param, attention_backend=FAMILIES[request.param]) as engine:
        worst = {"": worst_difference(engine, outcomes)}
        worst |= {fault: worst_difference(engine, found) for fault, (found, _) in faulty.items()}
    found = Soak(outcomes, states, metrics, faulty, worst)
    print(f"\n{request.param}: {report(found)}")
    return found


def run(server, folder):
    """Traffic in two rounds or more, of at most three minutes; after each, every page is asked for."""
    rounds = max(2, math.ceil(MINUTES / 3))
    outcomes, states = [], []
    flushed(server, folder, mutant=None)
    for number in range(rounds):
        outcomes += traffic(server.url, 60 * MINUTES / rounds, seed=number)
        states.append(flushed(server, folder))
    return outcomes, states


def under_fault(server, folder, fault):
    flushed(server, folder, mutant=fault)
    asked = (demand for demand in demands(-1, Shape()) if demand.way is Way.ANSWER)
    outcomes = [send(server.url, demand) for demand in itertools.islice(asked, FAULTS[fault])]
    return outcomes, flushed(server, folder, mutant=None)


def flushed(server, folder, **order):
    """Each rank's state, once no request is left."""
    deadline = time.monotonic() + IDLE
    while True:
        lab_folder.give_order(folder, **order)
        try:
            server.ask("/flush_cache", {})
            return lab_folder.states_in(folder, RANKS)
        except urllib.error.HTTPError as error:  # not idle
            if time.monotonic() > deadline:
                raise AssertionError(f"requests that nobody waits for run on:\n{server.said()[-3000:]}") from error
            time.sleep(0.5)


def answered(outcomes):
    return [outcome for outcome in outcomes if outcome.end == "answered"]


def worst_difference(engine, outcomes):
    """Of a sample of the answers, all retracted ones in it: the largest difference from what the engine gives."""
    sample = answered(outcomes)
    random.Random(0).shuffle(sample)
    sample = sorted(sample, key=lambda outcome: not outcome.meta["num_retractions"])[:SCORED]
    worst = 0.0
    for scores, outcome in zip(engine.score([outcome.text for outcome in sample]), sample, strict=True):
        for logprob, (own, best) in zip(outcome.logprobs, scores[len(outcome.demand.prompt) - 1 :], strict=True):
            worst = max(worst, abs(logprob - own), best - own)  # greedy: the likeliest token
    return worst


def report(soak):
    ends = Counter(outcome.end for outcome in soak.outcomes)
    counts = {name: count(soak) for name, count in MUST_HAPPEN.items()}
    longest = max(outcome.seconds for outcome in soak.outcomes)
    return f"{len(soak.outcomes)} requests {dict(ends)}, longest {longest:.0f} s; {counts}; differences {soak.worst}"


MUST_HAPPEN = {
    "answers": lambda soak: len(answered(soak.outcomes)),
    "aborts on demand": lambda soak: sum(outcome.end == "aborted" for outcome in soak.outcomes),
    "clients that gave up": lambda soak: left(soak, Way.GIVE_UP),
    "clients that hung up": lambda soak: left(soak, Way.HANG_UP),
    "aborts that the server counted": lambda soak: soak.metrics["sglang:num_aborted_requests_total"],
    "retractions that the server counted": lambda soak: soak.metrics["sglang:num_retracted_requests_total"],
    "retracted requests that were answered": lambda soak: having(soak, "num_retractions"),
    "prefix hits": lambda soak: having(soak, "cached_tokens"),
    "prompts shorter than a block": lambda soak: prompts(soak, lambda length: length < BLOCK),
    "prompts of several chunks": lambda soak: prompts(soak, lambda length: length > ROOM["chunked_prefill_size"]),
}


def left(soak, way):
    return sum(outcome.end == "left" and outcome.demand.way is way for outcome in soak.outcomes)


def having(soak, name):
    return sum(bool(outcome.meta[name]) for outcome in answered(soak.outcomes))


def prompts(soak, wanted):
    return sum(wanted(len(outcome.demand.prompt)) for outcome in answered(soak.outcomes))


def test_every_request_ends_as_its_client_wants(soak):
    """None hangs, and none ends with an error or without its client's doing."""
    assert not (wrong := [outcome for outcome in soak.outcomes if outcome.end not in ENDS]), wrong[:3]


def test_nothing_is_lost(soak):
    for states in soak.states:
        assert_nothing_lost(states)


def test_answers_are_those_of_an_engine_without_dcp(soak):
    assert soak.worst[""] <= TOLERANCE


@pytest.mark.parametrize("what", MUST_HAPPEN)
def test_it_happened(soak, what):
    assert MUST_HAPPEN[what](soak) > 0


def test_a_leak_would_be_seen(soak):
    _, states = soak.faulty["leak"]
    with pytest.raises(AssertionError):
        assert_nothing_lost(states)


def test_misplaced_rows_would_be_seen(soak):
    assert soak.worst["door:owner+1"] > 1e-2
