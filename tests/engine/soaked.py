"""What a soak puts load on: a served TP2 + DCP2 with a small pool, alone or behind a prefill server, over real Mooncake."""

from __future__ import annotations

import itertools
import os
import time
import urllib.error
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lab_folder
from cases import BASE
from pd import HOST, free_port, role
from served import Served
from traffic import Demand, Outcome, send, send_to_pair

RANKS, PAGE, CHUNK = 2, 8, 32
# SGLang admits a request where its prompt and whole answer fit, and counts on little growth of those that run. Ten virtual
# pages of 16 tokens so let in five or six short prompts, whose answers of 36 tokens then need fifteen pages or more.
ROWS = 80
ROOM = {
    "page_size": PAGE,
    "chunked_prefill_size": CHUNK,
    "schedule_conservativeness": 0.1,
    "context_length": 128,
    "enable_metrics": True,
    "skip_server_warmup": True,
}
LEAK, UNSENT = "leak", "sent:nothing"
IDLE = 180  # seconds until a server has noticed that all clients are gone, and pages of failed transfers are back


@dataclass(frozen=True)
class Kind:
    """One thing to put load on."""

    model: str
    attention: str
    block: int = 4
    prefill: bool = False  # whether a prefill server computes the prompts

    @property
    def faults(self) -> tuple[str, ...]:
        """Put in on purpose, one after the other: the checks must see them."""
        return (LEAK, "door:owner+1", *([UNSENT] if self.prefill else []))


KINDS = {
    "gqa": Kind("gqa", "triton"),
    "mla": Kind("mla", "flashinfer"),
    "pd": Kind("mla", "flashinfer", prefill=True),
}


@dataclass
class Soaked:
    """Servers that run, each with the folder of its lab plugin; the last one answers."""

    servers: list[Served]
    folders: list[Path]
    rooms: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def send(self, demand: Demand) -> Outcome:
        """One request, until it ends."""
        *before, last = self.servers
        if not before:
            return send(last.url, demand)
        (prefill,) = before
        port, room = prefill.arguments["disaggregation_bootstrap_port"], next(self.rooms)
        bootstrap = {"bootstrap_host": HOST, "bootstrap_port": port, "bootstrap_room": room}
        return send_to_pair(prefill.url, last.url, demand, **bootstrap)

    def flushed(self, fault: str | None = None) -> list[dict[str, Any]]:
        """The state of each rank of each server, once no request is left; from then on, with this fault.

        A prefill server has those of transfers only: SGLang itself looks for leaks where there is no DCP, and ends.
        """
        where = self.servers[0] if fault == UNSENT else self.servers[-1]
        return [
            state
            for server, folder in zip(self.servers, self.folders, strict=True)
            for state in _flushed(server, folder, mutant=fault if server is where else None)
        ]

    def metrics(self) -> Counter[str]:
        """SGLang's own, over servers and label values."""
        counted: Counter[str] = Counter()
        for server in self.servers:
            for (name, _), value in server.metrics().items():
                counted[name] += value
        return counted

    def close(self) -> None:
        for server in self.servers:
            server.close()


def started(kind: Kind, model_path: Path, folder: Path, environ: dict[str, str]) -> Soaked:
    """Serve it; returns when every server answers."""
    common = {**BASE, **ROOM, "model_path": str(model_path)}
    servers, folders = [], []
    for number, arguments in enumerate(_pair(kind) if kind.prefill else [_alone(kind)]):
        folders.append(folder / str(number))
        folders[-1].mkdir()
        lab = lab_folder.environ_of(folders[-1], {**os.environ, **environ}, mutants=True)
        servers.append(Served({**common, **arguments}, folders[-1] / "server.log", arguments.get("tp_size", 1), **lab))
    soaked = Soaked(servers, folders)
    try:
        for server in servers:
            server.wait()
    except BaseException:
        soaked.close()
        raise
    return soaked


def _alone(kind: Kind) -> dict[str, Any]:
    return {"attention_backend": kind.attention, "host": HOST, "port": free_port(), **_blocks(kind)}


def _pair(kind: Kind) -> list[dict[str, Any]]:
    sides = [
        role("prefill", max_total_tokens=RANKS * ROWS),
        # It takes in what its pool holds now, and copies out the KV of requests that it retracts.
        role(
            "decode",
            num_reserved_decode_tokens=1,
            disaggregation_decode_retraction_backup="cpu_tensor",
            **_blocks(kind),
        ),
    ]
    return [{key: value for key, value in side.items() if key != "model"} for side in sides]


def _blocks(kind: Kind) -> dict[str, Any]:
    return {"tp_size": RANKS, "dcp_size": RANKS, "dcp_block_size": kind.block, "max_total_tokens": ROWS}


def _flushed(server: Served, folder: Path, **order: Any) -> list[dict[str, Any]]:
    deadline = time.monotonic() + IDLE
    while True:
        lab_folder.give_order(folder, **order)
        try:
            server.ask("/flush_cache", {})
            return lab_folder.states_in(folder, server.arguments.get("tp_size", 1))
        except urllib.error.HTTPError as error:  # not idle
            if time.monotonic() > deadline:
                raise AssertionError(f"requests that nobody waits for run on:\n{server.said()[-3000:]}") from error
            time.sleep(0.5)
