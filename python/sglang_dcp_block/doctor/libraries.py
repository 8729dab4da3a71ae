"""Mooncake, the system libraries it is linked to, RDMA devices, and the GPUs that torch sees."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

from sglang_dcp_block.doctor import child
from sglang_dcp_block.doctor.child import Ending
from sglang_dcp_block.doctor.findings import Finding, note, ok, problem

PART = "libraries"
IBVERBS = "libibverbs.so.1"
INSTALL_IBVERBS = "apt-get install libibverbs1 (Debian, Ubuntu) or dnf install libibverbs (Fedora, RHEL)."
INFINIBAND = Path("/sys/class/infiniband")
TIMEOUT_SECONDS = 60  # of an import on a busy machine

_GPUS = """
import torch
print(", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())))
"""


def check(required: bool = False) -> list[Finding]:
    """All of them, as they are on this machine.

    Args:
        required: whether servers here exchange KV, so that what Mooncake lacks is a problem.
    """
    return [
        ibverbs(required),
        mooncake(required, lambda: child.run(["-c", "import mooncake.engine"], TIMEOUT_SECONDS)),
        rdma(),
        gpus(lambda: child.run(["-c", _GPUS], TIMEOUT_SECONDS)),
    ]


def ibverbs(required: bool, load: Callable[[str], object] = ctypes.CDLL) -> Finding:
    """Whether the library that Mooncake is linked to loads."""
    try:
        load(IBVERBS)
    except OSError as error:
        return _lacks(required, IBVERBS, f"does not load: {error}", INSTALL_IBVERBS)
    return ok(PART, IBVERBS, "loads")


def mooncake(required: bool, importing: Callable[[], Ending]) -> Finding:
    """Whether the transfer engine can be imported."""
    ending = importing()
    if ending.ok:
        return ok(PART, "mooncake.engine", "loads")
    if "ModuleNotFoundError" in ending.error:
        advice = "pip install mooncake-transfer-engine"
    elif "libibverbs" in ending.error:
        advice = INSTALL_IBVERBS
    else:
        advice = "Install what the message names, or Mooncake anew."
    return _lacks(required, "mooncake.engine", ending.error, advice)


def _lacks(required: bool, what: str, got: str, advice: str) -> Finding:
    if required:
        return problem(PART, what, got, advice)
    return note(PART, what, got, f"For prefill and decode servers only: {advice}")


def rdma(devices: Path = INFINIBAND) -> Finding:
    """The RDMA devices of this machine; without one, Mooncake needs its TCP transport."""
    try:
        names = sorted(path.name for path in devices.iterdir())
    except OSError:
        names = []
    if names:
        return ok(PART, "RDMA devices", ", ".join(names))
    return note(PART, "RDMA devices", "none", "Transfers can only go by TCP (MOONCAKE_PROTOCOL=tcp).")


def gpus(asking: Callable[[], Ending]) -> Finding:
    """The GPUs that torch sees."""
    ending = asking()
    if not ending.ok:
        if "ModuleNotFoundError" in ending.error:  # said by the versions already
            return note(PART, "GPUs", "unknown without torch")
        return problem(PART, "GPUs", f"torch could not be asked: {ending.error}", "Repair the installation of torch.")
    names = [name for name in ending.output.strip().split(", ") if name]
    if not names:
        return note(
            PART, "GPUs", "none", "Servers run here in the CPU environment only (python -m sglang_dcp_block.cpu)."
        )
    kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return ok(PART, "GPUs", kinds)
