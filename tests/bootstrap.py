"""Ends SGLang's bootstrap servers that tests start."""

from __future__ import annotations

from typing import Any


def close(server: Any) -> None:
    """End a ``CommonKVBootstrapServer``.

    Its own ``close`` stops the loop under its clean-up task, which Python then reports as destroyed while pending.
    """
    for task in list(server._background_tasks):
        server._loop.call_soon_threadsafe(task.cancel)
    server.close()
