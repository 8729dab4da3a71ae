"""Counts what a GPU would be asked to do: kernel launches, and reads that make the host wait."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager

from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor

# Metadata only: no kernel runs.
FREE = {
    "view", "_unsafe_view", "reshape", "slice", "select", "expand", "unsqueeze", "squeeze", "transpose", "permute", "t",
    "as_strided", "detach", "alias", "split", "split_with_sizes", "unbind", "empty", "empty_like", "new_empty",
    "empty_strided", "new_empty_strided", "lift_fresh", "_reshape_alias",
}  # fmt: skip


class Count(TorchDispatchMode):
    """Launches by name, and syncs."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.syncs = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name == "_local_scalar_dense":
            self.syncs += 1
        elif name.rstrip("_") not in FREE and name not in FREE:
            self.launches[name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        return sum(self.launches.values())


@contextmanager
def counted():
    """with counted() as count: everything run inside is counted; an interpreted Triton kernel counts once."""
    count, run = Count(), GridExecutor.__call__

    def launch(executor, *args, **kwargs):
        count.launches[f"triton:{getattr(executor.fn, '__name__', executor.fn)}"] += 1
        with _disable_current_modes():
            return run(executor, *args, **kwargs)

    GridExecutor.__call__ = launch
    try:
        with count:
            yield count
    finally:
        GridExecutor.__call__ = run
