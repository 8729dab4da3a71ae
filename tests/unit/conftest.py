"""Servers that run until the end of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from doctor_servers import Answer, Fake, send


@pytest.fixture
def fake() -> Iterator[Callable[..., Fake]]:
    """fake({path: answer}) -> a server that runs until the end of the test."""
    started: list[Fake] = []

    def start(answers: dict[str, Answer]) -> Fake:
        started.append(Fake(answers))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture
def sglang(fake: Callable[..., Fake]) -> Callable[..., Fake]:
    """sglang(info, ...) -> a server with this /server_info; a prefill server's bootstrap routes are its own."""

    def start(info: dict[str, Any], capability: Answer | None = None, metrics: Answer | None = None) -> Fake:
        answers: dict[str, Answer] = {}
        if capability:
            answers["/dcp_layout"] = capability
        if metrics:
            answers["/metrics"] = metrics
        started = fake(answers)
        answers["/server_info"] = send({"disaggregation_bootstrap_port": started.port, **info})
        return started

    return start
