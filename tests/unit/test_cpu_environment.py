"""The CPU environment: its variables, its command line, its stand-ins, and that a shim that does not fit is fatal."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest
import torch

from sglang_dcp_block.cpu import cpu_environment, plugin
from sglang_dcp_block.cpu.environment import DEFAULTS, PRELOAD, REQUIRED, SWITCH
from sglang_dcp_block.cpu.preload import sgl_kernel
from sglang_dcp_block.cpu.shims import (
    ShimError,
    dcp_backends,
    flashinfer_mla,
    host_cache,
    install_all,
    platform_check,
    torch_merge,
)
from sglang_dcp_block.cpu.shims.target import find, replace_function, shadow_global
from sglang_dcp_block.cpu.shims.torch_on_cpu import TorchOnCpu

CLI = [sys.executable, "-m", "sglang_dcp_block.cpu"]


def run(*command: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env={**os.environ, **changes}, capture_output=True, text=True, timeout=120)


def python(script: str, *, ranks: int = 1, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run a script inside the environment."""
    return run(sys.executable, "-c", script, **{**cpu_environment(ranks), **changes})


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

    def test_allow_list_of_plugins_is_widened(self) -> None:
        assert cpu_environment(1, {"SGLANG_PLUGINS": "a, b"})["SGLANG_PLUGINS"] == "a,b,dcp_block_cpu"
        assert "SGLANG_PLUGINS" not in cpu_environment(1, {"SGLANG_PLUGINS": "dcp_block_cpu"})
        assert "SGLANG_PLUGINS" not in cpu_environment(1, {})

    def test_twice_is_once(self) -> None:
        once = {"PYTHONPATH": "/a", "SGLANG_PLUGINS": "b"}
        once |= cpu_environment(3, once)
        assert once | cpu_environment(3, once) == once

    @pytest.mark.parametrize("ranks", [0, -1])
    def test_refuses_less_than_one_rank(self, ranks: int) -> None:
        with pytest.raises(ValueError, match=f"ranks: expected at least 1, got {ranks}"):
            cpu_environment(ranks)

    def test_refuses_no_cores(self) -> None:
        with pytest.raises(ValueError, match="cores: expected at least one core, got none"):
            cpu_environment(1, {}, [])


class TestCommandLine:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "expected a command after --, got none"),
            (["--"], "expected a command after --, got none"),
            (["--ranks", "0", "--", "true"], "argument --ranks: expected a whole number of at least 1, got '0'"),
            (["--ranks", "two", "--", "true"], "argument --ranks: expected a whole number of at least 1, got 'two'"),
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
    @pytest.mark.parametrize("with_plugin", [False, True])
    def test_a_refusal_names_what_is_accepted(self, is_mla: bool, with_plugin: bool) -> None:
        for backend in ("torch_native", "intel_amx", "flashinfer", "triton", "trtllm_mla"):
            reason = dcp_backends.why_not(2, is_mla, "triton" if not is_mla else "flashinfer", backend, with_plugin)
            accepted = dcp_backends.usable(is_mla, with_plugin)
            assert (reason is None) == (backend in accepted), backend
            if reason is not None:
                assert f"expected the attention backend {' or '.join(accepted)}, which" in reason
                assert f"got {backend}." in reason

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


