"""The doctor's checks of this machine: each one says ok, and each one can find something wrong."""

from __future__ import annotations

import socket
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from sglang_dcp_block import __version__
from sglang_dcp_block.doctor import child, libraries, patch_points, plugin, ports, versions
from sglang_dcp_block.doctor.child import Ending
from sglang_dcp_block.doctor.findings import Finding, Level, exit_status, note, ok, problem
from sglang_dcp_block.patches import fingerprint

OURS = EntryPoint("dcp_block", "sglang_dcp_block.plugin:register", plugin.GROUP)
GOOD = {"sglang-dcp-block": __version__, "sglang": "0.5.23", "torch": "2", "triton": "3", "flashinfer-python": "0.6"}


def levels(findings: list[Finding]) -> dict[str, Level]:
    return {finding.what: finding.level for finding in findings}


def found(findings: list[Finding], what: str) -> Finding:
    (finding,) = [finding for finding in findings if finding.what == what]
    return finding


def test_only_a_problem_changes_the_exit_status() -> None:
    assert exit_status([]) == 0
    assert exit_status([ok("a", "b", "c"), note("a", "b", "c")]) == 0
    assert exit_status([ok("a", "b", "c"), problem("a", "b", "c", "d")]) == 1


class TestVersions:
    def test_a_machine_with_everything(self) -> None:
        findings = versions.check({**GOOD, "mooncake-transfer-engine": "0.3"}.get)
        assert set(levels(findings).values()) == {Level.OK}
        assert {"Python", "sglang-dcp-block", "sglang", "torch", "triton", "flashinfer", "mooncake"} == set(
            levels(findings)
        )

    def test_a_machine_with_nothing(self) -> None:
        findings = versions.check({}.get)
        assert found(findings, "sglang").advice.endswith("pip install sglang==0.5.23")
        assert [what for what, level in levels(findings).items() if level is Level.PROBLEM] == [
            "sglang",
            "torch",
            "triton",
        ]
        assert found(findings, "mooncake").level is Level.NOTE

    def test_what_a_server_cannot_do_without(self) -> None:
        findings = versions.check(GOOD.get, needed={"flashinfer", "mooncake"})
        assert levels(findings)["flashinfer"] is Level.OK
        assert levels(findings)["mooncake"] is Level.PROBLEM
        assert "pip install mooncake-transfer-engine" in found(findings, "mooncake").advice

    def test_another_sglang(self) -> None:
        finding = found(versions.check({**GOOD, "sglang": "0.5.99"}.get), "sglang")
        assert (finding.level, finding.got) == (Level.PROBLEM, "0.5.99, expected 0.5.23")

    def test_another_copy_of_the_plugin_than_the_installed_one(self) -> None:
        finding = found(versions.check({**GOOD, "sglang-dcp-block": "9.9"}.get), "sglang-dcp-block")
        assert (finding.level, finding.got) == (Level.PROBLEM, f"{__version__} runs, 9.9 is installed")

    def test_mooncake_by_any_of_its_names(self) -> None:
        finding = found(versions.check({**GOOD, "mooncake-transfer-engine-non-cuda": "0.3"}.get), "mooncake")
        assert (finding.level, finding.got) == (Level.OK, "0.3 (mooncake-transfer-engine-non-cuda)")


