"""What a link costs: seconds a segment and bytes a second, and what gathering rows first costs. Each figure has a source.

TCP on loopback is fitted to this project's own measurements (``tcp_loopback.json``, written by benchmarks/fit_model.py). The
others are figures that others have published, on their machines; docs/transfer-model.md derives them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from sglang_dcp_block.shown import shown

FITTED = "tcp_loopback.json"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a figure comes from."""

    figure: str  # a field of Link
    text: str
    url: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """One decode rank's way from the prefill server."""

    name: str
    segment_seconds: float  # each contiguous piece that the transfer engine is handed, beside its bytes
    bytes_per_second: float
    gather_bytes_per_second: float  # of payload: each byte is read and written once
    sync_seconds: float  # a packing: upload of row numbers, launch, wait
    sources: tuple[Source, ...] = ()

    def __post_init__(self) -> None:
        for name in FIGURES:
            value = getattr(self, name)
            is_free = name == "sync_seconds" and value == 0
            if not (0 < value < float("inf") or is_free):
                raise ValueError(f"{self.name}: {name}: expected a finite positive number, got {value!r}")


FIGURES = ("segment_seconds", "bytes_per_second", "gather_bytes_per_second", "sync_seconds")

_RDMA_SEGMENT = Source(
    "segment_seconds",
    "Mooncake over RDMA at 400 Gb/s sent pieces of about 16 KB at 9 GB/s: 1.8 µs a piece, of which its bytes take 0.4. "
    "Others report 0.7 µs (the same page, shorter prompts), 1.4 to 4.5 µs (pieces of 4 KiB, kvcache-ai/Mooncake issue 2693) "
    "and 0.2 µs by native verbs, without Mooncake (pieces of 1 KiB, LMCache/LMCache pull request 4161).",
    "https://github.com/vllm-project/vllm/pull/53825",
)
_GATHER = Source(
    "gather_bytes_per_second",
    "gathers of rows on an H100 move 2.6 TB/s, half of it reads: 1.3 TB/s of KV",
    "https://github.com/pytorch/FBGEMM/pull/3993",
)
_SYNC = Source(
    "sync_seconds",
    "an assumption: an upload of row numbers, a launch and a wait, each 20 µs, as long as a launch takes",
    "https://developer.nvidia.com/blog/understanding-the-visualization-of-overhead-and-latency-in-nsight-systems/",
)
GPU = {"gather_bytes_per_second": 1.3e12, "sync_seconds": 60e-6}

_PUBLISHED = (
    Link(
        "rdma-400",
        segment_seconds=1.4e-6,
        bytes_per_second=42e9,
        **GPU,
        sources=(
            _RDMA_SEGMENT,
            Source(
                "bytes_per_second",
                "Mooncake, GPU memory, one NIC of 400 Gb/s",
                "https://github.com/kvcache-ai/Mooncake/issues/813",
            ),
            _GATHER,
            _SYNC,
        ),
    ),
    Link(
        "rdma-200",
        segment_seconds=1.4e-6,
        bytes_per_second=21.75e9,
        **GPU,
        sources=(
            _RDMA_SEGMENT,
            Source(
                "bytes_per_second",
                "Mooncake, 87 GB/s over four NICs of 200 Gb/s",
                "https://github.com/kvcache-ai/Mooncake",
            ),
            _GATHER,
            _SYNC,
        ),
    ),
    Link(
        "nvlink",
        segment_seconds=3e-6,
        bytes_per_second=380e9,
        **GPU,
        sources=(
            Source(
                "segment_seconds",
                "SGLang over Mooncake and NVLink saved 5.2 s where each of two peers got 1.70 million pieces less: 3 µs a "
                "piece if both were served at once, 1.5 µs if one after the other.",
                "https://github.com/sgl-project/sglang/pull/40500",
            ),
            Source(
                "bytes_per_second",
                "one direction between two H100, measured; 450 GB/s by the data sheet",
                "https://github.com/NVIDIA/nccl/issues/1264",
            ),
            _GATHER,
            _SYNC,
        ),
    ),
)


@functools.cache
def presets() -> dict[str, Link]:
    """All links by name, the fitted one among them."""
    return {link.name: link for link in (*_PUBLISHED, fitted())}


def fitted() -> Link:
    """TCP on loopback, as benchmarks/fit_model.py wrote it."""
    return from_json(_fitted_data())


def fit_rows() -> list[dict[str, Any]]:
    """The measurements that it was fitted to, each with what the model says of it."""
    return list(_fitted_data()["rows"])


@functools.cache
def _fitted_data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(resources.files(__package__).joinpath(FITTED).read_text(encoding="utf-8"))
    return data


def from_json(data: Mapping[str, object]) -> Link:
    """A fitted link from its file.

    Raises:
        ValueError: an entry is missing.
    """
    missing = [name for name in ("name", *FIGURES, "origin") if name not in data]
    if missing:
        raise ValueError(f"{FITTED}: expected entries {', '.join(missing)}, got none")
    origin = str(data["origin"])
    sources = tuple(Source(name, origin) for name in FIGURES)
    figures = {name: float(str(data[name])) for name in FIGURES}
    return Link(str(data["name"]), **figures, sources=sources)


# Figure as a user names it -> field of Link, and its unit.
UNITS = {
    "segment-us": ("segment_seconds", 1e-6),
    "gbytes": ("bytes_per_second", 1e9),
    "gather-gbytes": ("gather_bytes_per_second", 1e9),
    "sync-us": ("sync_seconds", 1e-6),
}
LEAST, MOST = 1e-6, 1e6  # of each, in its unit: no link is slower, and none is faster


def parse(text: str) -> Link:
    """A link as a user names it: a preset, or figures.

    Rule: ``segment-us=1.4,gbytes=42`` in microseconds and 10^9 bytes a second; ``gather-gbytes`` and ``sync-us`` may follow,
    and are else those of a GPU.
    Raises:
        ValueError: neither; says what was expected.

    >>> parse("segment-us=2,gbytes=10").segment_seconds
    2e-06
    """
    if "=" not in text:
        link = presets().get(text.lower())
        if link is None:
            raise ValueError(f"expected one of {', '.join(presets())}, or segment-us=1.4,gbytes=42, got {shown(text)}")
        return link
    figures: dict[str, float] = dict(GPU)
    given = set()
    for part in text.split(","):
        key, _, value = (word.strip() for word in part.partition("="))
        if (unit := UNITS.get(key)) is None:
            raise ValueError(f"expected figures among {', '.join(UNITS)}, got {shown(part)}")
        if key in given:
            raise ValueError(f"expected {key} once, got {shown(text)}")
        figures[unit[0]] = _figure(key, value) * unit[1]
        given.add(key)
    if absent := [key for key in ("segment-us", "gbytes") if key not in given]:
        raise ValueError(f"expected {' and '.join(absent)} too, got {shown(text)}")
    return Link(text, **figures, sources=(Source("all", "given on the command line"),))


def _figure(key: str, text: str) -> float:
    """A figure in its own unit; a sync may cost nothing, a segment may not: then no block would matter."""
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if LEAST <= number <= MOST or (key == "sync-us" and number == 0):
        return number
    zero = ", or 0" if key == "sync-us" else ""
    raise ValueError(f"{key}: expected a number from {LEAST:f} to {MOST:,.0f}{zero}, got {shown(text)}")
