"""Carries out a plan: builds the models, serves them case by case, asks the prompts."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from sglang_dcp_block.demo import report
from sglang_dcp_block.demo.client import complete_all
from sglang_dcp_block.demo.plan import NEW_TOKENS, Case, Part
from sglang_dcp_block.demo.progress import Steps
from sglang_dcp_block.demo.report import Result
from sglang_dcp_block.demo.servers import Server, flags


@dataclass(frozen=True, slots=True)
class Options:
    """How to run, as against what."""

    logs: Path  # folder for the servers' logs
    port: int = 0  # 0: a free one
    start_timeout: float = 900  # seconds
    answer_timeout: float = 1800


def run(parts: Sequence[Part], console: Console, options: Options) -> list[str]:
    """Run every part and print its table; returns a line for everything that is wrong.

    Raises:
        ServerFailed: a server did not start, died, or did not answer in time.
    """
    models = [built(part.model, part.title, console) for part in parts]
    wrong: list[str] = []
    with Steps(console, total=sum(2 * len(part.cases) for part in parts)) as steps:
        for part, model in zip(parts, models, strict=True):
            steps.say("")
            results = [serve(case, model, part, steps, options) for case in part.cases]
            console.print()
            console.print(report.table(part.title, results))
            if note := report.occupancy_note(results):
                steps.say(note)
            wrong += report.mismatches(results)
    return wrong


def built(model: Callable[[], Path], title: str, console: Console) -> Path:
    """Make a checkpoint in a process of its own, whose memory is free again when the servers start."""
    console.print(f"Model: {title}", markup=False, highlight=False, soft_wrap=True)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(model).result()


def serve(case: Case, model: Path, part: Part, steps: Steps, options: Options) -> Result:
    """Serve one case, ask all prompts at once, and end the server.

    Raises:
        ServerFailed: as :func:`run`.
    """
    log = options.logs / f"tp{case.tp_size}-dcp{case.dcp_size}-block{case.block_size or 1}-{model.name}.log"
    with ExitStack() as stack:
        with steps.step(f"{case.name}: sglang serve {' '.join(flags(case))}"):
            server = stack.enter_context(Server(case, model, log, options.port, options.start_timeout))
        info = server.info()
        began = time.monotonic()
        with steps.step(f"{case.name}: {len(part.prompts)} prompts at once, {NEW_TOKENS} new tokens each"):
            answers = complete_all(server.url, part.prompts, NEW_TOKENS, options.answer_timeout)
        seconds = time.monotonic() - began
    for prompt, answer in zip(part.prompts, answers, strict=True):
        if isinstance(prompt, str):
            steps.say(f"      {answer.prompt_tokens} tokens: ...{prompt[-40:]!r} ->{answer.text!r}")
    return Result(case, tuple(answers), server.start_seconds, seconds, info)
