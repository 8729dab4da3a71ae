"""The CPU environment: its variables and its command line."""

from __future__ import annotations

import ast
import json
import os
import sys
from pathlib import Path

import pytest
from commands import run

from sglang_dcp_block.cpu import cpu_environment
from sglang_dcp_block.cpu.environment import DEFAULTS, MAX_RANKS, PRELOAD, REQUIRED, SCRIPTS

CLI = [sys.executable, "-m", "sglang_dcp_block.cpu"]


class TestVariables:
    @pytest.mark.parametrize(
        ("ranks", "cores", "bound"),
        [(1, [0], "0"), (2, [0, 1], "0|1"), (5, [3, 5], "3|5|3|5|3"), (1, [2, 9], "2")],
    )
    def test_one_core_a_rank_in_turn(self, ranks: int, cores: list[int], bound: str) -> None:
        assert cpu_environment(ranks, {}, cores)["SGLANG_CPU_OMP_THREADS_BIND"] == bound

    def test_cores_default_to_those_of_this_process(self) -> None:
        cores = sorted(os.sched_getaffinity(0))
        bound = cpu_environment(len(cores), {})["SGLANG_CPU_OMP_THREADS_BIND"]
        assert [int(core) for core in bound.split("|")] == cores

    def test_required_wins_over_what_was_set_and_defaults_do_not(self) -> None:
        old = dict.fromkeys([*REQUIRED, *DEFAULTS], "mine")
        new = cpu_environment(1, old)
        assert {name: new[name] for name in REQUIRED} == REQUIRED
        assert not set(new) & set(DEFAULTS)
        assert DEFAULTS.items() <= cpu_environment(1, {}).items()

    def test_path_keeps_its_entries_behind_the_preload_folder(self) -> None:
        assert cpu_environment(1, {"PYTHONPATH": "/a::/b"})["PYTHONPATH"].split(":") == [str(PRELOAD), "/a", "/b"]
        assert cpu_environment(1, {})["PYTHONPATH"] == str(PRELOAD)

    def test_programs_of_this_python_come_first(self) -> None:
        """Nobody has to activate the virtual environment, or gets the system's Python without SGLang."""
        assert Path(SCRIPTS, "sglang").exists()
        assert cpu_environment(1, {"PATH": f"/a:{SCRIPTS}:/b"})["PATH"] == f"{SCRIPTS}:/a:/b"
        assert cpu_environment(1, {})["PATH"] == f"{SCRIPTS}:{os.defpath}"

    def test_allow_list_of_plugins_is_widened(self) -> None:
        assert cpu_environment(1, {"SGLANG_PLUGINS": "a, b"})["SGLANG_PLUGINS"] == "a,b,dcp_block_cpu"
        assert "SGLANG_PLUGINS" not in cpu_environment(1, {"SGLANG_PLUGINS": "dcp_block_cpu"})
        assert "SGLANG_PLUGINS" not in cpu_environment(1, {})

    def test_twice_is_once(self) -> None:
        once = {"PATH": "/bin", "PYTHONPATH": "/a", "SGLANG_PLUGINS": "b"}
        once |= cpu_environment(3, once)
        assert once | cpu_environment(3, once) == once

    @pytest.mark.parametrize("ranks", [0, -1, MAX_RANKS + 1, 10**30])
    def test_refuses_other_numbers_of_ranks(self, ranks: int) -> None:
        with pytest.raises(ValueError, match=f"ranks: expected 1 to {MAX_RANKS}, got {ranks}"):
            cpu_environment(ranks)
        assert cpu_environment(MAX_RANKS)

    def test_refuses_no_cores(self) -> None:
        with pytest.raises(ValueError, match="cores: expected at least one core, got none"):
            cpu_environment(1, {}, [])


class TestCommandLine:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "expected a command after --, got none"),
            (["--"], "expected a command after --, got none"),
            (["--ranks", "0", "--", "true"], "argument --ranks: expected a whole number from 1 to 1024, got '0'"),
            (["--ranks", "two", "--", "true"], "argument --ranks: expected a whole number from 1 to 1024, got 'two'"),
            (["--ranks", "1025", "--", "true"], "argument --ranks: expected a whole number from 1 to 1024, got '1025'"),
            (["--print", "--", "echo", "a b"], "--print runs nothing: expected no command, got \"echo 'a b'\""),
        ],
    )
    def test_bad_arguments(self, arguments: list[str], message: str) -> None:
        done = run(*CLI, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.splitlines()[-1] == f"python -m sglang_dcp_block.cpu: error: {message}"

    def test_help_has_examples(self) -> None:
        done = run(*CLI, "--help")
        assert done.returncode == 0
        assert "python -m sglang_dcp_block.cpu --ranks 2 -- python my_engine_script.py" in done.stdout

    @pytest.mark.parametrize("status", [0, 1, 7, 255])
    def test_exit_status_is_the_commands(self, status: int) -> None:
        assert run(*CLI, "--", "sh", "-c", f"exit {status}").returncode == status

    def test_a_signal_ends_the_command_itself(self) -> None:
        assert run(*CLI, "--", "sh", "-c", "kill -TERM $$").returncode == -15

    def test_command_may_have_options_of_its_own(self) -> None:
        done = run(
            *CLI, "--ranks", "3", "--", sys.executable, "-c", "import sys; print(sys.argv)", "--ranks", "--print"
        )
        assert ast.literal_eval(done.stdout) == ["-c", "--ranks", "--print"]

    def test_command_sees_the_environment(self) -> None:
        script = "import json, os; print(json.dumps(dict(os.environ)))"
        done = run(*CLI, "--ranks", "3", "--", sys.executable, "-c", script)
        assert cpu_environment(3).items() <= json.loads(done.stdout).items()

    def test_a_command_is_found_beside_this_python(self) -> None:
        done = run(*CLI, "--", "python", "-c", "import sys; print(sys.prefix)", PATH="/usr/bin:/bin")
        assert done.stdout.strip() == sys.prefix

    def test_variables_that_cannot_be_written(self) -> None:
        done = run("sh", "-c", '"$@" > /dev/full', "sh", *CLI, "--print")
        assert (done.returncode, done.stderr) == (
            2,
            "python -m sglang_dcp_block.cpu: error: expected to write to standard output, got: No space left on device\n",
        )

    def test_command_not_found(self) -> None:
        done = run(*CLI, "--", "no-such-command")
        assert done.returncode == 127
        assert done.stderr == "python -m sglang_dcp_block.cpu: error: command not found: no-such-command\n"

    def test_command_not_executable(self, tmp_path: Path) -> None:
        file = tmp_path / "data"
        file.write_text("")
        done = run(*CLI, "--", str(file))
        assert done.returncode == 126
        assert done.stderr == f"python -m sglang_dcp_block.cpu: error: cannot run {file}: Permission denied\n"

    def test_print_is_shell_that_sets_the_same(self) -> None:
        script = 'eval "$("$@")"; exec env -0'
        strange = "/with space:/with'quote"
        done = run("bash", "-c", script, "bash", *CLI, "--ranks", "2", "--print", PYTHONPATH=strange)
        got = dict(line.split("=", 1) for line in done.stdout.split("\0") if line)
        assert cpu_environment(2, {**os.environ, "PYTHONPATH": strange}).items() <= got.items()
