"""The folder through which a test and the lab plugin in a server's schedulers talk: orders in, states out."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

LAB = Path(__file__).parent.parent / "lab"


def environ_of(folder: Path, env: Mapping[str, str], mutants: bool = False) -> dict[str, str]:
    """What to add to a server's environment ``env``, so that the lab works in it."""
    added = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(LAB), env.get("PYTHONPATH", "")])),
        "DCP_BLOCK_LAB": str(folder),
    }
    if "SGLANG_PLUGINS" in env:
        added["SGLANG_PLUGINS"] = f"{env['SGLANG_PLUGINS']},dcp_block_lab"
    return added | ({"DCP_BLOCK_LAB_MUTANTS": "1"} if mutants else {})


def give_order(folder: Path, **order: Any) -> None:
    """What the schedulers obey at the next flush; states of an earlier one go."""
    for old in folder.glob("state.*.pt"):
        old.unlink()
    (folder / "order.json").write_text(json.dumps(order))


def states_in(folder: Path, ranks: int, timeout: float = 60) -> list[dict[str, Any]]:
    """Each scheduler's state just before the flush.

    Raises:
        TimeoutError: a scheduler wrote none in time.
    """
    deadline = time.monotonic() + timeout
    while len(files := sorted(folder.glob("state.*.pt"))) < ranks:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(files)} of {ranks} schedulers wrote their state")
        time.sleep(0.02)
    return [torch.load(file, weights_only=False) for file in files]
