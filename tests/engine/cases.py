"""Prompts, engine arguments and comparisons that the engine suites share."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

import reference
from session import Completion, EngineSession

TOLERANCE = 1e-4  # log-probabilities, fp32

BASE: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "triton",
    "triton_attention_num_kv_splits": 2,
    "page_size": 8,
    "chunked_prefill_size": 64,
    "max_total_tokens": 512,
    "max_running_requests": 8,
    "context_length": 256,
    "mem_fraction_static": 0.3,
    "skip_tokenizer_init": True,
    "disable_cuda_graph": True,
    "disable_custom_all_reduce": True,
    "grammar_backend": "none",
    "sampling_backend": "pytorch",
    "sleep_on_idle": True,  # idle engines would take the time of those that start
    "random_seed": 1,
    "log_level": "info",
}

# Kinds of attention with DCP.
FAMILIES = {
    "gqa": {"model": "gqa", "attention_backend": "triton"},
    "mla-flashinfer": {"model": "mla", "attention_backend": "flashinfer"},
    "mla-triton": {"model": "mla", "attention_backend": "triton"},
}
WITHOUT_STOCK = ("mla-triton",)  # SGLang as released has no such path

Answers = dict[str, Completion]


@dataclass(frozen=True)
class Expected:
    """What an engine without DCP answers, and the keys it stored."""

    answers: Answers
    keys: dict[tuple[int, ...], list[torch.Tensor]]  # tokens of a request -> K by layer: [position, ...]


def token_list(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 512) for _ in range(length)]


LONG = token_list(1, 99)  # spans chunks of 64; 99 is odd
MIDDLE = token_list(2, 53)
SHORT = token_list(3, 5)  # leaves ranks without KV
CACHED = [*LONG[:90], 7, 6, 5]  # a radix hit, then a tail

# Sent in this order, each list as one batch.
BATCHES = (("long", "middle"), ("cached", "short"))
PROMPTS = {"long": LONG, "middle": MIDDLE, "short": SHORT, "cached": CACHED}


def answers_of(engine: EngineSession, batches=BATCHES, max_new_tokens: int = 7) -> Answers:
    """Completions of the shared prompts, by name."""
    answers: Answers = {}
    for names in batches:
        completions = engine.generate([PROMPTS[name] for name in names], max_new_tokens)
        answers.update(zip(names, completions, strict=True))
    return answers


def differences(got: Answers, want: Answers) -> dict[str, float]:
    """Largest difference in log-probability by prompt; infinite where a token differs."""
    result = {}
    for name, expected in want.items():
        pairs = zip(got[name].logprobs, expected.logprobs, strict=True)
        same = got[name].ids == expected.ids
        result[name] = max(abs(a - b) for a, b in pairs) if same else float("inf")
    return result


def assert_same(got: Answers, want: Answers, tolerance: float = TOLERANCE) -> None:
    """Equal tokens, and log-probabilities within ``tolerance``."""
    worst = differences(got, want)
    assert max(worst.values()) <= tolerance, worst


def assert_nothing_lost(states: list[dict[str, Any]]) -> None:
    """With no request left and the prefix cache evicted, each rank's allocator holds every page, each once.

    So does the pool of host memory, where there is one.
    """
    assert states
    for state in states:
        everything = list(range(1, state["num_pages"] + 1))
        assert state["free_pages"] == everything, state["dcp_rank"]
        assert state.get("free_host_slots", []) == list(range(state.get("num_host_slots", 0))), state["dcp_rank"]


def keys_by_position(state: dict[str, Any]) -> dict[tuple[int, ...], list[torch.Tensor]]:
    """From an engine without DCP: tokens of each released request -> K of each layer in position order.

    The last token's forward may still run while a request is released, so it is left out.
    """
    return {
        tuple(request["tokens"]): [rows[torch.tensor(request["slots"][:-1])] for rows in request["k"]]
        for request in state["released"]
    }


def keys_for(tokens: list[int], keys_of: dict[tuple[int, ...], list[torch.Tensor]]) -> list[torch.Tensor]:
    """The keys of the request that begins with ``tokens``, or that they begin with: servers release at other lengths."""
    for known, keys in keys_of.items():
        both = min(len(known), len(tokens))
        if list(known[:both]) == tokens[:both]:
            return keys
    raise AssertionError(f"no request without DCP had these {len(tokens)} tokens")


def assert_placed(states: list[dict[str, Any]], keys_of: dict[tuple[int, ...], list[torch.Tensor]], block: int) -> None:
    """Each token's key lies on its owner, in the row that dealing one by one gives; every token is looked at once a group.

    Args:
        states: of all ranks, in rank order; DCP groups are runs of neighbouring ranks.
        keys_of: as of :func:`keys_by_position`, of all KV heads.
    """
    compared = held = 0
    for index, state in enumerate(states):
        rank, size, virtual_page = state["dcp_rank"], state["dcp_size"], state["virtual_page"]
        for request in state["released"]:
            keys = keys_for(request["tokens"], keys_of)
            positions = min(len(request["slots"]) - 1, len(keys[0]))  # the last one may still be written
            held += positions
            for position, slot in enumerate(request["slots"][:positions]):
                if reference.owner(position, size, block) != rank:
                    continue
                page, offset = divmod(slot, virtual_page)
                row = page * (virtual_page // size) + reference.local_index(offset, size, block)
                for rows, key in zip(request["k"], keys, strict=True):
                    heads = rows.shape[1]
                    first = index // size * heads % key.shape[1]  # KV heads are dealt over groups
                    want = key[position, first : first + heads]
                    torch.testing.assert_close(rows[row], want, atol=2e-5, rtol=0)
                compared += 1
    assert held > 0, "no request was recorded"
    assert compared * states[0]["dcp_size"] == held, "a token was looked at by no rank, or by two"


def serves_in_blocks(engine: EngineSession, want: Expected, blocks: Iterable[int]) -> None:
    """At each block size: log-probabilities equal DCP1's, every row lies where dealing puts it, and no page is lost."""
    for block in blocks:
        engine.flush(block_size=block, record=True)
        got = answers_of(engine)
        states = engine.flush()
        assert_same(got, want.answers)
        assert_placed(states, want.keys, block)
        assert_nothing_lost(states)


