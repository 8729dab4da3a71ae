"""A plan as tables, in 100 columns."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sglang_dcp_block.plan.advice import time_text
from sglang_dcp_block.plan.figures import Balance, Sending
from sglang_dcp_block.plan.whole import Plan

NAMES = {
    "tokens": "token round-robin, as it lies",
    "tokens_packed": "token round-robin, packed (SGLang)",
    "blocks_packed": "blocks of {}, packed",
    "blocks": "blocks of {}",
    "blocks_grouped": "blocks of {}, pages grouped",
    "one_segment": "one segment a layer: the least",
}


def show(plan: Plan, console: Console) -> None:
    """Print all of it."""
    console.print(heading(plan), highlight=False, markup=False)
    for table in tables(plan):
        console.print()
        console.print(table)
    console.print()
    for line in closing(plan):
        console.print(line, highlight=False, markup=False)


def heading(plan: Plan) -> str:
    """What it is for, in a line or two."""
    inputs, shape = plan.inputs, plan.inputs.shape
    kind = "MLA" if shape.is_mla else f"{shape.num_kv_heads} KV heads"
    pools = "scattered" if inputs.scattered else "fresh"
    return (
        f"{shape.name}: {shape.num_layers} layers, {kind}, {inputs.row_bytes:,} bytes a token and layer on a GPU; "
        f"TP {inputs.tp_size}, DCP {inputs.dcp_size}\n"
        f"requests: {inputs.mix.name}, {inputs.mix.number:,} with {inputs.mix.total_tokens:,} tokens; "
        f"link: {inputs.link.name}; chunks of {inputs.chunk_tokens:,}; {pools} pools"
    )


def tables(plan: Plan) -> Iterator[Table]:
    """All tables."""
    yield memory_table(plan)
    yield balance_table(plan)
    if plan.sendings:
        yield transfer_table(plan)
    yield candidate_table(plan)


def memory_table(plan: Plan) -> Table:
    """KV of all requests on one GPU."""
    table = _table("KV of all requests on one GPU", "", "GiB", "of TP alone")
    alone = plan.memory.tp_alone
    for name, value in (
        ("TP alone", float(alone)),
        ("DCP, mean", plan.memory.mean),
        ("DCP, fullest rank", float(plan.memory.fullest)),
        ("DCP, with what whole pages take", plan.memory.mean * plan.rounding.taken / plan.rounding.used),
    ):
        table.add_row(name, f"{value / 2**30:.2f}", f"{value / alone:.1%}")
    return table


def balance_table(plan: Plan) -> Table:
    """Rows of each rank."""
    ranks = range(plan.inputs.dcp_size)
    table = _table("Rows of each rank", "", *(f"rank {rank}" for rank in ranks), "max/mean")
    rows: list[tuple[str, Balance]] = [("token round-robin", plan.by_tokens)]
    if plan.advice.block_size > 1:
        rows.append((f"blocks of {plan.advice.block_size}", plan.by_blocks))
    for name, balance in rows:
        table.add_row(name, *(f"{number:,}" for number in balance.rows), f"{balance.imbalance:.4f}")
    return table


def transfer_table(plan: Plan) -> Table:
    """All prompts in every way."""
    title = "All prompts from a prefill server: segments and bytes counted, times modelled"
    table = _table(title, "", "segments", "GB", "GB staged", "to the fullest rank", "longest prompt")
    for one in plan.sendings:
        mark = " ←" if one.name == plan.advice.sent else ""
        table.add_row(
            label(one) + mark,
            f"{one.segments:,}",
            f"{one.num_bytes / 1e9:.2f}",
            f"{one.staged_bytes / 1e9:.2f}",
            time_text(one.rank_seconds),
            time_text(one.longest_seconds),
        )
    return table


def candidate_table(plan: Plan) -> Table:
    """What there was to choose from."""
    table = _table("What there was to choose from", "page", "block", "max/mean", "lost to pages", "against it")
    table.columns[-1].justify = "left"
    table.columns[-1].overflow = "fold"
    for one in plan.candidates:
        chosen = (one.page_size, one.block_size) == (plan.advice.page_size, plan.advice.block_size)
        against = "; ".join(one.against) or ("← recommended" if chosen else "")
        table.add_row(str(one.page_size), str(one.block_size), f"{one.imbalance:.3f}", f"{one.share_lost:.1%}", against)
    return table


def closing(plan: Plan) -> Iterator[str]:
    """The advice, and what the figures are."""
    advice = plan.advice
    size = f"blocks of {advice.block_size}, pages of {advice.page_size}" if advice.block_size > 1 else "no blocks"
    yield f"Recommended: {size}"
    yield f"  decode server:  {' '.join(advice.decode_flags)}"
    if advice.prefill_flags:
        yield f"  prefill server: {' '.join(advice.prefill_flags)}"
    yield from (f"  - {reason}" for reason in advice.reasons)
    yield from (f"  ! {warning}" for warning in advice.warnings)
    if plan.sendings:
        even, link = plan.break_even_block, plan.inputs.link.name
        met = f"from blocks of {even} on, sending as they lie takes less time" if even else "packing beats every block"
        yield f"Longest prompt, pages not grouped, by the model of {link}: {met}."
        if advice.group_pages and not plan.inputs.scattered:
            yield "Grouped is counted in pools with room: one segment a rank, layer and chunk. Pools in use by 60 to 98 %"
            yield "took 1.7 to 4.7 (benchmarks/results/fragmentation.md)."
        yield "Times are a model, not a measurement: docs/transfer-model.md says what it knows and where it errs."


def label(one: Sending) -> str:
    """The way, for readers."""
    return NAMES[one.name].format(one.block_size)


def _table(title: str, *heads: str) -> Table:
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for i, head in enumerate(heads):
        table.add_column(head, justify="right" if i or head else "left")
    return table
