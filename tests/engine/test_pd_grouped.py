"""``--dcp-group-pages`` with real servers over real Mooncake: one segment a rank and layer, and the same answers."""

from __future__ import annotations

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from cases import BASE, BATCHES, LONG, PROMPTS, assert_same
from pd import HOST, role
from served import Served
from session import Completion
from sglang_dcp_block.cpu.checkpoints import tiny_config

pytestmark = pytest.mark.slow

PAGE, CHUNK, RANKS = BASE["page_size"], BASE["chunked_prefill_size"], 2


@pytest.fixture(scope="module")
def want(expected):
    return expected("mla")


@pytest.fixture(scope="module")
def servers(want, checkpoints, tmp_path_factory):
    """(prefill, decode), started together."""
    folder, model = tmp_path_factory.mktemp("served"), str(checkpoints("mla"))
    common = {**BASE, "model_path": model, "enable_metrics": True, "skip_server_warmup": True, "dcp_group_pages": RANKS}

    def arguments(mode, **more):
        return {key: value for key, value in {**common, **role(mode), **more}.items() if key != "model"}

    prefill = Served(arguments("prefill"), folder / "prefill.log", 1)
    decode = Served(
        arguments("decode", tp_size=RANKS, dcp_size=RANKS, dcp_block_size=PAGE), folder / "decode.log", RANKS
    )
    with contextlib.closing(prefill), contextlib.closing(decode):
        prefill.wait()
        decode.wait()
        yield prefill, decode


def ask(servers, room: int, prompts: list[list[int]]) -> list[Completion]:
    """Greedy completions of a batch, prefilled on one server and decoded on the other."""
    prefill, _ = servers
    body = {
        "input_ids": prompts,
        "sampling_params": {"temperature": 0, "max_new_tokens": 7, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": -1,
        "bootstrap_host": [HOST] * len(prompts),
        "bootstrap_port": [prefill.arguments["disaggregation_bootstrap_port"]] * len(prompts),
        "bootstrap_room": list(range(room, room + len(prompts))),
    }
    with ThreadPoolExecutor(2) as threads:
        *_, answer = threads.map(lambda server: server.ask("/generate", body), servers)
    metas = [(output["output_ids"], output["meta_info"]) for output in json.loads(answer)]
    return [
        Completion(ids, [entry[0] for entry in meta["output_token_logprobs"]], meta["cached_tokens"])
        for ids, meta in metas
    ]


def test_a_chunk_is_one_segment_a_rank_and_layer(servers):
    """Counted where segments are handed to Mooncake, in pools that were never used."""
    prefill, _ = servers
    ask(servers, 1, [LONG])
    got, transfers = prefill.metrics(), -(-len(LONG) // CHUNK) * RANKS
    assert got["sglang:dcp_block_transfers_total", ("direct",)] == transfers
    assert got["sglang:dcp_block_segments_total", ("direct",)] == transfers * tiny_config("mla")["num_hidden_layers"]


def test_answers_are_those_without_dcp(servers, want):
    """In fresh pages and behind a cached prefix; several requests share a batch."""
    answers = {}
    for room, names in enumerate(BATCHES, start=2):
        answers.update(zip(names, ask(servers, 10 * room, [PROMPTS[name] for name in names]), strict=True))
    assert_same(answers, want.answers)


def test_it_is_said(servers):
    prefill, decode = servers
    assert [json.loads(server.ask("/server_info"))["dcp_group_pages"] for server in servers] == [RANKS, RANKS]
    assert "Pages of a chunk lie together by rank, for 2 decode ranks." in prefill.said()
    assert decode.said().count("A request takes pages with few gaps, for 2 decode ranks.") == RANKS
