"""What the prefill/decode demo runs: servers and prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sglang_dcp_block.demo.plan import Case, random_ids

PAGE_SIZE = 16  # tokens; 18,432 bytes of KV a layer, so blocks of a page are sent as they lie
CHUNK_TOKENS = 64  # of chunked prefill
NEW_TOKENS = 6
DCP_SIZES = (2, 4, 8)  # what divides the model's heads
DEFAULT_DCP_SIZE = 8
PREFILL_TP_SIZES = (1, 2)

MODEL = ("--attention-backend", "flashinfer", "--chunked-prefill-size", str(CHUNK_TOKENS), "--max-total-tokens", "2048")
OVER_MOONCAKE = ("--disaggregation-transfer-backend", "mooncake_tcp")
# An idle scheduler would take a core from the decode server that starts meanwhile.
PREFILL = ("--disaggregation-mode", "prefill", *OVER_MOONCAKE, "--enable-metrics", "--sleep-on-idle")
DECODE = ("--disaggregation-mode", "decode", *OVER_MOONCAKE)
BOOTSTRAP_PORT = "--disaggregation-bootstrap-port"


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt with a name for the table."""

    name: str
    ids: tuple[int, ...]
    shared_tokens: int = 0  # at its beginning, with a prompt of an earlier round

    @property
    def cached_tokens(self) -> int:
        """What a prefix cache of whole pages finds of it."""
        return self.shared_tokens // PAGE_SIZE * PAGE_SIZE


@dataclass(frozen=True, slots=True)
class Plan:
    """The reference server, then every prefill server with every decode server."""

    title: str
    model: Callable[[], Path]  # makes the checkpoint the first time; run in another process, so picklable
    num_layers: int
    row_bytes: int  # KV of one token in one layer
    reference: Case
    prefills: tuple[Case, ...]
    decodes: tuple[Case, ...]
    rounds: tuple[tuple[Question, ...], ...]  # one after the other; the prompts of a round at once
    warm_up: tuple[int, ...]  # a prompt with blocks for every rank: connections are made at the first transfer
    minutes: float  # on two cores with little else to do; an estimate

    @property
    def questions(self) -> tuple[Question, ...]:
        """All prompts, in the order in which they are sent."""
        return tuple(question for questions in self.rounds for question in questions)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts together: what a prefill server sends for one decode server."""
        return sum(len(question.ids) for question in self.questions)

    @property
    def num_bytes(self) -> int:
        """KV of all prompts: each row is sent once."""
        return self.prompt_tokens * self.num_layers * self.row_bytes

    def num_segments(self, block_size: int) -> int:
        """Contiguous pieces of all prompts, where no pack buffer gathers them: each block's part of each layer is one."""
        return self.num_layers * sum(-(-len(question.ids) // block_size) for question in self.questions)


def pd_plan(dcp_size: int = DEFAULT_DCP_SIZE) -> Plan:
    """Prefill on one and on two ranks, decode on ``dcp_size`` ranks, by tokens and in blocks of a page.

    Raises:
        ValueError: a size that the model's heads do not allow.
    """
    from sglang_dcp_block.cpu.checkpoints import CONFIGS, write_tiny
    from sglang_dcp_block.cpu.smollm2 import cache_root

    if dcp_size not in DCP_SIZES:
        raise ValueError(f"dcp_size: expected one of {', '.join(map(str, DCP_SIZES))}, got {dcp_size}")
    config = CONFIGS["mla"]

    def decode(block_size: int | None) -> Case:
        name = f"decode TP{dcp_size}+DCP{dcp_size} B={block_size or 1}"
        return Case(name, dcp_size, dcp_size, block_size, PAGE_SIZE, more=(*MODEL, *DECODE))

    return Plan(
        "tiny random MLA model (its logits depend on every KV row)",
        partial(write_tiny, "mla", cache_root() / "tiny-mla"),
        config["num_hidden_layers"],
        (config["kv_lora_rank"] + config["qk_rope_head_dim"]) * 4,  # float32
        Case("TP1", 1, 1, None, PAGE_SIZE, more=MODEL),
        tuple(Case(f"prefill TP{tp}", tp, 1, None, PAGE_SIZE, more=(*MODEL, *PREFILL)) for tp in PREFILL_TP_SIZES),
        (decode(None), decode(PAGE_SIZE)),
        questions(),
        random_ids(dcp_size * PAGE_SIZE + 1),
        minutes=8 if dcp_size == 8 else 5,
    )


def questions() -> tuple[tuple[Question, ...], ...]:
    """Prompts over several chunks and pages, of lengths that neither divides; one within a block; one that is cached."""
    long = random_ids(299)
    first = (Question("long", long), Question("middle", random_ids(149)), Question("short", random_ids(5)))
    shared = 283
    return first, (Question("cached", long[:shared] + random_ids(18), shared),)
