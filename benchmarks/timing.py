"""Ways of doing the same, timed in turns, so that whatever else the machine does falls on all of them alike."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from benchmarks.record import Spread

SELDOM = 3  # rounds between two of a slow way


def spread(samples: Sequence[float]) -> Spread:
    """The percentiles of some samples, between neighbours where they fall between.

    >>> spread([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    Spread(p20=2.0, p50=3.5, p80=5.0)
    """
    if not samples:
        raise ValueError("samples: expected one or more, got none")
    return Spread(*(float(value) for value in np.percentile(samples, (20, 50, 80))))


def in_turns(
    ways: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    around: Callable[[str, int], AbstractContextManager[object]] = lambda way, round_: nullcontext(),
    slow: Collection[str] = (),
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Way -> seconds of each round.

    Round 0 warms up and is not timed. Each round has an order of its own, the same in every run: what a way finds in the
    processor's caches depends on the one before it.

    Args:
        around: a context for each call, given (way, round), whose two ends are outside the timed part: it prepares, and
            checks what was done. What it raises ends the measurement.
        slow: ways that take part in every third round only, the first one included.
    """
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    rng = random.Random(0)
    for round_ in range(rounds + 1):
        for way in rng.sample(list(ways), len(ways)):
            if way in slow and round_ and round_ % SELDOM != 1:
                continue
            with around(way, round_):
                begin = clock()
                ways[way]()
                elapsed = clock() - begin
            if round_:
                seconds[way].append(elapsed)
    return seconds
