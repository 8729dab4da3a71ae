"""The prefill/decode demo's verdict: what it must call equal, and what it must not let pass."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from sglang_dcp_block.demo.client import Answer
from sglang_dcp_block.demo.pd import report
from sglang_dcp_block.demo.pd.client import Reply
from sglang_dcp_block.demo.pd.counters import Sent
from sglang_dcp_block.demo.pd.plan import PAGE_SIZE, pd_plan
from sglang_dcp_block.demo.pd.report import Route

PLAN = pd_plan(8)
PREFILL = PLAN.prefills[1]
TOKENS, BLOCKS = PLAN.decodes
WANTED = {q.name: Answer("", (7, 8, 9), (-0.5, -1.0, -2.0), len(q.ids)) for q in PLAN.questions}
INFO = {
    PREFILL: {"dcp_size": 1, "page_size": 16},
    TOKENS: {"dcp_size": 8, "page_size": 16},
    BLOCKS: {"dcp_size": 8, "page_size": 16, "dcp_block_size": 16, "dcp_block": {"block_size": 16, "dcp_size": 8}},
}
# 754 tokens of prompts in 2 layers of 1,152 bytes
SENT = {
    TOKENS: Sent(("tokens",), 100, 754 * 2, 754 * 2 * 1152, 0.5),
    BLOCKS: Sent(("direct",), 100, (19 + 10 + 1 + 19) * 2, 754 * 2 * 1152, 0.1),
}


def route(decode=BLOCKS, *, question="long", cached=None, sent=None, infos=None, **changes) -> Route:
    """A pair that did everything right, but for what is given."""
    replies = {q.name: Reply(WANTED[q.name], q.cached_tokens) for q in PLAN.questions}
    reply = replies[question]
    replies[question] = Reply(
        dataclasses.replace(reply.answer, **changes), reply.cached_tokens if cached is None else cached
    )
    facts = dataclasses.replace(SENT[decode], **(sent or {}))
    return Route(PREFILL, decode, replies, facts, {PREFILL: INFO[PREFILL], decode: INFO[decode]} | (infos or {}))


def wrong(*routes: Route) -> list[str]:
    return report.mismatches(PLAN, routes, WANTED)


def test_what_is_right_passes():
    assert wrong(route(TOKENS), route(BLOCKS)) == []
    assert wrong(route(logprobs=(-0.50009, -1.0, -2.0))) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"logprobs": (-0.5, -1.0, -2.0002)}, "long: log-probabilities: expected within 1e-04 of TP1, got 2.0e-04"),
        ({"logprobs": (-0.5, float("nan"), -2.0)}, "got inf"),
        ({"logprobs": (-0.5, -1.0)}, "got inf"),
        ({"tokens": (7, 8, 10)}, "long: expected the tokens of TP1"),
        ({"question": "cached", "cached": 256}, "cached: expected 272 tokens of the prompt in the prefill server's"),
        ({"question": "short", "cached": 5}, "short: expected 0 tokens of the prompt"),
        ({"sent": {"num_bytes": 754 * 2 * 1152 + 1152}}, "bytes: expected 1737216, got 1738368"),
        ({"sent": {"segments": 97}}, "segments: expected 98, got 97"),
        ({"sent": {"paths": ("direct", "fallback")}}, "the way KV was sent: expected ('direct',), got"),
        ({"sent": {"fallbacks": ("no pack buffer",)}}, "fallbacks: expected (), got ('no pack buffer',)"),
        ({"sent": {"failures": ("transport",)}}, "failures: expected (), got ('transport',)"),
        ({"infos": {BLOCKS: INFO[TOKENS]}}, "decode TP8+DCP8 B=16: /server_info dcp_block"),  # the flag was ignored
        ({"infos": {PREFILL: INFO[BLOCKS]}}, "prefill TP2: /server_info dcp_size: expected 1, got 8"),
    ],
)
def test_anything_else_fails(changes, words):
    lines = wrong(route(TOKENS), route(**changes))
    assert lines
    assert all(line.startswith("prefill TP2 -> decode TP8+DCP8 B=16: ") for line in lines)
    assert any(words in line for line in lines)


def test_a_token_server_that_gets_blocks_fails():
    assert wrong(route(TOKENS, sent={"paths": ("direct",)}))
    assert wrong(route(TOKENS, sent={"segments": SENT[BLOCKS].segments}))


def test_the_tables_say_it_all():
    console = Console(file=io.StringIO(), width=80)
    for table in report.tables(PLAN, [route(TOKENS), route(BLOCKS, question="middle", tokens=(1, 2, 3))], WANTED):
        console.print(table)
    console.print(report.note(PLAN), highlight=False)
    text = console.file.getvalue()
    for words in (
        "299 tokens",
        "0.0e+00 equal",
        "DIFFER",
        "1,508",
        "2.00",
        "98",
        "0.13",
        "1,737,216",
        "17,727",
        "0.50 s",
    ):
        assert words in text, words
    assert text.count("TP2 → TP8+DCP8 B=16") == 2  # not cut, not wrapped
    assert "CUDA only" in text
    assert all(len(line) <= 80 for line in report.note(PLAN).splitlines())


@pytest.mark.parametrize("dcp_size", [2, 4, 8])
def test_the_prompts_are_what_they_are_for(dcp_size):
    plan = pd_plan(dcp_size)
    long, middle, short, cached = plan.questions
    assert len(short.ids) < PAGE_SIZE
    for question in (long, middle, cached):
        assert len(question.ids) > 2 * 64  # chunks
        assert len(question.ids) > dcp_size * PAGE_SIZE  # comes back to the first rank
        assert len(question.ids) % PAGE_SIZE
        assert len(question.ids) % dcp_size
    assert cached.ids[: cached.shared_tokens] == long.ids[: cached.shared_tokens]
    assert cached.ids[cached.shared_tokens] != long.ids[cached.shared_tokens]
    assert cached.shared_tokens % PAGE_SIZE
    assert len(plan.warm_up) > dcp_size * PAGE_SIZE
    assert not any(plan.warm_up[:PAGE_SIZE] == question.ids[:PAGE_SIZE] for question in plan.questions)
    assert [case.tp_size for case in plan.prefills] == [1, 2]
    assert [case.block_size for case in plan.decodes] == [None, PAGE_SIZE]
    assert all(case.tp_size == case.dcp_size == dcp_size for case in plan.decodes)
    assert PAGE_SIZE * plan.row_bytes >= 16384  # so that they are sent as they lie


def test_a_size_that_the_model_does_not_allow():
    with pytest.raises(ValueError, match="expected one of 2, 4, 8, got 3"):
        pd_plan(3)
