"""A prefill and a decode server of the real SGLang, over the real Mooncake on loopback TCP."""

from __future__ import annotations

import itertools
import socket
from dataclasses import dataclass
from typing import Any

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


@dataclass
class Pair:
    """One prefill and one decode server."""

    prefill: EngineSession
    decode: EngineSession

    def generate(self, prompts: list[list[int]], max_new_tokens: int = 7) -> list[Completion]:
        """Greedy completions of a batch, prefilled on one server and decoded on the other.

        Raises:
            EngineFailed: with what the decode server answered.
        """
        rooms = [next(_rooms) for _ in prompts]
        port = self.prefill.kwargs["disaggregation_bootstrap_port"]
        params = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        request = {
            "input_ids": prompts,
            "sampling_params": params,
            "bootstrap_host": [HOST] * len(prompts),
            "bootstrap_port": [port] * len(prompts),
            "bootstrap_room": rooms,
        }
        for server in (self.prefill, self.decode):
            server.send("generate", **request)
        # A refused prefill server waits for a handshake that never comes; whoever expects a refusal ends it.
        answer = [Completion(**r) for r in self.decode.receive()]
        self._end_prefill()
        aborted = [c.finish for c in answer if (c.finish or {}).get("type") == "abort"]
        if aborted:
            raise EngineFailed(f"aborted: {aborted}")
        return answer

    def _end_prefill(self) -> None:
        try:
            self.prefill.receive()
        except EngineFailed as failure:
            if self.prefill.process.poll() is not None:
                raise failure
