"""A prefill and a decode server of the real SGLang, over the real Mooncake on loopback TCP."""

from __future__ import annotations

import itertools
import socket
import time
from dataclasses import dataclass
from typing import Any

from cases import BATCHES, PROMPTS, Answers, Expected, assert_nothing_lost, assert_placed, assert_same
from session import Completion, EngineFailed, EngineSession

_rooms = itertools.count(1000)
HOST = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def role(mode: str, **kwargs: Any) -> dict[str, Any]:
    """Engine arguments of a prefill or decode server."""
    return {
        "disaggregation_mode": mode,
        "disaggregation_transfer_backend": "mooncake_tcp",
        "disaggregation_bootstrap_port": free_port(),
        "host": HOST,
        "port": free_port(),
        "model": "mla",
        "attention_backend": "flashinfer",
        **kwargs,
    }


def assert_pages_come_back(server: EngineSession, seconds: float) -> None:
    """No page is lost; those of a transfer that failed are held until nothing can write into them any more."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return assert_nothing_lost(server.flush())
        except AssertionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)


def said(server: EngineSession) -> str:
    """Its log."""
    return server.log.read_text(errors="replace")


def completions(server: EngineSession) -> list[Completion]:
    """The answer to the oldest batch that was sent.

    Raises:
        EngineFailed: a request was aborted, with the reason.
    """
    answer = [Completion(**r) for r in server.receive()]
    aborted = [c.finish for c in answer if (c.finish or {}).get("type") == "abort"]
    if aborted:
        raise EngineFailed(f"aborted: {aborted}")
    return answer


@dataclass
class Pair:
    """One prefill and one decode server."""

    prefill: EngineSession
    decode: EngineSession

    def generate(self, prompts: list[list[int]], max_new_tokens: int = 7, **sampling: Any) -> list[Completion]:
        """Greedy completions of a batch, prefilled on one server and decoded on the other.

        Raises:
            EngineFailed: with what the decode server answered; the prefill server's answer is not waited for, because
                one that was refused waits minutes for a handshake that never comes.
        """
        self.send(prompts, max_new_tokens, **sampling)
        answer = completions(self.decode)
        completions(self.prefill)
        return answer

    def send(self, prompts: list[list[int]], max_new_tokens: int = 7, **sampling: Any) -> None:
        """Give a batch to both servers, and do not wait."""
        request = {
            "input_ids": prompts,
            "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True, **sampling},
            "bootstrap_host": [HOST] * len(prompts),
            "bootstrap_port": [self.prefill.kwargs["disaggregation_bootstrap_port"]] * len(prompts),
            "bootstrap_room": [next(_rooms) for _ in prompts],
        }
        for server in (self.prefill, self.decode):
            server.send("generate", **request)

    def answers(self) -> Answers:
        """Completions of the shared prompts, by name."""
        answers: Answers = {}
        for names in BATCHES:
            answers.update(zip(names, self.generate([PROMPTS[n] for n in names]), strict=True))
        return answers

    def serves_in_blocks(self, want: Expected, block: int) -> Answers:
        """Log-probabilities equal DCP1's, the decode server's rows lie where dealing puts them, and no page is lost."""
        self.decode.flush(record=True)
        got = self.answers()
        states = self.decode.flush()
        assert_same(got, want.answers)
        assert_placed(states, want.keys, block)
        assert_nothing_lost(states)
        assert_nothing_lost(self.prefill.flush())
        return got

    def refusal(self) -> str:
        """The decode server's answer to a request that it cannot serve from this prefill server.

        Where another rank was the first to know, the answer has no reason: it is in the log, which is added then.
        """
        before = len(said(self.decode))
        try:
            answer = self.generate([PROMPTS["middle"]])
        except EngineFailed as failure:
            first, *_ = str(failure).splitlines()
            return f"{first}\n{said(self.decode)[before:]}" if "from another rank" in first else first
        raise AssertionError(f"expected a refusal, got {answer}")
