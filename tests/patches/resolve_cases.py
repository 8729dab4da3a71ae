"""Run in a process of its own, by conftest.py: resolves SGLang's real arguments for many cases; starts nothing.

Reads {name: case} as JSON from stdin and writes the outcomes to the file named by the first argument.
A case: {"argv" | "keywords": ..., "environ": {...}, "platform": {facts}, "upstream": {...}, "elsewhere": bool}.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

OURS = "sglang_dcp_block"


class Warnings(logging.Handler):
    """Collects what the plugin says at warning level or above."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def record_for(case: dict[str, Any]) -> Any:
    """The raw record, by the command line or by the Engine's way of building one."""
    if "argv" in case:
        from sglang.srt.server_args import prepare_server_args

        return prepare_server_args(case["argv"])
    from sglang.srt.entrypoints.engine import Engine

    return Engine.server_args_class(**case["keywords"])


def resolve(case: dict[str, Any]) -> Any:
    """The resolved record of a case."""
    from sglang.srt.runtime_context import override_platform

    with override_platform(**case.get("platform", {})):
        record = record_for(case)
        if "chosen" in case:  # by SGLang for the model, before attention backends are looked at
            record._resolved_overrides = [("model", case["chosen"])]
        if case.get("pickle_first"):
            record = pickle.loads(pickle.dumps(record))
        record.resolve_once()
    return record


def outcome_of(case: dict[str, Any]) -> dict[str, Any]:
    """What came of a case, as plain data."""
    from sglang.srt.arg_groups.model_override_base import attention_backends_of
    from sglang.srt.arg_groups.overrides import resolving_view

    said, stderr = Warnings(), io.StringIO()
    logger = logging.getLogger(OURS)
    logger.addHandler(said)
    outcome: dict[str, Any] = {"warnings": said.lines}
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.dict(os.environ, case.get("environ", {})))
            stack.enter_context(contextlib.redirect_stderr(stderr))
            if "upstream" in case:
                pretend_upstream(stack, **case["upstream"])
            record = resolve(case)
        view = resolving_view(record)
        outcome |= {
            "page_size": view.page_size,
            "backends": attention_backends_of(view),
            "block_size": getattr(record, "_dcp_block_size", None),
            "raw_page_size": record.page_size,
            "group_pages": getattr(record, "_dcp_group_pages", 0),
        }
        if case.get("elsewhere"):
            outcome["elsewhere"] = elsewhere(record)
    except SystemExit as end:
        outcome |= {"error": "SystemExit", "status": end.code, "message": stderr.getvalue().strip().splitlines()[-1]}
    except Exception as error:
        outcome |= {"error": type(error).__name__, "message": str(error)}
    finally:
        logger.removeHandler(said)
    return outcome


def pretend_upstream(stack: contextlib.ExitStack, version: str | None = None, altered: str | None = None) -> None:
    """Another version of SGLang, or one definition that is not the known one."""
    from sglang_dcp_block.patches import fingerprint, register

    if version is not None:
        stack.enter_context(mock.patch.object(register, "upstream_version", return_value=version))
    if altered is not None:
        known = {v: {**targets, altered: "0123456789abcdef"} for v, targets in fingerprint.known().items()}
        stack.enter_context(mock.patch.object(fingerprint, "known", return_value=known))


def elsewhere(record: Any) -> int | None:
    """What another process is armed with, from a copy of the record; its environment asks for something else."""
    script = (
        "import json, pickle, sys; from sglang_dcp_block.patches.flag import armed_block_size;"
        "print(json.dumps(armed_block_size(pickle.load(sys.stdin.buffer))))"
    )
    child = subprocess.run(
        [sys.executable, "-c", script],
        input=pickle.dumps(record),
        env={**os.environ, "SGLANG_DCP_BLOCK_SIZE": "32"},
        capture_output=True,
        check=True,
    )
    return json.loads(child.stdout.splitlines()[-1])


def facts_by_field(record: Any, changes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Which facts change when a resolved field does: {name: {fact: value}}."""
    from sglang.srt.arg_groups import model_override_base
    from sglang.srt.runtime_context import override_platform

    from sglang_dcp_block.patches.facts import facts_of

    base, found = facts_of(record, 8), {}
    model = model_override_base.model_config_of(record)
    for name, change in changes.items():
        record._resolved_overrides.append(("test", change.get("fields", {})))
        changed_model = Changed(model, change.get("model", {}))
        if "hf_config" in change:
            changed_model.hf_config = Changed(model.hf_config, change["hf_config"])
        with (
            mock.patch.object(model_override_base, "model_config_of", lambda _, m=changed_model: m),
            mock.patch.dict(os.environ, change.get("environ", {})),
            override_platform(**change.get("platform", {})),
        ):
            facts = facts_of(record, 8)
        record._resolved_overrides.pop()
        found[name] = {
            field.name: getattr(facts, field.name)
            for field in dataclasses.fields(facts)
            if getattr(facts, field.name) != getattr(base, field.name)
        }
    return {"base": dataclasses.asdict(base), "changes": found}


def facts_of_case(case: dict[str, Any]) -> dict[str, Any]:
    """The facts of a case, resolved without blocks and so without being refused."""
    from sglang_dcp_block.patches.facts import facts_of

    return dataclasses.asdict(facts_of(resolve(case), 8))


class Changed:
    """An object with some attributes replaced."""

    def __init__(self, original: Any, attributes: dict[str, Any]) -> None:
        self.__dict__.update(attributes)
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def registered() -> dict[str, Any]:
    """What of the plugin is in this process."""
    from sglang.srt.arg_groups import resolution_hooks
    from sglang.srt.plugins.hook_registry import HookRegistry

    hooks = [hook for hooks in HookRegistry._hooks.values() for _, hook, _ in hooks]
    steps = [step for steps in resolution_hooks._HOOKS.values() for step in steps]
    return {
        "hooks": [h.__qualname__ for h in hooks if h.__module__.startswith(f"{OURS}.patches")],
        "steps": [s.__qualname__ for s in steps if s.__module__.startswith(f"{OURS}.patches")],
        "imported": f"{OURS}.patches" in sys.modules,
        "layout": "sglang_dcp_block.patches.active" in sys.modules
        and sys.modules["sglang_dcp_block.patches.active"].is_active(),
    }


def engine_refusal(**keywords: Any) -> str:
    from sglang.srt.entrypoints.engine import Engine

    try:
        Engine(**keywords)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "started"


def main() -> None:
    order = json.load(sys.stdin)
    from sglang.srt import plugins

    results: dict[str, Any] = {}
    # First without the plugin: SGLang reads its allow-list at each load.
    os.environ["SGLANG_PLUGINS"] = "dcp_block_cpu"
    plugins.load_plugins()
    results["excluded"] = {name: outcome_of(case) for name, case in order["excluded"].items()}
    results["excluded_engine"] = engine_refusal(**order["engine"])
    results["excluded_registered"] = registered()
    # Then with it. The first load has patched nothing of ours, so this is a fresh one but for the CPU shims.
    os.environ["SGLANG_PLUGINS"] = "dcp_block"
    plugins._plugins_loaded = False
    plugins.load_plugins()
    results["cases"] = {name: outcome_of(case) for name, case in order["cases"].items()}
    results["facts"] = facts_by_field(resolve(order["facts"]["case"]), order["facts"]["changes"])
    results["models"] = {name: facts_of_case(case) for name, case in order["models"].items()}
    results["registered"] = registered()
    Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
