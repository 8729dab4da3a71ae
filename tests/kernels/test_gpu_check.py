"""``make gpu-check`` in the interpreter: it passes, says that it saw no GPU, and fails where something is wrong."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.gpu_check import __main__ as program
from sglang_dcp_block.gpu_check import attention, checks, report, simulation
from sglang_dcp_block.gpu_check.checks import Scale
from sglang_dcp_block.kernels import neutralise

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch):
    """One layout, one step."""
    scale = Scale(CPU, 100, 40, (DcpLayout(2, 4),), simulation.Sizes(4, 24, 1, 8, 4, 4), steps=1)
    monkeypatch.setattr(Scale, "of", lambda device: scale)
    return scale


def test_passes_with_torch_triton_and_numpy_alone(tmp_path: Path):
    """In a process that can import neither SGLang nor rich."""
    script = (
        "import sys; sys.modules.update(dict.fromkeys(['sglang', 'rich', 'flashinfer', 'sgl_kernel']))\n"
        "from sglang_dcp_block.gpu_check.__main__ import main; sys.exit(main([]))"
    )
    environ = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    *_, verdict, last = done.stdout.splitlines()
    assert last == program.NOT_ON_A_GPU
    assert verdict.endswith("s. Everything held.")
    for name, _ in checks.CHECKS:
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(name)]
        assert ("skipped" in line) == (name == "CUDA graph replay"), line
        assert ("held" in line) == (name != "CUDA graph replay"), line


def test_a_required_gpu_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(program, "run_checks", lambda device: pytest.fail("nothing is checked"))
    assert program.main(["--require-gpu"]) == program.NO_GPU == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert "error: --require-gpu: expected a CUDA device, torch" in said.err


@pytest.mark.parametrize("package", ["torch", "triton", "numpy"])
def test_a_package_that_is_missing_is_2(package, capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))
    with pytest.raises(SystemExit) as end:
        program.main([])
    assert end.value.code == 2
    assert f"expected {package} in this Python, got none: pip install {package}" in capsys.readouterr().err


def run(capsys) -> tuple[int, dict[str, str]]:
    """(status, result by check)"""
    status = program.main([])
    lines = capsys.readouterr().out.splitlines()
    return status, {
        name: next(line for line in lines if line.strip().startswith(name)).split() for name, _ in checks.CHECKS
    }


def test_report_with_rich(small, capsys):
    status, results = run(capsys)
    assert status == 0
    assert all("held" in words or "skipped" in words for words in results.values())


def broken_neutralise(out, lse, indptr):
    out[torch.diff(indptr[: len(out) + 1]) == 0] = 0  # and leaves the LSE


def unmoved(original):
    return lambda slots, layout, out=None: slots if out is None else out.copy_(slots)


def rows_of_single_tokens(original):
    return lambda slots, layout, out: out.copy_(slots // layout.dcp_size)


def without_rank_1(original):
    def merge(outs, lses, merged):
        lses[1] = -torch.inf
        original(outs, lses, merged)

    return merge


FAULTS = {  # where, what is broken, how, and the check that must see it
    "the write door does nothing": (simulation, "place_slots", unmoved, "attention over ranks"),
    "the checked map does nothing": (checks, "place_slots", unmoved, "slot maps"),
    "rows are those of B = 1": (simulation, "slot_rows", rows_of_single_tokens, "attention over ranks"),
    "rows are off by one": (checks, "build_kv_indices", lambda f: lambda *a: f(*a).add_(1), "rows of requests"),
    "a stream is rotated": (checks, "compact_kv_indices", lambda f: lambda *a: f(*a).roll(1), "slots of a stream"),
    "long runs come last": (checks, "long_runs_first", lambda f: lambda pages: f(pages).flip(0), "orders of pages"),
    "pages are not grouped": (checks, "group_pages", lambda f: lambda pages, *lens, **sizes: pages, "orders of pages"),
    "empty requests keep an LSE": (checks, "neutralise_empty", lambda f: broken_neutralise, "neutral element"),
    "nothing is made neutral": (simulation, "neutralise_empty", lambda f: lambda *a: None, "attention over ranks"),
    "a rank is left out": (attention, "merge", without_rank_1, "attention over ranks"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_its_check(fault, small, capsys, monkeypatch):
    owner, name, make, check = FAULTS[fault]
    monkeypatch.setattr(owner, name, make(getattr(owner, name)))
    status, results = run(capsys)
    assert status == 1
    assert [name for name, words in results.items() if "FAILED" in words] == [check]


def test_a_crash_is_a_failure(small, capsys, monkeypatch):
    monkeypatch.setattr(neutralise, "_neutralise_kernel", None)
    status, results = run(capsys)
    assert status == 1
    assert "FAILED" in results["neutral element"]
    assert "held" in results["slot maps"]


def test_plain_table_without_rich(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.box", None)
    report.show("title", ["a", "b"], [["x", "1"]])
    assert capsys.readouterr().out == "title\na  b\nx  1\n"
