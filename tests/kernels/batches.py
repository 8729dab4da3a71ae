"""Batches for kernel tests: tensors as the engine has them, and what the oracles of ``reference`` expect."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

import torch

import reference

SIZES = [(P, B) for P in (1, 2, 3, 4, 8) for B in (1, 2, 3, 8, 16, 64)]
TILE = 16  # small, so that short requests span several tiles
SENTINEL = -77  # no slot, row or padding: an entry that must stay
MAX_SLOT = 4096  # in oracle tests, so that the oracle's table stays short


def some_ranks(P: int) -> list[int]:
    """Few ranks where there are many: the first, the last, and two of the rest."""
    return sorted({0, P // 3, P // 2, P - 1})


@functools.cache
def dealt_slots(P: int, B: int) -> list[tuple[int, int]]:
    """(owner, row) of every slot below MAX_SLOT."""
    return reference.deal(MAX_SLOT, P, B)


@functools.cache
def positions(rank: int, start: int, end: int, P: int, B: int) -> list[int]:
    """The positions in [start, end) that ``rank`` holds."""
    return reference.tokens_of(rank, end - start, P, B, start)


def request_ranges(P: int, B: int, rng: random.Random) -> list[tuple[int, int]]:
    """[start, end) of some requests: empty, shorter than a block, around a cycle, of several tiles, cut anywhere."""
    cycle = P * B
    several_tiles = 3 * TILE * P + rng.randrange(cycle)
    ends = [0, 1, B, cycle + 1, several_tiles, rng.randrange(several_tiles)]
    ranges = [(rng.choice([0, 0, end, rng.randint(0, end)]), end) for end in ends]
    ranges += [(1, several_tiles), (cycle - 1, cycle)]
    rng.shuffle(ranges)
    return ranges


@dataclass
class Batch:
    """Requests [start, end) with slots of their own, laid out as the engine does."""

    P: int
    B: int
    ranges: list[tuple[int, int]]
    slots: list[list[int]]  # of each request, by position
    req_to_token: torch.Tensor  # [2 * num_requests, max_context] int32; unused entries SENTINEL
    pool_indices: list[int]

    @classmethod
    def make(cls, P: int, B: int, ranges: list[tuple[int, int]], rng: random.Random) -> Batch:
        """A batch at random rows of a ``req_to_token`` whose row stride is not its width."""
        slots = [[rng.randrange(MAX_SLOT) for _ in range(end)] for _, end in ranges]
        pool_indices = rng.sample(range(2 * len(ranges)), len(ranges))
        width = max((end for _, end in ranges), default=0) + rng.randrange(3)
        padded = torch.full((2 * len(ranges), width + 5), SENTINEL, dtype=torch.int32)
        for pool_index, request in zip(pool_indices, slots, strict=True):
            padded[pool_index, : len(request)] = torch.tensor(request, dtype=torch.int32)
        return cls(P, B, ranges, slots, padded[:, :width], pool_indices)

    def owned(self, rank: int) -> list[list[int]]:
        """The slots of each request in [start, end) that ``rank`` holds, in position order."""
        return [
            [request[t] for t in positions(rank, start, end, self.P, self.B)]
            for request, (start, end) in zip(self.slots, self.ranges, strict=True)
        ]


def spread(pieces: list[list[int]], rng: random.Random) -> tuple[list[int], list[int]]:
    """Lay pieces into one buffer with gaps of SENTINEL around them: (where each begins, the buffer)."""
    begins, buffer = [], [SENTINEL] * rng.randrange(4)
    for piece in pieces:
        begins.append(len(buffer))
        buffer += piece + [SENTINEL] * rng.randrange(4)
    return begins, buffer + [SENTINEL] * TILE
