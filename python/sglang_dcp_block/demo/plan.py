"""What the demo runs: models, configurations and prompts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.demo.client import Prompt

NEW_TOKENS = 8

TEXTS = (  # 5, 17 and 39 tokens: none a multiple of dcp_size
    "The capital of France is",
    "Water boils at a hundred degrees at sea level, but high up in the cold mountains",
    "Once upon a time there was an old fisherman who lived with his daughter in a small village by the sea. "
    "Every morning before the sun came up he rowed out, and one day his net",
)


@dataclass(frozen=True, slots=True)
class Case:
    """One way of serving a model."""

    name: str  # as the table shows it
    tp_size: int
    dcp_size: int
    block_size: int | None  # tokens; None: the flag is left out
    page_size: int  # tokens, per rank
    more: tuple[str, ...] = ()  # further flags, which the progress leaves out

    @property
    def layout(self) -> DcpLayout:
        """Which rank holds which position; without DCP each rank is alone in its group and holds everything."""
        return DcpLayout(self.dcp_size, self.block_size or 1)


@dataclass(frozen=True, slots=True)
class Part:
    """One model, served in several ways; the first is what the others must equal."""

    title: str  # of the table
    model: Callable[[], Path]  # makes the checkpoint the first time; run in another process, so picklable
    cases: tuple[Case, ...]
    prompts: Sequence[Prompt]
    minutes: float  # seen on two idle cores


def trained_part(also_eight_ranks: bool = False) -> Part:
    """SmolLM2-135M, whose text can be read."""
    from sglang_dcp_block.cpu import smollm2

    cases = [
        Case("TP1", tp_size=1, dcp_size=1, block_size=None, page_size=16),
        Case("TP2+DCP2 B=8", tp_size=2, dcp_size=2, block_size=8, page_size=16),
    ]
    if also_eight_ranks:
        cases.append(Case("TP8+DCP8 B=8", tp_size=8, dcp_size=8, block_size=8, page_size=16))
    return Part(
        "SmolLM2-135M-Instruct, rearranged to one KV head",
        smollm2.build,
        tuple(cases),
        TEXTS,
        minutes=12 if also_eight_ranks else 6,
    )


def tiny_part() -> Part:
    """A random checkpoint of two layers, small enough for eight ranks on a laptop."""
    from sglang_dcp_block.cpu.checkpoints import write_tiny
    from sglang_dcp_block.cpu.smollm2 import cache_root

    return Part(
        "tiny random GQA model (its logits depend on every KV row)",
        partial(write_tiny, "gqa", cache_root() / "tiny-gqa"),
        (
            Case("TP8", tp_size=8, dcp_size=1, block_size=None, page_size=8),
            Case("TP8+DCP8 B=1", tp_size=8, dcp_size=8, block_size=None, page_size=8),
            Case("TP8+DCP8 B=8", tp_size=8, dcp_size=8, block_size=8, page_size=8),
        ),
        tuple(random_ids(length) for length in (5, 21, 39)),
        minutes=5,
    )


def random_ids(length: int) -> tuple[int, ...]:
    """A prompt of ``length`` token ids of the tiny model; the same at every call."""
    draw = random.Random(length)
    return tuple(draw.randrange(2, 512) for _ in range(length))
