"""Engines under test: one at a time, started late, shared by the tests of a module."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cases import BASE, Expected, answers_of, keys_by_position
from session import EngineSession


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the engine suites, and keep the tests of one engine together."""
    modules: dict[Path, int] = {}
    families: dict[str, int] = {}

    def place(item: pytest.Item) -> tuple[int, int]:
        family = getattr(getattr(item, "callspec", None), "params", {}).get("family", "")
        return modules.setdefault(item.path, len(modules)), families.setdefault(str(family), len(families))

    items.sort(key=place)
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
        return EngineSession(
            arguments,
            tmp_path_factory.mktemp("engine"),
            tp,
            environ={**of.environ, **(environ or {})},
            mutants=mutants,
        )

    return start


@pytest.fixture(scope="session")
def expected(start):
    """expected(model, overrides) -> what plain TP1 without DCP answers and stores; one engine a checkpoint.

    Chunk and page sizes, and the attention backend, change nothing beyond rounding, so all suites share it.
    """
    backends = {"gqa": "triton", "mla": "flashinfer"}
    known: dict[str, Expected] = {}

    def expected(model: str = "gqa", overrides: dict | None = None) -> Expected:
        key = repr((model, sorted((overrides or {}).items())))
        if key not in known:
            with start(model=model, overrides=overrides, tp=1, attention_backend=backends[model]) as engine:
                engine.flush(record=True)
                answers = answers_of(engine)
                (state,) = engine.flush()
            known[key] = Expected(answers, keys_by_position(state))
        return known[key]

    return expected