def softmax_loop(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> tuple[list, list]:
    """Attention written out: ``[T][H]`` outputs and natural log-sum-exps."""
    group = q.shape[1] // k.shape[1]
    outs, lses = [], []
    for t in range(q.shape[0]):
        seen = range(k.shape[0] if not causal else max(0, t + 1 + k.shape[0] - q.shape[0]))
        for h in range(q.shape[1]):
            weights = [math.exp(scale * float(q[t, h] @ k[s, h // group])) for s in seen]
            total = sum(weights)
            mixed = sum(
                (w / total * v[s, h // group] for s, w in zip(seen, weights, strict=True)), torch.zeros(v.shape[2])
            )
            outs.append(mixed)
            lses.append(math.log(total) if total else -math.inf)
    return outs, lses


class TestFlashInferWrappers:
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize(("queries", "keys", "kv_heads"), [(3, 7, 1), (4, 4, 2), (1, 5, 4), (5, 3, 4), (2, 0, 1)])
    def test_attention(self, queries: int, keys: int, kv_heads: int, causal: bool) -> None:
        torch.manual_seed(0)
        q, k, v = torch.randn(queries, 4, 6), torch.randn(keys, kv_heads, 6), torch.randn(keys, kv_heads, 5)
        out, lse = flashinfer_mla.attention(q, k, v, 0.4, causal)
        expected_out, expected_lse = softmax_loop(q, k, v, 0.4, causal)
        torch.testing.assert_close(out.reshape(-1, 5), torch.stack(expected_out))
        torch.testing.assert_close(lse.reshape(-1), torch.tensor(expected_lse))

    def test_paged_gathers_rows_and_returns_base_2(self) -> None:
        torch.manual_seed(0)
        latent, rope, rows = (
            torch.randn(20, 1, 8),
            torch.randn(20, 1, 2),
            torch.tensor([9, 3, 4, 17], dtype=torch.int32),
        )
        q_nope, q_pe = torch.randn(3, 4, 8), torch.randn(3, 4, 2)
        wrapper = flashinfer_mla.PagedMla(torch.empty(1), backend="auto")
        qo, kv = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 3, 3, 4])  # the second request has no key here
        float32 = torch.float32
        wrapper.plan(qo, kv, rows, torch.tensor([3, 0, 1]), 4, 8, 2, 1, False, 0.3, float32, float32)
        rows.zero_()  # the plan is a snapshot
        out, lse = wrapper.run(q_nope, q_pe, latent, rope, return_lse=True)
        for request, own in enumerate([[9, 3, 4], [], [17]]):
            q, k = torch.cat([q_nope, q_pe], -1)[request : request + 1], torch.cat([latent, rope], -1)[own]
            expected_out, expected_lse = softmax_loop(q, k, latent[own], 0.3, False)
            torch.testing.assert_close(out[request], torch.stack(expected_out))
            torch.testing.assert_close(lse[request] / math.log2(math.e), torch.tensor(expected_lse))
        assert wrapper.run(q_nope, q_pe, latent, rope, out=out) is out

    def test_paged_refuses_what_flashinfer_refuses(self) -> None:
        wrapper = flashinfer_mla.PagedMla(torch.empty(1))
        one = torch.tensor([0, 1])
        with pytest.raises(ValueError, match=r"expected kv_len_arr \[1\], got \[2\]"):
            wrapper.plan(one, one, one, torch.tensor([2]), 1, 8, 2, 1, False, 1.0, torch.float32, torch.float32)
        with pytest.raises(ValueError, match="expected page_size 1, got 4"):
            wrapper.plan(one, one, one, torch.tensor([1]), 1, 8, 2, 4, False, 1.0, torch.float32, torch.float32)

    @pytest.mark.parametrize(
        ("wrapper_class", "base"), [(flashinfer_mla.RaggedPrefill, 2.0), (flashinfer_mla.NaturalRaggedPrefill, math.e)]
    )
    def test_ragged_and_its_base(self, wrapper_class: type[flashinfer_mla.RaggedPrefill], base: float) -> None:
        torch.manual_seed(0)
        q, k, v = torch.randn(5, 2, 6), torch.randn(6, 2, 6), torch.randn(6, 2, 4)
        wrapper = wrapper_class(torch.empty(1), "NHD", backend="auto")
        wrapper.begin_forward(torch.tensor([0, 2, 5]), torch.tensor([0, 3, 6]), num_qo_heads=2)
        out, lse = wrapper.forward_return_lse(q, k, v, causal=True, sm_scale=0.5, logits_soft_cap=0.0)
        for queries, keys in ((slice(0, 2), slice(0, 3)), (slice(2, 5), slice(3, 6))):
            expected_out, expected_lse = softmax_loop(q[queries], k[keys], v[keys], 0.5, True)
            torch.testing.assert_close(out[queries].reshape(-1, 4), torch.stack(expected_out))
            torch.testing.assert_close(lse[queries].reshape(-1) * math.log(base), torch.tensor(expected_lse))
        torch.testing.assert_close(wrapper.forward(q, k, v, causal=True, sm_scale=0.5), out)


@pytest.mark.parametrize("natural", [True, False])
def test_torch_merge_adds_up_to_full_attention(natural: bool) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 6), torch.randn(9, 1, 6), torch.randn(9, 1, 5)
    shards = [[0, 3, 5], [], [1, 2, 4, 6, 7, 8]]  # the second rank holds nothing
    parts = [flashinfer_mla.attention(q, k[own], v[own], 0.4, False) for own in shards]
    lses = torch.stack([lse for _, lse in parts]) * (1 if natural else math.log2(math.e))
    merged = torch.zeros(4, 2, 5)
    for rank, (out, _) in enumerate(parts):
        scaled, total = torch_merge.corrected(out, lses, rank, None, torch.empty(4, 2, 5), natural)
        merged += scaled
    full, lse = flashinfer_mla.attention(q, k, v, 0.4, False)
    torch.testing.assert_close(merged.transpose(0, 1), full)
    torch.testing.assert_close(total, lse if natural else lse * math.log2(math.e))


class TestHostCache:
    """Each transfer against a loop over rows; device rows of a layer, host memory by row and by page."""

    LAYERS, PAGE, WIDTH = 3, 4, 2
    HOST = torch.tensor([*range(20, 24), *range(4, 8)])  # rows of the host's pages 5 and 1
    DEVICE = torch.tensor([*range(8, 12), *range(16, 20)])

    @pytest.fixture
    def device(self) -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [torch.randn(24, 1, self.WIDTH) for _ in range(self.LAYERS)]

    def addresses(self, layers: list[torch.Tensor]) -> torch.Tensor:
        return torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64)

    def moved(self, device: list[torch.Tensor]) -> torch.Tensor:
        """``[layer, host row, 1, width]`` after all layers went to the host."""
        host = torch.zeros(self.LAYERS, 28, 1, self.WIDTH)
        for layer, rows in enumerate(device):
            for host_row, row in zip(self.HOST.tolist(), self.DEVICE.tolist(), strict=True):
                host[layer, host_row] = rows[row]
        return host

    def assert_back(self, back: torch.Tensor, layer: torch.Tensor) -> None:
        assert torch.equal(back[self.DEVICE], layer[self.DEVICE])
        assert back.count_nonzero() == self.DEVICE.numel() * self.WIDTH, "something else was written"

    # From the device to the host, and back.
    DOWN: ClassVar[dict[str, torch.Tensor]] = {"src_indices": DEVICE, "dst_indices": HOST}
    UP: ClassVar[dict[str, torch.Tensor]] = {"src_indices": HOST, "dst_indices": DEVICE}
    ITEM = WIDTH * 4

    def test_layer_first(self, device: list[torch.Tensor]) -> None:
        host, direct = torch.zeros(2, self.LAYERS, 28, 1, self.WIDTH)
        tables = {"src_layers": self.addresses(device), "dst_layers": self.addresses([*host])}
        host_cache.all_layers(**tables, **self.DOWN, item_size=self.ITEM, num_layers=self.LAYERS)
        host_cache.direct(src_layers=device, dst_layers=[*direct], **self.DOWN, page_size=self.PAGE)
        assert torch.equal(host, self.moved(device))
        assert torch.equal(direct, host)
        for layer in range(self.LAYERS):
            back, same = torch.zeros(2, 24, 1, self.WIDTH)
            host_cache.one_layer(src=host[layer], dst=back, **self.UP, item_size=self.ITEM)
            host_cache.direct(src_layers=[host[layer]], dst_layers=[same], **self.UP, page_size=self.PAGE)
            self.assert_back(back, device[layer])
            self.assert_back(same, device[layer])

    def test_page_first(self, device: list[torch.Tensor]) -> None:
        host, row = torch.zeros(28, self.LAYERS, 1, self.WIDTH), self.ITEM * self.LAYERS
        host_cache.all_layers_to_pages(
            src_layers=self.addresses(device), dst=host, **self.DOWN, item_size=self.ITEM, dst_layout_dim=row,
            num_layers=self.LAYERS,
        )  # fmt: skip
        assert torch.equal(host.transpose(0, 1), self.moved(device))
        for layer in range(self.LAYERS):
            back = torch.zeros(24, 1, self.WIDTH)
            sizes = {"item_size": self.ITEM, "src_layout_dim": row}
            host_cache.one_layer_of_pages(src=host, dst=back, **self.UP, layer_id=layer, **sizes)
            self.assert_back(back, device[layer])

    def test_page_first_direct(self, device: list[torch.Tensor]) -> None:
        """Pages are moved whole, by the first of their rows: what the others say is not read."""
        host = torch.zeros(7, self.LAYERS, self.PAGE, 1, self.WIDTH)
        rows = self.DEVICE.clone()
        rows[1 :: self.PAGE] = 0
        host_cache.all_layers_direct_to_pages(
            src_ptrs=device, dst_ptrs=[host], src_indices=rows, dst_indices=self.HOST, page_size=self.PAGE
        )
        assert torch.equal(host.transpose(0, 1).reshape(self.LAYERS, 28, 1, self.WIDTH), self.moved(device))
        for layer in range(self.LAYERS):
            back = torch.zeros(24, 1, self.WIDTH)
            ways = {"src_ptrs": [host], "dst_ptrs": [back], "src_indices": self.HOST, "dst_indices": rows}
            host_cache.one_layer_direct_of_pages(**ways, layer_id=layer, page_size=self.PAGE)
            self.assert_back(back, device[layer])

    def test_nothing_to_move(self, device: list[torch.Tensor]) -> None:
        none, table = self.HOST[:0], self.addresses(device)
        rows = {"src_indices": none, "dst_indices": none, "item_size": 8, "num_layers": self.LAYERS}
        host_cache.all_layers(src_layers=table, dst_layers=table, **rows)
        host_cache.all_layers_to_pages(src_layers=table, dst=device[0], dst_layout_dim=8, **rows)

    @pytest.mark.parametrize(
        ("src", "dst", "text"),
        [
            (HOST.int(), DEVICE, "source rows: expected int64, got torch.int32"),
            (HOST, DEVICE - 9, "destination rows: expected none below 0, got -1"),
            (HOST[:4], DEVICE, "expected as many source as destination rows, in pages of 4, got 4 and 8"),
            (HOST[:6], DEVICE[:6], "expected as many source as destination rows, in pages of 4, got 6 and 6"),
        ],
    )
    def test_rows_that_a_kernel_would_not_take(self, src: torch.Tensor, dst: torch.Tensor, text: str) -> None:
        layers = [torch.zeros(30, 1, self.WIDTH)]
        rows = {"src_indices": src, "dst_indices": dst}
        with pytest.raises(ValueError, match=text):
            host_cache.direct(src_layers=layers, dst_layers=layers, **rows, page_size=self.PAGE)

    def test_the_number_of_layers_is_that_of_the_table(self, device: list[torch.Tensor]) -> None:
        table = self.addresses(device)
        with pytest.raises(ValueError, match="expected the addresses of 4 layers, got 3"):
            host_cache.all_layers(src_layers=table, dst_layers=table, **self.DOWN, item_size=8, num_layers=4)


def test_torch_on_cpu() -> None:
    stand_in = TorchOnCpu()
    assert stand_in.empty(3, dtype=torch.int32, device="cuda").device.type == "cpu"
    assert not stand_in.zeros((2,), device="cpu", pin_memory=True).is_pinned()
    assert stand_in.empty((2,), device="meta").device.type == "meta"
    assert stand_in.cumsum is torch.cumsum
    event = stand_in.cuda.Event()
    event.record(stand_in.cuda.current_stream())
    event.synchronize()
    assert event.query()


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
