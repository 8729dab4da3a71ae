"""Run in a process of its own by test_real_targets.py: checks and arms the real patch points on the real modules.

Writes what it saw as JSON to the file named by the first argument.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import json
import sys
import types
from pathlib import Path
from typing import Any

# What a scheduler has imported when it is armed, and model code on top, which holds functions by name.
MODULES = (
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.data_parallel_controller",
    "sglang.srt.entrypoints.engine",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.layers.attention.triton_backend",
    "sglang.srt.layers.attention.flashinfer_mla_backend",
    "sglang.srt.models.llama",
    "sglang.srt.models.qwen2",
    "sglang.srt.models.qwen3",
    "sglang.srt.models.deepseek_v2",
)


def check_first() -> dict[str, Any]:
    """Phase one, before anything of SGLang is imported."""
    from sglang_dcp_block.patches import register
    from sglang_dcp_block.patches.points import all_points

    register.check(all_points())
    return {"imported": sorted(name for name in sys.modules if name.partition(".")[0] == "sglang")}


def fingerprints() -> dict[str, list[str]]:
    """Target -> fingerprint by text and of the live object."""
    from sglang_dcp_block.patches import fingerprint
    from sglang_dcp_block.patches.points import all_points

    tree = fingerprint.installed_tree()
    return {p.target: [fingerprint.from_tree(p.target, tree), fingerprint.from_live(p.target)] for p in all_points()}


def calls_of(target: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Ways to call a function: all it takes by position, and all by name but ``self`` and ``cls``."""
    parameters = list(inspect.signature(target).parameters.values())
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    by_position = [p for p in named if p.kind is p.POSITIONAL_OR_KEYWORD]
    own = [p for p in by_position[:1] if p.name in ("self", "cls")]
    must = [p for p in named if p.default is p.empty and p not in own]
    keyword_only = {p.name: p.name for p in named if p.kind is p.KEYWORD_ONLY}
    return [
        (tuple(p.name for p in by_position), keyword_only),
        (tuple(p.name for p in own), {p.name: p.name for p in named if p not in own}),
        (tuple(p.name for p in own), {p.name: p.name for p in must}),
    ]


def signatures() -> dict[str, dict[str, Any]]:
    """Target -> parameters of the target and of the hook, and the calls that the hook could not take."""
    from sglang_dcp_block.patches import fingerprint
    from sglang_dcp_block.patches.points import all_points
    from sglang_dcp_block.patches.register import Kind

    found = {}
    for point in all_points():
        if point.hook is None:
            continue
        target = inspect.unwrap(fingerprint.resolve(point.target))
        extra = () if point.kind is Kind.REPLACE else ("first",)
        refused = []
        for args, kwargs in calls_of(target):
            try:
                inspect.signature(point.hook).bind(*extra, *args, **kwargs)
            except TypeError as error:
                refused.append(f"{args} {kwargs}: {error}")
        found[point.target] = {
            "kind": point.kind.value,
            "target": [(p.name, str(p.kind), str(p.default)) for p in inspect.signature(target).parameters.values()],
            "hook": [(p.name, str(p.kind), str(p.default)) for p in inspect.signature(point.hook).parameters.values()],
            "refused": refused,
        }
    return found


def stale_references() -> dict[str, list[str]]:
    """Target -> who but our wrappers still holds the original."""
    from sglang_dcp_block.patches import fingerprint
    from sglang_dcp_block.patches.points import all_points

    stale: dict[str, list[str]] = {}
    for point in all_points():
        if point.hook is None:
            continue
        wrapper = fingerprint.resolve(point.target)
        original = inspect.unwrap(wrapper)
        wrappers = []
        while wrapper is not original:
            wrappers.append(wrapper)
            wrapper = wrapper.__wrapped__
        allowed = {id(w.__dict__) for w in wrappers} | {id(c) for w in wrappers for c in w.__closure__ or ()}
        gc.collect()
        for holder in gc.get_referrers(original):
            if id(holder) in allowed or isinstance(holder, types.FrameType) or holder is wrappers:
                continue
            stale.setdefault(point.target, []).append(f"{type(holder).__name__}: {describe(holder, original)}")
    return stale


def describe(holder: Any, original: Any) -> str:
    if isinstance(holder, dict):
        keys = [key for key, value in holder.items() if value is original]
        return f"{holder.get('__name__', holder.get('__module__', '?'))} {keys}"
    return repr(holder)[:200]


def main() -> None:
    report: dict[str, Any] = {"check": check_first()}
    for name in MODULES:
        importlib.import_module(name)
    report["fingerprints"] = fingerprints()
    report["signatures"] = signatures()

    from sglang_dcp_block.dcp.layout import DcpLayout
    from sglang_dcp_block.patches import active, register
    from sglang_dcp_block.patches.points import all_points

    active.activate(DcpLayout(4, 8))
    register.arm(all_points())
    register.arm(all_points())  # again: must change nothing
    report["wrappers"] = {}
    from sglang_dcp_block.patches import fingerprint

    for point in all_points():
        depth, found = 0, fingerprint.resolve(point.target)
        while (found := getattr(found, "__wrapped__", None)) is not None:
            depth += 1
        report["wrappers"][point.target] = depth
    report["stale"] = stale_references()
    report["points"] = [[p.target, p.kind.value] for p in all_points()]
    Path(sys.argv[1]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
