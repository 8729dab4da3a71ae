"""A running engine under test, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lab_folder
from sglang_dcp_block.cpu.leftovers import Scratch, kill_group
from tied import tied

HERE = Path(__file__).parent


class EngineFailed(AssertionError):
    """The engine refused to start, died, answered with an error or not in time."""


@dataclass
class Completion:
    """One request's result."""

    ids: list[int]
    logprobs: list[float]
    cached: int
    from_host: int = 0  # of the cached tokens, those that HiCache loaded from host memory
    from_storage: int = 0  # and from storage
    retracted: int | None = None
    finish: Any = None


@dataclass
class EngineSession:
    """Starts on construction; ``with`` ends it. ``lab`` lets tests steer and inspect the schedulers."""

    kwargs: dict[str, Any]
    folder: Path
    ranks: int
    environ: dict[str, str] = field(default_factory=dict)
    lab: bool = True
    mutants: bool = False
    start_timeout: float | None = None  # seconds; ranks start side by side, on the same few cores
    answer_timeout: float = 300.0

    def __post_init__(self) -> None:
        from sglang_dcp_block.cpu.environment import cpu_environment

        self.folder.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, **self.environ}
        if self.lab:
            env |= lab_folder.environ_of(self.folder, env, self.mutants)
        self.scratch = Scratch()
        env |= self.scratch.environ
        env.update(cpu_environment(self.ranks, env))
        self.log = self.folder / "engine.log"
        reader, writer = os.pipe()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                tied([sys.executable, str(HERE / "worker.py"), json.dumps(self.kwargs), str(writer)]),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[writer],
                env=env,
                start_new_session=True,
                text=True,
            )
        os.close(writer)
        self.answers = os.fdopen(reader, "r")
        try:
            self.start_seconds = self._answer(self.start_timeout or 300 + 90 * self.ranks)["seconds"]
        except BaseException:
            self.close()
            raise

    # -- commands -------------------------------------------------------------------------------------------------

    def generate(self, prompts: list[list[int]], max_new_tokens: int = 8, **sampling: Any) -> list[Completion]:
        """Greedy completions of a batch of token lists, sent together."""
        params = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True, **sampling}
        return [Completion(**r) for r in self._do("generate", input_ids=prompts, sampling_params=params)]

    def flush(self, **order: Any) -> list[dict[str, Any]]:
        """Empty the cache; returns each scheduler's state just before it, after carrying out ``order``."""
        lab_folder.give_order(self.folder, **order)
        assert self._do("flush"), "the engine did not flush: a request still runs"
        try:
            return lab_folder.states_in(self.folder, self.ranks)
        except TimeoutError as error:
            raise EngineFailed(str(error)) from error

    def score(self, texts: list[list[int]]) -> list[list[tuple[float, float]]]:
        """Of each token list, from its second token on: (log-probability of the token, that of the likeliest one)."""
        return [[(own, best) for own, best in text] for text in self._do("score", input_ids=texts)]

    def info(self, *keys: str) -> dict[str, Any]:
        """Fields of the server info."""
        return self._do("info", keys=list(keys))

    def send(self, name: str, **fields: Any) -> None:
        """Give a command and do not wait."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": name, **fields}) + "\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        """The answer to the oldest command that was sent."""
        return self._answer(self.answer_timeout)["result"]

    def _do(self, name: str, **fields: Any) -> Any:
        self.send(name, **fields)
        return self.receive()

    def _answer(self, timeout: float) -> dict[str, Any]:
        ready, _, _ = select.select([self.answers], [], [], timeout)
        line = self.answers.readline() if ready else ""
        if not line:
            what = "ended" if ready else f"gave no answer in {timeout:.0f} s"
            raise EngineFailed(f"the engine {what}\n{self.tail()}")
        fields: dict[str, Any] = json.loads(line)
        if "error" in fields:
            raise EngineFailed(f"{fields['error']}\n{self.tail()}")
        return fields

    def tail(self, lines: int = 60) -> str:
        """The end of the engine's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def signal(self, number: int) -> None:
        """Send a signal to the engine and everything it started."""
        with contextlib.suppress(ProcessLookupError):  # the group outlives its leader as long as anyone is in it
            os.killpg(self.process.pid, number)

    # -- end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the engine and everything it started."""
        if self.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.communicate(timeout=20)
        kill_group(self.process.pid)
        self.process.wait()
        self.answers.close()
        self.scratch.remove()

    def __enter__(self) -> EngineSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
