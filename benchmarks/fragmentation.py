"""Segments of a transfer while pools fill, age and fragment: with and without ``--dcp-group-pages``.

Replays one seeded mix of requests (fragmentation.json) through SGLang's own allocator and radix tree, for each order of
pages, also those that were tried and left out, and each share of the pools in use.
"""

from __future__ import annotations

from benchmarks import environment  # noqa: F401  # before what follows

import json  # isort: skip
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.page_orders import LEFT_OUT, ORDERS, installed
from benchmarks.page_replay import Transfer, replay
from benchmarks.record import Result, Row, Value
from benchmarks.timing import spread

PARAMETERS = Path(__file__).with_suffix(".json")
LONG_PAGES = 128  # a transfer of half a chunk or more: those that matter
WINDOW = 40  # long transfers that a point of the plot is the mean of
SHORT_REQUESTS, SHORT_FILLS = 120, (0.8, 0.98)  # where not everything is asked for


@dataclass(frozen=True, slots=True)
class Replay:
    """One replay."""

    order: str
    fill: float
    transfers: list[Transfer]

    def long(self, later: bool = True) -> list[Transfer]:
        """Its long transfers, of the second half: pools have aged by then."""
        part = self.transfers[len(self.transfers) // 2 :] if later else self.transfers
        return [transfer for transfer in part if transfer.pages >= LONG_PAGES]

    def over_time(self, dcp_size: int) -> list[tuple[int, float]]:
        """(batch, segments a rank) of long transfers: means of :data:`WINDOW`."""
        long = self.long(later=False)
        parts = [long[i : i + WINDOW] for i in range(0, len(long) - WINDOW + 1, WINDOW // 4)]
        return [(part[-1].batch, statistics.mean(t.segments for t in part) / dcp_size) for part in parts]


def replays(parameters: dict[str, Any], full: bool) -> Iterator[Replay]:
    """Every order at every fill; in full, what was left out at the lowest but one and the highest."""
    fills = parameters["fills"]
    for fill in fills:
        for order in (*ORDERS, *(LEFT_OUT if full and fill in (fills[1], fills[-1]) else ())):
            with installed(order, parameters["replayed_page_tokens"], parameters["dcp_size"]):
                yield Replay(order.name, fill, replay(parameters, fill))


def rows(found: list[Replay], dcp_size: int) -> Iterator[Row]:
    """Segments a rank and layer of long transfers."""
    for one in found:
        long = one.long()
        stock = next(other for other in found if other.fill == one.fill and other.order == ORDERS[0].name).long()
        case: dict[str, Value] = {
            "fill": f"{one.fill:.0%}",
            "pages_a_rank": round(statistics.mean(t.pages for t in long) / dcp_size, 1),
            "mean": round(statistics.mean(t.segments for t in long) / dcp_size, 2),
            "mean_into_adjacent": round(statistics.mean(t.segments_into_adjacent_pages for t in long) / dcp_size, 2),
        }
        segments = spread([t.segments / dcp_size for t in long])
        yield Row(one.order, case, segments, ORDERS[0].name, spread([t.segments / dcp_size for t in stock]).p50)


def draw(found: list[Replay], dcp_size: int, figure: Any) -> None:
    """Segments a rank over time, a panel a fill, a line an order."""
    fills, shipped = sorted({one.fill for one in found}), [order.name for order in ORDERS]
    figure.set_size_inches(4 * len(fills), 3.6)
    panels = figure.subplots(1, len(fills), sharey=True, squeeze=False)[0]
    for panel, fill in zip(panels, fills, strict=True):
        for one in (one for one in found if one.fill == fill and one.order in shipped):
            batches, segments = zip(*one.over_time(dcp_size), strict=True)
            panel.plot(batches, segments, label=one.order)
        panel.set(title=f"pools {fill:.0%} full", xlabel="batches of the prefill server", yscale="log", ylim=(0.9, 40))
        panel.axhline(1, color="grey", linewidth=0.5)
        panel.set_yticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
        panel.minorticks_off()
    panels[0].set_ylabel(f"segments a rank and layer\n(mean of {WINDOW} long transfers)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)


def measure(full: bool) -> Result:
    """Replay the mix for each order of pages."""
    parameters = json.loads(PARAMETERS.read_text(encoding="utf-8"))
    if not full:
        parameters |= {"requests": SHORT_REQUESTS, "fills": list(SHORT_FILLS)}
    found, dcp_size = list(replays(parameters, full)), parameters["dcp_size"]
    reading = (
        f"Transfers of {LONG_PAGES} pages or more in the second half of a replay of {parameters['requests']} requests (seed "
        f"{parameters['seed']}, other parameters in benchmarks/fragmentation.json) through SGLang's own allocator and radix "
        f"tree of both servers, DCP {dcp_size}, blocks of a page of {parameters['page_tokens']} tokens. Percentiles and "
        "means are of segments a rank and layer; *mean_into_adjacent* is what they would be were the decode server's pages "
        "side by side. A segment more or less says nothing about seconds."
    )
    return Result(
        "fragmentation", "Segments of a transfer in pools that fragment", "segments", reading, list(rows(found, dcp_size)),
        draw=lambda figure: draw(found, dcp_size, figure),
    )  # fmt: skip
