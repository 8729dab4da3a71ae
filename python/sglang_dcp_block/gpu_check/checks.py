"""What must hold.  Each check raises :class:`CheckFailed`, or returns a line on what it covered."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.gpu_check.simulation import Simulation, Sizes
from sglang_dcp_block.kernels.compact_indices import compact_kv_indices, compact_kv_indices_torch
from sglang_dcp_block.kernels.group_pages import group_pages, group_pages_torch
from sglang_dcp_block.kernels.kv_indices import build_kv_indices, build_kv_indices_torch
from sglang_dcp_block.kernels.long_runs import long_runs_first, long_runs_first_torch
from sglang_dcp_block.kernels.neutralise import neutralise_empty
from sglang_dcp_block.kernels.slot_maps import place_slots, slot_rows

TOLERANCE = 1e-5  # of attention outputs in float32, whose values are of order 1


class CheckFailed(AssertionError):
    """Something does not hold on this machine."""


class Skipped(Exception):
    """Cannot be checked on this machine."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes for a GPU, or for the interpreter."""

    device: torch.device
    num_slots: int
    context: int  # tokens of the longest request
    layouts: tuple[DcpLayout, ...]
    simulation: Sizes
    steps: int

    @classmethod
    def of(cls, device: torch.device) -> Scale:
        """The sizes for a device."""
        if device.type == "cuda":
            layouts = tuple(DcpLayout(p, b) for p, b in itertools.product((2, 8), (1, 4, 64)))
            return cls(device, 1 << 22, 20_000, layouts, Sizes(16, 4096, 8, 128, 64, 64), steps=12)
        layouts = tuple(DcpLayout(p, b) for p, b in ((2, 8), (4, 1), (4, 4)))
        return cls(device, 3000, 150, layouts, Sizes(4, 64, 2, 16, 8, 8), steps=3)


