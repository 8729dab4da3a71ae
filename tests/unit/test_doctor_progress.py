"""The doctor says what it looks at while it does, on standard error only."""

from __future__ import annotations

import io
import threading
import time

import pytest
from rich.console import Console

from sglang_dcp_block import cli
from sglang_dcp_block.doctor import command, progress
from sglang_dcp_block.doctor.server import Server


def console(is_terminal: bool) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=is_terminal, width=100), file


def test_one_line_where_it_takes_long() -> None:
    on, file = console(is_terminal=False)
    with progress.looking(on, patience=0.05) as say:
        say("the flags [here]")
        deadline = time.monotonic() + 10
        while not file.getvalue():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        say("libraries")
        time.sleep(0.15)
    assert file.getvalue() == "Looking at the flags [here] ...\n"


def test_nothing_where_it_is_quick() -> None:
    on, file = console(is_terminal=False)
    before = threading.active_count()
    with progress.looking(on, patience=60) as say:
        say("libraries")
    deadline = time.monotonic() + 10
    while threading.active_count() > before:
        assert time.monotonic() < deadline, "the timer still runs"
    assert file.getvalue() == ""


def test_a_terminal_shows_each_and_keeps_none() -> None:
    on, file = console(is_terminal=True)
    with progress.looking(on) as say:
        for what in ("the flags [here]", "http://[::1]:30000"):
            say(what)
            time.sleep(0.25)
    assert "Looking at the flags [here]" in file.getvalue()
    assert "Looking at http://[::1]:30000" in file.getvalue()
    assert file.getvalue().endswith("\x1b[2K")  # the line is erased


def test_output_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    before = threading.active_count()

    class Full(io.StringIO):
        tried = False

        def write(self, text: str) -> int:
            self.tried = True
            raise OSError(28, "No space left on device")

    file = Full()
    with progress.looking(Console(file=file), patience=0.01):
        deadline = time.monotonic() + 10
        while not file.tried or threading.active_count() > before:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert raised == []


def test_the_doctor_names_what_it_looks_at(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (command.versions, command.plugin, command.patch_points, command.libraries, command.ports):
        monkeypatch.setattr(module, "check", lambda *args, **options: [])
    monkeypatch.setattr(command.flags, "check", lambda *args, **options: command.flags.Checked(()))
    said: list[str] = []
    command.of_machine(["--tp", "8"], said.append)
    assert said == ["these flags, as SGLang resolves them", "versions and patch points", "libraries and GPUs"]


def test_standard_output_stays_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def slow(url, *_: object) -> Server:
        time.sleep(0.1)
        return Server(url.geturl(), ())

    monkeypatch.setattr(command.server, "look_at", slow)
    monkeypatch.setattr(progress.looking.__wrapped__, "__defaults__", (0.02,))
    assert cli.main(["doctor", "--url", "http://h:1", "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("{")
    assert printed.err == "Looking at http://h:1 ...\n"


def test_an_interrupt_is_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> Server:
        raise KeyboardInterrupt

    monkeypatch.setattr(command.server, "look_at", interrupted)
    assert cli.main(["doctor", "--url", "http://h:1"]) == 130
    assert capsys.readouterr().err == "sglang-dcp-block doctor: interrupted\n"
