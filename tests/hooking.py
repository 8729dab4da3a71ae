"""Patch points on SGLang's own classes for the length of one test, wrapped as SGLang's HookRegistry wraps them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import pytest

from sglang_dcp_block.patches import fingerprint
from sglang_dcp_block.patches.register import PatchPoint


def hook(monkeypatch: pytest.MonkeyPatch, points: Iterable[PatchPoint]) -> None:
    """Apply ``points`` to methods; undone with ``monkeypatch``."""
    from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

    for point in points:
        if point.hook is None:
            continue
        owner_path, _, name = point.target.rpartition(".")
        owner = fingerprint.resolve(owner_path)
        wrapped = _wrap_fn(inspect.unwrap(fingerprint.resolve(point.target)), point.hook, HookType(point.kind.value))
        is_classmethod = isinstance(vars(owner)[name], classmethod)
        monkeypatch.setattr(owner, name, classmethod(wrapped) if is_classmethod else wrapped)