def serves_on_eight_ranks(engine: EngineSession, want: Expected, block: int) -> None:
    """A prompt of some blocks and one of five tokens together: up to seven ranks hold nothing of the short one."""
    engine.flush(record=True)
    got = answers_of(engine, (("middle", "short"),))
    states = engine.flush()
    assert_same(got, {name: want.answers[name] for name in got})
    assert_placed(states, want.keys, block)
    assert_nothing_lost(states)


def retraction_and_readmission(start: Any, **family: Any) -> None:
    """Four requests that outgrow the pool together: some are retracted, computed again, and answer the same.

    A pool of 128 tokens holds each of them alone (9 to 12 tokens, then 64 more), and no two. Requests that ignore
    the end of text would be admitted one by one: SGLang knows how long they get.
    """
    prompts = [token_list(100 + i, 9 + i) for i in range(4)]
    kwargs = {"schedule_conservativeness": 0.1, "context_length": 128, **family}
    with start(tp=1, **kwargs) as engine:
        want = {str(i): c for i, c in enumerate(engine.generate(prompts, 64, ignore_eos=False))}
    with start(tp=2, dcp=2, block=4, max_total_tokens=64, **kwargs) as engine:
        got = {str(i): c for i, c in enumerate(engine.generate(prompts, 64, ignore_eos=False))}
        assert any(c.retracted for c in got.values()), "no request was retracted: the case tests nothing"
        assert_same(got, want)
        assert_nothing_lost(engine.flush())
