"""Run by Python at start-up: let torchvision be imported beside CPU torch; then run the host's ``sitecustomize``."""

import importlib.machinery
import importlib.util
import os
import sys

import dcp_block_torchvision  # type: ignore[import-not-found]  # beside this file

dcp_block_torchvision.install()


def _run_shadowed() -> None:
    """Run the ``sitecustomize`` that this file hides, if the host has one."""
    here = os.path.dirname(os.path.realpath(__file__))
    others = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_run_shadowed()