class TestPlugin:
    def test_found_and_allowed(self) -> None:
        for environ in ({}, {"SGLANG_PLUGINS": "other, dcp_block"}):
            assert set(levels(plugin.check(environ, [OURS])).values()) == {Level.OK}

    def test_not_installed(self) -> None:
        assert levels(plugin.check({}, []))["entry point"] is Level.PROBLEM

    def test_an_entry_point_of_this_name_that_is_not_ours(self) -> None:
        finding = found(plugin.check({}, [EntryPoint("dcp_block", "evil:register", plugin.GROUP)]), "entry point")
        assert finding.level is Level.PROBLEM
        assert "evil:register" in finding.got

    @pytest.mark.parametrize("text", ["other", "dcp_block_cpu", "dcp-block"])
    def test_left_out_of_the_list(self, text: str) -> None:
        assert levels(plugin.check({"SGLANG_PLUGINS": text}, [OURS]))["SGLANG_PLUGINS"] is Level.PROBLEM

    def test_other_plugins_are_named(self) -> None:
        other = EntryPoint("other", "other.plugin:register", plugin.GROUP)
        finding = found(plugin.check({}, [OURS, other]), "other plugins")
        assert (finding.level, finding.got) == (Level.NOTE, "other")

    @pytest.mark.parametrize(("text", "level"), [("64", Level.NOTE), ("auto", Level.NOTE), ("-1", Level.PROBLEM)])
    def test_a_block_size_in_the_environment(self, text: str, level: Level) -> None:
        environ = {"SGLANG_DCP_BLOCK_SIZE": text}
        assert levels(plugin.check(environ, [OURS]))["SGLANG_DCP_BLOCK_SIZE"] is level

    def test_a_block_size_in_the_environment_that_is_none(self) -> None:
        """With flags it is judged with them: one of them may win over it, and it is one problem at most."""
        environ = {"SGLANG_DCP_BLOCK_SIZE": "nonsense"}
        for has_flags, level in ((False, Level.PROBLEM), (True, Level.NOTE)):
            finding = found(plugin.check(environ, [OURS], has_flags=has_flags), "SGLANG_DCP_BLOCK_SIZE")
            assert finding.level is level
            assert finding.got == "expected a positive number of tokens or 'auto', got 'nonsense'"


