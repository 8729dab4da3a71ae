"""Which block and page size follow from the figures, and why.

Longer blocks are fewer segments, and shorter ones even out ranks. So: the longest block whose fullest rank stays within the
limit; of the pages that it divides, the shortest, so that a block is a page where it can be.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dcp_block.config import FLAG, GROUP_FLAG
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.dcp.transfer import DIRECT_BYTES
from sglang_dcp_block.patches.mooncake_pack import ENVIRONMENT as DIRECT_VARIABLE
from sglang_dcp_block.plan.figures import Sending, balance, divisors, goes_direct, rounding, sendings
from sglang_dcp_block.plan.inputs import Inputs, refused

FASTER = 1.05  # a way that is said to be faster is so by this factor, by the model


@dataclass(frozen=True, slots=True)
class Candidate:
    """One page and block size that was looked at."""

    page_size: int
    block_size: int
    imbalance: float
    share_lost: float  # to whole virtual pages
    against: tuple[str, ...]  # what speaks against it; empty if it may be taken


@dataclass(frozen=True, slots=True)
class Advice:
    """What to run with."""

    page_size: int
    block_size: int  # 1: leave the flag out
    group_pages: int | None  # for --dcp-group-pages, on both sides
    sent: str | None  # name of the way that prompts then go; None without transfers
    decode_flags: tuple[str, ...]
    prefill_flags: tuple[str, ...]
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]


def candidates(inputs: Inputs) -> list[Candidate]:
    """Every page and block size to choose from, the longest blocks first."""
    found = []
    for page in inputs.pages():
        lost = rounding(inputs.mix, page, inputs.dcp_size).share_lost
        for block in [inputs.block_size] if inputs.block_size else divisors(page):
            even = balance(inputs.mix, DcpLayout(inputs.dcp_size, block)).imbalance
            against = [line.partition(":")[0] for line in refused(inputs, page, block)]
            if _is_too_uneven(inputs, block, even):
                against.append(f"fullest rank {even:.3f} times the mean, more than {inputs.max_imbalance:g}")
            if lost > inputs.max_rounding:
                against.append(
                    f"{100 * lost:.3g}% of what is allocated holds nothing, more than {100 * inputs.max_rounding:.3g}%"
                )
            found.append(Candidate(page, block, even, lost, tuple(against)))
    return sorted(found, key=lambda one: (-one.block_size, one.page_size))


def _is_too_uneven(inputs: Inputs, block_size: int, imbalance: float) -> bool:
    """Token round-robin never is: it is what there is without this plugin."""
    return block_size > 1 and imbalance > inputs.max_imbalance


def choose(inputs: Inputs, looked_at: list[Candidate]) -> tuple[Candidate, str | None]:
    """The one to take, and a warning where none is within the limits."""
    if fitting := [one for one in looked_at if not one.against]:
        return fitting[0], None
    startable = [one for one in looked_at if not refused(inputs, one.page_size, one.block_size)]
    least = min(
        startable,
        key=lambda one: (one.share_lost, _is_too_uneven(inputs, one.block_size, one.imbalance), -one.block_size),
    )
    return least, f"no choice is within the limits; against this one: {'; '.join(least.against)}."


def advise(inputs: Inputs, looked_at: list[Candidate], no_transfers: list[str]) -> Advice:
    """Map the figures to a recommendation.

    Args:
        no_transfers: why a prefill server cannot send to this decode server; empty if it can.
    """
    if no_transfers:
        return _without_blocks(inputs, looked_at, no_transfers)
    chosen, warning = choose(inputs, looked_at)
    page, block = chosen.page_size, chosen.block_size
    if block == 1:
        return _flags(inputs, page, 1, None, "tokens_packed", [_why_tokens(inputs, page)], [warning] if warning else [])
    ways = {one.name: one for one in sendings(inputs, page, block)}
    # Pages of one rank lie together for segments as they lie; what is packed is one segment anyway.
    group = inputs.dcp_size if block == page and goes_direct(inputs, block) else None
    sent = "blocks_grouped" if group else "blocks" if goes_direct(inputs, block) else "blocks_packed"
    reasons = [
        *_balance_reasons(inputs, looked_at, chosen),
        *_page_reasons(inputs, chosen, group),
        *_sending_reasons(inputs, ways, sent, block),
    ]
    warnings = [warning] if warning else []
    fastest = min(
        (ways[name] for name in ("tokens_packed", "blocks_packed", "blocks")), key=lambda one: one.rank_seconds
    )
    if fastest.rank_seconds * FASTER < ways[sent].rank_seconds:
        times = f"{time_text(fastest.rank_seconds)} to {time_text(ways[sent].rank_seconds)}"
        warnings.append(
            f"By the model, {fastest.name.replace('_', ' ')} is faster here than what will happen "
            f"({sent.replace('_', ' ')}): {times} for all prompts. {DIRECT_VARIABLE} on the prefill server moves the limit "
            "between blocks that are packed and blocks that are not; measure before you do."
        )
    return _flags(inputs, page, block, group, sent, reasons, warnings)


def _balance_reasons(inputs: Inputs, looked_at: list[Candidate], chosen: Candidate) -> list[str]:
    tokens = balance(inputs.mix, DcpLayout(inputs.dcp_size, 1)).imbalance
    longer = [one for one in looked_at if one.block_size > chosen.block_size]
    text = (
        f"Blocks of {chosen.block_size}: the fullest rank holds {chosen.imbalance:.3f} times the mean "
        f"(token round-robin {tokens:.3f})"
    )
    if inputs.block_size:
        return [f"{text}. The block was given."]
    if longer:
        nearest = longer[-1]
        return [f"{text}; of blocks of {nearest.block_size} against it: {'; '.join(nearest.against)}."]
    return [f"{text}; the longest block that was looked at."]


def _why_tokens(inputs: Inputs, page: int) -> str:
    if inputs.block_size:
        return "The block was given."
    if page == 1:
        return "A page of one token has no longer block."
    return (
        f"No longer block keeps the fullest rank within {inputs.max_imbalance:g} times the mean. "
        "Longer requests, or a higher --max-imbalance, may allow one."
    )


def _page_reasons(inputs: Inputs, chosen: Candidate, group: int | None) -> list[str]:
    page, virtual = chosen.page_size, chosen.page_size * inputs.dcp_size
    text = f"Pages of {page}: requests take virtual pages of {virtual} tokens; {chosen.share_lost:.1%} of those hold nothing"
    if group:
        return [f"{text}. A block is a page, so pages of one rank can lie together ({GROUP_FLAG})."]
    return [f"{text}."]


def _sending_reasons(inputs: Inputs, ways: dict[str, Sending], sent: str, block: int) -> list[str]:
    tokens, chosen = ways["tokens"], ways[sent]
    num_bytes = block * inputs.row_bytes
    side = "as it lies, without a pack buffer" if goes_direct(inputs, block) else "through SGLang's pack buffer"
    return [
        f"A block has {num_bytes:,} bytes, so it is sent {side} (from {DIRECT_BYTES:,} bytes on, it goes as it lies).",
        f"{chosen.segments:,} segments for all prompts instead of {tokens.segments:,}; by the model "
        f"{time_text(chosen.rank_seconds)} to the fullest rank, {time_text(ways['tokens_packed'].rank_seconds)} for token "
        f"round-robin packed, {time_text(tokens.rank_seconds)} for token round-robin as it lies.",
    ]


def _without_blocks(inputs: Inputs, looked_at: list[Candidate], no_transfers: list[str]) -> Advice:
    if inputs.block_size and inputs.block_size > 1:
        chosen = next(one for one in looked_at if one.block_size == inputs.block_size)
        reasons = ["The block was given."]
    else:
        lost = {
            one.page_size: one.share_lost for one in looked_at if not refused(inputs, one.page_size, one.block_size)
        }
        page = max((p for p in lost if lost[p] <= inputs.max_rounding), default=min(lost))
        chosen = next(one for one in looked_at if (one.page_size, one.block_size) == (page, 1))
        reasons = [
            "Blocks shorten transfers from a prefill server, and this model cannot have those: nothing is gained."
        ]
    reasons += [f"No transfers: {line}" for line in no_transfers]
    return _flags(inputs, chosen.page_size, chosen.block_size, None, None, reasons, [])


def _flags(
    inputs: Inputs, page: int, block: int, group: int | None, sent: str | None, reasons: list[str], warnings: list[str]
) -> Advice:
    decode = ["--tp", str(inputs.tp_size), "--dcp-size", str(inputs.dcp_size), "--page-size", str(page)]
    prefill = ["--page-size", str(page)] if sent else []
    if block > 1:
        decode += [FLAG, str(block)]
    if group:
        decode += [GROUP_FLAG, str(group)]
        prefill += [GROUP_FLAG, str(group)]
    return Advice(page, block, group, sent, tuple(decode), tuple(prefill), tuple(reasons), tuple(warnings))


def time_text(seconds: float) -> str:
    """Three digits, in ms or s.

    >>> time_text(0.00123), time_text(12.345)
    ('1.23 ms', '12.3 s')
    """
    value, unit = (seconds, "s") if seconds >= 1 else (seconds * 1e3, "ms")
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
