"""Says what is going on: a line with a spinner and a clock on a terminal, plain lines anywhere else."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

TICK_SECONDS = 20


class Steps:
    """Progress through a known number of steps; use inside ``with``."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total, self.done = console, total, 0
        self._bar = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            expand=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Steps:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        """One step; its time is printed at the end, and every now and then in between where nobody sees a clock."""
        began = time.monotonic()
        self._bar.update(self._task, description=text)
        finished = threading.Event()
        ticker = threading.Thread(target=self._tick, args=(text, began, finished), daemon=True)
        if not self.console.is_terminal:
            self.say(f"[{self.done + 1}/{self.total}] {text} ...")
            ticker.start()
        try:
            yield
        finally:
            finished.set()
        self.done += 1
        self._bar.advance(self._task)
        self.say(f"[{self.done}/{self.total}] {text}: {time.monotonic() - began:.1f} s")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _tick(self, text: str, began: float, finished: threading.Event) -> None:
        while not finished.wait(TICK_SECONDS):
            self.say(f"      still at it: {text} ({time.monotonic() - began:.0f} s)")
