"""Times of the metadata of a decode step, with blocks of one token and of 64, measured side by side on a GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.gpu_check.checks import captured
from sglang_dcp_block.kernels.compact_indices import compact_kv_indices
from sglang_dcp_block.kernels.kv_indices import build_kv_indices
from sglang_dcp_block.kernels.neutralise import neutralise_empty
from sglang_dcp_block.kernels.slot_maps import place_slots, slot_rows

NUM_REQUESTS, CONTEXT, DCP_SIZE = 64, 131_072, 8
BLOCKS = (1, 64)
MOST = 1.05  # time with blocks of 64 over time with blocks of 1, summed
LAUNCHES, SAMPLES = 20, 31  # launches in a graph; replays of it


@dataclass(frozen=True, slots=True)
class Time:
    """One kernel's time a launch, in microseconds, by block size."""

    name: str
    microseconds: dict[int, float]

    @property
    def ratio(self) -> float:
        """Of the larger block to the smaller."""
        return self.microseconds[BLOCKS[1]] / self.microseconds[BLOCKS[0]]


def measure(device: torch.device) -> list[Time]:
    """Times of each kernel for 64 requests of 128k tokens, last rank of eight; medians, block sizes taking turns."""
    virtual = DCP_SIZE * 64
    t = torch.arange(CONTEXT, device=device)
    pages = torch.randperm(NUM_REQUESTS * CONTEXT // virtual, device=device).view(NUM_REQUESTS, -1) + 1
    req_to_token = (pages[:, t // virtual] * virtual + t % virtual).int()
    requests = torch.randperm(NUM_REQUESTS, device=device)
    lens = torch.full((NUM_REQUESTS,), CONTEXT, device=device)
    indptr = torch.arange(NUM_REQUESTS + 1, dtype=torch.int32, device=device) * CONTEXT
    stream = req_to_token.flatten()
    rank = DCP_SIZE - 1
    share = CONTEXT // DCP_SIZE
    local, local_indptr = torch.full_like(lens, share), indptr // DCP_SIZE
    rows = torch.empty(NUM_REQUESTS * share, dtype=torch.int64, device=device)
    slots, own_rows = torch.empty_like(rows, dtype=torch.int32), torch.empty_like(rows, dtype=torch.int32)
    new, prefill = stream[:NUM_REQUESTS].long(), stream[:8192].long()
    placed_new, placed_prefill = torch.empty_like(new), torch.empty_like(prefill)
    out, lse = (
        torch.zeros(NUM_REQUESTS, 128, 512, dtype=torch.bfloat16, device=device),
        torch.zeros(NUM_REQUESTS, 128, device=device),
    )

    def work(layout: DcpLayout) -> dict[str, Callable[[], object]]:
        return {
            "write door, 64 slots": lambda: place_slots(new, layout, placed_new),
            "write door, 8192 slots": lambda: place_slots(prefill, layout, placed_prefill),
            "rows of requests": lambda: build_kv_indices(
                req_to_token, requests, local, local_indptr, layout, rank, rows
            ),
            "slots of a stream": lambda: compact_kv_indices(stream, indptr, local, local_indptr, layout, rank, slots),
            "rows of slots": lambda: slot_rows(slots, layout, own_rows),
            "neutral element": lambda: neutralise_empty(out, lse, local_indptr),
        }

    works = {block: work(DcpLayout(DCP_SIZE, block)) for block in BLOCKS}
    return [side_by_side(name, {block: works[block][name] for block in BLOCKS}) for name in works[BLOCKS[0]]]


def side_by_side(name: str, works: dict[int, Callable[[], object]]) -> Time:
    """Median time a launch of each; launches are in CUDA graphs, so that the host's part does not count."""

    def repeated(work: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(LAUNCHES):
                work()

        return run

    graphs = {block: captured(repeated(work)) for block, work in works.items()}
    samples: dict[int, list[float]] = {block: [] for block in works}
    for _ in range(SAMPLES):
        for block, graph in graphs.items():
            begin, end = _event(), _event()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples[block].append(begin.elapsed_time(end) * 1000 / LAUNCHES)
    return Time(name, {block: statistics.median(times) for block, times in samples.items()})


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def total(times: list[Time]) -> Time:
    """The sum over kernels."""
    return Time("all", {block: sum(time.microseconds[block] for time in times) for block in BLOCKS})
