"""Steers a prefill server's transfer engine: calls that take long, and calls that report an error.

``$DCP_BLOCK_LAB/transfers.json`` says what the next calls do; each call adds a line, its number of segments, to
``$DCP_BLOCK_LAB/transfers``.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

TARGET = (
    "sglang.srt.distributed.device_communicators.mooncake_transfer_engine.MooncakeTransferEngine.batch_transfer_sync"
)


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, steered, HookType.AROUND)


def steered(original, engine, session, sources, *args, **kwargs):
    folder = Path(os.environ["DCP_BLOCK_LAB"])
    order = json.loads((folder / "transfers.json").read_text()) if (folder / "transfers.json").exists() else {}
    with (folder / "transfers").open("a") as calls:
        calls.write(f"{len(sources)}\n")
    time.sleep(order.get("seconds", 0))
    status = original(engine, session, sources, *args, **kwargs)
    return order.get("status", status)  # Mooncake too may write rows and report an error
