"""What the CPU environment puts in place of parts of SGLang; a stand-in that does not fit is fatal."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from commands import python, run

from sglang_dcp_block.cpu import cpu_environment, plugin
from sglang_dcp_block.cpu.environment import PRELOAD, SWITCH
from sglang_dcp_block.cpu.preload import sgl_kernel
from sglang_dcp_block.cpu.shims import ShimError, dcp_backends, flashinfer_mla, install_all, platform_check
from sglang_dcp_block.cpu.shims.target import find, replace_function, shadow_global


class TestPreload:
    def test_host_sitecustomize_still_runs(self, tmp_path: Path) -> None:
        (tmp_path / "sitecustomize.py").write_text("print('host', __name__)\n")
        environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
        environ |= cpu_environment(1, environ)
        done = run(sys.executable, "-c", "", **environ)
        assert (done.stdout, done.stderr, done.returncode) == ("host sitecustomize\n", "", 0)

    def test_stub_shadows_sgl_kernel(self) -> None:
        done = python("import sgl_kernel; from sgl_kernel import anything; print(sgl_kernel.__file__); anything(1)")
        assert Path(done.stdout.strip()) == PRELOAD / "sgl_kernel" / "__init__.py"
        assert "NotImplementedError: sgl_kernel.anything needs CUDA" in done.stderr

    def test_stub_has_no_dunder_of_its_own_making(self) -> None:
        assert not hasattr(sgl_kernel, "__wrapped__")

    def test_slots_are_written_in_the_order_of_requests(self) -> None:
        table = torch.zeros(4, 6, dtype=torch.int32)
        rows, starts, ends = torch.tensor([2, 0, 1]), torch.tensor([1, 3, 2]), torch.tensor([4, 5, 2])
        sgl_kernel.assign_req_to_token_pool_cpu(rows, table, starts, ends, torch.tensor([7, 8, 9, 10, 11]), 6)
        expected = [[0, 0, 0, 10, 11, 0], [0] * 6, [0, 7, 8, 9, 0, 0], [0] * 6]
        assert table.tolist() == expected

    @pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed")
    def test_torchvision_can_be_imported(self) -> None:
        done = python("import torch, torchvision; print(torch.ops.torchvision.nms)")
        assert done.stdout == "torchvision.nms\n", done.stderr


class TestPlugin:
    def test_inert_without_the_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(SWITCH, raising=False)
        plugin.register()
        script = (
            "import sys; from sglang_dcp_block.cpu.plugin import register; register();"
            "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'sglang', 'triton')])"
        )
        done = run(sys.executable, "-c", script, **{SWITCH: "0"})
        assert (done.stdout, done.stderr) == ("[]\n", "")

    def test_half_an_environment_is_fatal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(SWITCH, "1")
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        with pytest.raises(SystemExit, match="expected TRITON_INTERPRET=1 in the environment, got '0'"):
            plugin.register()

    def test_bad_base_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SGLANG_DCP_BLOCK_CPU_RAGGED_LSE", "10")
        with pytest.raises(ShimError, match="SGLANG_DCP_BLOCK_CPU_RAGGED_LSE: expected 2 or e, got '10'"):
            flashinfer_mla.install()


class TestDcpBackends:
    @pytest.mark.parametrize("is_mla", [False, True])
    @pytest.mark.parametrize("triton_mla", [False, True])
    def test_a_refusal_names_what_is_accepted(self, is_mla: bool, triton_mla: bool) -> None:
        for backend in ("torch_native", "intel_amx", "flashinfer", "triton", "trtllm_mla"):
            reason = dcp_backends.why_not(2, is_mla, "triton" if not is_mla else "flashinfer", backend, triton_mla)
            accepted = dcp_backends.usable(is_mla, triton_mla)
            assert (reason is None) == (backend in accepted), backend
            if reason is not None:
                assert f"expected the attention backend {' or '.join(accepted)}, which" in reason
                assert f"got {backend}." in reason

    def test_an_sglang_with_blocks_of_its_own_judges_by_itself(self) -> None:
        assert dcp_backends._has_triton_mla(SimpleNamespace(dcp_block_size=None))
        assert not dcp_backends._has_triton_mla(SimpleNamespace())

    def test_its_step_is_the_last_one(self) -> None:
        """So the backends are final, and whether blocks were asked for."""
        spec = importlib.util.find_spec("sglang")
        assert spec is not None
        assert spec.submodule_search_locations
        pipeline = Path(spec.submodule_search_locations[0], "srt", "arg_groups", "pipeline.py").read_text()
        *_, last = re.findall(r"run_hook\((\w+), server_args\)", pipeline)
        assert last == dcp_backends.STEP


class TestTargets:
    @pytest.fixture
    def module(self, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
        made = ModuleType("fake_upstream")
        source = (
            "name = 1\n"
            "def top(a, b=2): return [name for _ in 'x']\n"
            "class Class:\n"
            "    def method(self, a): return lambda: name\n"
            "    def other(self): return 0\n"
        )
        exec(source, made.__dict__)
        monkeypatch.setitem(sys.modules, made.__name__, made)
        return made

    def test_replaces_functions_and_methods(self, module: ModuleType) -> None:
        replace_function("fake_upstream:top", lambda a, b: "new")
        replace_function("fake_upstream:Class.method", lambda self, a: "new method")
        assert (module.top(1, 2), module.Class().method(1)) == ("new", "new method")

    @pytest.mark.parametrize("path", ["gone", "Class.gone", "Gone.method"])
    def test_missing_target_names_itself_and_the_version(self, module: ModuleType, path: str) -> None:
        with pytest.raises(
            ShimError, match=rf"^fake_upstream:{path}: expected in .*SGLang.*, got nothing of that name$"
        ):
            find(f"fake_upstream:{path}")

    def test_missing_module(self) -> None:
        with pytest.raises(ShimError, match=r"no_such_module:x: expected in .*SGLang"):
            find("no_such_module:x")

    def test_other_parameters(self, module: ModuleType) -> None:
        with pytest.raises(ShimError, match=r"fake_upstream:top: expected parameters \['a'\], got \['a', 'b'\] in "):
            replace_function("fake_upstream:top", lambda a: None)
        assert module.top(1) == [1]

    @pytest.mark.parametrize("reader", ["top", "Class.method"])
    def test_shadows_a_global_that_is_read(self, module: ModuleType, reader: str) -> None:
        shadow_global("fake_upstream", "name", 5, readers=(reader,))
        assert module.name == 5

    def test_global_that_is_not_read(self, module: ModuleType) -> None:
        with pytest.raises(ShimError, match=r"fake_upstream:Class.other: expected to read the global 'name', does not"):
            shadow_global("fake_upstream", "name", 5, readers=("top", "Class.other"))
        assert module.name == 1


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
class TestInstalledSglang:
    def test_every_shim_fits_and_the_torch_merge_equals_the_kernel(self) -> None:
        script = """
