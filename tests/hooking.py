"""The plugin's hooks in this process, for as long as a test needs them."""

from __future__ import annotations

import contextlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from unittest import mock

import pytest

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.patches import active, fingerprint
from sglang_dcp_block.patches.kv_points import KV_POINTS
from sglang_dcp_block.patches.register import PatchPoint


@contextlib.contextmanager
def hooked(layout: DcpLayout, wanted: Callable[[PatchPoint], bool]) -> Iterator[None]:
    """The wanted hooks of the KV cache, put on as SGLang's registry does: also where a name was imported from elsewhere."""
    from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

    for point in KV_POINTS:  # a module first imported under a hook would keep it
        pkgutil.resolve_name(point.target)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(active, "_layout", layout))
        for point in filter(wanted, KV_POINTS):
            owner_path, _, name = point.target.rpartition(".")
            owner = pkgutil.resolve_name(owner_path)
            original = getattr(owner, name)
            wrapped = _wrap_fn(original, point.hook, HookType(point.kind.value))
            places = [(owner, name)]
            places += [
                (module, key)
                for module in list(sys.modules.values())
                for key, value in list(getattr(module, "__dict__", {}).items())
                if value is original and module is not owner
            ]
            for place, key in places:
                stack.enter_context(mock.patch.object(place, key, wrapped))
        yield


def hook(monkeypatch: pytest.MonkeyPatch, points: Iterable[PatchPoint]) -> None:
    """Patch points on methods of SGLang's classes, undone with ``monkeypatch``."""
    from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

    for point in points:
        if point.hook is None:
            continue
        owner_path, _, name = point.target.rpartition(".")
        owner = fingerprint.resolve(owner_path)
        wrapped = _wrap_fn(inspect.unwrap(fingerprint.resolve(point.target)), point.hook, HookType(point.kind.value))
        is_classmethod = isinstance(vars(owner)[name], classmethod)
        monkeypatch.setattr(owner, name, classmethod(wrapped) if is_classmethod else wrapped)
