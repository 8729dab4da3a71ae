"""The tables of docs/transfer-model.md, made from the model.

``python -m sglang_dcp_block.transfer_model docs/transfer-model.md`` renews them in place; ``--check`` only says whether they
are up to date.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.made_tables import Tables
from sglang_dcp_block.transfer_model.counts import Way
from sglang_dcp_block.transfer_model.links import FIGURES, Link, fit_rows, presets
from sglang_dcp_block.transfer_model.shapes import PRESETS
from sglang_dcp_block.transfer_model.times import long_run_break_even, rank_seconds

SHAPE = PRESETS["deepseek-v3"]  # Kimi-K2 has the same layers and rows
DCP, PAGE, CHUNK = 8, 64, 8192
TOKENS = (8192, 32768, 131072, 524288, 1048576)
BLOCKS = (8, 16, 32, 64)
SEGMENT_US = (0.2, 0.7, 1.4, 4.5)  # what reports over RDMA range over: native verbs, then Mooncake
KV = {1152: "bf16", 576: "fp8"}

SIZES = {"page_size": PAGE, "chunk_tokens": CHUNK, "num_layers": SHAPE.num_layers}


def milliseconds(
    link: Link, way: Way, tokens: int, block: int, *, row_bytes: int = 1152, scattered: bool = False
) -> float:
    """Of one prompt to rank 0."""
    layout = DcpLayout(DCP, block)
    return 1e3 * rank_seconds(link, way, tokens, layout=layout, row_bytes=row_bytes, scattered=scattered, **SIZES)


def links_table() -> Iterator[str]:
    """The figures of each link."""
    yield "| link | µs a segment | GB/s | gather, GB/s | sync, µs |"
    yield "|---|---|---|---|---|"
    for link in presets().values():
        segment, wire, gather, sync = (getattr(link, name) for name in FIGURES)
        yield f"| `{link.name}` | {segment * 1e6:.3g} | {wire / 1e9:.3g} | {gather / 1e9:,.4g} | {sync * 1e6:.3g} |"


def sources_table() -> Iterator[str]:
    """Where each figure comes from."""
    yield "| figure | links | source |"
    yield "|---|---|---|"
    found: dict[tuple[str, str, str], list[str]] = {}
    for link in presets().values():
        for source in link.sources:
            found.setdefault((source.figure, source.text, source.url), []).append(link.name)
    for (figure, text, url), names in sorted(found.items(), key=lambda item: FIGURES.index(item[0][0])):
        yield f"| {figure} | {', '.join(names)} | {text}{f' <{url}>' if url else ''} |"


def fit_table() -> Iterator[str]:
    """Measured TCP transfers beside the model."""
    yield "| way | layers × tokens, row | segments | measured, ms | modelled, ms | model ÷ measurement |"
    yield "|---|---|---|---|---|---|"
    errors = []
    for row in fit_rows():
        measured, modelled = float(row["measured_s"]), float(row["modelled_s"])
        errors.append(abs(modelled / measured - 1))
        yield (
            f"| {row['way']} | {row['layers']} × {int(row['tokens']):,}, {int(row['row_bytes']):,} B "
            f"| {int(row['segments']):,} | {_ms(1e3 * measured)} | {_ms(1e3 * modelled)} | {modelled / measured:.2f} |"
        )
    yield ""
    yield f"Errors: {statistics.median(errors):.0%} in the median of {len(errors)} rows, {max(errors):.0%} at most."


def times_table(link: Link) -> Iterator[str]:
    """Modelled times of a prompt in every way."""
    yield (
        "| tokens | pools | token round-robin | the same, packed | "
        + " | ".join(f"blocks of {block}" for block in BLOCKS)
        + " | grouped | one segment |"
    )
    yield "|" + "---|" * (6 + len(BLOCKS))
    for tokens in TOKENS:
        for scattered in (False, True):
            cells = [
                milliseconds(link, way, tokens, block, scattered=scattered)
                for way, block in (
                    (Way.DIRECT, 1),
                    (Way.PACKED, 1),
                    *((Way.DIRECT, block) for block in BLOCKS),
                    (Way.GROUPED, PAGE),
                    (Way.ONE_SEGMENT, PAGE),
                )
            ]
            pools = "scattered" if scattered else "fresh"
            yield f"| {tokens:,} | {pools} | " + " | ".join(map(_ms, cells)) + " |"


def break_even_table() -> Iterator[str]:
    """The block from which on sending as it lies pays, for long prompts, by what a segment costs."""
    yield "| link | KV | fresh, chunks of 8,192 | fresh, chunks of 65,536 | scattered pages of 64, chunks of 8,192 |"
    yield "|---|---|---|---|---|"
    rdma = presets()["rdma-400"]
    varied = [
        Link(f"rdma-400 at {us} µs", us * 1e-6, rdma.bytes_per_second, rdma.gather_bytes_per_second, rdma.sync_seconds)
        for us in SEGMENT_US
    ]
    for link in (*varied, presets()["nvlink"], presets()["tcp-loopback"]):
        for row_bytes, kv in KV.items():
            cells = []
            for chunk_rows, segment_rows in ((1024, 1024), (8192, 8192), (1024, PAGE)):
                tokens = long_run_break_even(
                    link, row_bytes, packed_segment_rows=segment_rows, sync_rows=chunk_rows * SHAPE.num_layers
                )
                cells.append(f"{tokens:,.0f} ({tokens * row_bytes / 1024:,.0f} KiB)")
            yield f"| {link.name} | {kv} | " + " | ".join(cells) + " |"


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "links": links_table,
    "sources": sources_table,
    "fit": fit_table,
    "times of rdma-400": lambda: times_table(presets()["rdma-400"]),
    "times of rdma-200": lambda: times_table(presets()["rdma-200"]),
    "times of nvlink": lambda: times_table(presets()["nvlink"]),
    "times of tcp-loopback": lambda: times_table(presets()["tcp-loopback"]),
    "break-even": break_even_table,
}


def begin(name: str) -> str:
    """The marker above a table."""
    return f"<!-- begin {name}: made by `python -m sglang_dcp_block.transfer_model`; do not edit -->"


def marked() -> Tables:
    """All tables by their markers."""
    return {begin(name): lambda table=table: "\n".join(table()) + "\n" for name, table in TABLES.items()}  # type: ignore[misc]


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