import torch
from sglang.srt.plugins import load_plugins
from sglang_dcp_block.cpu import plugin, shims
from sglang.srt.layers.dcp import comm
kernel = comm.correct_attn_out
plugin.register()
from sglang.srt.layers.attention import flashinfer_mla_backend
assert flashinfer_mla_backend.BatchPrefillWithRaggedKVCacheWrapper is shims.flashinfer_mla.NaturalRaggedPrefill
assert comm.correct_attn_out is shims.torch_merge.corrected is not kernel
torch.manual_seed(0)
out, lses = torch.randn(3, 4, 16), torch.randn(4, 3, 4)
lses[1, 0], lses[2, 1], lses[:, 2, 3] = float("-inf"), float("nan"), float("-inf")
for natural in (False, True):
    for rank in range(4):
        args = out, lses, rank
        ours = comm.correct_attn_out(*args, None, torch.empty(4, 3, 16), natural)
        theirs = kernel(*args, comm.CPTritonContext(), torch.empty(4, 3, 16), natural)
        torch.testing.assert_close(ours, theirs)
print("fits")
"""
        done = python(script, SGLANG_DCP_BLOCK_CPU_RAGGED_LSE="e", SGLANG_DCP_BLOCK_CPU_TORCH_MERGE="1")
        assert done.stdout.splitlines()[-1:] == ["fits"], done.stderr[-3000:]

    def test_missing_target_ends_the_process_through_load_plugins(self) -> None:
        script = """
from sglang.srt.model_executor import model_runner
del model_runner.adjust_config_with_unaligned_cpu_tp
from sglang.srt import plugins
from sglang_dcp_block.cpu import plugin
plugins.load_plugins_by_group = lambda *a, **k: {"dcp_block_cpu": (plugin.register, None)}
plugins.load_plugins()
print("served on")
"""
        done = python(script)
        assert done.returncode == 1
        assert "served on" not in done.stdout
        target = "sglang.srt.model_executor.model_runner:adjust_config_with_unaligned_cpu_tp"
        assert (
            done.stderr.strip()
            .splitlines()[-1]
            .startswith(f"the CPU environment of sglang-dcp-block cannot be set up: {target}: expected in SGLang ")
        )

    def test_platform_check_is_the_only_use_of_is_cuda(self) -> None:
        spec = importlib.util.find_spec("sglang")
        assert spec is not None
        assert spec.submodule_search_locations
        path = Path(spec.submodule_search_locations[0], *platform_check.MODULE.split(".")[1:]).with_suffix(".py")
        uses = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)]
        assert [node.id for node in uses].count("is_cuda") == 1


def test_install_needs_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    with pytest.raises(
        ShimError, match=r"expected SGLANG_USE_CPU_ENGINE=1 in the environment, got None; start the command"
    ):
        install_all()
