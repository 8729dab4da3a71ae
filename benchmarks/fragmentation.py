"""Segments of a transfer while pools fill, age and fragment: with and without ``--dcp-group-pages``.

Replays one seeded mix of requests (fragmentation.json) through SGLang's own allocator and radix tree, for each order of
pages, also those that were tried and left out, and each share of the pools in use. Writes fragmentation.csv,
fragmentation.md and, with matplotlib (requirements/benchmarks.txt), fragmentation.png into benchmarks/results/.

    python benchmarks/fragmentation.py [--requests N]
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from page_replay import Transfer

HERE = Path(__file__).parent
RESULTS = HERE / "results"
LONG_PAGES = 128  # a transfer of half a chunk or more: those that matter
WINDOW = 40  # long transfers that a point of the plot is the mean of


@dataclass(frozen=True, slots=True)
class Row:
    """One replay."""

    order: str
    fill: float
    transfers: list[Transfer]

    def long(self, later: bool = True) -> list[Transfer]:
        """Its long transfers, of the second half: pools have aged by then."""
        part = self.transfers[len(self.transfers) // 2 :] if later else self.transfers
        return [transfer for transfer in part if transfer.pages >= LONG_PAGES]

    def over_time(self, dcp_size: int) -> list[tuple[int, float, float, float]]:
        """(batch, pages a rank, segments a rank, into adjacent pages) of long transfers: means of :data:`WINDOW`."""
        long = self.long(later=False)
        parts = [long[i : i + WINDOW] for i in range(0, len(long) - WINDOW + 1, WINDOW // 4)]
        return [
            (
                part[-1].batch,
                statistics.mean(t.pages for t in part) / dcp_size,
                statistics.mean(t.segments for t in part) / dcp_size,
                statistics.mean(t.segments_into_adjacent_pages for t in part) / dcp_size,
            )
            for part in parts
        ]


def measure(parameters: dict[str, Any]) -> list[Row]:
    """Every order at every fill; what was left out at the lowest but one and the highest."""
    from page_orders import LEFT_OUT, ORDERS, installed
    from page_replay import replay

    rows = []
    fills = parameters["fills"]
    for fill in fills:
        for order in (*ORDERS, *(LEFT_OUT if fill in (fills[1], fills[-1]) else ())):
            begin = time.perf_counter()
            with installed(order, parameters["replayed_page_tokens"], parameters["dcp_size"]):
                rows.append(Row(order.name, fill, replay(parameters, fill)))
            print(f"{order.name}, {fill:.0%} full: {time.perf_counter() - begin:.0f} s", flush=True)
    return rows


def table(rows: list[Row], dcp_size: int) -> str:
    """Segments a rank and layer of long transfers, as Markdown."""
    lines = [
        "| pools in use | order of pages | pages a rank | segments a rank: mean | p50 | p90 | into adjacent pages, mean |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        long = row.long()
        segments = sorted(transfer.segments / dcp_size for transfer in long)
        lines.append(
            f"| {row.fill:.0%} | {row.order} | {statistics.mean(t.pages for t in long) / dcp_size:.1f} "
            f"| {statistics.mean(segments):.2f} | {segments[len(segments) // 2]:.2f} "
            f"| {segments[len(segments) * 9 // 10]:.2f} "
            f"| {statistics.mean(t.segments_into_adjacent_pages for t in long) / dcp_size:.2f} |"
        )
    return "\n".join(lines) + "\n"


def plot(rows: list[Row], shipped: list[str], dcp_size: int) -> None:
    """Segments a rank over time, a panel a fill, a line an order."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    fills = sorted({row.fill for row in rows})
    figure, panels = pyplot.subplots(1, len(fills), figsize=(4 * len(fills), 3.6), sharey=True, layout="constrained")
    for panel, fill in zip(panels, fills, strict=True):
        for row in (row for row in rows if row.fill == fill and row.order in shipped):
            batches, _, segments, _ = zip(*row.over_time(dcp_size), strict=True)
            panel.plot(batches, segments, label=row.order)
        panel.set(title=f"pools {fill:.0%} full", xlabel="batches of the prefill server", yscale="log", ylim=(0.9, 40))
        panel.axhline(1, color="grey", linewidth=0.5)
        panel.set_yticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
        panel.minorticks_off()
    panels[0].set_ylabel(f"segments a rank and layer\n(mean of {WINDOW} long transfers)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(RESULTS / "fragmentation.png", dpi=110)


def main() -> None:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, help="fewer or more than in fragmentation.json")
    args = parser.parse_args()
    parameters = json.loads((HERE / "fragmentation.json").read_text())
    parameters["requests"] = args.requests or parameters["requests"]
    import environment  # noqa: F401
    import sglang
    import torch
    from page_orders import ORDERS

    rows, dcp_size = measure(parameters), parameters["dcp_size"]
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / "fragmentation.csv").open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(
            ["order", "fill", "batch", "pages_a_rank", "segments_a_rank", "segments_a_rank_into_adjacent_pages"]
        )
        for row in rows:
            for batch, *means in row.over_time(dcp_size):
                out.writerow([row.order, row.fill, batch, *(f"{mean:.3f}" for mean in means)])
    (RESULTS / "fragmentation.md").write_text(
        "# Segments of a transfer in pools that fragment\n\n"
        "Made by `python benchmarks/fragmentation.py`; parameters in `benchmarks/fragmentation.json`, "
        f"{parameters['requests']} requests, seed {parameters['seed']}. "
        f"SGLang {sglang.__version__}, torch {torch.__version__}, Python {platform.python_version()}.\n\n"
        f"Transfers of {LONG_PAGES} pages or more in the second half of the replay, DCP {dcp_size}, blocks of a page of "
        f"{parameters['page_tokens']} tokens. A segment more or less says nothing about seconds.\n\n"
        f"{table(rows, dcp_size)}\n![Segments over time](fragmentation.png)\n"
    )
    print(table(rows, dcp_size))
    try:
        plot(rows, [order.name for order in ORDERS], dcp_size)
    except ImportError:
        print("No plot: matplotlib is not installed (pip install -r requirements/benchmarks.txt).")


if __name__ == "__main__":
    main()
