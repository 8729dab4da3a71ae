"""Engines under test: one at a time, started late, shared by the tests of a module."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cases import BASE, Expected, answers_of, keys_by_position
from session import EngineSession


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def start(flavour, checkpoints, tmp_path_factory):
    """start(model=..., tp=..., dcp=..., block=..., **engine arguments) -> EngineSession; use it with ``with``."""

    def start(
        *, model="gqa", overrides=None, tp=1, dcp=1, block=None, of=flavour, environ=None, mutants=False, **kwargs
    ):
        arguments = {**BASE, "model_path": str(checkpoints(model, **(overrides or {}))), "tp_size": tp, **kwargs}
        if dcp > 1:
            arguments["dcp_size"] = dcp
        if block is not None:
            arguments["dcp_block_size"] = block
        ranks = tp * arguments.get("dp_size", 1) if not arguments.get("enable_dp_attention") else tp
        return EngineSession(
            arguments,
            tmp_path_factory.mktemp("engine"),
            ranks,
            environ={**of.environ, **(environ or {})},
            mutants=mutants,
        )

    return start


@pytest.fixture(scope="session")
def expected(start):
    """expected(model=..., **what shapes the outputs) -> the same engine at TP1 without DCP; started once each."""
    known: dict[str, Expected] = {}

    def expected(model="gqa", overrides=None, **kwargs) -> Expected:
        key = repr((model, sorted((overrides or {}).items()), sorted(kwargs.items())))
        if key not in known:
            with start(model=model, overrides=overrides, tp=1, **kwargs) as engine:
                engine.flush(record=True)
                answers = answers_of(engine)
                (state,) = engine.flush()
            known[key] = Expected(answers, keys_by_position(state))
        return known[key]

    return expected
