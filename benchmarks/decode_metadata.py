"""What a decode step plans before attention: this rank's rows of each request, by SGLang's functions and by the plugin's."""

from __future__ import annotations

from benchmarks import environment  # noqa: F401  # before what follows

import inspect  # isort: skip
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import sglang.srt.layers.dcp.layout as upstream_layout
import sglang.srt.layers.dcp.planner as upstream_planner
import sglang.srt.runtime_context as upstream_context
import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

from benchmarks.record import Check, Result, Row, Value
from benchmarks.timing import in_turns, spread
from counting import counted
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.patches import active, mla_decode, triton_gqa

P, RANK, BLOCK = 8, 1, 64
STOCK, OURS = "token round-robin", f"blocks of {BLOCK}"
GQA, MLA = "Triton: lengths and row indices", "FlashInfer MLA: lengths and index stream"
BATCHES = ((1, 100), (8, 1024), (8, 16384), (64, 1024))  # requests, tokens of each

READING = f"""
What one of {P} ranks computes once a decode step, before attention: how many tokens of each request are its own, and
in which rows they lie. SGLang's functions for token round-robin against the plugin's, which replace them. **CPU
only**: kernels of both sides run in Triton's interpreter, where a program costs about a millisecond whatever it does,
so times say little about GPUs. *launches* and *syncs* do: they are what a GPU would be asked to do, counted.
"""


def _gqa(block: int, requests: int, tokens: int) -> Callable[[], Any]:
    upstream_lens = inspect.unwrap(upstream_layout.get_dcp_lens)
    backend = SimpleNamespace(
        dcp_size=P, dcp_rank=RANK, device="cpu",
        req_to_token=torch.arange(requests * tokens, dtype=torch.int32).view(requests, tokens),
        _dcp_lens=lambda lens, start=None: upstream_lens(lens, P, RANK, start, block),
    )  # fmt: skip
    plan = triton_gqa.plan_kv_indices if block > 1 else inspect.unwrap(TritonAttnBackend._dcp_kv_indices)
    pool, lens = torch.arange(requests), torch.full((requests,), tokens)
    return lambda: plan(backend, pool, lens, torch.zeros(requests + 1, dtype=torch.int32), None)


def _mla(block: int, requests: int, tokens: int) -> Callable[[], Any]:
    plan = mla_decode.plan_decode if block > 1 else inspect.unwrap(upstream_planner.plan_dcp_decode_metadata)
    lens = torch.full((requests,), tokens, dtype=torch.int32)
    indptr = torch.arange(requests + 1, dtype=torch.int32) * tokens
    stream = torch.arange(requests * tokens, dtype=torch.int32)
    return lambda: plan(lens.clone(), indptr.clone(), stream.clone(), False, {}, requests)


@contextmanager
def _as_rank() -> Iterator[None]:
    """One rank's view of the group, for functions that look it up."""
    parallel = SimpleNamespace(dcp_enabled=True, dcp_size=P, dcp_rank=RANK)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(active, "_layout", DcpLayout(P, BLOCK)))
        for module in (upstream_layout, upstream_planner, upstream_context):
            stack.enter_context(mock.patch.object(module, "get_parallel", return_value=parallel))
        yield


def _rows(what: str, requests: int, tokens: int, ways: Mapping[str, Callable[[], Any]], rounds: int) -> Iterator[Row]:
    counts = {}
    for way, call in ways.items():
        with counted() as counts[way]:
            call()
    spreads = {way: spread(seconds) for way, seconds in in_turns(ways, rounds).items()}
    for way, times in spreads.items():
        case: dict[str, Value] = {"metadata": what, "requests": requests, "tokens": tokens}
        case |= {"launches": counts[way].total, "syncs": counts[way].syncs}
        yield Row(way, case, times, STOCK, spreads[STOCK].p50)


def measure(full: bool) -> Result:
    """Plan batches of all sizes."""
    rows: list[Row] = []
    with _as_rank():
        for requests, tokens in BATCHES:
            for what, make in ((GQA, _gqa), (MLA, _mla)):
                ways = {STOCK: make(1, requests, tokens), OURS: make(BLOCK, requests, tokens)}
                rows += _rows(what, requests, tokens, ways, 25 if full else 9)
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    checks = tuple(
        Check(f"{name} of blocks beyond token round-robin's, at most over all rows", float(worst), 0, at_most=True)
        for name in ("launches", "syncs")
        for worst in [max(int(ours.case[name]) - int(stock.case[name]) for stock, ours in pairs)]
    )
    return Result("decode_metadata", "Metadata of a decode step", "s", READING, rows, checks)
