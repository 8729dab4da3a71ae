"""One plan: all figures and the advice that follows from them."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.plan.advice import Advice, Candidate, advise, candidates
from sglang_dcp_block.plan.figures import (
    Balance,
    Memory,
    Rounding,
    Sending,
    balance,
    break_even,
    memory,
    rounding,
    sendings,
)
from sglang_dcp_block.plan.inputs import Inputs, require_possible, transfers_refused


@dataclass(frozen=True, slots=True)
class Plan:
    """What the command prints, draws and writes."""

    inputs: Inputs
    advice: Advice
    by_tokens: Balance  # token round-robin
    by_blocks: Balance  # blocks of the advice
    memory: Memory
    rounding: Rounding
    sendings: tuple[Sending, ...]  # empty where there are no transfers
    break_even_block: int | None  # by the model, for the longest prompt; None also where there are no transfers
    candidates: tuple[Candidate, ...]


def plan(inputs: Inputs) -> Plan:
    """Everything about ``inputs``.

    Raises:
        InputError: nothing could work; with all reasons.
    """
    require_possible(inputs)
    no_transfers = transfers_refused(inputs)
    looked_at = candidates(inputs)
    advice = advise(inputs, looked_at, no_transfers)
    rows = balance(inputs.mix, DcpLayout(inputs.dcp_size, advice.block_size))
    return Plan(
        inputs,
        advice,
        balance(inputs.mix, DcpLayout(inputs.dcp_size, 1)),
        rows,
        memory(inputs, rows),
        rounding(inputs.mix, advice.page_size, inputs.dcp_size),
        () if no_transfers else sendings(inputs, advice.page_size, advice.block_size),
        None if no_transfers else break_even(inputs, advice.page_size),
        tuple(looked_at),
    )
