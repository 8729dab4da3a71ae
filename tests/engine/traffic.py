"""Random traffic over HTTP: requests arrive from several clients, share prefixes, and some end early, each in its own way.

What is asked follows from a seed; when it is answered does not, so a request may be answered before its client leaves.
"""

from __future__ import annotations

import json
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import requests

from cases import token_list

ERROR = "error: "  # begins the end of a request that a server answered with one
MOMENT = 1  # seconds between what is done to one server and to another
HUNG = 240  # seconds without an answer, on a machine that is busy with other work too


class Way(StrEnum):
    """How a client means to end its request."""

    ANSWER = "waits for the answer"
    ABORT = "asks the server to abort"
    GIVE_UP = "closes the connection before anything came"
    HANG_UP = "closes the stream in the middle of an answer"


@dataclass(frozen=True)
class Demand:
    """One request, and what its client does."""

    pause: float  # seconds before it is sent
    prompt: list[int]
    new_tokens: int
    way: Way
    patience: float  # seconds until a client that does not wait for the answer ends the request


@dataclass(frozen=True)
class Shape:
    """Bounds of random requests, in tokens; a prompt and its answer together fit the smallest pool under test."""

    longest_prompt: int = 44
    longest_answer: int = 36
    conversations: int = 2  # prompts of one share all but their last tokens
    longest_tail: int = 9
    mean_pause: float = 0.2  # seconds


@dataclass(frozen=True)
class Outcome:
    """How a request ended."""

    demand: Demand
    end: str  # "answered", "aborted", "left", or what went wrong
    seconds: float
    answer: dict[str, Any] = field(default_factory=dict)  # what SGLang sent; empty for a client that left

    @property
    def meta(self) -> dict[str, Any]:
        """SGLang's facts about an answer."""
        found: dict[str, Any] = self.answer.get("meta_info", {})
        return found

    @property
    def text(self) -> list[int]:
        """Prompt and answer."""
        return [*self.demand.prompt, *self.answer["output_ids"]]

    @property
    def logprobs(self) -> list[float]:
        """Of the answer's tokens."""
        return [entry[0] for entry in self.meta["output_token_logprobs"]]


ENDS = ("answered", "aborted", "left")  # as they should


def script(client: int, shape: Shape) -> list[Demand]:
    """What each client begins with, so that the shortest and slowest run has all that a soak is for.

    Short prompts with the longest answers, all at once, overfill a small pool as they grow; then a prefix that all share;
    then one of the ways to end.
    """
    own, shared = token_list(2000 + client, shape.longest_tail), token_list(1000, shape.longest_prompt)
    return [
        Demand(0, own[: 1 + client], shape.longest_answer, Way.ANSWER, 0),
        Demand(0, [*shared[: -len(own)], *own], 2 + client, Way.ANSWER, 0),
        Demand(0, own, shape.longest_answer, list(Way)[client % len(Way)], 0.5),
    ]


def demands(seed: int, shape: Shape) -> Iterator[Demand]:
    """Random requests, without an end."""
    rng = random.Random(seed)
    openings = [token_list(1000 + c, shape.longest_prompt) for c in range(shape.conversations)]
    while True:
        length = rng.randint(1, shape.longest_prompt)
        shared = rng.choice(openings)[: max(0, length - rng.randint(0, shape.longest_tail))]
        yield Demand(
            pause=rng.expovariate(1 / shape.mean_pause),
            prompt=[*shared, *(rng.randrange(2, 512) for _ in range(length - len(shared)))],
            new_tokens=rng.randint(1, shape.longest_answer),
            way=rng.choices(list(Way), [6, 2, 1, 1])[0],
            patience=rng.uniform(0.05, 3),
        )


