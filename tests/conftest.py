"""Where tests run: the CPU environment, in this process too, and one switch for what is under test.

``DCP_BLOCK_UNDER_TEST`` says which SGLang the suites exercise: ``plugin`` (default) is stock SGLang with this plugin;
``native`` is an SGLang tree that has blocks built in, with the plugin left out.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from sglang_dcp_block.cpu.environment import PRELOAD, cpu_environment

# Before anything imports triton or SGLang in this process.
os.environ.update(cpu_environment(1))
sys.path.insert(0, str(PRELOAD))

import dcp_block_torchvision

from flavours import FLAVOURS, Flavour

dcp_block_torchvision.install()
settings.register_profile("any speed", deadline=None)  # a busy machine is no fault
settings.load_profile("any speed")


@pytest.fixture(scope="session")
def flavour() -> Flavour:
    """The SGLang under test."""
    return FLAVOURS[os.environ.get("DCP_BLOCK_UNDER_TEST", "plugin")]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory):
    """checkpoints(kind, **overrides) -> folder of a tiny checkpoint whose logits depend on the KV cache."""
    from sglang_dcp_block.cpu.checkpoints import write_tiny

    root = tmp_path_factory.mktemp("checkpoints")

    def write(kind: str, **overrides) -> Path:
        name = "-".join([kind, *(f"{k}={v}" for k, v in sorted(overrides.items()))])
        folder = root / name
        write_tiny(kind, folder, **overrides)
        return folder

    return write


def pytest_sessionfinish(exitstatus: int) -> None:
    """End with the last of the exit handlers.

    Python's own end collects all that SGLang has imported: seconds, and minutes on a machine that is busy.
    """
    _status.append(int(exitstatus))


_status: list[int] = []


def _end_now() -> None:
    if _status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status[0])


atexit.register(_end_now)  # handlers run in the opposite order, and most are registered later
