"""The demo's verdict: what it must call equal, and what it must not let pass."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from sglang_dcp_block.demo import report
from sglang_dcp_block.demo.client import Answer, from_generate, from_openai
from sglang_dcp_block.demo.plan import Case, tiny_part, trained_part
from sglang_dcp_block.demo.report import Result

PLAIN = Case("TP4", tp_size=4, dcp_size=1, block_size=None, page_size=8)
TOKEN = Case("TP4+DCP4 B=1", tp_size=4, dcp_size=4, block_size=None, page_size=8)
BLOCKS = Case("TP4+DCP4 B=4", tp_size=4, dcp_size=4, block_size=4, page_size=8)
LAYOUT = {"block_size": 4, "dcp_size": 4}
INFO = {
    PLAIN: {"dcp_size": 1, "page_size": 8},
    TOKEN: {"dcp_size": 4, "page_size": 8},
    BLOCKS: {"dcp_size": 4, "page_size": 8, "dcp_block_size": 4, "dcp_block": LAYOUT},
}


def answer(prompt_tokens: int = 17, **changes) -> Answer:
    return dataclasses.replace(Answer("a b c", ("a", "b", "c"), (-0.5, -1.0, -2.0), prompt_tokens), **changes)


def result(case: Case = PLAIN, *answers: Answer, info=None) -> Result:
    return Result(case, answers or (answer(),), 10.0, 6.0, INFO[case] if info is None else info)


def test_equal_results_pass():
    results = [result(), result(TOKEN), result(BLOCKS, answer(logprobs=(-0.50001, -1.0, -2.0)))]
    assert report.mismatches(results) == []
    assert report.difference(results[2], results[0]) == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"logprobs": (-0.5, -1.0, -2.0002)}, ["expected within 1e-04 of TP4", "got 2.0e-04"]),
        ({"logprobs": (-0.5, float("nan"), -2.0)}, ["got inf"]),
        ({"logprobs": (-0.5, -1.0)}, ["got inf"]),
        ({"tokens": ("a", "b", "d")}, ["expected the tokens of TP4"]),
        ({"text": "a b d"}, ["expected the tokens of TP4"]),
    ],
)
def test_any_difference_fails(changes, words):
    (line,) = report.mismatches([result(), result(BLOCKS, answer(**changes))])
    assert line.startswith("TP4+DCP4 B=4: ")
    assert all(word in line for word in words)


def test_a_difference_in_the_second_prompt_is_seen():
    wrong = answer(logprobs=(-0.5, -1.0, -3.0))
    assert report.mismatches([result(PLAIN, answer(), answer()), result(TOKEN, answer(), wrong)])


@pytest.mark.parametrize(
    "info",
    [
        {"dcp_size": 4, "page_size": 8},  # the flag was ignored
        INFO[BLOCKS] | {"dcp_block_size": 8},
        INFO[BLOCKS] | {"dcp_block": LAYOUT | {"dcp_size": 2}},
        INFO[BLOCKS] | {"dcp_size": 2},
    ],
)
def test_a_server_that_runs_something_else_fails(info):
    assert all("/server_info" in line for line in report.mismatches([result(), result(BLOCKS, info=info)]))
    assert report.mismatches([result(), result(BLOCKS, info=info)])


def test_blocks_without_being_asked_for_fail():
    assert report.mismatches([result(), result(TOKEN, info=INFO[BLOCKS])])


def test_rows_of_each_rank():
    answers = (answer(prompt_tokens=3), answer(prompt_tokens=19))  # 5 and 21 tokens of KV
    assert report.rows_per_rank(result(PLAIN, *answers)) == [26]
    assert report.rows_per_rank(result(TOKEN, *answers)) == [2 + 6, 1 + 5, 1 + 5, 1 + 5]
    assert report.rows_per_rank(result(BLOCKS, *answers)) == [4 + 8, 1 + 5, 0 + 4, 0 + 4]
    assert report.imbalance([12, 6, 4, 4]) == pytest.approx(12 / 6.5)


def test_the_table_says_it_all():
    results = [result(), result(TOKEN), result(BLOCKS, answer(tokens=("x", "y", "z")))]
    console = Console(file=io.StringIO(), width=80)
    console.print(report.table("a model", results))
    text = console.file.getvalue()
    for words in ("a model", "reference", "equal", "DIFFER", "19 on all 4", "5 5 5 4", "7 4 4 4", "2.0"):
        assert words in text


def test_long_prompts_are_even():
    note = report.occupancy_note([result(), result(TOKEN), result(BLOCKS)])
    assert "at most B rows" in note
    assert "max/mean of 1.0000" in note
    assert report.occupancy_note([result(), result(TOKEN)]) is None


def test_replies_are_read():
    openai = {
        "choices": [{"text": " Paris.", "logprobs": {"tokens": [" Paris", "."], "token_logprobs": [-0.25, -0.375]}}],
        "usage": {"prompt_tokens": 5},
    }
    assert from_openai(openai) == Answer(" Paris.", (" Paris", "."), (-0.25, -0.375), 5)
    generate = {
        "output_ids": [7, 9],
        "meta_info": {"output_token_logprobs": [[-0.25, 7, None], [-0.375, 9, None]], "prompt_tokens": 5},
    }
    assert from_generate(generate) == Answer("", (7, 9), (-0.25, -0.375), 5)
    assert from_generate(generate).kv_tokens == 6


@pytest.mark.parametrize("part", [trained_part(), trained_part(also_eight_ranks=True), tiny_part()])
def test_every_part_has_blocks_and_lengths_that_dcp_does_not_divide(part):
    assert part.cases[0].dcp_size == 1
    assert any(case.block_size for case in part.cases)
    for case in part.cases:
        assert case.page_size % (case.block_size or 1) == 0
    if not isinstance(part.prompts[0], str):
        lengths = [len(prompt) for prompt in part.prompts]
        assert 5 in lengths
        assert max(lengths) <= 40
        assert all(length % case.dcp_size for length in lengths for case in part.cases if case.dcp_size > 1)
