"""All ranks of a group in one process, one at a time: collectives join what the ranks brought.

Each rank runs in a thread of its own, but only the one that holds the baton moves; it hands the baton on where it waits for
the others in a collective. So nothing runs at the same time, and Triton's interpreter, which patches modules while it runs
a kernel, works as it does in a single thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

TIMEOUT = 60.0  # seconds a rank waits for the others: one of them left a collective out


class Meeting:
    """Where the ranks of a group meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.baton = threading.Condition()
        self.brought: list[Any] = [None] * size
        self.arrived = self.round = 0
        self.joined: list[Any] = []

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """What all ranks brought, in rank order; called with the baton held."""
        self.brought[rank] = value
        self.arrived += 1
        if self.arrived == self.size:
            self.joined, self.arrived = list(self.brought), 0
            self.round += 1
            self.baton.notify_all()
        else:
            this = self.round
            if not self.baton.wait_for(lambda: self.round != this, TIMEOUT):
                raise TimeoutError(f"rank {rank} waited alone in a collective")
        return self.joined


class Group:
    """One rank's end of a group: the collectives of SGLang's ``GroupCoordinator`` that DCP uses."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank_in_group, self.world_size = meeting, rank, meeting.size

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self._joined(tensor), dim)

    def all_gather_into_tensor(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        output.copy_(torch.cat(self._joined(tensor)))

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._joined(tensor)).sum(0)

    def reduce_scatter_along_dim(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.stack(self._joined(tensor)).sum(0).chunk(self.world_size, dim)[self.rank_in_group]

    def all_to_all_single(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        parts = [sent.chunk(self.world_size)[self.rank_in_group] for sent in self._joined(tensor)]
        output.copy_(torch.cat(parts))

    def _joined(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        joined: list[torch.Tensor] = self.meeting.exchange(self.rank_in_group, tensor.clone())
        return joined


def on_all_ranks(size: int, work: Callable[[Group], Any]) -> list[Any]:
    """work(group of rank r) for each rank; the results in rank order. The first error of any rank is raised."""
    meeting = Meeting(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        with meeting.baton:
            try:
                results[rank] = work(Group(meeting, rank))
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
