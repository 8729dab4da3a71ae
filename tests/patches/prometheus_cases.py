"""Run in a process of its own by test_prometheus.py: counts a transfer and two refusals, and tells what Prometheus holds."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace


def main() -> None:
    os.environ.pop("SGLANG_PLUGINS", None)
    order = json.load(sys.stdin)

    import sglang_dcp_block.patches.pd_points  # noqa: F401
    from sglang_dcp_block.patches import peer_refusals, prometheus, transfer_counts

    imported_before = "prometheus_client" in sys.modules
    complaints: list[str] = []
    prometheus.logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: complaints.append(record.getMessage())  # type: ignore[method-assign]

    from sglang.srt import runtime_context

    if "enable_metrics" in order:  # as a scheduler's configuration has it
        runtime_context._CONTEXT._config_bags = {"observability": SimpleNamespace(**order)}
    peer_refusals.begin(peer_refusals.RefusedBy.DECODE)
    transfer_counts.begin()
    for _ in range(2):
        peer_refusals.count(peer_refusals.RefusedBy.DECODE, peer_refusals.Reason.NO_BLOCKS)
    with transfer_counts.counted("peer", "direct") as transfer:
        transfer.add_batch(3, 300)

    from prometheus_client import REGISTRY, CollectorRegistry, multiprocess

    ours = sorted({m.name for m in REGISTRY.collect() if m.name.startswith("sglang:dcp_block")})
    registry = REGISTRY
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        multiprocess.MultiProcessCollector(registry := CollectorRegistry())
    wanted = {
        "refusals": {"side": "decode", "reason": "no_blocks"}, "segments": {"path": "direct"}, "bytes": {"path": "direct"},
    }  # fmt: skip
    shown = [sample for metric in registry.collect() for sample in metric.samples if "reason" in sample.labels]
    samples = {n: registry.get_sample_value(f"sglang:dcp_block_{n}_total", labels) for n, labels in wanted.items()}
    seen = {
        "imported_before": imported_before,
        "complaints": complaints,
        "names": ours,
        "reasons": sorted(s.labels["reason"] for s in shown if s.name.endswith("_total")),
        "samples": {name: value for name, value in samples.items() if value is not None},
    }
    Path(sys.argv[1]).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
