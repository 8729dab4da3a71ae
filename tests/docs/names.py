"""What exists: the flags, metrics, environment variables, make targets and modules that the docs may name."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from pages import ROOT, Code, Page, folders
from sglang_dcp_block import cli, config

PACKAGE = ROOT / "python" / "sglang_dcp_block"
# Flags of other people's tools, by tool.
OTHERS_FLAGS = {
    "pip": {"--no-deps", "--force-reinstall", "--index-url", "--break-system-packages"},
    "docker": {"--gpus", "--ipc", "--network", "--rm", "--volume", "--workdir"},
    "ruff": {"--isolated"},
}
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*(?![\w*-])")
VARIABLE = re.compile(r"\b(?:SGLANG|MC|MOONCAKE|DCP_BLOCK|TRITON)_[A-Z0-9_]+\b")
METRIC = re.compile(r"\bsglang:[a-z][a-z0-9_]*[a-z0-9]\b")
MAKE = re.compile(r"(?:^|[\s(])make ([a-z][a-z-]*)", re.MULTILINE)
MODULE = re.compile(r"\bpython3? -m (sglang_dcp_block[\w.]*)")
COMMAND = re.compile(r"(?:^|\s|\$ )sglang-dcp-block ([a-z]+)", re.MULTILINE)
SCRIPT = re.compile(r"\bpython3? ((?:docs|benchmarks|tests|upstream)/[\w/]+\.py)")
PATH = re.compile(r"(?:python|tests|docs|docker|benchmarks|requirements|upstream)/[\w./*-]*[\w*/]")


def unknown_names(page: Page) -> Iterator[str]:
    """A line for each name in code that does not exist."""
    for code in page.code():
        for kind, name in _unknown(code):
            yield f"{page.name}:{code.line}: {kind} {name} does not exist"


def _unknown(code: Code) -> Iterator[tuple[str, str]]:
    for flag in FLAG.findall(code.text):
        if flag not in flags():
            yield "flag", flag
    for name in VARIABLE.findall(code.text):
        if name not in variables():
            yield "environment variable", name
    for name in METRIC.findall(code.text):
        if name not in metrics() and name != "sglang:dcp_block":
            yield "metric", name
    for target in MAKE.findall(code.text):
        if target not in make_targets():
            yield "make target", target
    for module in MODULE.findall(code.text):
        if not _is_module(module):
            yield "module", module
    for command in COMMAND.findall(code.text):
        if command not in cli.COMMANDS:
            yield "command sglang-dcp-block", command
    for script in SCRIPT.findall(code.text):
        if not (ROOT / script).is_file():
            yield "script", script
    if not code.is_block and PATH.fullmatch(code.text) and not list(ROOT.glob(code.text.rstrip("/"))):
        yield "path", code.text


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@cache
def upstream() -> Path:
    """SGLang's source."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))) / "srt"


@cache
def flags() -> frozenset[str]:
    """Options of our commands, of SGLang's servers, and of other tools that the docs use."""
    found = {config.FLAG, config.ALIAS, config.GROUP_FLAG, "--help", "--version"}
    for folder in folders():
        for file in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                    found |= {
                        str(a.value) for a in node.args if isinstance(a, ast.Constant) and str(a.value).startswith("--")
                    }
    for tool in OTHERS_FLAGS.values():
        found |= tool
    order = (upstream() / "arg_groups" / "field_order.py").read_text(encoding="utf-8")
    found |= {"--" + name.replace("_", "-") for name in re.findall(r'"(\w+)"', order)}
    for file in [upstream() / "server_args.py", *(upstream() / "arg_groups").rglob("*.py")]:
        found |= set(re.findall(r'"(--[a-z][a-z0-9-]+)"', file.read_text(encoding="utf-8")))
    return frozenset(found)


@cache
def variables() -> frozenset[str]:
    """Environment variables that SGLang declares, that this repository reads or sets, or that Mooncake's engine names."""
    texts = [(upstream() / "environ.py").read_text(encoding="utf-8"), (ROOT / "Makefile").read_text(encoding="utf-8")]
    texts += [file.read_text(encoding="utf-8") for file in (*PACKAGE.rglob("*.py"), ROOT / "tests" / "conftest.py")]
    texts += [file.read_bytes().decode("latin-1") for file in mooncake_engine()]
    return frozenset(name for text in texts for name in VARIABLE.findall(text))


def mooncake_engine() -> list[Path]:
    """Mooncake's library, where it is installed; it need not load."""
    spec = importlib.util.find_spec("mooncake")
    return [
        file for folder in (spec and spec.submodule_search_locations) or () for file in Path(folder).glob("engine*.so")
    ]


@cache
def own_metrics() -> frozenset[str]:
    """Names of the plugin's metrics as Prometheus shows them, without the suffixes of histograms."""
    from sglang_dcp_block.patches import prometheus

    return frozenset(
        f"{family.name}_total" if family.type == "counter" else family.name
        for metric in prometheus._metrics().values()
        for family in metric.describe()
    )


@cache
def metrics() -> frozenset[str]:
    """Sample names: the plugin's, and SGLang's."""
    found = set(own_metrics())
    for name in own_metrics():
        if not name.endswith("_total"):
            found |= {f"{name}_{part}" for part in ("bucket", "sum", "count")}
    for file in (upstream() / "observability").rglob("*.py"):
        found |= set(METRIC.findall(file.read_text(encoding="utf-8")))
    return frozenset(found)


@cache
def make_targets() -> frozenset[str]:
    """Targets of the Makefile."""
    return frozenset(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
