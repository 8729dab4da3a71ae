"""Lets a benchmark import SGLang on a CPU, and the tests' oracles and servers. Import this before them."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

from sglang_dcp_block.cpu.environment import PRELOAD, cpu_environment

warnings.simplefilter("ignore", UserWarning)  # of what only a GPU has

ROOT = Path(__file__).parents[1]

os.environ.update(cpu_environment(1), MC_FORCE_TCP="1", MC_LOG_LEVEL="ERROR")
sys.path[:0] = [str(PRELOAD), str(ROOT / "tests"), str(ROOT / "tests" / "transfer")]

import dcp_block_torchvision  # type: ignore[import-not-found]  # noqa: E402

dcp_block_torchvision.install()
