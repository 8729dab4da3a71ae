"""All-gathering a sharded prefix back into position order.

MLA's extend needs the whole latent KV of a prefix on every rank.  Each rank sends its tokens of all requests, one after
another, padded to the largest share over ranks; the receiver picks them out in query order:

    rank 0 sends  [ req 0's blocks 0, 2, ..  | req 1's .. | pad ]        received, P = 2:
    rank 1 sends  [ req 0's blocks 1, 3, ..  | req 1's .. | pad ]   ->   [ rank 0's | rank 1's ]  --order-->  req 0, req 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang_dcp_block.dcp.layout import DcpLayout


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """How many tokens each rank sends, and where each token of the result comes from."""

    sent: tuple[int, ...]  # [dcp_size] tokens of each rank, before padding
    padded: int  # tokens that every rank sends: the largest of ``sent``
    order: torch.Tensor  # [num_tokens] int64: index into the received [dcp_size * padded] tokens


def plan_gather(
    lens: Sequence[int], starts: Sequence[int], layout: DcpLayout, device: torch.device | str = "cpu"
) -> GatherPlan:
    """Plan the all-gather of the parts [start, start + len) of several requests.

    Every rank computes the same plan from the same global numbers, so all ranks send equally much, also those that own
    nothing.

    Args:
        lens: [num_requests] tokens of each request's part; host ints.
        starts: [num_requests] first position of each part; any alignment.
        layout: the block layout.
        device: where ``order`` goes.
    Returns:
        The plan; ``order`` lists the requests in turn, each in position order.
    Law: picking ``order`` from the concatenated, padded shares of all ranks gives every token once, in order.
    Work grows with tokens on ``device`` and with requests x ranks on the host; no device data is read.

    >>> plan = plan_gather([6], [2], DcpLayout(dcp_size=2, block_size=4))
    >>> plan.sent, plan.order.tolist()
    ((2, 4), [0, 1, 4, 5, 6, 7])
    """
    shape, ranks = (layout.dcp_size, len(lens)), range(layout.dcp_size)
    parts = list(zip(lens, starts, strict=True))
    counts = np.array([[layout.local_len(n, rank, start) for n, start in parts] for rank in ranks], np.int64).reshape(
        shape
    )
    sent = counts.sum(axis=1)
    padded = int(sent.max())
    # Index in the receive buffer = shift[owner, request] + local_index(position).
    before = np.cumsum(counts, axis=1) - counts
    first = np.array([[layout.local_len(start, rank) for start in starts] for rank in ranks], np.int64).reshape(shape)
    shift = np.array(ranks, np.int64)[:, None] * padded + before - first

    num_tokens = int(sum(lens))
    offsets = np.cumsum([0, *lens])[:-1]
    table = np.concatenate([np.asarray(lens), np.asarray(starts) - offsets, shift.ravel()]).astype(np.int64)
    there = to_device(torch.from_numpy(table), device)  # one small copy
    lens_there, to_position = there[: len(lens)], there[len(lens) : 2 * len(lens)]
    shift_there = there[2 * len(lens) :]
    request = torch.repeat_interleave(torch.arange(len(lens), device=device), lens_there, output_size=num_tokens)
    position = torch.arange(num_tokens, device=device) + to_position[request]
    order = shift_there[layout.owner(position) * len(lens) + request] + layout.local_index(position)
    return GatherPlan(tuple(int(n) for n in sent), padded, order)


def to_device(numbers: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A host tensor on the device, without waiting for what runs there: torch waits to copy from pageable memory."""
    if torch.device(device).type == "cuda":
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)


def local_share(lens: Sequence[int], starts: Sequence[int], rank: int, layout: DcpLayout) -> torch.Tensor:
    """Indices of one rank's tokens in a stream of several requests' parts [start, start + len).

    Args:
        lens, starts: as of :func:`plan_gather`.
        rank: in [0, dcp_size).
    Returns:
        [num_owned] int64 on the host, increasing.
    Law: over ranks, a partition of ``range(sum(lens))``.

    >>> local_share([6, 3], [2, 0], 1, DcpLayout(dcp_size=2, block_size=4)).tolist()
    [2, 3, 4, 5]
    """
    parts, offset = [np.empty(0, np.int64)], 0
    for length, start in zip(lens, starts, strict=True):
        positions, _, run_lens = layout.runs(int(start), int(length), rank)
        within = np.arange(int(run_lens.sum())) - np.repeat(np.cumsum(run_lens) - run_lens, run_lens)
        parts.append(np.repeat(positions - start + offset, run_lens) + within)
        offset += int(length)
    return torch.from_numpy(np.concatenate(parts))