def traffic(
    send: Callable[[Demand], Outcome], seconds: float, seed: int, clients: int = 8, shape: Shape | None = None
) -> list[Outcome]:
    """Keep ``clients`` busy for so long, and with their script in any case; returns when the last request has ended.

    Nothing is raised for a request.
    """
    deadline, bounds = time.monotonic() + seconds, shape or Shape()

    def client(number: int) -> list[Outcome]:
        outcomes = [send(demand) for demand in script(number, bounds)]
        for demand in demands(1000 * seed + number, bounds):
            if time.monotonic() + demand.pause > deadline:
                break
            time.sleep(demand.pause)
            outcomes.append(send(demand))
        return outcomes

    with ThreadPoolExecutor(clients) as threads:
        return [outcome for outcomes in threads.map(client, range(clients)) for outcome in outcomes]


def send(url: str, demand: Demand, **more: Any) -> Outcome:
    """Send one request and stay with it until it ends.

    Args:
        more: what else stands in the request.
    """
    began = time.monotonic()
    try:
        end, answer = _ended(url, demand, more)
    except (requests.RequestException, ValueError, KeyError) as error:
        end, answer = f"{type(error).__name__}: {error}", {}
    return Outcome(demand, end, time.monotonic() - began, answer)


def send_to_pair(prefill: str, decode: str, demand: Demand, **more: Any) -> Outcome:
    """Send one request to a prefill and a decode server, and end both in the client's way; the second one's outcome."""
    with ThreadPoolExecutor(2) as threads:
        first, last = (_excused(one) for one in threads.map(lambda url: send(url, demand, **more), (prefill, decode)))
    return last if first.end in ENDS else replace(last, end=f"on the prefill server: {first.end}")


def _excused(outcome: Outcome) -> Outcome:
    """Of a client that ended its request: the second server to hear of it may call the transfer failed, as it is."""
    demand = outcome.demand
    has_left = demand.way is not Way.ANSWER and outcome.seconds + MOMENT > demand.patience
    if not has_left or not outcome.end.startswith(ERROR):
        return outcome
    return replace(outcome, end="aborted" if demand.way is Way.ABORT else "left")


def _ended(url: str, demand: Demand, more: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    rid = uuid.uuid4().hex
    body = {
        **more,
        "rid": rid,
        "input_ids": demand.prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": demand.new_tokens},
        "return_logprob": True,
        "stream": demand.way is Way.HANG_UP,
    }
    session = requests.Session()
    session.trust_env = False  # the server is on this machine
    with session:
        if demand.way is Way.HANG_UP:
            return _hang_up(session, url, body, demand.patience)
        abort = threading.Timer(demand.patience, _abort, [url, rid])
        if demand.way is Way.ABORT:
            abort.start()
        try:
            timeout = demand.patience if demand.way is Way.GIVE_UP else HUNG
            answer = session.post(f"{url}/generate", json=body, timeout=(HUNG, timeout)).json()
        except requests.ReadTimeout:
            if demand.way is Way.GIVE_UP:
                return "left", {}
            raise
        finally:
            abort.cancel()
    if "meta_info" not in answer:
        return f"{ERROR}{json.dumps(answer)[:500]}", {}
    finish = answer["meta_info"]["finish_reason"]
    if finish["type"] != "abort":
        return "answered", answer
    return ("aborted" if demand.way is Way.ABORT else f"aborted by nobody: {finish}"), answer


def _hang_up(session: requests.Session, url: str, body: dict[str, Any], patience: float) -> tuple[str, dict[str, Any]]:
    deadline = time.monotonic() + patience
    with session.post(f"{url}/generate", json=body, stream=True, timeout=HUNG) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if line == b"data: [DONE]":
                return "left", {}
            if line and "meta_info" not in json.loads(line.removeprefix(b"data: ")):
                return f"{ERROR}{line[:500]!r}", {}
            if time.monotonic() > deadline:
                return "left", {}
    return "the stream broke off", {}


def _abort(url: str, rid: str) -> None:
    with requests.Session() as session:
        session.trust_env = False
        session.post(f"{url}/abort_request", json={"rid": rid}, timeout=HUNG)
