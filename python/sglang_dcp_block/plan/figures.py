"""The figures of a plan: plain arithmetic over the layout, the mix and the transfer model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.dcp.transfer import prefers_direct
from sglang_dcp_block.plan.inputs import Inputs
from sglang_dcp_block.plan.mix import Mix
from sglang_dcp_block.transfer_model.counts import Counts, Way, count
from sglang_dcp_block.transfer_model.times import break_even_block, seconds


@dataclass(frozen=True, slots=True)
class Balance:
    """Rows of all requests of the mix, by decode rank, when each is at its end."""

    rows: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """The fullest rank over the mean: what attention waits for, and what the fullest GPU holds more."""
        return max(self.rows) * len(self.rows) / sum(self.rows)


@dataclass(frozen=True, slots=True)
class Memory:
    """KV of all requests of the mix on one GPU, in bytes. Rows of pages that hold nothing are not in it."""

    tp_alone: int
    mean: float  # over decode ranks
    fullest: int

    @property
    def saving(self) -> float:
        """TP alone over the fullest rank."""
        return self.tp_alone / self.fullest


@dataclass(frozen=True, slots=True)
class Rounding:
    """Rows that the allocator hands out, over all ranks: whole virtual pages of page_size * dcp_size tokens."""

    virtual_page: int  # tokens
    taken: int  # tokens
    used: int  # tokens

    @property
    def share_lost(self) -> float:
        """Of what is taken."""
        return 1 - self.used / self.taken


@dataclass(frozen=True, slots=True)
class Sending:
    """All prompts of the mix, sent in one way."""

    name: str  # stable; a key of the JSON
    way: Way
    layout: DcpLayout
    segments: int  # of all layers and ranks
    num_bytes: int  # of all layers and ranks
    rank_seconds: float  # modelled, to rank 0, which gets the most; one prompt after the other
    longest_seconds: float  # the same for the longest prompt alone
    staged_bytes: int  # of num_bytes, those that are copied into a pack buffer first

    @property
    def block_size(self) -> int:
        """Tokens."""
        return self.layout.block_size


def balance(mix: Mix, layout: DcpLayout) -> Balance:
    """Rows of each rank.

    Law: they sum to the mix's tokens.
    """
    lengths = np.array([request.total_tokens for request in mix.requests])
    numbers = np.array([request.number for request in mix.requests])
    return Balance(tuple(int((layout.local_len(lengths, rank) * numbers).sum()) for rank in range(layout.dcp_size)))


def memory(inputs: Inputs, rows: Balance) -> Memory:
    """Bytes of KV on a GPU, beside the same GPU with tensor parallelism alone."""
    a_row = inputs.shape.num_layers * inputs.row_bytes
    alone = inputs.mix.total_tokens * inputs.shape.token_bytes(inputs.tp_size)
    return Memory(alone, sum(rows.rows) * a_row / len(rows.rows), max(rows.rows) * a_row)


def rounding(mix: Mix, page_size: int, dcp_size: int) -> Rounding:
    """What whole virtual pages cost. The same for every block size."""
    virtual_page = page_size * dcp_size
    pages = sum(request.number * -(-request.total_tokens // virtual_page) for request in mix.requests)
    return Rounding(virtual_page, pages * virtual_page, mix.total_tokens)


def sending(inputs: Inputs, name: str, way: Way, layout: DcpLayout, page_size: int) -> Sending:
    """All prompts of the mix in one way."""
    layers, a_row = inputs.shape.num_layers, inputs.row_bytes
    requests = inputs.mix.requests
    total = _count(
        inputs, way, layout, page_size, [one.prompt_tokens for one in requests], [one.number for one in requests]
    )
    longest = _count(inputs, way, layout, page_size, [inputs.mix.longest_prompt], [1])
    num_bytes = layers * sum(total.rows) * a_row
    return Sending(
        name,
        way,
        layout,
        layers * sum(total.segments),
        num_bytes,
        _seconds(inputs, way, total),
        _seconds(inputs, way, longest),
        num_bytes if way is Way.PACKED else 0,
    )


def sendings(inputs: Inputs, page_size: int, block_size: int) -> tuple[Sending, ...]:
    """Token round-robin and blocks in every way that they can go."""
    tokens, blocks = DcpLayout(inputs.dcp_size, 1), DcpLayout(inputs.dcp_size, block_size)
    found = [
        sending(inputs, "tokens", Way.DIRECT, tokens, page_size),
        sending(inputs, "tokens_packed", Way.PACKED, tokens, page_size),
    ]
    if block_size > 1:
        found += [
            sending(inputs, "blocks_packed", Way.PACKED, blocks, page_size),
            sending(inputs, "blocks", Way.DIRECT, blocks, page_size),
        ]
    if block_size == page_size > 1:
        found.append(sending(inputs, "blocks_grouped", Way.GROUPED, blocks, page_size))
    return (*found, sending(inputs, "one_segment", Way.ONE_SEGMENT, blocks, page_size))


def goes_direct(inputs: Inputs, block_size: int) -> bool:
    """Whether the prefill server sends these blocks as they lie, as it is shipped."""
    return block_size > 1 and prefers_direct(DcpLayout(inputs.dcp_size, block_size), inputs.row_bytes)


def break_even(inputs: Inputs, page_size: int) -> int | None:
    """The smallest block that the model sends as it lies no slower than packed: the longest prompt, divisors of the page."""
    return break_even_block(
        inputs.link,
        divisors(page_size),
        inputs.mix.longest_prompt,
        dcp_size=inputs.dcp_size,
        page_size=page_size,
        chunk_tokens=inputs.chunk_tokens,
        num_layers=inputs.shape.num_layers,
        row_bytes=inputs.row_bytes,
        scattered=inputs.scattered,
    )


def divisors(number: int) -> list[int]:
    """In order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [part for part in range(1, number + 1) if number % part == 0]


def _count(
    inputs: Inputs, way: Way, layout: DcpLayout, page_size: int, tokens: list[int], numbers: list[int]
) -> Counts:
    return count(
        way,
        tokens,
        numbers,
        layout=layout,
        page_size=page_size,
        chunk_tokens=inputs.chunk_tokens,
        scattered=inputs.scattered,
    )


def _seconds(inputs: Inputs, way: Way, got: Counts) -> float:
    layers = inputs.shape.num_layers
    packings = got.chunks[0] if way is Way.PACKED else 0
    return seconds(inputs.link, layers * got.segments[0], layers * got.rows[0] * inputs.row_bytes, packings)
