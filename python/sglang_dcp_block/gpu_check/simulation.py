"""Requests of random lengths, the KV pools of all ranks on one device, and a decode step over all of them.

req_to_token  --build_kv_indices-->                          rows of rank r  --decode-->  out, LSE  --neutralise-->
or: stream of all slots  --compact_kv_indices, slot_rows-->  rows of rank r                          ranks  --merge-->
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.gpu_check import attention
from sglang_dcp_block.kernels.compact_indices import compact_kv_indices
from sglang_dcp_block.kernels.kv_indices import build_kv_indices
from sglang_dcp_block.kernels.neutralise import neutralise_empty
from sglang_dcp_block.kernels.slot_maps import place_slots, slot_rows

EVERYTHING = DcpLayout(1, 1)  # one rank that owns all: the rows that it builds are the slots themselves


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large a simulation is."""

    num_requests: int
    max_context: int  # tokens
    heads: int
    width: int  # of a KV row; a power of 2
    value_width: int  # the first part of a row; a power of 2
    page_size: int  # tokens, per rank


class Simulation:
    """All ranks of one layout.  Buffers keep their addresses; a step reads lengths, slots and queries from them.

    Args:
        layout: ``dcp_size`` a power of 2; its block divides ``sizes.page_size``.
        from_stream: build each rank's rows from the stream of all slots, as for MLA on FlashInfer, not from req_to_token.
    """

    def __init__(
        self, layout: DcpLayout, sizes: Sizes, device: torch.device, *, from_stream: bool = False, seed: int = 0
    ) -> None:
        self.layout, self.sizes, self.from_stream = layout, sizes, from_stream
        ranks, n = layout.dcp_size, sizes.num_requests
        self.generator = torch.Generator(device).manual_seed(seed)
        self.device = device
        virtual_page = ranks * sizes.page_size
        pages_each = -(-sizes.max_context // virtual_page)
        pages = torch.randperm(n * pages_each, generator=self.generator, device=device) + 1  # page 0 is the sink
        positions = torch.arange(sizes.max_context, device=device)
        own = pages.view(n, pages_each)[:, positions // virtual_page]
        self.req_to_token = (own * virtual_page + positions % virtual_page).int()
        self.requests = torch.arange(n, device=device)
        self.num_rows = (n * pages_each + 1) * sizes.page_size

        self.kv = self._random(n, sizes.max_context, sizes.width)
        self.pools = torch.full((ranks * self.num_rows, sizes.width), torch.nan, device=device)
        self._write(self.req_to_token.flatten().long(), self.kv.flatten(0, 1))

        most = n * layout.max_local_len(sizes.max_context)
        self.lens = torch.zeros(n, dtype=torch.int64, device=device)
        self.new_slots = torch.zeros(n, dtype=torch.int64, device=device)
        self.new_kv = self._random(n, sizes.width)
        self.queries = self._random(n, sizes.heads, sizes.width)
        self.stream = torch.zeros(n * sizes.max_context, dtype=torch.int64, device=device)
        self.stream_indptr = torch.zeros(n + 1, dtype=torch.int32, device=device)
        self.indptr = torch.zeros(ranks, n + 1, dtype=torch.int32, device=device)
        self.slots = torch.zeros(ranks, most, dtype=torch.int64, device=device)
        self.rows = torch.zeros(ranks, most, dtype=torch.int64, device=device)
        self.outs = torch.empty(ranks, n, sizes.heads, sizes.value_width, device=device)
        self.lses = torch.empty(ranks, n, sizes.heads, device=device)
        self.merged = torch.empty(n, sizes.heads, sizes.value_width, device=device)
        self.scale = sizes.width**-0.5

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def _write(self, slots: torch.Tensor, kv: torch.Tensor) -> None:
        """What upstream's write kernels do with placed ids: rank id % P, row id // P."""
        placed = place_slots(slots, self.layout)
        self.pools.index_copy_(0, placed % self.layout.dcp_size * self.num_rows + placed // self.layout.dcp_size, kv)

    def set_lens(self, lens: list[int]) -> None:
        """The next step's lengths, with a new last token and new queries; the host's part of a step."""
        last = torch.tensor(lens, device=self.device) - 1
        self.lens.copy_(last + 1)
        self.new_slots.copy_(self.req_to_token[self.requests, last])
        self.new_kv.copy_(self._random(*self.new_kv.shape))
        self.queries.copy_(self._random(*self.queries.shape))
        self.kv[self.requests, last] = self.new_kv

    def step(self) -> None:
        """Write the new tokens, attend on every rank, merge: what a CUDA graph of a decode step holds."""
        self.outs.fill_(torch.nan)  # what uninitialised memory may hold
        self.lses.fill_(torch.nan)
        self._write(self.new_slots, self.new_kv)
        if self.from_stream:
            torch.cumsum(self.lens, 0, out=self.stream_indptr[1:])
            build_kv_indices(
                self.req_to_token, self.requests, self.lens, self.stream_indptr, EVERYTHING, 0, self.stream
            )  # fmt: skip
        for rank in range(self.layout.dcp_size):
            self.plan(rank)
            pool = self.pools[rank * self.num_rows : (rank + 1) * self.num_rows]
            out, lse, indptr = self.outs[rank], self.lses[rank], self.indptr[rank]
            attention.decode(self.queries, pool, self.rows[rank], indptr, self.scale, out, lse)
            neutralise_empty(out, lse, indptr)
        attention.merge(self.outs, self.lses, self.merged)

    def plan(self, rank: int) -> None:
        """This rank's lengths and rows."""
        indptr, rows = self.indptr[rank], self.rows[rank]
        local_lens = self.layout.local_len(self.lens, rank)
        torch.cumsum(local_lens, 0, out=indptr[1:])
        if self.from_stream:
            slots = self.slots[rank]
            compact_kv_indices(self.stream, self.stream_indptr, local_lens, indptr, self.layout, rank, slots)
            slot_rows(slots, self.layout, rows)
        else:
            build_kv_indices(self.req_to_token, self.requests, local_lens, indptr, self.layout, rank, rows)

    def expected(self) -> torch.Tensor:
        """[num_requests, heads, value_width]: dense attention over each request's tokens."""
        return torch.stack(
            [
                attention.dense(q, kv[:length], self.sizes.value_width, self.scale)
                for q, kv, length in zip(self.queries, self.kv, self.lens.tolist(), strict=True)
            ]
        )