def require_equal(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    if not torch.equal(got, want):
        wrong = int((got != want).sum()) if got.shape == want.shape else -1
        raise CheckFailed(f"{what}: {wrong} of {want.numel()} values differ")


def slot_maps(scale: Scale) -> str:
    """Slots to placed slots and to rows, against ``dcp/layout.py``."""
    for layout, dtype in itertools.product(scale.layouts, (torch.int32, torch.int64)):
        slots = torch.arange(-1, scale.num_slots, dtype=dtype, device=scale.device)
        require_equal(f"placed slots, {layout}", place_slots(slots, layout), layout.slot_to_placed(slots))
        require_equal(f"rows, {layout}", slot_rows(slots, layout), layout.row(slots))
    return f"{len(scale.layouts)} layouts x {scale.num_slots} slots"


def rows_of_requests(scale: Scale) -> str:
    """Each rank's rows, read from ``req_to_token`` from any position on, against the torch twin."""
    rng = random.Random(1)
    lens = [scale.context, 1, 0, *(rng.randrange(scale.context) for _ in range(5))]
    slots = torch.randint(0, 1 << 30, (len(lens), scale.context), dtype=torch.int32, device=scale.device)
    requests = torch.randperm(len(lens), device=scale.device)
    for layout, with_starts in itertools.product(scale.layouts, (False, True)):
        starts = torch.tensor([rng.randint(0, n) * with_starts for n in lens], device=scale.device)
        for rank in {0, layout.dcp_size - 1}:
            local = layout.local_len(torch.tensor(lens, device=scale.device) - starts, rank, starts)
            indptr = torch.zeros(len(lens) + 1, dtype=torch.int32, device=scale.device)
            indptr[1:] = local.cumsum(0)
            args = slots, requests, local, indptr, layout, rank
            got, want = (torch.full((int(indptr[-1]) + 5,), -7, device=scale.device) for _ in range(2))
            build_kv_indices(*args, got, starts if with_starts else None)
            build_kv_indices_torch(*args, want, starts if with_starts else None)
            require_equal(f"rows of rank {rank}, {layout}", got, want)
    return f"{len(scale.layouts)} layouts, {len(lens)} requests of up to {scale.context} tokens"


def slots_of_stream(scale: Scale) -> str:
    """Each rank's slots of a stream of all slots, against the torch twin."""
    rng = random.Random(2)
    lens = torch.tensor([scale.context, 1, 0, *(rng.randrange(scale.context) for _ in range(5))], device=scale.device)
    indptr = torch.zeros(len(lens) + 1, dtype=torch.int32, device=scale.device)
    indptr[1:] = lens.cumsum(0)
    stream = torch.randint(0, 1 << 30, (int(indptr[-1]),), device=scale.device)
    for layout in scale.layouts:
        for rank in {0, layout.dcp_size - 1}:
            local = layout.local_len(lens, rank)
            local_indptr = torch.zeros_like(indptr)
            local_indptr[1:] = local.cumsum(0)
            args = stream, indptr, local, local_indptr, layout, rank
            got, want = (torch.full((int(local_indptr[-1]) + 5,), -7, device=scale.device) for _ in range(2))
            require_equal(
                f"slots of rank {rank}, {layout}", compact_kv_indices(*args, got), compact_kv_indices_torch(*args, want)
            )
    return f"{len(scale.layouts)} layouts, {len(lens)} requests of up to {scale.context} tokens"


def orders_of_pages(scale: Scale) -> str:
    """A prefill server's free pages, long runs first, then grouped by decode rank, against the torch twins."""
    rng, page = random.Random(5), 16
    for layout, fill in itertools.product(scale.layouts, (0.1, 0.5, 0.95)):
        free = sorted(rng.sample(range(scale.context), int(scale.context * (1 - fill))))
        pages = torch.tensor(free, device=scale.device)
        got = long_runs_first(pages)
        require_equal(f"long runs first, {fill:.0%} in use", got, long_runs_first_torch(pages))
        starts = [rng.randrange(9 * page) for _ in range(3)]
        ends = [start + rng.randrange(max(1, len(free) // 4 * page)) for start in starts]
        lens = torch.tensor(starts, device=scale.device), torch.tensor(ends, device=scale.device)
        own = (part.cpu() for part in (got, *lens))
        want = group_pages_torch(*own, page_size=page, dcp_size=layout.dcp_size).to(scale.device)
        grouped = group_pages(got, *lens, page_size=page, dcp_size=layout.dcp_size)
        require_equal(f"grouped pages, {layout}", grouped, want)
    return f"{len(scale.layouts)} layouts, pools of {scale.context} pages"


def neutral_element(scale: Scale) -> str:
    """Requests without rows get out = 0, LSE = -inf over NaN; the others keep every bit."""
    lens = torch.tensor([3, 0, 0, 1, 0, 7], device=scale.device)
    indptr = torch.zeros(len(lens) + 1, dtype=torch.int32, device=scale.device)
    indptr[1:] = lens.cumsum(0)
    for dtype in (torch.float32, torch.bfloat16):
        out, lse = (
            torch.randn(len(lens), 5, 640, device=scale.device).to(dtype),
            torch.randn(len(lens), 5, device=scale.device),
        )
        out[lens == 0], lse[lens == 0] = torch.nan, torch.nan
        want_out, want_lse = out.clone(), lse.clone()
        want_out[lens == 0], want_lse[lens == 0] = 0, -torch.inf
        neutralise_empty(out, lse, indptr)
        require_equal(f"outputs, {dtype}", out, want_out)
        require_equal(f"LSEs, {dtype}", lse, want_lse)
    return "float32 and bfloat16 outputs"


def lengths(simulation: Simulation, rng: random.Random) -> list[int]:
    """Lengths of a step: the longest, one token, one block or less, and anything."""
    most, block = simulation.sizes.max_context, simulation.layout.block_size
    rest = [rng.randint(1, most) for _ in range(simulation.sizes.num_requests - 3)]
    return [most, 1, min(block, most), *rest]


def require_dense(simulation: Simulation, when: str) -> float:
    got, want = simulation.merged, simulation.expected()
    error = float((got - want).abs().max())
    if not error <= TOLERANCE:  # NaN fails too
        raise CheckFailed(f"attention, {simulation.layout}, {when}: off by {error:.1e}, allowed {TOLERANCE:.0e}")
    return error


def attention_over_ranks(scale: Scale) -> str:
    """Write, read, attend on each rank and merge, against dense float32; ranks without KV had NaN in their output."""
    rng, worst = random.Random(3), 0.0
    for layout, from_stream in itertools.product(scale.layouts, (False, True)):
        simulation = Simulation(layout, scale.simulation, scale.device, from_stream=from_stream)
        for step in range(scale.steps):
            simulation.set_lens(lengths(simulation, rng))
            simulation.step()
            worst = max(worst, require_dense(simulation, f"step {step}"))
    return f"{len(scale.layouts)} layouts x {scale.steps} steps x 2 ways of planning; off by {worst:.0e} at most"


def cuda_graphs(scale: Scale) -> str:
    """A step captured once and replayed at changing lengths: one graph serves all of them, in the same memory."""
    if scale.device.type != "cuda":
        raise Skipped("CUDA graphs need a GPU")
    rng, worst = random.Random(4), 0.0
    for layout, from_stream in itertools.product(scale.layouts, (False, True)):
        simulation = Simulation(layout, scale.simulation, scale.device, from_stream=from_stream)
        simulation.set_lens([1] * scale.simulation.num_requests)  # what SGLang captures with
        graph = captured(simulation.step)
        for step in range(scale.steps):
            simulation.set_lens(lengths(simulation, rng))
            graph.replay()
            worst = max(worst, require_dense(simulation, f"replay {step}"))
    return f"{len(scale.layouts)} layouts x {scale.steps} replays x 2 ways of planning; off by {worst:.0e} at most"


def captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of ``work``, which has run before, so that its kernels are compiled."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


CHECKS: tuple[tuple[str, Callable[[Scale], str]], ...] = (
    ("slot maps", slot_maps),
    ("rows of requests", rows_of_requests),
    ("slots of a stream", slots_of_stream),
    ("orders of pages", orders_of_pages),
    ("neutral element", neutral_element),
    ("attention over ranks", attention_over_ranks),
    ("CUDA graph replay", cuda_graphs),
)
