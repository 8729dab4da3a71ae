"""The cover letter of the blocks series, in upstream's form, with the figures that this checkout has measured."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from upstream.commit import Commit

TEMPLATE = Path(__file__).parent / "cover_letter.md"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "transfer.csv"
WAYS = ("token round-robin", "host pack", "blocks of 8", "blocks of 64")  # of the benchmark, those that the series has
PD = "c07_pd_blocks"

PD_TEXT = """\
Set, in PD disaggregation: both sides must know blocks, and no peer of another release can misread the other.

- A decode server names its block size in the query of `/route`. A prefill server that knows blocks adds its own to the
  answer, for those who ask; where it is missing, requests to that server fail with the reason.
- The registration has one more frame, success two more (reason, block size). Both name themselves, `dcp_block_size=64`.
- Page sizes that a block does not divide, and other block sizes at equal DCP sizes, reject that session and no other.

The frames are those of the plugin that this series was made from; messages of both kinds are compared in every direction.
Real servers of both have served each other over Mooncake TCP, each as prefill and as decode server: MLA, DCP 1 to 2,
log-probabilities within 1e-4 of one server without DCP, every row where dealing by hand puts it, no page lost. A decode
server of 0.5.23 is served single tokens as before; a prefill server of 0.5.23 is refused, with the reason.

Left out of PD: NIXL and Mori (refused); an order of pages by decode rank in the prefill allocator; and a hold of a failed
transfer's pages that follows Mooncake's time limit, which concerns every decode server and is an issue of its own."""


def render(commits: Sequence[Commit], results: Path = RESULTS) -> str:
    """The letter for these commits."""
    has_pd = any(commit.name == PD for commit in commits)
    return TEMPLATE.read_text().format(
        commits="\n".join(f"{number}. **{commit.subject}**" for number, commit in enumerate(commits, 1)),
        figures=figures(results),
        pd=PD_TEXT if has_pd else "Set: PD disaggregation is refused in this version of the series.",
    )


def figures(results: Path) -> str:
    """A table of the transfer benchmark's largest case, or a sentence that says that there is none."""
    if not results.is_file():
        return "Not measured in this checkout."
    with results.open() as file:
        rows = [row for row in csv.DictReader(file) if row["way"] in WAYS]
    if not rows:
        return "Not measured in this checkout."
    case = max((int(row["layers"]), int(row["tokens"])) for row in rows)
    chosen = [row for row in rows if (int(row["layers"]), int(row["tokens"])) == case]
    lines = [
        "One chunk of {} layers x {:,} tokens to one of 8 decode ranks, Mooncake TCP on loopback between two".format(
            *case
        ),
        "processes, measured with the plugin that this series was made from (a segment costs the most over TCP):",
        "",
        "| | segments | bytes staged | p50, ms |",
        "|---|---|---|---|",
        *(
            f"| {row['way']} | {int(row['segments']):,} | {int(row['staged']):,} | {float(row['p50_s']) * 1e3:,.0f} |"
            for row in chosen
        ),
        "",
        "A block below 16 KiB (here 8 tokens of {:,} bytes) loses against packing, so the series packs it.".format(
            int(chosen[0]["row_bytes"])
        ),
    ]
    return "\n".join(lines)
