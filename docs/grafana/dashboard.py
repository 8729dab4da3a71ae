"""``python docs/grafana/dashboard.py``: write the Grafana dashboard of the plugin's metrics.  ``--check`` only compares."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("dcp-block.json")
OURS = "sglang:dcp_block_"
WINDOW = "$__rate_interval"
HERE = 'instance=~"$instance"'

Panel = dict[str, Any]


def rate(name: str, by: str) -> str:
    """A counter's growth a second, summed over servers by one or more labels."""
    return f"sum by ({by}) (rate({OURS}{name}{{{HERE}}}[{WINDOW}]))"


def quantile(q: float) -> str:
    """Of the time of a transfer, by path."""
    return f"histogram_quantile({q}, {rate('transfer_seconds_bucket', 'le, path')})"


# title, unit, what to look for, [(query, legend)]
PANELS: tuple[tuple[str, str, str, list[tuple[str, str]]], ...] = (
    (
        "Refused peers and messages",
        "short",
        "Anything here wants to be looked at: docs/operations.md says what each reason means.",
        [(f"sum by (side, reason) (increase({OURS}refusals_total{{{HERE}}}[{WINDOW}]))", "{{side}}: {{reason}}")],
    ),
    (
        "Failed transfers",
        "short",
        "transport: Mooncake reported an error. request: it could not be planned. cancelled: nothing is wrong.",
        [(f"sum by (reason) (increase({OURS}transfer_failures_total{{{HERE}}}[{WINDOW}]))", "{{reason}}")],
    ),
    (
        "Time of a transfer",
        "s",
        "One chunk of a request to one decode rank, planning included. A tail near MC_TRANSFER_TIMEOUT is about to fail.",
        [(quantile(0.5), "{{path}}, half are below"), (quantile(0.99), "{{path}}, 99 % are below")],
    ),
    ("Bytes sent", "Bps", "By the way they were sent.", [(rate("bytes_total", "path"), "{{path}}")]),
    ("Transfers", "ops", "Chunks to decode ranks.", [(rate("transfers_total", "path"), "{{path}}")]),
    (
        "Segments a transfer",
        "short",
        "Contiguous pieces of memory. Falls with larger blocks, and with --dcp-group-pages.",
        [(f"{rate('segments_total', 'path')} / {rate('transfers_total', 'path')}", "{{path}}")],
    ),
    (
        "Bytes a segment",
        "bytes",
        "Blocks of 16 KiB or more are sent as they lie.",
        [(f"{rate('bytes_total', 'path')} / {rate('segments_total', 'path')}", "{{path}}")],
    ),
    (
        "Fallbacks",
        "short",
        "Transfers that did not go the way their blocks ask for.",
        [(f"sum by (reason) (increase({OURS}fallbacks_total{{{HERE}}}[{WINDOW}]))", "{{reason}}")],
    ),
    (
        "KV pool in use",
        "percentunit",
        "SGLang's own number; the same with and without blocks.",
        [(f"max by (instance) (sglang:token_usage{{{HERE}}})", "{{instance}}")],
    ),
    (
        "Requests that run",
        "short",
        "SGLang's own number.",
        [(f"sum by (instance) (sglang:num_running_reqs{{{HERE}}})", "{{instance}}")],
    ),
)


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    return {
        "title": "SGLang DCP blocks",
        "uid": "sglang-dcp-block",
        "tags": ["sglang", "dcp"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_source(), _instance()]},
        "panels": [_panel(number, *panel) for number, panel in enumerate(PANELS)],
    }


def _source() -> dict[str, Any]:
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _instance() -> dict[str, Any]:
    query = "label_values(sglang:num_running_reqs, instance)"
    return {
        "name": "instance",
        "label": "servers",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "$source"},
        "query": {"query": query, "refId": "instance"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
    }


def _panel(number: int, title: str, unit: str, text: str, queries: list[tuple[str, str]]) -> Panel:
    source = {"type": "prometheus", "uid": "$source"}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "description": text,
        "datasource": source,
        "gridPos": {"x": number % 2 * 12, "y": number // 2 * 8, "w": 12, "h": 8},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": source, "expr": expr, "legendFormat": legend}
            for i, (expr, legend) in enumerate(queries)
        ],
    }


def main(argv: list[str] | None = None) -> int:
    """Command line entry point; returns the exit status."""
    cli = argparse.ArgumentParser(prog="python docs/grafana/dashboard.py", description="Write the Grafana dashboard.")
    cli.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the file is out of date")
    check = cli.parse_args(argv).check
    text = json.dumps(dashboard(), indent=2) + "\n"
    if check and (not FILE.exists() or FILE.read_text(encoding="utf-8") != text):
        print("docs/grafana/dcp-block.json is out of date. Run: make docs")
        return 1
    if not check:
        FILE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
