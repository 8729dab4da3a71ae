"""Compares what the pairs of servers answered and sent; the tables and the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from sglang_dcp_block.demo.client import Answer
from sglang_dcp_block.demo.pd.client import Reply
from sglang_dcp_block.demo.pd.counters import Sent
from sglang_dcp_block.demo.pd.plan import Plan
from sglang_dcp_block.demo.plan import Case
from sglang_dcp_block.demo.report import TOLERANCE, answer_difference, misreported

Answers = Mapping[str, Answer]  # of the plain server, by the prompts' names


@dataclass(frozen=True, slots=True)
class Route:
    """What one prefill server and one decode server did together."""

    prefill: Case
    decode: Case
    replies: Mapping[str, Reply]  # by the prompts' names
    sent: Sent
    infos: Mapping[Case, Mapping[str, Any]]  # the servers' own, of /server_info

    @property
    def name(self) -> str:
        """As messages show it."""
        return f"{self.prefill.name} -> {self.decode.name}"

    @property
    def short_name(self) -> str:
        """As tables show it, which say what is what in their heading."""
        return f"{self.prefill.name.removeprefix('prefill ')} → {self.decode.name.removeprefix('decode ')}"


def mismatches(plan: Plan, routes: Sequence[Route], wanted: Answers) -> list[str]:
    """One line for everything that is wrong; empty if all is as it must be."""
    lines: list[str] = []
    for route in routes:
        wrong = [f"{case.name}: {line}" for case, info in route.infos.items() for line in misreported(case, info)]
        wrong += _wrong_answers(plan, route, wanted)
        wrong += _wrong_transfers(plan, route)
        lines += [f"{route.name}: {line}" for line in wrong]
    return lines


def _wrong_answers(plan: Plan, route: Route, wanted: Answers) -> list[str]:
    lines, reference = [], plan.reference.name
    for question in plan.questions:
        reply, want = route.replies[question.name], wanted[question.name]
        if reply.answer.tokens != want.tokens:
            lines.append(f"{question.name}: expected the tokens of {reference}, got others")
        largest = answer_difference(reply.answer, want)
        if not largest <= TOLERANCE:
            expected = f"expected within {TOLERANCE:.0e} of {reference}"
            lines.append(f"{question.name}: log-probabilities: {expected}, got {largest:.1e}")
        if reply.cached_tokens != question.cached_tokens:
            expected = f"expected {question.cached_tokens} tokens of the prompt in the prefill server's prefix cache"
            lines.append(f"{question.name}: {expected}, got {reply.cached_tokens}")
    return lines


def _wrong_transfers(plan: Plan, route: Route) -> list[str]:
    sent, block_size = route.sent, route.decode.block_size
    facts: list[tuple[str, object, object]] = [
        ("the way KV was sent", ("direct" if block_size else "tokens",), sent.paths),
        ("bytes", plan.num_bytes, sent.num_bytes),
        ("segments", plan.num_segments(block_size or 1), sent.segments),
        ("reasons of fallbacks", (), sent.fallbacks),
        ("reasons of failures", (), sent.failures),
    ]
    return [f"{name}: expected {expected}, got {got}" for name, expected, got in facts if got != expected]


def tables(plan: Plan, routes: Sequence[Route], wanted: Answers) -> list[Table]:
    """Answers and transfers, in 80 columns each."""
    return [answer_table(plan, routes, wanted), transfer_table(plan, routes)]


def answer_table(plan: Plan, routes: Sequence[Route], wanted: Answers) -> Table:
    """A row a pair of servers, a column a prompt: the largest difference of log-probabilities."""
    result = _table(f"{plan.title}\nlargest |Δ log p| against {plan.reference.name}, and whether tokens are equal")
    result.add_column("prefill → decode")
    for question in plan.questions:
        result.add_column(f"{question.name}\n{len(question.ids)} tokens", justify="right")
    for route in routes:
        result.add_row(route.short_name, *(_cell(route.replies[q.name].answer, wanted[q.name]) for q in plan.questions))
    return result


def _cell(got: Answer, want: Answer) -> str:
    return f"{answer_difference(got, want):.1e} {'equal' if got.tokens == want.tokens else 'DIFFER'}"


def transfer_table(plan: Plan, routes: Sequence[Route]) -> Table:
    """A row a pair of servers: what the prefill server counted."""
    result = _table("What the prefill server sent, by its own counters (/metrics)")
    result.add_column("prefill → decode")
    for heading in ("transfers", "segments", "a token", "bytes", "a segment", "time"):
        result.add_column(heading, justify="right")
    for route in routes:
        sent = route.sent
        result.add_row(
            route.short_name,
            str(sent.transfers),
            f"{sent.segments:,}",
            f"{sent.segments / plan.prompt_tokens:.2f}",
            f"{sent.num_bytes:,}",
            f"{sent.bytes_per_segment:,.0f}",
            f"{sent.seconds:.2f} s",
        )
    return result


def note(plan: Plan) -> str:
    """What the numbers of transfers are, and what they are not; in 80 columns."""
    return (
        "A transfer: one chunk of a prompt to one decode rank. B=1 is token round-robin:\n"
        f"each token is {plan.num_layers} segments, one a layer. So it is without a pack buffer, and\n"
        "SGLang allocates those on CUDA only: a GPU server gathers a rank's rows there\n"
        "first. Blocks of this size are sent as they lie, on a GPU too. Time: the sum\n"
        "over transfers, by TCP on loopback, while decode ranks that wait for KV keep the\n"
        "cores busy; benchmarks/ measures transfers alone."
    )


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
    )