class TestPatchPoints:
    @pytest.fixture
    def tree(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A tree of one module, whose two functions are known as version 1."""
        (tmp_path / "mod.py").write_text("def f():\n    return 1\n\n\ndef g():\n    return 2\n")
        known = {"1": {f"sglang.mod.{name}": fingerprint.from_tree(f"sglang.mod.{name}", tmp_path) for name in "fg"}}
        monkeypatch.setattr(fingerprint, "known", lambda: known)
        return tmp_path

    def check(self, tree: Path, version: str = "1") -> list[Finding]:
        fingerprint._parsed.cache_clear()
        return patch_points.check(tree, version)

    def test_known_source(self, tree: Path) -> None:
        assert levels(self.check(tree)) == {"sglang.mod.f": Level.OK, "sglang.mod.g": Level.OK}

    def test_other_source_and_a_missing_target(self, tree: Path) -> None:
        (tree / "mod.py").write_text("def f():\n    return 3\n")
        findings = self.check(tree)
        assert [finding.level for finding in findings] == [Level.PROBLEM] * 2
        assert "expected" in findings[0].got
        assert findings[1].got == "missing: mod.py defines no g"

    def test_a_file_that_is_no_python(self, tree: Path) -> None:
        (tree / "mod.py").write_text("def f(:\n")
        assert [finding.level for finding in self.check(tree)] == [Level.PROBLEM] * 2

    def test_another_version(self, tree: Path) -> None:
        (finding,) = self.check(tree, "2")
        assert finding.level is Level.PROBLEM
        assert finding.got == "2 of an unknown SGLang, 2; 0 of their targets are missing"

    def test_no_sglang(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def gone() -> Path:
            raise fingerprint.TargetMissingError("SGLang is not installed in this environment")

        monkeypatch.setattr(fingerprint, "installed_tree", gone)
        (finding,) = patch_points.check()
        assert (finding.level, finding.got) == (Level.PROBLEM, "SGLang is not installed in this environment")

    def test_the_installed_sglang(self) -> None:
        """Every known target of the SGLang that the tests run with."""
        fingerprint._parsed.cache_clear()
        findings = patch_points.check()
        assert {finding.what for finding in findings} == set(fingerprint.known()["0.5.23"])
        assert {finding.level for finding in findings} == {Level.OK}


class TestLibraries:
    def broken(self, name: str) -> object:
        raise OSError(f"{name}: cannot open shared object file")

    @pytest.mark.parametrize(("required", "level"), [(False, Level.NOTE), (True, Level.PROBLEM)])
    def test_ibverbs_that_does_not_load(self, required: bool, level: Level) -> None:
        finding = libraries.ibverbs(required, self.broken)
        assert finding.level is level
        assert "libibverbs.so.1: cannot open" in finding.got
        assert "apt-get install libibverbs1" in finding.advice

    def test_ibverbs_that_loads(self) -> None:
        assert libraries.ibverbs(True, lambda name: None).level is Level.OK

    @pytest.mark.parametrize(
        ("ending", "level", "advice"),
        [
            (Ending(True, "", "a warning"), Level.OK, ""),
            (
                Ending(False, "", "ModuleNotFoundError: No module named 'mooncake'"),
                Level.PROBLEM,
                "pip install mooncake",
            ),
            (
                Ending(False, "", "ImportError: libibverbs.so.1: cannot open"),
                Level.PROBLEM,
                "apt-get install libibverbs1",
            ),
            (Ending(False, "", "ended by signal 11"), Level.PROBLEM, "Mooncake anew"),
        ],
    )
    def test_mooncake(self, ending: Ending, level: Level, advice: str) -> None:
        finding = libraries.mooncake(True, lambda: ending)
        assert finding.level is level
        assert advice in finding.advice

    def test_rdma_devices(self, tmp_path: Path) -> None:
        assert libraries.rdma(tmp_path).level is Level.NOTE
        assert libraries.rdma(tmp_path / "gone").level is Level.NOTE
        (tmp_path / "mlx5_0").mkdir()
        assert libraries.rdma(tmp_path) == ok(libraries.PART, "RDMA devices", "mlx5_0")

    @pytest.mark.parametrize(
        ("ending", "level", "got"),
        [
            (Ending(True, "H200, H200, A10\n", ""), Level.OK, "2 x H200, 1 x A10"),
            (Ending(True, "\n", ""), Level.NOTE, "none"),
            (Ending(False, "", "ModuleNotFoundError: No module named 'torch'"), Level.NOTE, "unknown without torch"),
            (Ending(False, "", "ended by signal 6"), Level.PROBLEM, "torch could not be asked: ended by signal 6"),
        ],
    )
    def test_gpus(self, ending: Ending, level: Level, got: str) -> None:
        finding = libraries.gpus(lambda: ending)
        assert (finding.level, finding.got) == (level, got)


class TestChild:
    def test_output_and_last_error(self) -> None:
        assert child.run(["-c", "print(1)"], 60) == Ending(True, "1\n", "")
        ending = child.run(["-c", "import nothing_of_this_name"], 60)
        assert (ending.ok, ending.error) == (False, "ModuleNotFoundError: No module named 'nothing_of_this_name'")

    def test_colours_and_what_a_bar_drew_before_are_left_out(self) -> None:
        code = r"import sys; sys.exit('50 %\r\x1b[31mno\x07 room\x1b[0m')"
        assert child.run(["-c", code], 60).error == r"no\x07 room"

    def test_a_crash_and_a_silent_end(self) -> None:
        assert child.run(["-c", "import os; os.kill(os.getpid(), 11)"], 60).error == "ended by signal 11"
        assert child.run(["-c", "raise SystemExit(3)"], 60).error == "ended with status 3"

    def test_one_that_hangs(self) -> None:
        assert child.run(["-c", "import time; time.sleep(60)"], 0.5) == Ending(False, "", "no answer in 0 s")

    def test_no_python(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "executable", "/gone/python")
        assert "cannot start /gone/python" in child.run([], 1).error


class TestPorts:
    def test_free_and_in_use(self) -> None:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen()
            port = server.getsockname()[1]
            (finding,) = ports.check({"--port": port})
            assert finding.level is Level.PROBLEM
            assert f"in use on 127.0.0.1, {finding.got}".endswith("in use on 127.0.0.1")
            (finding,) = ports.check({"--port": port}, required=False)
            assert finding.level is Level.NOTE
        assert ports.check({"--port": port}) == [ok(ports.PART, f"--port {port}", "free on 127.0.0.1")]

    @pytest.mark.parametrize(("port", "host"), [(0xFFFF, "192.0.2.1"), (70000, "127.0.0.1"), (1, "no host")])
    def test_an_address_that_is_not_here(self, port: int, host: str) -> None:
        (finding,) = ports.check({"--port": port}, host)
        assert finding.level is Level.PROBLEM
        assert "cannot listen" in finding.got
