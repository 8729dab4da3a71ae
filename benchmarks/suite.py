"""Which benchmarks there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module

from benchmarks.record import Result


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A module of this package with a function ``measure(full: bool) -> Result``."""

    name: str  # of the module
    about: str
    quick: bool = True  # whether it runs where not everything is asked for

    def measure(self, full: bool) -> Result:
        """Import it, and run it."""
        run: Callable[[bool], Result] = import_module(f"benchmarks.{self.name}").measure
        return run(full)


_ALL = (
    Benchmark("transfer", "a chunk to a decode rank over Mooncake TCP: token round-robin, packed, blocks, grouped"),
    Benchmark("direct_or_packed", "the same by the bytes of a block: as it lies, or packed by SGLang's code"),
    Benchmark("segment_sizes", "the same bytes over Mooncake TCP, by the size of a segment", quick=False),
    Benchmark("planning", "which rows go where: SGLang's plan by tokens, and runs"),
    Benchmark("decode_metadata", "this rank's lengths and rows, once a decode step (CPU)"),
    Benchmark("imbalance", "rows of the fullest rank over the mean, for mixes of request lengths"),
    Benchmark("memory", "pack buffers, and rows that no token fills"),
    Benchmark("grouping", "what --dcp-group-pages adds to scheduling a chunk, in SGLang's own prefill scheduler"),
    Benchmark("end_to_end", "real prefill and decode servers on the CPU"),
    Benchmark("fragmentation", "segments while pools fill and age, for orders of pages", quick=False),
)

BENCHMARKS: Mapping[str, Benchmark] = {benchmark.name: benchmark for benchmark in _ALL}
