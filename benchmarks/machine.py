"""What a benchmark ran on: processor, memory, load and versions. Nothing that names a machine or its owner."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

DISTRIBUTIONS = ("sglang-dcp-block", "sglang", "torch", "triton", "numpy", "mooncake-transfer-engine-non-cuda")


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware, and how busy it was."""

    processor: str
    cores: int
    memory_bytes: int
    system: str
    load_before: float  # runnable processes, mean of the last minute, before the suite began
    niceness: int  # of this process; negative where it goes before others

    def __str__(self) -> str:
        """In one line."""
        return (
            f"{self.cores} × {self.processor}, {self.memory_bytes / 2**30:.0f} GiB of memory, {self.system}; "
            f"load average before: {self.load_before:.1f}{f', nice {self.niceness}' if self.niceness else ''}"
        )


def machine() -> Machine:
    """This one."""
    processors = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    return Machine(
        processors[0] if processors else platform.machine(),
        len(os.sched_getaffinity(0)),
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        f"{platform.system()} {platform.machine()}",
        os.getloadavg()[0],
        os.nice(0),
    )


def versions() -> str:
    """Of Python and what is measured, as ``name version, ...``; those that are not installed are left out."""
    found = [f"python {platform.python_version()}"]
    for name in DISTRIBUTIONS:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)
