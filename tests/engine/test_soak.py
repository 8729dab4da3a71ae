"""A soak: random traffic for minutes on servers with small pools, in blocks. Nothing hangs, nothing is lost.

``DCP_BLOCK_SOAK_MINUTES`` says for how long (3). A few requests follow under faults put in on purpose, which the
same checks must see. What was answered is then scored by an engine without DCP.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from cases import TOLERANCE, assert_nothing_lost
from soaked import CHUNK, KINDS, LEAK, Kind, started
from traffic import ENDS, Outcome, Shape, Way, demands, traffic

MINUTES = float(os.environ.get("DCP_BLOCK_SOAK_MINUTES", "3"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(60 * MINUTES + 3000)]

SCORED = 120  # answers that are compared, at most
UNDER_FAULT = 5  # requests
LEAKING = 2  # of those; a leak soon takes every page


@dataclass
class Soak:
    """What the servers did, and what an engine without DCP says to it."""

    kind: Kind
    outcomes: list[Outcome]
    states: list[list[dict[str, Any]]]  # of each round: each rank's, at its end
    metrics: Counter[str]
    faulty: dict[str, tuple[list[Outcome], list[dict[str, Any]]]]  # by fault
    worst: dict[str, float]  # largest difference in log-probability, by fault; "" without one


@pytest.fixture(scope="module", params=KINDS)
def soak(request, start, checkpoints, flavour, tmp_path_factory):
    kind = KINDS[request.param]
    folder = tmp_path_factory.mktemp("soak")
    with contextlib.closing(started(kind, checkpoints(kind.model), folder, flavour.environ)) as soaked:
        outcomes, states = run(soaked)
        metrics = soaked.metrics()
        faulty = {fault: under_fault(soaked, fault) for fault in kind.faults}
    with start(tp=1, model=kind.model, attention_backend=kind.attention) as engine:
        worst = {"": worst_difference(engine, outcomes)}
        worst |= {fault: worst_difference(engine, found) for fault, (found, _) in faulty.items()}
    found = Soak(kind, outcomes, states, metrics, faulty, worst)
    print(f"\n{request.param}: {report(found)}")
    return found


def run(soaked):
    """Traffic in two rounds or more, of at most three minutes; after each, every page is asked for."""
    rounds = max(2, math.ceil(MINUTES / 3))
    outcomes, states = [], []
    soaked.flushed()
    for number in range(rounds):
        outcomes += traffic(soaked.send, 60 * MINUTES / rounds, seed=number)
        states.append(soaked.flushed())
    return outcomes, states


def under_fault(soaked, fault):
    soaked.flushed(fault)
    asked = (demand for demand in demands(-1, Shape()) if demand.way is Way.ANSWER)
    outcomes = [soaked.send(demand) for demand in itertools.islice(asked, LEAKING if fault == LEAK else UNDER_FAULT)]
    return outcomes, soaked.flushed()


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
    "prompts shorter than a block": lambda soak: prompts(soak, lambda length: length < soak.kind.block),
    "prompts of several chunks": lambda soak: prompts(soak, lambda length: length > CHUNK),
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
    _, states = soak.faulty[LEAK]
    with pytest.raises(AssertionError):
        assert_nothing_lost(states)


def test_misplaced_rows_would_be_seen(soak):
    for fault in set(soak.kind.faults) - {LEAK}:
        assert soak.worst[fault] > 1e-2, fault
