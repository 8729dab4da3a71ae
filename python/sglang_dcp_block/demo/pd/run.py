"""Carries out the plan of the prefill/decode demo."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from sglang_dcp_block.demo.client import Answer, complete_all
from sglang_dcp_block.demo.pd import counters, report
from sglang_dcp_block.demo.pd.client import Reply, ask_pair
from sglang_dcp_block.demo.pd.plan import BOOTSTRAP_PORT, NEW_TOKENS, Plan
from sglang_dcp_block.demo.pd.report import Route
from sglang_dcp_block.demo.plan import Case
from sglang_dcp_block.demo.progress import Steps
from sglang_dcp_block.demo.run import Options, built
from sglang_dcp_block.demo.servers import Server, flags, free_port


def run(plan: Plan, console: Console, options: Options) -> list[str]:
    """Ask the reference and every pair of servers, print the tables; returns a line for everything that is wrong.

    Raises:
        ServerFailed: a server did not start, died, refused a request, or did not answer in time.
    """
    model = built(plan.model, plan.title, console)
    pairs = len(plan.prefills) * len(plan.decodes)
    with Steps(console, total=2 + len(plan.prefills) + len(plan.decodes) + 2 * pairs) as steps:
        runner = _Runner(plan, model, steps, options)
        wanted = runner.reference()
        routes = runner.routes()
    console.print()
    for table in report.tables(plan, routes, wanted):
        console.print(table)
        console.print()
    console.print(report.note(plan), markup=False, highlight=False)
    return report.mismatches(plan, routes, wanted)


class _Runner:
    def __init__(self, plan: Plan, model: Path, steps: Steps, options: Options) -> None:
        self.plan, self.model, self.steps, self.options = plan, model, steps, options

    def reference(self) -> dict[str, Answer]:
        """Answers of the plain server, by the prompts' names."""
        case = self.plan.reference
        answers: dict[str, Answer] = {}
        with ExitStack() as stack:
            server = self._start(stack, case)
            with self.steps.step(f"{case.name}: {self._work()}"):
                for questions in self.plan.rounds:
                    prompts = [question.ids for question in questions]
                    replies = complete_all(server.url, prompts, NEW_TOKENS, self.options.answer_timeout)
                    answers.update(zip((q.name for q in questions), replies, strict=True))
        return answers

    def routes(self) -> list[Route]:
        """Every prefill server with every decode server, one decode server at a time."""
        routes = []
        with ExitStack() as prefill_stack:
            prefills = []
            for case in self.plan.prefills:
                port = free_port()
                case = replace(case, more=(*case.more, BOOTSTRAP_PORT, str(port)))
                prefills.append((self._start(prefill_stack, case), port))
            for case in self.plan.decodes:
                with ExitStack() as stack:
                    decode = self._start(stack, case)
                    routes += [self._route(prefill, decode, port) for prefill, port in prefills]
        return routes

    def _start(self, stack: ExitStack, case: Case) -> Server:
        log = self.options.logs / f"{case.name.replace(' ', '-').replace('=', '')}.log"
        with self.steps.step(f"{case.name}: sglang serve {' '.join(flags(case))}"):
            return stack.enter_context(Server(case, self.model, log, start_timeout=self.options.start_timeout))

    def _route(self, prefill: Server, decode: Server, port: int) -> Route:
        replies: dict[str, Reply] = {}
        timeout = self.options.answer_timeout
        # The KV of the pair before must not be found again.
        prefill.ask("/flush_cache", {}, timeout)
        with self.steps.step(f"{prefill.case.name} -> {decode.case.name}: the first transfer, which connects them"):
            ask_pair(prefill, decode, port, [self.plan.warm_up], NEW_TOKENS, timeout)
        before = self._counters(prefill)
        with self.steps.step(f"{prefill.case.name} -> {decode.case.name}: {self._work()}"):
            for questions in self.plan.rounds:
                prompts = [question.ids for question in questions]
                answers = ask_pair(prefill, decode, port, prompts, NEW_TOKENS, timeout)
                replies.update(zip((q.name for q in questions), answers, strict=True))
        try:
            sent = counters.sent_between(before, self._counters(prefill))
        except ValueError as error:
            raise prefill.failed(error) from error
        infos = {server.case: server.info() for server in (prefill, decode)}
        return Route(prefill.case, decode.case, replies, sent, infos)

    def _counters(self, server: Server) -> dict[tuple[str, str], float]:
        return counters.parse(server.ask("/metrics").decode())

    def _work(self) -> str:
        return f"{len(self.plan.questions)} prompts, {NEW_TOKENS} new tokens each"
